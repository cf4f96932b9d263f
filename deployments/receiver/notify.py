"""Send the messages of the outbox as signed Standard Webhooks, with retries.

standard-webhooks/standard-webhooks, spec/standard-webhooks.md: the same id on every try, a schedule over
days, 410 ends the tries, redirects are not followed.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from datetime import datetime, timedelta

import httpx

from ckptcore.errors import CkptError
from ckptcore.redaction import beginning
from ckptcore.utils.isolation import attempt, for_each
from deployments.receiver.inbox import EventQueues, Message
from deployments.receiver.senders import DIALECTS
from deployments.receiver.settings import NotifyTarget
from deployments.receiver.verify import key_of, sign

# Seconds between tries, as the specification suggests: about three days in total.
SCHEDULE = (5, 300, 1800, 7200, 18000, 36000, 50400, 72000, 86400)
TIMEOUT = 20.0  # seconds each to connect, to send and to wait; a lease is longer than all of them
LIMIT = 10  # messages at once
GONE = 410

_STANDARD = DIALECTS["standard-webhooks"]
_log = logging.getLogger("deployments.receiver")


def send_due(
    box: EventQueues,
    targets: Mapping[str, NotifyTarget],
    client: httpx.Client,
    env: Mapping[str, str] = os.environ,
    now: datetime | None = None,
) -> int:
    """Send the due messages in parallel, and return how many were tried.

    This takes as long as the slowest reply, which is less than the lease of the messages. Messages to other
    targets than `targets` are left to the receivers that have those.
    """
    now = now or box.now()
    messages = box.messages(now, LIMIT, list(targets))
    if not messages:
        return 0
    answers: dict[str, tuple[str, bool] | CkptError] = {}

    def post(message: Message) -> None:
        answers[message.id] = attempt(_post, message, targets[message.endpoint], client, env, now)

    # Daemon threads: a process that ends does not wait for other servers.
    threads = [threading.Thread(target=post, args=(message,), daemon=True) for message in messages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    def record(message: Message) -> None:
        answer = answers[message.id]
        error, gone = (beginning(answer.message, 500), False) if isinstance(answer, CkptError) else answer
        if not error:
            box.sent(message, now)
            return
        tries = message.tries  # this one included
        retry_at = None if gone or tries > len(SCHEDULE) else now + timedelta(seconds=SCHEDULE[tries - 1])
        box.unsent(message, now, error, retry_at)
        _log.warning("cannot notify %s (%s), next try: %s", message.endpoint, error, retry_at or "none")

    for_each(record, messages)
    return len(messages)


def _post(
    message: Message, target: NotifyTarget, client: httpx.Client, env: Mapping[str, str], now: datetime
) -> tuple[str, bool]:
    """Send one message. Return the error, or "", and whether the target wants no more messages."""
    body = json.dumps(message.body, separators=(",", ":"), sort_keys=True).encode()
    headers = signed(message.id, body, env[target.secret], now)
    # The body of the reply is not read.
    with client.stream(
        "POST", target.url, content=body, headers=headers, timeout=TIMEOUT, follow_redirects=False
    ) as answer:
        return "" if answer.is_success else f"HTTP {answer.status_code}", answer.status_code == GONE


def signed(id: str, body: bytes, secret: str, now: datetime) -> dict[str, str]:
    """Return the signed headers of one try. id: the message's id, the same on every try."""
    time = str(int(now.timestamp()))
    key = key_of(secret, _STANDARD.key)
    return {
        "content-type": "application/json",
        "webhook-id": id,
        "webhook-timestamp": time,
        "webhook-signature": sign(_STANDARD, key, body, id=id, time=time),
    }
