"""Notify: the outbox is sent, signed as Standard Webhooks are, until it arrives.

standard-webhooks/standard-webhooks, spec/standard-webhooks.md: the same id for every try, a schedule over
days, 410 ends it, no redirects are followed.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import httpx

from deployments.receiver.dialects import DIALECTS
from deployments.receiver.inbox import Box
from deployments.receiver.settings import Target
from deployments.receiver.verify import key_of, sign

# Seconds between tries, as the specification proposes them: about three days in all.
SCHEDULE = (5, 300, 1800, 7200, 18000, 36000, 50400, 72000, 86400)
TIMEOUT = 20.0
LIMIT = 10
GONE = 410

_STANDARD = DIALECTS["standard-webhooks"]
_log = logging.getLogger("deployments.receiver")


def send_due(
    box: Box,
    targets: Mapping[str, Target],
    client: httpx.Client,
    env: Mapping[str, str] = os.environ,
    now: datetime | None = None,
) -> int:
    """Send what is due; how many messages were tried."""
    now = now or datetime.now(UTC)
    messages = box.messages(now, LIMIT)
    for message in messages:
        target = targets.get(message.endpoint)
        if target is None:
            box.unsent(message, now, "the configuration has no such target any more", None)
            continue
        body = json.dumps(message.body, separators=(",", ":"), sort_keys=True).encode()
        gone = False
        try:
            headers = signed(message.id, body, env[target.secret], now)
            answer = client.post(
                target.url, content=body, headers=headers, timeout=TIMEOUT, follow_redirects=False
            )
            error = "" if answer.is_success else f"HTTP {answer.status_code}"
            gone = answer.status_code == GONE
        except httpx.HTTPError as failure:
            error = f"{type(failure).__name__}: {failure}"[:500]
        if not error:
            box.sent(message, now)
            continue
        tries = message.tries  # this one included
        again = None if gone or tries > len(SCHEDULE) else now + timedelta(seconds=SCHEDULE[tries - 1])
        box.unsent(message, now, error, again)
        _log.warning("%s was not told (%s), again at %s", message.endpoint, error, again or "no time")
    return len(messages)


def signed(id: str, body: bytes, secret: str, now: datetime) -> dict[str, str]:
    """The headers of one try; id: the message's, the same for every try."""
    time = str(int(now.timestamp()))
    key = key_of(secret, _STANDARD.key)
    return {
        "content-type": "application/json",
        "webhook-id": id,
        "webhook-timestamp": time,
        "webhook-signature": sign(_STANDARD, key, body, id=id, time=time),
    }
