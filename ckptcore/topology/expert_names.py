"""Experts: which rank of the ep axis has an expert that is a tensor of its own?

The rank's experts are neighbours: E / ep of them, as Megatron-Core and torchtitan number them.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptcore.errors import UsageError
from ckptcore.topology.pipeline_stages import pattern
from ckptcore.topology.rules import Rules
from ckptcore.utils.text import shown


def place_experts(shapes: Mapping[str, tuple[int, ...]], rules: Rules, ep: int) -> dict[str, int]:
    """Coordinate on the ep axis of each parameter of one expert.

    Raises `UsageError` when there are no experts, in tensors of their own or stacked, and when their number
    does not divide by ``ep``.
    """
    templates = [pattern(t) for t in rules.experts]
    number: dict[str, tuple[str, int]] = {}  # (what is before the number, the number)
    count: dict[str, int] = {}
    for name in shapes:
        match = next((m for t in templates if (m := t.match(name))), None)
        if match:
            group = name[: match.start("n")]
            number[name] = group, int(match["n"])
            count[group] = max(count.get(group, 0), int(match["n"]) + 1)
    for name, shape in shapes.items():
        rule = rules.find(name)
        if (
            name not in number
            and rule is not None
            and rule.ep is not None
            and -len(shape) <= rule.ep < len(shape)
        ):
            count[name] = shape[rule.ep]
    if not count:
        raise UsageError(f"ep={ep}, but no parameter is one of experts", hint="leave ep out of --mesh")
    for name, n in count.items():
        if n % ep:
            raise UsageError(
                f"{shown(name)}: {n} experts do not divide by ep={ep}", hint=f"a size that divides {n}"
            )
    return {name: n * ep // count[group] for name, (group, n) in number.items()}
