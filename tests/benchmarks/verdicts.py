"""Print what a benchmark that judges itself has found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def ended(result: Mapping[str, Any], load: float, *, as_json: bool, **measured: Any) -> int:
    """Print a verdict and return the exit code.

    Args:
        result: `ok`, and the texts `measured` and `bound`.
        load: Of the machine, when the benchmark began.
        as_json: Print one JSON object, with what was measured.
        measured: Values of single runs.
    """
    if as_json:
        print(json.dumps({**result, **measured, "load": load}))
    else:
        ok = "ok" if result["ok"] else "MISSED"
        print(f"{result['measured']}; load {load:.1f}; {result['bound']}: {ok}")
    return 0 if result["ok"] else 1
