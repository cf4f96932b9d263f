"""Fingerprint an existing checkpoint in one read, in bounded memory.

Workers share the boxes of all tensors, also of one large tensor. A box is read, verified, and summed
(`ckptcore.fingerprints.sums`), on a device if one is given. At the end every record with a checksum of which
a part was read is verified completely, and the files must still be those that were opened.

Peak memory: the interpreter, torch where tensors are computed or transposed, and ``Settings.memory``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ckptcore.checking.check import require_complete
from ckptcore.comparison.box_walk import OpenTensor, read_boxes
from ckptcore.comparison.opened import OpenSide, closing_sides
from ckptcore.comparison.tensor_processes import read_shared
from ckptcore.core.box import Box
from ckptcore.core.manifest import Manifest
from ckptcore.errors import Finding, UsageError, finding
from ckptcore.fingerprints.result import Fingerprints
from ckptcore.fingerprints.sums import (
    ZERO,
    Fingerprinted,
    Sum,
    add,
    box_sum,
    checkpoint_fingerprint,
    map_digest,
    tensor_fingerprint,
)
from ckptcore.naming.model_part import find_model, in_model
from ckptcore.naming.rename import is_kept, matches, remap
from ckptcore.planning.request import Settings
from ckptcore.planning.tiles import Tiles
from ckptcore.reading.rereading import rereading
from ckptcore.utils.workers import Progress, ProgressMeter


@dataclass(frozen=True, slots=True)
class FingerprintRules:
    """Which tensors are fingerprinted, and under which names.

    Attributes:
        model: The model part alone, with wrappers removed from names.
        model_prefix: The prefix of the model part, or None to detect it.
        include: Globs on stored names that are fingerprinted.
        exclude: Globs on stored names that are not.
        rename: (old, new).
    """

    model: bool = False
    model_prefix: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    rename: tuple[tuple[str, str], ...] = ()


EVERYTHING = FingerprintRules()


@rereading
def fingerprint(
    manifest: Manifest,
    settings: Settings,
    progress: Progress | None = None,
    rules: FingerprintRules = EVERYTHING,
) -> Fingerprints:
    """Fingerprint a checkpoint; see `ckptcore.api.fingerprint`.

    Args:
        manifest: The checkpoint.
        settings: Memory, threads and device.
        progress: Called with the number of bytes read.
        rules: Which tensors are fingerprinted, and under which names.

    Returns:
        The fingerprints of the checkpoint and of its tensors.

    Raises:
        UsageError: No tensor is selected.
        DamagedCheckpoint: A selected tensor is incomplete or does not match its checksum.
    """
    include, exclude, warnings = _with_effect(manifest, rules)
    if settings.device != "cpu":  # the bytes are on the host, where their sums take less than a transfer
        message = f"--device {settings.device} is not used: fingerprints are summed where files are read"
        warnings = (*warnings, finding("unused-option", "files", message))
        settings = replace(settings, device="cpu")
    inside = in_model(manifest, rules.model_prefix) if rules.model else str
    require_complete(manifest, lambda name: is_kept(name, include, exclude) and inside(name) is not None)
    part = find_model(manifest, rules.model_prefix) if rules.model else None
    mapped = remap(manifest, include=include, exclude=exclude, model=part, rename=rules.rename)
    if not mapped.manifest.tensors:
        raise UsageError(
            f"no tensor is left (got {len(manifest.tensors)} in the checkpoint)",
            hint="check --include, --exclude and --model-prefix",
        )
    opened = OpenSide(manifest.root, mapped.manifest)
    with closing_sides([opened]):
        tensors = _tensors(opened, settings, progress)
        opened.finish()
    digest = map_digest(mapped.renamed, [d.fqn for d in mapped.dropped], ())
    return Fingerprints(
        checkpoint_fingerprint(tensors), digest, tensors, mapped.renamed, opened.unverified, warnings
    )


def _with_effect(
    manifest: Manifest, rules: FingerprintRules
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[Finding, ...]]:
    """Return the globs that match tensors, and a warning for each option that matches none.

    Without a single --include that matches, nothing is selected, which is an error.
    """
    names = [*(t.fqn for t in manifest.tensors), *manifest.unread]
    used = {g for g in (*rules.include, *rules.exclude) if any(matches(n, [g]) for n in names)}
    idle = [(o, g) for o in ("include", "exclude") for g in getattr(rules, o) if g not in used]
    if rules.include and not used & {*rules.include}:
        raise UsageError(
            f"no tensor is left: --include {rules.include[0]} matches nothing",
            hint="`ckptcore inspect SRC` lists the names",
        )
    idle += [("rename", old) for old, new in rules.rename if not _renames(names, rules, old, new)]
    warnings = tuple(
        finding("unused-option", "files", f"--{option} {glob} matches no tensor", fqn=None)
        for option, glob in idle
    )
    include, exclude = (tuple(g for g in gs if g in used) for gs in (rules.include, rules.exclude))
    return include, exclude, warnings


def _renames(names: Sequence[str], rules: FingerprintRules, old: str, new: str) -> bool:
    """Report whether a rename has an effect; those of the model part have names without its prefix."""
    head, star, tail = old.partition("*")
    if rules.model or len(rules.rename) > 1:  # a rule may apply to what another makes
        return True
    return any(n.startswith(head) and (not star or n.endswith(tail)) for n in names) or old == new


def _tensors(opened: OpenSide, settings: Settings, progress: Progress | None) -> tuple[Fingerprinted, ...]:
    """Return the fingerprint of every tensor. Raise the first error of any worker."""
    specs = opened.manifest.tensors
    rows, sizes = range(len(specs)), [spec.nbytes for spec in specs]
    meter = ProgressMeter(progress, "read", opened.manifest.nbytes)
    sums = read_shared(sum_tensors, [opened], rows, sizes, settings, meter)
    return tuple(
        (s.fqn, s.dtype, s.shape, tensor_fingerprint(s.dtype, s.shape, total))
        for s, total in zip(specs, sums, strict=True)
    )


def sum_tensors(
    sides: Sequence[OpenSide], rows: Sequence[int], settings: Settings, meter: ProgressMeter
) -> list[Sum]:
    """Return the sum of each of some tensors, read in the threads of this process.

    Args:
        sides: The checkpoint alone.
        rows: Of the tensors in its manifest.
        settings: Memory and threads.
        meter: Counts the bytes that are read.
    """
    lock = threading.Lock()
    # The order of `rows`, whichever box ends first.
    sums = dict.fromkeys(rows, ZERO)

    def worker(tiles: Tiles) -> Callable[[OpenTensor, Box], None]:
        tile, scratch = tiles.take(), tiles.take()

        def read(tensor: OpenTensor, box: Box) -> None:
            (elements,) = tensor.read(box, (tile,), scratch)
            box_total = box_sum(tensor.spec.dtype, tensor.spec.shape, box, elements, scratch)
            (row,) = tensor.rows
            with lock:
                sums[row] = add(sums[row], box_total)

        return read

    read_boxes(sides, (OpenTensor(sides, [row]) for row in rows), worker, settings, meter)
    return list(sums.values())
