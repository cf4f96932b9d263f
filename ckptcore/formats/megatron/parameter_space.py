"""Restate the state of flat optimizer buffers in the form that names it by parameter.

A job that saves buffers keeps the options of parameter groups, and the loss scale, in an object for each
model-parallel group, and notes in the common state how the optimizer's state is stored. A job that asks for
the state by parameter finds all of it in the common state (`DistributedOptimizer.sharded_state_dict`, and
`ChainedOptimizer.sharded_state_dict` for the prefix of its names). There are two forms by parameter:

- `fully_reshardable` (0.15 and later) calls a master ``param``.
- `fully_sharded_model_space` (0.11 to 0.15) calls it ``fp32_param``, and has a prefix for each of several
  optimizers, unless ``content_metadata`` says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptcore.core.manifest import Blob, Manifest
from ckptcore.core.object_tree import Named, decode, encode, references
from ckptcore.core.subset import select
from ckptcore.errors import finding
from ckptcore.formats.common.join import renamed_tree
from ckptcore.utils.text import count, short_repr

MODEL_SPACE = "fully_sharded_model_space"
RESHARDABLE = "fully_reshardable"
SHARDING_TYPE = "param_state_sharding_type"  # of the common state's ``optimizer``
_GATHERED = "dp_zero_gather_scatter"
_BY_PARAMETER = {"dp_reshardable": RESHARDABLE, "fully_sharded_bucket_space": MODEL_SPACE}
_OPTIMIZER, _ARGS, _CONTENT = "optimizer", "args", "content_metadata"
_GROUPS = "param_groups"
_ASKED = "distrib_optim_sharding_type"  # of ``content_metadata``: what a loader asks for
_UNPREFIXED = "chained_optim_avoid_prefix"
_BUCKETS = ("per_bucket_numel", "per_bucket_numel_unpadded")  # sizes of buckets, which are no longer there
_PART = re.compile(
    r"^(?:.*?\.)??(?:chained_(?P<chain>\d{1,9})\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d{1,9})\."
    r"(?P<what>\w+)/shard_0_1$"
)


@dataclass(frozen=True, slots=True)
class ParameterSpace:
    """A form that names the optimizer's state by parameter.

    Attributes:
        type: Its ``param_state_sharding_type``.
        prefixed: Whether names begin with the optimizer's number, where there are several.
    """

    type: str
    prefixed: bool

    def name(self, kind: str, parameter: str, chain: int | None) -> str:
        """Return the name of a parameter's state.

        Args:
            kind: Kind of state, as flat buffers call it.
            parameter: Name of the parameter.
            chain: Number of its optimizer; None for the only one.
        """
        lead = f"chained_{chain}." if self.prefixed and chain is not None else ""
        kind = "fp32_param" if self.type == MODEL_SPACE and kind == "param" else kind
        return f"{lead}optimizer.state.{kind}.{parameter}"


def space_of(manifest: Manifest, *, before_016: bool) -> ParameterSpace:
    """Return the form for the state of a manifest's flat buffers.

    Args:
        manifest: As it is stored.
        before_016: Whether Megatron-Core before 0.16 saved it.
    """
    values = {b.key: decode(b.tree) for b in manifest.blobs if b.known and b.key in (_OPTIMIZER, _CONTENT)}
    stored = set(sharding_types(values.get(_OPTIMIZER)).values())
    spaces = {
        (MODEL_SPACE if before_016 else RESHARDABLE) if name == _GATHERED else _BY_PARAMETER.get(name)
        for name in stored
    }
    kind = MODEL_SPACE if spaces == {MODEL_SPACE} else RESHARDABLE
    content = values.get(_CONTENT)
    avoided = content.get(_UNPREFIXED, False) if isinstance(content, dict) else kind == RESHARDABLE
    return ParameterSpace(kind, prefixed=not avoided)


def sharding_types(optimizer: Any) -> dict[int | None, str]:
    """Return the sharding type of each optimizer by its number in a chain; None: the only one."""
    if not isinstance(optimizer, Mapping):
        return {}
    chain = {k: v for k, v in optimizer.items() if isinstance(k, int) and isinstance(v, Mapping)}
    types = {k: v.get(SHARDING_TYPE) for k, v in [(None, optimizer), *chain.items()]}
    return {k: v for k, v in types.items() if isinstance(v, str)}


def restate(manifest: Manifest, space: ParameterSpace) -> Manifest:
    """Return the manifest with the common state of a job that saves in this form.

    A manifest whose common state names no sharding type is returned as it is. So is one whose groups of ranks
    contradict each other, with a finding: no job will find the options of its parameter groups.
    """
    blobs = {b.key: b for b in manifest.blobs}
    chains = sharding_types(decode(blobs[_OPTIMIZER].tree) if _OPTIMIZER in blobs else None)
    if not chains:
        return manifest
    parts: dict[tuple[int | None, str], list[Blob]] = {}
    for blob in manifest.blobs:
        m = _PART.match(blob.key)
        if m is not None:
            parts.setdefault((_number(m["chain"]), m["what"]), []).append(blob)
    moved: dict[int | None, dict[str, Any]] = {chain: {} for chain in chains}
    names: dict[str, str] = {}
    try:
        for (chain, field), group_blobs in parts.items():
            if field not in _BUCKETS:
                place = ".".join(str(n) for n in (_OPTIMIZER, chain, field) if n is not None)
                merged_blob, value = _merge_groups(field, place, group_blobs)
                names |= {n: _moved_to(place, merged_blob.key)(n) for n in references(merged_blob.tree)}
                moved.setdefault(chain, {})[field] = value
        _require_groups(moved, chains)
    except _Contradiction as error:
        message = f"Megatron-Core will not find the parameter groups of flat optimizer buffers: {error}"
        return replace(manifest, findings=(*manifest.findings, finding("flat-buffers", "coverage", message)))
    gone = {b.key for of in parts.values() for b in of}
    manifest = _without(manifest, {n for key in gone for n in references(blobs[key].tree)}, names)
    stated_blobs = (_stated(b, moved, space.type) for b in manifest.blobs if b.key not in gone)
    return replace(manifest, blobs=tuple(stated_blobs))


class _Contradiction(Exception):
    """Groups of ranks have different values; the message says which."""


def _require_groups(moved: Mapping[int | None, Mapping[str, Any]], chains: Mapping[int | None, str]) -> None:
    if any(_OPTIMIZER not in of for of in moved.values()):
        raise _Contradiction(f"not every one of {count(len(moved), 'optimizer')} has them")
    if moved.keys() != chains.keys():
        raise _Contradiction(f"{count(len(moved), 'optimizer')} for {count(len(chains), 'sharding type')}")


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


def _moved_to(place: str, key: str) -> Callable[[str], str]:
    """Return what renames an object's tensors for its place in the common state."""
    return lambda name: place + name.removeprefix(key)


