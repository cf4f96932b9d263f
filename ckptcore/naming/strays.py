"""Find tensors outside of the model part that the optimizer has state for: they are the model's, too.

The state of an optimizer names its parameters, or numbers them. A name is a stray if the part lacks it and it
is stored elsewhere. Numbers tell shapes alone: where an optimizer has state for more tensors of a shape than
the part has, those of that shape outside are strays.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING

from ckptcore.naming.moments import SHAPED, endings, state_of
from ckptcore.naming.rename import strip_wrappers
from ckptcore.naming.training_state import StoredKinds, below
from ckptcore.utils.late_pattern import late_pattern

if TYPE_CHECKING:
    from ckptcore.core.manifest import Manifest
    from ckptcore.naming.model_part import ModelPart

# Names of copies of a model that were not trained themselves.
COPY = late_pattern(
    r"(^|[._])(ema|swa|averaged?|shadow|teacher|target|ref|reference|old|best)([._]|$)", re.IGNORECASE
)


def find_strays(
    kinds: StoredKinds, names: Sequence[str], part: ModelPart, states: Mapping[str, Set[str]]
) -> tuple[str, ...]:
    """Return the stored names of strays, in the checkpoint's order.

    Args:
        kinds: What names outside of the model are.
        names: All tensors.
        part: The model part.
        states: Optimizer -> names of its parameters.
    """
    strays = _by_name(kinds, names, part, states) if part.prefix else set()
    strays |= _by_shape(kinds, names, part)
    return tuple(name for name in names if name in strays)


def _by_name(
    kinds: StoredKinds, names: Sequence[str], part: ModelPart, states: Mapping[str, Set[str]]
) -> set[str]:
    inner = {strip_wrappers(n[len(part.prefix) :]) for n in names if n.startswith(part.prefix)}
    parts = part.prefix.split(".")[:-1]
    heads = ("", *(".".join(parts[n:]) + "." for n in range(len(parts))))
    trained, missing = set[str](), set[str]()
    for parameters in states.values():
        for parameter in parameters:
            bare = strip_wrappers(parameter)
            inside = any(bare.startswith(head) and bare[len(head) :] in inner for head in heads)
            (trained if inside else missing).add(bare)
    if not missing:
        return set()
    strays: dict[str, set[str]] = {}
    for name in _outside(names, part, states):
        bare = strip_wrappers(name)
        for ending in endings(bare):
            # One element at the end of a longer name, such as ``scale``, proves nothing.
            if ending in missing and ("." in ending or ending == bare) and kinds.kind_of(name) is None:
                strays.setdefault(bare[: len(bare) - len(ending)], set()).add(name)
                break
    stored = {strip_wrappers(name) for name in names}
    copies = {
        prefix
        for prefix in strays
        if prefix and (COPY.search(prefix) or 2 * sum(prefix + n in stored for n in trained) > len(trained))
    }
    return {name for prefix, same in strays.items() if prefix not in copies for name in same}


def _by_shape(kinds: StoredKinds, names: Sequence[str], part: ModelPart) -> set[str]:
    manifest: Manifest = kinds.manifest
    moments: dict[tuple[str, str], tuple[int, ...]] = {}
    for spec in manifest.tensors:
        state = state_of(spec.fqn) if "state." in spec.fqn else None
        if state is None or state.key not in SHAPED or not spec.numel > 1:
            continue
        if not state.parameter.isdigit():
            return set()
        moments[state.root, state.parameter] = spec.shape
    if not moments:
        return set()
    more = Counter(moments.values())
    shapes = {spec.fqn: spec.shape for spec in manifest.tensors}
    for name in names:
        if part.holds(name):
            more[shapes[name]] -= 1
    outside = [
        name
        for name in _outside(names, part, dict.fromkeys(root for root, _ in moments))
        if more[shapes[name]] > 0 and kinds.is_weight_like(name) and kinds.kind_of(name) is None
    ]
    there = Counter(shapes[name] for name in outside if not COPY.search(name))
    return {n for n in outside if there[shapes[n]] >= more[shapes[n]] and not COPY.search(n)}


def _outside(names: Sequence[str], part: ModelPart, optimizers: Mapping[str, object]) -> Iterator[str]:
    """Yield names outside of the model part, of other candidates for it, and of optimizers' own states."""
    for name in names:
        if part.holds(name):
            continue
        if name.startswith(part.others or ("\0",)) or state_of(name) is not None:
            continue
        if not any(below(name, f"{root}.state" if root else "state") for root in optimizers):
            yield name
