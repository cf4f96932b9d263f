"""Hooks of `schemathesis run`: each generated body goes into an event of some sender, and is signed."""

from __future__ import annotations

import copy
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import schemathesis

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
import webhooks

CHOICE = random.Random(7)
PLACES = [
    webhooks.URI,
    webhooks.URI,
    "s3://team/runs/a",
    "/elsewhere",
    "/runs/../etc",
    "::",
    "/runs/\ud800",
    "",
]


def mixed(event: dict[str, Any], values: list[Any]) -> dict[str, Any]:
    """An event some of whose values are others."""
    found = copy.deepcopy(event)
    for value in values:
        inside = found
        while True:
            key = CHOICE.choice([*inside, "new"])
            if not isinstance(inside.get(key), dict) or not inside[key] or CHOICE.random() < 0.2:
                inside[key] = value
                break
            inside = inside[key]
    return found


@schemathesis.hook  # type: ignore[untyped-decorator]
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Make most requests such that they come in: from a known source, and signed."""
    if case.method.upper() != "POST" or CHOICE.random() < 0.05:
        return
    hook = webhooks.HOOKS[CHOICE.choice(sorted(webhooks.HOOKS))]
    body = case.body
    if CHOICE.random() < 0.8:
        values = list(body.values()) if isinstance(body, dict) else [body]
        body = mixed(hook.naming(CHOICE.choice(PLACES)).event, values)
    try:
        raw = json.dumps(body).encode()
    except TypeError:  # no body at all
        return
    if CHOICE.random() < 0.1:
        hook = hook.but(secret="whsec_" + "QUJD" * 8)
    hook = hook.but(raw=raw, at=time.time())
    case.path_parameters = {"source": hook.source}
    case.media_type = hook.media.split(";")[0]
    case.body = body
    for name, value in hook.headers.items():
        case.headers[name] = value
