"""Combine what a user asks of `retire` and `thin` with the retention that a watched root has of its own.

A root's retention is an object with some of the fields ``keep_last``, ``keep_every``, ``keep_best``, ``rest``
and ``accept_loss`` for `retire`, and ``keep_optimizer_last`` for `thin` and sweeps. What the user names wins
over it, field by field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ckptcore.catalog.row_values import require_sound
from ckptcore.catalog.watched_roots import RootRow
from ckptcore.errors import UsageError
from ckptcore.operations.options import RetireOptions
from ckptcore.operations.retention.part_replacement import OPTIMIZER
from ckptcore.operations.retention.policy import KeepBest, Policy
from ckptcore.operations.retention.replacement import Allowed

KEEP_LAST = 3
FULL, WEIGHTS = RESTS = ("full", "weights")
FIELDS = ("keep_last", "keep_every", "keep_best", "rest", "accept_loss", "keep_optimizer_last")
_KINDS = {
    "keep_last": int,
    "keep_every": int,
    "keep_best": list,
    "rest": str,
    "accept_loss": list,
    "keep_optimizer_last": int,
}


def rules(asked: RetireOptions, root: RootRow | None = None) -> tuple[Policy, Allowed]:
    """Return the policy and the allowed losses for the sources of a root.

    Raises:
        UsageError: A value is invalid.
        CatalogError: The root's row is odd.
    """
    if root is not None:
        require_sound(root)
    root_options = checked(root.retention) if root is not None else {}

    def chosen(name: str) -> Any:
        asked_option = getattr(asked, name)
        return root_options.get(name) if asked_option is None else asked_option

    policy = _policy({name: chosen(name) for name in ("keep_last", "keep_every", "keep_best")})
    rest = chosen("rest") or FULL
    if rest not in RESTS:
        raise UsageError(f"--rest must be {FULL} or {WEIGHTS} (got {rest!r})")
    names = [*(chosen("accept_loss") or ()), *([OPTIMIZER] if rest == WEIGHTS else [])]
    return policy, Allowed.of(names)


def optimizers_kept(root: RootRow) -> int | None:
    """Return how many of the newest steps of every run keep their optimizer; None: all do.

    Raises:
        UsageError: A value is invalid.
        CatalogError: The root's row is odd.
    """
    require_sound(root)
    steps: int | None = checked(root.retention).get("keep_optimizer_last")
    return steps


def checked(retention: Mapping[str, Any]) -> dict[str, Any]:
    """Return a root's retention; raise `UsageError` if a field or a value is invalid."""
    unknown = sorted(set(retention) - set(FIELDS))
    if unknown:
        raise UsageError(
            f"a root's retention has no field {', '.join(unknown)}", hint=f"fields are {', '.join(FIELDS)}"
        )
    for name, kind in _KINDS.items():
        value = retention.get(name)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise UsageError(
                f"{name} of a root's retention must be {kind.__name__} (got {json.dumps(value)})"
            )
    for field in ("accept_loss", "keep_best"):
        names = retention.get(field) or []
        if not all(isinstance(name, str) for name in names):
            raise UsageError(f"{field} of a root's retention must be texts (got {json.dumps(names)})")
    if retention.get("rest") not in (None, *RESTS):
        raise UsageError(f"rest must be {FULL} or {WEIGHTS} (got {retention['rest']!r})")
    _policy(retention)
    steps = retention.get("keep_optimizer_last")
    if steps is not None and steps < 1:
        raise UsageError(f"keep_optimizer_last of a root's retention must be at least 1 (got {steps})")
    return dict(retention)


def _policy(retention: Mapping[str, Any]) -> Policy:
    keep_last = retention.get("keep_last")
    best = tuple(KeepBest.of(text) for text in retention.get("keep_best") or ())
    return Policy(KEEP_LAST if keep_last is None else keep_last, retention.get("keep_every"), best)
