#!/usr/bin/env python3
"""Announce a checkpoint with Python's standard library only; copy this file to where the job runs.

    export CKPTCORE_HOOK_URL=https://hooks.example/hooks/trainer CKPTCORE_HOOK_SECRET=whsec_...
    python send.py URI [RUN [STEP]] [--meta=metrics.loss=2.31 --meta=git_commit=3f9a ...]

or ``from send import announce`` and ``announce("/checkpoints/llama/step-300", "llama", 300)``. Requests are
signed as Standard Webhooks (standard-webhooks/standard-webhooks, spec/standard-webhooks.md).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import math
import os
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from typing import Any

WAITS = (1, 2, 5, 10, 20, 30, 60, 60, 60)  # seconds between tries; a refused request is not repeated
TIMEOUT = 20


def announce(
    uri: str,
    run: str = "",
    step: int | None = None,
    *,
    meta: Mapping[str, Any] | None = None,
    url: str | None = None,
    secret: str | None = None,
    waits: tuple[float, ...] = WAITS,
) -> dict[str, Any]:
    """Announce the checkpoint at `uri`. Call it on one rank when the save is complete.

    Args:
        uri: the checkpoint.
        run: the name of the training run.
        step: the training step.
        meta: facts about the training, for the catalog: {"metrics": {"loss": 2.31}, "git_commit": "3f9a",
            "user": "ada", "dataset": "...", "job_url": "...", "config": {...}}. What the job had in memory
            is one, too: `ckptcore.fingerprint_state(state).as_facts()`, taken before the save.
        url: the receiver; by default CKPTCORE_HOOK_URL.
        secret: by default CKPTCORE_HOOK_SECRET.
        waits: seconds between tries.

    Returns:
        The receiver's reply.

    Raises:
        OSError: the receiver refused the event or did not answer.
    """
    address, shared = url or _setting("URL"), secret or _setting("SECRET")
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    event: dict[str, Any] = {
        "type": "checkpoint.saved",
        "timestamp": stamp,
        "data": {"uri": uri, "run": run, "step": step},
    }
    if meta:
        event["data"]["meta"] = _finite(meta)
    body, id = json.dumps(event, allow_nan=False).encode(), f"msg_{uuid.uuid4().hex}"
    key = base64.b64decode(shared.removeprefix("whsec_"))
    for wait in (*waits, None):
        now = str(int(time.time()))
        digest = hmac.new(key, f"{id}.{now}.".encode() + body, hashlib.sha256).digest()
        headers = {
            "content-type": "application/json",
            "webhook-id": id,
            "webhook-timestamp": now,
            "webhook-signature": "v1," + base64.b64encode(digest).decode(),
        }
        request = urllib.request.Request(address, body, headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            reply = error.read().decode(errors="replace")
            if wait is None or (error.code < 500 and error.code not in (408, 429)):
                raise OSError(f"HTTP {error.code}: {reply}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            # No connection, or it broke before the reply was complete. If the event was stored, the repeat is
            # a duplicate.
            if wait is None:
                raise OSError(f"no answer: {error!r}") from error
        time.sleep(wait)
    raise AssertionError("the last try returns or raises")


def _setting(name: str) -> str:
    """Return the environment variable of a setting."""
    return os.environ[f"CKPTCORE_HOOK_{name}"]


def _finite(value: Any) -> Any:
    """Return a JSON value with NaN and infinities as texts: JSON has no such numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value


def _pairs(texts: list[str]) -> dict[str, Any]:
    """Return the facts in texts such as ``metrics.loss=2.31`` and ``user=ada``."""
    meta: dict[str, Any] = {}
    for text in texts:
        key, _, value = text.partition("=")
        group, dot, name = key.partition(".")
        if dot and group in ("metrics", "config"):
            meta.setdefault(group, {})[name] = value
        else:
            meta[key] = value
    return meta


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--meta=")]
    facts = [argument.removeprefix("--meta=") for argument in sys.argv[1:] if argument.startswith("--meta=")]
    options = any(argument.startswith("-") for argument in arguments)
    if not 1 <= len(arguments) <= 3 or options or any("=" not in argument for argument in facts):
        sys.exit("usage: send.py URI [RUN [STEP]] [--meta=KEY=VALUE ...]")
    uri, run, step = (*arguments, "", "")[:3]
    if step and not step.isdecimal():
        sys.exit("the step is a whole number")
    try:
        print(json.dumps(announce(uri, run, int(step) if step else None, meta=_pairs(facts))))
    except KeyError as unset:
        sys.exit(f"{unset.args[0]} is not set")
    except OSError as refused:
        sys.exit(str(refused))