def _merge_groups(field: str, place: str, blobs: Sequence[Blob]) -> tuple[Blob, Any]:
    """Return the object to use for those of all groups of ranks, and its value."""
    unread = [b.key for b in blobs if not b.known]
    if unread:
        raise _Contradiction(f"{unread[0]} cannot be read")
    values = [decode(renamed_tree(b.tree, _moved_to(place, b.key))) for b in blobs]
    differs = _Contradiction(f"{field} differs between groups of ranks")
    if field != _OPTIMIZER:
        if any(v != values[0] for v in values):
            raise differs
        return blobs[0], values[0]
    for blob, value in zip(blobs, values, strict=True):
        groups = value.get(_GROUPS) if isinstance(value, dict) else None
        if not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups):
            raise _Contradiction(f"{blob.key} has none")
    steps = [g["step"] for v in values for g in v[_GROUPS] if "step" in g]
    if any(s != steps[0] for s in steps):
        raise _Contradiction(f"steps are {', '.join(dict.fromkeys(short_repr(s, 20) for s in steps))}")
    # A group without parameters of a rank has no step: since 0.15 all have that of the others.
    step = {"step": steps[0]} if steps else {}
    aligned = [{**v, _GROUPS: [{**g, **step} for g in v[_GROUPS]]} for v in values]
    # Ranks may have fewer groups: the object with the most must have all of them.
    best = max(range(len(aligned)), key=lambda n: len(aligned[n][_GROUPS]))
    for value in aligned:
        rest = {**value, _GROUPS: aligned[best][_GROUPS]}
        if rest != aligned[best] or any(g not in aligned[best][_GROUPS] for g in value[_GROUPS]):
            raise differs
    return blobs[best], aligned[best]


def _without(manifest: Manifest, inside: set[str], names: Mapping[str, str]) -> Manifest:
    """Return the manifest without the tensors of the objects that are gone; those moved have new names."""
    if not inside:
        return manifest
    rows = [n for n, t in enumerate(manifest.tensors) if t.fqn not in inside or t.fqn in names]
    return select(manifest, rows, [names.get(t.fqn, t.fqn) for t in (manifest.tensors[n] for n in rows)])


def _stated(blob: Blob, moved: Mapping[int | None, Mapping[str, Any]], kind: str) -> Blob:
    """Return an object of the common state as a job that saves by parameter has it."""
    value = decode(blob.tree) if blob.known and blob.key in (_OPTIMIZER, _CONTENT, _ARGS) else None
    if blob.key == _OPTIMIZER and isinstance(value, dict):
        for chain, of in moved.items():
            entry = value if chain is None else value.setdefault(chain, {})
            entry |= {**of, SHARDING_TYPE: kind}
    elif blob.key == _CONTENT and isinstance(value, dict):
        value = {**value, _ASKED: kind}
    elif blob.key == _ARGS and kind == MODEL_SPACE and isinstance(value, Named) and value.kind == "namespace":
        # Before 0.13 this argument of the job that saved says what its loader asks for.
        value = Named(value.kind, {**value.value, "ckpt_fully_parallel_save": True})
    else:
        return blob
    return replace(blob, tree=encode(value))
