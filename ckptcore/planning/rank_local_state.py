"""Drop state that is valid only on the ranks that saved it.

A reshard carries model, optimizer, schedules and counters. Random states belong to one rank each, and
a data loader's positions to one data-parallel degree; on other ranks they would be silently wrong. They are
dropped, each with a rule that is reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ckptcore.core.manifest import Manifest
from ckptcore.core.subset import select
from ckptcore.errors import UnreadablePart, UsageError
from ckptcore.naming.rename import matches
from ckptcore.naming.training_state import StoredKinds
from ckptcore.topology.layout import Mesh
from ckptcore.utils.globs import leave_out
from ckptcore.utils.text import count, some

_RANDOM = re.compile(
    r"(?:^|[./])(?:rng|rng_states?|random_states?|np_rng_state|random_rng_state|torch_rng_state"
    r"|cuda_rng_states?|rng_tracker_states)(?:[./]|$)"
)
# torchtitan (components/dataloader.py) keeps ``dp_rank_N`` and ``world_size`` together, and refuses
# another degree; OLMo and others name the rank in the same way.
_LOADER = re.compile(r"^(?P<root>(?:.*[./])?)dp_rank_(?P<rank>\d+)(?:[./]|$)")
# Names of the entries that rank files with a flat optimizer are read as: number, state, rank.
_FLAT = re.compile(r"(?:^|\.)state\.\d+\.\w+\.rank\d+$")
_DATA_AXES = ("dp_replicate", "fsdp")


def without_bound(
    manifest: Manifest, mesh: Mesh, keep: Sequence[str] = ()
) -> tuple[Manifest, tuple[tuple[str, str], ...]]:
    """Return the manifest without state bound to the ranks that saved it, and (name, rule) of that state.

    Args:
        manifest: The checkpoint.
        mesh: The new mesh.
        keep: Globs on names of such state that stays.

    Raises:
        UsageError: A glob matches no such state.
    """
    sizes = dict(mesh.axes)
    degree = 1
    for axis in _DATA_AXES:
        degree *= sizes.get(axis, 1)
    rules = bound_names(manifest, degree)
    for glob in keep:
        if not any(matches(name, [glob]) for name in rules):
            raise UsageError(
                f"--keep-object {glob} matches no state that a reshard to this mesh would drop",
                hint=f"dropped are: {some(sorted(rules))}" if rules else "leave it out: nothing is dropped",
            )
    rules = {name: rule for name, rule in rules.items() if not matches(name, keep)}
    if not rules:
        return manifest, ()
    rows = [n for n, t in enumerate(manifest.tensors) if t.fqn not in rules]
    subset = select(manifest, rows, [manifest.tensors[n].fqn for n in rows])
    blobs = tuple(b for b in manifest.blobs if b.key not in rules)
    return replace(subset, blobs=blobs), tuple(rules.items())


def bound_names(manifest: Manifest, degree: int | None = None) -> dict[str, str]:
    """Return name -> rule of the state that is bound to the ranks that saved it.

    A tensor counts if it has the form of such state: a submodule may be called ``rng``.

    Args:
        manifest: The checkpoint.
        degree: Number of data-parallel ranks whose data loaders may stay; None for none.
    """
    names, kinds = [t.fqn for t in manifest.tensors] + [b.key for b in manifest.blobs], StoredKinds(manifest)
    loaders = _loaders(names)
    rules: dict[str, str] = {}
    for name in names:
        root = next((r for r in loaders if name.startswith(r)), None)
        if _RANDOM.search(name):
            if not kinds.is_random_state(name):
                continue
            rules[name] = "random state of a rank that saved it"
        elif root is not None and loaders[root] != degree and not kinds.is_weight_like(name):
            mesh = "" if degree is None else f"; the mesh has {degree}"
            rules[name] = f"data loader of {loaders[root]} data-parallel ranks{mesh}"
    return rules


def require_cut(manifest: Manifest, names: Iterable[str]) -> None:
    """Raise `UnreadablePart` where ``names``, stored names, has state that only the saving ranks can use.

    A flat run of FSDP1's parameters is one rank's own: other ranks have others, and the names of its
    parameters are not recorded.
    """
    lost = [name for name in names if _FLAT.search(name)]
    if lost:
        other_names = {*(t.fqn for t in manifest.tensors), *(b.key for b in manifest.blobs)} - set(lost)
        rest = f" and {count(len(lost) - 1, 'more tensor')}" if lost[1:] else ""
        raise UnreadablePart(
            f"cannot reshard {lost[0]}{rest}: each is a flat run of the optimizer on one rank",
            hint=f"{leave_out(lost, other_names)}; sharded state dicts of an optimizer can be resharded",
        )


def _loaders(names: Sequence[str]) -> dict[str, int]:
    """Return the container of per-rank loader states -> its number of ranks."""
    ranks: dict[str, set[int]] = {}
    for name in names:
        match = _LOADER.match(name)
        if match:
            ranks.setdefault(match["root"], set()).add(int(match["rank"]))
    return {root: len(numbers) for root, numbers in ranks.items()}
