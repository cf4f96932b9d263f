"""Load values from a checkpoint into a live, possibly sharded, state dict, all or none.

Three steps: find the value of every leaf and prove that it exists and fits; fill memory; pass objects the
filled state. Every refusal is in the first step, where nothing has changed yet.

Leaves and their names are those of `torch.distributed.checkpoint`, so that what it saved is found again.
Dicts are entered, and lists that hold tensors or dicts. An object with ``state_dict`` and ``load_state_dict``
is entered through the first, and gets its state through the second when everything is loaded.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ckptcore.core.box import Box
from ckptcore.core.manifest import Blob, Manifest, TensorSpec
from ckptcore.core.object_tree import references
from ckptcore.errors import NameMismatch, UsageError
from ckptcore.loading.live_tensors import FILL, MemoryUse, on_memory, on_meta, pieces, require_cast
from ckptcore.loading.plain_values import NotBuilt, built, find
from ckptcore.naming.quantized_names import bound, is_code
from ckptcore.reading.fill_memory import Fill, fill_memory
from ckptcore.reading.state_dict import require_cover, require_readable
from ckptcore.store import Store, open_source_store
from ckptcore.utils.near_names import did_you_mean, near_names
from ckptcore.utils.text import some

Put = Callable[[Any], None]
_log = logging.getLogger("ckptcore")


@dataclass(slots=True)
class _Plan:
    """The value of each leaf.

    Attributes:
        tensors: (leaf, row of its tensor).
        values: (leaf, JSON form of its value).
        missing: Names that the checkpoint lacks.
        unbuilt: Name -> what its value holds that cannot be built.
    """

    tensors: list[tuple[LiveLeaf, int]] = field(default_factory=list)
    values: list[tuple[LiveLeaf, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unbuilt: dict[str, str] = field(default_factory=dict)


def load_into(manifest: Manifest, state_dict: Any, *, prefix: str, strict: bool, verify: bool) -> list[str]:
    """Fill a live state dict; see `ckptcore.load_into`."""
    state = live_state(state_dict)
    require_readable(manifest, [prefix + leaf.fqn for leaf in state.leaves])
    plan = _plan(manifest, state, prefix)
    _require_all(plan, len(state.leaves), strict, manifest, prefix)
    _require_fit(manifest, plan)
    fresh = {id(leaf): on_memory(leaf.value) for leaf, _ in plan.tensors if on_meta(leaf.value)}
    parts = [(row, pieces(leaf.fqn, fresh.get(id(leaf), leaf.value))) for leaf, row in plan.tensors]
    with closing(open_source_store(manifest.root, manifest.versions)) as store:
        # New values come first: until then, a wrong checksum has changed nothing.
        full = partial(full_tensor, manifest, store, verify)
        values = [(leaf, built(form, full)) for leaf, form in plan.values]
        fills = [Fill(row, want, local) for row, filled in parts for local, want in filled]
        fill_memory(manifest, store, fills, verify=verify)
    for leaf, value in [*values, *((x, fresh[id(x)]) for x, _ in plan.tensors if id(x) in fresh)]:
        assert leaf.put is not None  # `_require_fit`
        leaf.put(value)
    # Inner objects first: `_visit` appends an object behind what it holds.
    for finish in state.finish:
        finish()
    _require_no_meta([leaf for leaf, _ in plan.tensors if id(leaf) in fresh])
    used = {manifest.tensors[row].fqn for _, row in plan.tensors} | _referenced_names(plan)
    return sorted(t.fqn for t in manifest.tensors if t.fqn not in used)


def _plan(manifest: Manifest, state: LiveState, prefix: str) -> _Plan:
    import torch

    plan = _Plan()
    objects: dict[str, Blob] = {b.key: b for b in manifest.blobs}
    for leaf in state.leaves:
        name = prefix + leaf.fqn
        row = manifest.index.get(name)
        if isinstance(leaf.value, torch.Tensor) and row is not None:
            plan.tensors.append((leaf, row))
            continue
        try:
            stored_value = find(objects, name)
        except NotBuilt as error:
            plan.unbuilt[leaf.fqn] = str(error)
            continue
        if row is None and stored_value is None:
            plan.missing.append(leaf.fqn)
        elif isinstance(leaf.value, torch.Tensor) or row is not None:
            live_kind, stored_kind = (
                ("a tensor", "a plain value") if row is None else ("a plain value", "a tensor")
            )
            raise NameMismatch(
                f"cannot load {leaf.fqn}: it is {live_kind} here and {stored_kind} in the checkpoint",
                hint="try the same kind here",
            )
        elif stored_value is not None:
            plan.values.append((leaf, stored_value[1]))
    return plan


def _near_hint(missing: Sequence[str], prefix: str, manifest: Manifest) -> str:
    """Return the next step where the checkpoint lacks names: the prefix that all have, or near names."""
    first = missing[0]
    for name in near_names(first, manifest.index):
        before = name.removesuffix(first)
        if before and before != name and all(before + leaf in manifest.index for leaf in missing):
            return f"try prefix={before!r}"
    otherwise = "try prefix= for names with a common prefix, or strict=False to leave them as they are"
    return did_you_mean(prefix + first, manifest.index, otherwise)


def _require_all(plan: _Plan, count: int, strict: bool, manifest: Manifest, prefix: str) -> None:
    """Require that every leaf gets a value; without ``strict``, log the leaves that do not."""
    if plan.missing and strict:
        raise NameMismatch(
            f"cannot load {len(plan.missing)} of {count} values: not in the checkpoint: "
            f"{some(plan.missing, 5)}",
            hint=_near_hint(plan.missing, prefix, manifest),
            missing=plan.missing,
        )
    for leaf, form in plan.values:
        try:
            built(form, lambda name: None)
        except NotBuilt as error:
            plan.unbuilt[leaf.fqn] = str(error)
    plan.values = [(leaf, form) for leaf, form in plan.values if leaf.fqn not in plan.unbuilt]
    if plan.unbuilt and strict:
        refused = [f"{name} ({problem})" for name, problem in plan.unbuilt.items()]
        raise NameMismatch(
            f"cannot load {len(refused)} of {count} values: refused by the reader: {some(refused, 5)}",
            hint="try to remove them from the state dict, or strict=False to leave them as they are",
            missing=[*plan.unbuilt],
        )
    if plan.missing or plan.unbuilt:
        left = [*plan.missing, *plan.unbuilt]
        _log.warning("not loaded, because the checkpoint has no value for them: %s", ", ".join(left))


def require_decoded(manifest: Manifest, live: Sequence[tuple[str, int, Any]]) -> None:
    """Require that no quantised values are cast without their scales.

    Args:
        manifest: The checkpoint.
        live: (name, row of its tensor, torch dtype of the memory) of what is filled.
    """
    import torch

    rows = [(name, manifest.tensors[row], dtype) for name, row, dtype in live]
    codes = [(n, t, d) for n, t, d in rows if is_code(t.dtype) and d != getattr(torch, t.dtype)]
    partners = bound(manifest.tensors) if codes else {}
    for name, spec, dtype in codes:
        if spec.fqn in partners:
            raise UsageError(
                f"cannot load {name} into a tensor of {dtype}: it is {spec.dtype}, and its "
                f"values need {partners[spec.fqn]}",
                hint="open the checkpoint without keep_quantized, if its weights are decoded here",
            )


def _require_fit(manifest: Manifest, plan: _Plan) -> None:
    """Require that everything can be filled, and that every element of it is in the checkpoint."""
    import torch

    require_decoded(manifest, [(leaf.fqn, row, leaf.value.dtype) for leaf, row in plan.tensors])
    for leaf, row in plan.tensors:
        spec: TensorSpec = manifest.tensors[row]
        memory: Sequence[Any] = ()
        if not on_meta(leaf.value):
            memory = [part for part, _ in pieces(leaf.fqn, leaf.value)]
        elif leaf.put is None or isinstance(leaf.owner, torch.nn.Module):
            raise UsageError(
                f"cannot load into {leaf.fqn}: it is a meta tensor, and its container accepts no other",
                hint="try module.to_empty(device=...) first",
            )
        live_shape = list(leaf.value.size())
        if live_shape != list(spec.shape):
            raise NameMismatch(
                f"cannot load {leaf.fqn}: it is {live_shape} here and {list(spec.shape)} in the checkpoint",
                hint="the model was built from another config, such as another vocab_size or number of heads",
            )
        for part in (leaf.value, *memory):  # a tensor that lists its chunks need not have their dtype
            require_cast(leaf.fqn, spec.dtype, part)
    fixed = [leaf.fqn for leaf, _ in plan.values if leaf.put is None]
    if fixed:
        raise UsageError(
            f"cannot load {some(fixed)}: the container accepts no new value",
            hint="try a dict or a list around it",
        )
    inside = [manifest.index[n] for n in sorted(_referenced_names(plan)) if n in manifest.index]
    require_cover(manifest, [*(row for _, row in plan.tensors), *inside])


def _require_no_meta(leaves: Sequence[LiveLeaf]) -> None:
    """Require that objects accepted the memory that they got for their meta tensors."""
    import torch

    owners = {id(leaf.owner): leaf.owner for leaf in leaves if leaf.owner is not None}
    still = [
        leaf.fqn
        for owner in owners.values()
        for leaf in live_state(owner.state_dict()).leaves
        if isinstance(leaf.value, torch.Tensor) and on_meta(leaf.value)
    ]
    if still:
        raise UsageError(
            f"cannot load {some(still)}: still on the meta device after load_state_dict()",
            hint="try module.to_empty(device=...) first, or load_state_dict(..., assign=True) inside",
        )


def _referenced_names(plan: _Plan) -> set[str]:
    """Return the names of tensors inside plain values."""
    return {name for _, form in plan.values for name in references(form)}


def full_tensor(manifest: Manifest, store: Store, verify: bool, name: str) -> Any:
    """Build a tensor that is inside a plain value."""
    import torch

    row = manifest.index[name]
    spec = manifest.tensors[row]
    out = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
    fill_memory(manifest, store, [Fill(row, Box.full(spec.shape), out)], verify=verify)
    return out


@dataclass(slots=True)
class LiveLeaf:
    """A tensor, or a value that is replaced as a unit.

    Attributes:
        fqn: Its name.
        value: The current value.
        put: Stores another value in its place; None where the container accepts none.
        owner: The object with ``load_state_dict`` that it belongs to, if any.
    """

    fqn: str
    value: Any
    put: Put | None
    owner: Any = None


@dataclass(slots=True)
class LiveState:
    """The leaves of a state dict, and the calls (``finish``) to make, in order, when all are filled."""

    leaves: list[LiveLeaf] = field(default_factory=list)
    finish: list[Callable[[], None]] = field(default_factory=list)


def live_state(state_dict: Any, use: MemoryUse = FILL) -> LiveState:
    """Return every leaf of a state dict, or of an object; objects return their state, and nothing is changed.

    Args:
        state_dict: A mapping, or an object with ``state_dict`` and ``load_state_dict``.
        use: What is done with its tensors.

    Raises:
        NameMismatch: Two leaves have one name.
        UsageError: It is neither a mapping nor an object with ``state_dict`` and ``load_state_dict``.
    """
    state = LiveState()
    if isinstance(state_dict, Mapping):
        _enter(state, state_dict, "", None)
    elif stateful(state_dict):
        _visit(state, state_dict, "", None, None)
    else:
        raise UsageError(
            f"cannot {use.verb} a {type(state_dict).__name__}",
            hint="name a state dict, a module, or a dict of them: {'model': model}",
        )
    twice = [n for n, count in Counter(leaf.fqn for leaf in state.leaves).items() if count > 1]
    if twice:
        raise NameMismatch(
            f"cannot {use.verb} two leaves of one name: {some(twice)}",
            hint="try other keys: `{'a.b': ...}` and `{'a': {'b': ...}}` have one name in a checkpoint",
        )
    return state


def stateful(value: Any) -> bool:
    """Report whether a value is like `torch.distributed.checkpoint.stateful.Stateful`."""
    return not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")
    )


def _enter(state: LiveState, values: Mapping[Any, Any], path: str, owner: Any) -> None:
    into = values if isinstance(values, MutableMapping) else None
    # torch loads the objects' states in the order of their names.
    items = list(values.items())
    for key, value in items if path else sorted(items, key=lambda item: str(item[0])):
        put = None if into is None else _setter(into, key)
        _visit(state, value, f"{path}.{key}" if path else str(key), put, owner)


def _visit(state: LiveState, value: Any, path: str, put: Put | None, owner: Any) -> None:
    import torch

    if isinstance(value, torch.Tensor):
        state.leaves.append(LiveLeaf(path, value, put, owner))
    elif stateful(value):
        inside = value.state_dict()
        if not isinstance(inside, Mapping):
            raise UsageError(
                f"state_dict() of {path or type(value).__name__} must return a mapping "
                f"(got {type(inside).__name__})",
                hint="try to return a dict of tensors and plain values",
            )
        _enter(state, inside, path, value)
        state.finish.append(lambda: value.load_state_dict(inside))
    elif isinstance(value, Mapping):
        _enter(state, value, path, owner)
    elif isinstance(value, (list, tuple)) and _holds(value, (torch.Tensor, Mapping)):
        _enter_sequence(state, value, path, put, owner)
    else:
        state.leaves.append(LiveLeaf(path, value, put, owner))


def _enter_sequence(state: LiveState, values: Sequence[Any], path: str, put: Put | None, owner: Any) -> None:
    items = values if isinstance(values, list) else list(values)
    takes = isinstance(values, list) or put is not None
    for place, value in enumerate(list(items)):
        _visit(state, value, f"{path}.{place}", _setter(items, place) if takes else None, owner)
    if isinstance(values, tuple) and put is not None:  # rebuilt if an item was replaced

        def rebuild() -> None:
            if any(a is not b for a, b in zip(items, values, strict=True)):
                put(type(values)(*items) if hasattr(values, "_fields") else tuple(items))

        state.finish.append(rebuild)


def _holds(values: Sequence[Any], kinds: tuple[type, ...]) -> bool:
    """Report whether a sequence is entered: it holds such a value, at any depth of sequences."""
    return any(isinstance(v, kinds) or (isinstance(v, (list, tuple)) and _holds(v, kinds)) for v in values)


def _setter(container: Any, key: Any) -> Put:
    return lambda value: container.__setitem__(key, value)
