"""Notify: the outbox is sent, signed as Standard Webhooks are, until it arrives.

standard-webhooks/standard-webhooks, spec/standard-webhooks.md: the same id for every try, a schedule over
days, 410 ends it, no redirects are followed.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import httpx

from ckptcore.redaction import beginning
from deployments.receiver.inbox import Mailbox, Message
from deployments.receiver.senders import DIALECTS
from deployments.receiver.settings import NotifyTarget
from deployments.receiver.verify import key_of, sign

# Seconds between tries, as the specification proposes them: about three days in all.
SCHEDULE = (5, 300, 1800, 7200, 18000, 36000, 50400, 72000, 86400)
TIMEOUT = 20.0  # to connect, to send, and to be answered, each; a lease is longer than all of them
LIMIT = 10  # messages at once
GONE = 410

_STANDARD = DIALECTS["standard-webhooks"]
_log = logging.getLogger("deployments.receiver")


def send_due(
    box: Mailbox,
    targets: Mapping[str, NotifyTarget],
    client: httpx.Client,
    env: Mapping[str, str] = os.environ,
    now: datetime | None = None,
) -> int:
    """Send what is due, all of it at once; how many messages were tried.

    Takes no longer than the slowest answer, and so less than the lease of what was taken. Messages to others
    than ``targets`` are left to the receiver that has those.
    """
    now = now or datetime.now(UTC)
    messages = box.messages(now, LIMIT, list(targets))
    if not messages:
        return 0
    answers: dict[str, tuple[str, bool]] = {}

    def post(message: Message) -> None:
        answers[message.id] = _post(message, targets[message.endpoint], client, env, now)

    # Daemons: a process that is told to end waits for no stranger.
    threads = [threading.Thread(target=post, args=(message,), daemon=True) for message in messages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for message in messages:
        error, gone = answers[message.id]
        if not error:
            box.sent(message, now)
            continue
        tries = message.tries  # this one included
        again = None if gone or tries > len(SCHEDULE) else now + timedelta(seconds=SCHEDULE[tries - 1])
        box.unsent(message, now, error, again)
        _log.warning("%s was not told (%s), again at %s", message.endpoint, error, again or "no time")
    return len(messages)


def _post(
    message: Message, target: NotifyTarget, client: httpx.Client, env: Mapping[str, str], now: datetime
) -> tuple[str, bool]:
    """What went wrong, or "", and whether nothing needs to be sent to the target any more."""
    body = json.dumps(message.body, separators=(",", ":"), sort_keys=True).encode()
    try:
        headers = signed(message.id, body, env[target.secret], now)
        # The answer's own body is nobody's: it is not waited for.
        with client.stream(
            "POST", target.url, content=body, headers=headers, timeout=TIMEOUT, follow_redirects=False
        ) as answer:
            return "" if answer.is_success else f"HTTP {answer.status_code}", answer.status_code == GONE
    except Exception as failure:  # whatever ails one target, the others are told
        return beginning(f"{type(failure).__name__}: {failure}", 500), False


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
