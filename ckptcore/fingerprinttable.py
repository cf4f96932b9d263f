"""Fingerprint tables: which fingerprints do the sums of many files make up, and whose are they?

Files hold boxes of tensors, and receipts what these add. The same box in several files (a replica for each
rank) counts once; boxes that are no partition of their tensor make up no fingerprint.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from ckptcore.box import Box
from ckptcore.errors import OutputMismatch
from ckptcore.fileplan import FilePlan, PlannedTensor
from ckptcore.fingerprint import ZERO, Fingerprinted, Sum, add, checkpoint_fingerprint, tensor_fingerprint
from ckptcore.manifest import Manifest
from ckptcore.receipts import Receipt

_log = logging.getLogger("ckptcore")


def fingerprints(plans: Iterable[FilePlan], receipts: Sequence[Receipt]) -> tuple[Fingerprinted, ...] | None:
    """The fingerprint of every tensor that a plan writes, before any cast, in the order of the files.

    None when a file was written without sums. Raises `OutputMismatch` for two files that hold the same box
    of a tensor with other elements.
    """
    if any(receipt.sums is None for receipt in receipts):
        return None
    specs: dict[str, PlannedTensor] = {}
    boxes: dict[str, dict[Box, Sum]] = {}
    for plan, receipt in zip(plans, receipts, strict=True):
        for tensor, total in zip(plan.tensors, receipt.sums or (), strict=True):
            specs.setdefault(tensor.name, tensor)
            first = boxes.setdefault(tensor.name, {}).setdefault(tensor.box, total)
            if first != total:
                raise OutputMismatch(
                    f"{plan.path} holds {tensor.box} of {tensor.name} with other elements than a file before",
                    hint="run the command again with --no-resume",
                )
    found = []
    for name, tensor in specs.items():
        parts = boxes[name]
        if sum(box.numel for box in parts) != Box.whole(tensor.full).numel:
            _log.warning("no fingerprint: the boxes of %s in the files are no partition of it", name)
            return None
        total = ZERO
        for part in parts.values():
            total = add(total, part)
        dtype = tensor.source_dtype
        found.append((name, dtype, tensor.full, tensor_fingerprint(dtype, tensor.full, total)))
    return tuple(found)


def held_by(manifest: Manifest, found: Iterable[Fingerprinted], names: Mapping[str, str]
            ) -> tuple[str | None, dict[str, str]]:  # fmt: skip
    """(fingerprint of a checkpoint, those of its tensors by FQN), as far as tensors of it were fingerprinted.

    names: FQN in the checkpoint -> name in ``found``, where they differ. A tensor of another dtype (a cast)
    or shape is another tensor. The checkpoint's is None unless all its tensors are known.
    """
    known = {name: (dtype, shape, each) for name, dtype, shape, each in found}
    mine: dict[str, str] = {}
    for spec in manifest.tensors:
        row = known.get(names.get(spec.fqn, spec.fqn))
        if row is not None and row[:2] == (spec.dtype, spec.shape):
            mine[spec.fqn] = row[2]
    if len(mine) < len(manifest.tensors) or not mine:
        return None, mine
    return checkpoint_fingerprint((t.fqn, t.dtype, t.shape, mine[t.fqn]) for t in manifest.tensors), mine
