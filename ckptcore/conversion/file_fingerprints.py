"""Compute fingerprints and statistics of tensors from those of their boxes, which the files contain.

Each receipt has the sums and statistics of the boxes in its file. The same box in several files (a replica
for each rank) counts once. If the boxes are not a partition of their tensor, there is no fingerprint.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckptcore.core.box import Box
from ckptcore.core.manifest import Ints, Manifest, with_dims
from ckptcore.errors import OutputMismatch
from ckptcore.execution.receipts import Receipt
from ckptcore.fingerprints.statistics import COLUMNS, MeasuredTensor, Statistics, joined
from ckptcore.fingerprints.sums import Fingerprinted, Shape, checkpoint_fingerprint, tensor_fingerprint
from ckptcore.planning.file_plan import FilePlan

Qwords = npt.NDArray[np.uint64]
_log = logging.getLogger("ckptcore")


def fingerprints(plans: Iterable[FilePlan], receipts: Sequence[Receipt]) -> tuple[Fingerprinted, ...] | None:
    """Compute the fingerprint of every tensor that a plan writes, before any cast.

    Args:
        plans: The plan of each file.
        receipts: The receipt of each file, in the same order.

    Returns:
        The tensors in the order of the files; None if a file was written without sums.

    Raises:
        OutputMismatch: Two files contain the same box of a tensor with different elements.
    """
    if any(receipt.sums is None for receipt in receipts):
        return None
    boxes, added = _boxes(plans, receipts, [_qwords(receipt.sums, 2) for receipt in receipts])
    volume, total = np.zeros(len(boxes.specs), np.int64), np.zeros((len(boxes.specs), 2), np.uint64)
    # `add.at`, as a tensor has many boxes: an indexed sum would add only one of them. Sums wrap around at 64
    # bits, as the fingerprint defines them.
    np.add.at(volume, boxes.tensor, boxes.numel)
    np.add.at(total, boxes.tensor, added)
    fingerprinted = []
    for (name, dtype, full), elements, (low, high) in zip(
        boxes.specs, volume.tolist(), total.tolist(), strict=True
    ):
        # Replicas were removed before: what is left must fill the tensor, or
        # overlaps and holes would cancel out in the sum.
        if elements != Box.full(full).numel:
            _log.warning("no fingerprint: the boxes of %s in the files are not a partition of it", name)
            return None
        fingerprinted.append((name, dtype, full, tensor_fingerprint(dtype, full, (low, high))))
    return tuple(fingerprinted)


def statistics(plans: Iterable[FilePlan], receipts: Sequence[Receipt]) -> tuple[MeasuredTensor, ...]:
    """Compute the statistics of every tensor that a plan writes, before any cast.

    Args:
        plans: The plan of each file.
        receipts: The receipt of each file, in the same order.

    Returns:
        The tensors with numbers, in the order of the files; none if a file was written without statistics,
        and without those whose boxes in the files are not a partition of them.

    Raises:
        OutputMismatch: Two files contain the same box of a tensor with different elements.
    """
    if any(receipt.statistics is None for receipt in receipts):
        return ()
    packed = [_qwords(receipt.statistics, len(COLUMNS)) for receipt in receipts]
    boxes, added = _boxes(plans, receipts, packed)
    # Together by tensor, each in the order of its boxes: floating-point sums depend on the order.
    order = np.argsort(boxes.tensor, kind="stable")
    bounds = np.searchsorted(boxes.tensor[order], np.arange(len(boxes.specs) + 1))
    measured = []
    for (name, dtype, full), start, stop in zip(boxes.specs, bounds[:-1], bounds[1:], strict=True):
        mine = order[start:stop]
        row = joined(added[mine].view(np.float64))
        numel = Box.full(full).numel
        if row is not None and int(boxes.numel[mine].sum()) == numel:
            measured.append(MeasuredTensor(name, dtype, full, Statistics.of_row(dtype, numel, row)))
    return tuple(measured)


def matching(
    manifest: Manifest, fingerprinted: Iterable[Fingerprinted], names: Mapping[str, str]
) -> tuple[str | None, dict[str, str]]:
    """Select the fingerprints that belong to a checkpoint's tensors.

    A tensor of another dtype (a cast) or shape is another tensor.

    Args:
        manifest: The checkpoint.
        fingerprinted: Fingerprinted tensors.
        names: FQN in the checkpoint -> name in ``fingerprinted``, where they differ.

    Returns:
        (fingerprint of the checkpoint, fingerprints of its tensors by FQN). The first is None unless all its
        tensors are known.
    """
    by_name = {name: (dtype, shape, digest) for name, dtype, shape, digest in fingerprinted}
    mine: dict[str, str] = {}
    for spec in manifest.tensors if by_name else ():
        row = by_name.get(names.get(spec.fqn, spec.fqn))
        # By dtype and shape: the same name after a cast has other bits.
        if row is not None and row[:2] == (spec.dtype, spec.shape):
            mine[spec.fqn] = row[2]
    # A checkpoint's fingerprint covers all of its tensors, or none.
    if len(mine) < len(manifest.tensors) or not mine:
        return None, mine
    return checkpoint_fingerprint((t.fqn, t.dtype, t.shape, mine[t.fqn]) for t in manifest.tensors), mine


class _Boxes(NamedTuple):
    """The boxes of tensors in the files of a plan, each once: index into ``specs``, and number of elements.

    specs: (name, dtype before any cast, shape) of each tensor.
    """

    specs: list[tuple[str, str, Shape]]
    tensor: Ints
    numel: Ints


def _qwords(packed: bytes | None, count: int) -> Qwords:
    """Return what a receipt has of each box as ``count`` qwords of 64 bits."""
    # Little-endian on every machine: receipts travel.
    return np.frombuffer(packed or b"", "<u8").reshape(-1, count)


def _boxes(
    plans: Iterable[FilePlan], receipts: Sequence[Receipt], packed: Sequence[Qwords]
) -> tuple[_Boxes, Qwords]:
    """Return the boxes of all files, without replicas, and the qwords of each."""
    names: dict[str, int] = {}
    specs: list[tuple[str, str, Shape]] = []
    rows, files = [], []
    for number, plan in enumerate(plans):
        columns = plan.columns
        for name, source, rank, full in zip(
            columns.names, columns.source_dtype, columns.rank, columns.full, strict=True
        ):
            if names.setdefault(name, len(specs)) == len(specs):
                specs.append((name, columns.dtypes[source], tuple(full[:rank].tolist())))
        tensor = np.array([names[name] for name in columns.names], np.int64)
        # Copies: views would keep the plans of all files in memory at once.
        rows.append((tensor, columns.offset.copy(), columns.shape.copy()))
        files.append(np.full(len(columns), number))
    boxes, qwords = _columns(rows), np.concatenate(packed)
    # Replicas are in several files, and each element counts once.
    distinct = _distinct_rows(boxes, qwords, np.concatenate(files), list(names), receipts)
    boxes = boxes[distinct]
    return _Boxes(specs, boxes[:, 0], np.prod(boxes[:, 1 + boxes.shape[1] // 2 :], axis=1)), qwords[distinct]


def _columns(rows: Sequence[tuple[Ints, Ints, Ints]]) -> Ints:
    """Return (tensor, offsets, shapes) of all boxes as one table, padded to the highest rank."""
    rank = max(offset.shape[1] for _, offset, _ in rows)
    parts = [
        np.concatenate([tensor[:, None], with_dims(offset, rank, 0), with_dims(shape, rank, 1)], axis=1)
        for tensor, offset, shape in rows
    ]
    return np.concatenate(parts)


def _distinct_rows(
    boxes: Ints, sums: Qwords, files: Ints, names: Sequence[str], receipts: Sequence[Receipt]
) -> Ints:
    """Return the rows without those whose box an earlier row has; equal boxes must have equal sums."""
    order = np.lexsort(boxes.T[::-1])  # stable: equal boxes stay in the order of the files
    duplicate = np.zeros(len(order), np.bool_)
    duplicate[1:] = (boxes[order[1:]] == boxes[order[:-1]]).all(axis=1)
    # Two ranks wrote one box with different values: whichever a reader takes, the other is lost.
    differing = np.flatnonzero(duplicate[1:] & (sums[order[1:]] != sums[order[:-1]]).any(axis=1))
    if len(differing):
        first, second = order[differing[0]], order[differing[0] + 1]
        raise OutputMismatch(
            f"{receipts[files[first]].path} and {receipts[files[second]].path} contain the same box of "
            f"{names[boxes[first, 0]]} with different elements",
            hint="run the command again with --no-resume",
        )
    return order[~duplicate]
