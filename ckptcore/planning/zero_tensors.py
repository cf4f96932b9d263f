"""Require that tensors which an export drops, because they change nothing where they are zero, are zero.

Values are known only by reading. These tensors are small, a number for each expert, so they are read while an
export is planned: a refusal comes before anything is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import closing

import numpy as np

from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Manifest
from ckptcore.errors import NameMismatch
from ckptcore.naming.rename import Dropped
from ckptcore.reading.box_reader import BoxReader
from ckptcore.reading.checksums import Records
from ckptcore.reading.gather import Bytes, tile_view
from ckptcore.reading.rereading import rereading
from ckptcore.store import open_source_store
from ckptcore.utils.text import listed

_TILE = 1 << 20  # bytes that are read at a time
_SIGNED_ZERO = {2: np.uint16, 4: np.uint32, 8: np.uint64}  # bytes of an IEEE number -> its bits


def require_zero(source: Manifest, dropped: Iterable[Dropped]) -> None:
    """Require zeros where a rule of a map drops zeros only.

    Raises:
        NameMismatch: Another value is there: the target's model would compute something else.
        DamagedCheckpoint: A tensor cannot be read.
    """
    wrong = not_zero(source, dropped)
    if not wrong:
        return
    first = wrong[0][0]
    names = [f"{d.fqn} ({count} of {numel} elements)" for d, count, numel in wrong]
    glob = re.sub(r"\d+", "*", first.fqn)
    raise NameMismatch(
        f"cannot export {listed(names)}: not all zero, and {first.only_zero}",
        hint=f"try --names stored; or give up these values by name, and what they do: --exclude '{glob}'",
        broken=[d.fqn for d, _, _ in wrong],
    )


def not_zero(source: Manifest, dropped: Iterable[Dropped]) -> list[tuple[Dropped, int, int]]:
    """Return the tensors that must be all zero and are not.

    Args:
        source: The checkpoint, before names were mapped.
        dropped: What does not go on.

    Returns:
        (tensor, elements that are not zero, elements).

    Raises:
        DamagedCheckpoint: A tensor cannot be read.
    """
    asked = [d for d in dropped if d.only_zero]
    return _not_zero(source, asked) if asked else []


@rereading
def _not_zero(source: Manifest, asked: Sequence[Dropped]) -> list[tuple[Dropped, int, int]]:
    nonzero = []
    with closing(open_source_store(source.root, source.versions)) as store:
        records = Records(store, len(source.items))
        for tensor in asked:
            row = source.index[tensor.fqn]
            count = _count(source, row, records)
            if count:
                nonzero.append((tensor, count, source.tensors[row].numel))
        # A tensor may be a part of a record: what is left of that is read for its checksum.
        records.finish()
    return nonzero


def _count(source: Manifest, row: int, records: Records) -> int:
    """Count the elements of a tensor that are not zero."""
    spec, nonzero = source.tensors[row], 0
    itemsize = BY_NAME[spec.dtype].itemsize
    scratch = np.empty(_TILE, np.uint8)
    with closing(BoxReader(source, row, records)) as reader:
        for box in Box.full(spec.shape).tiles(_TILE // itemsize) if spec.numel else ():
            data = np.empty(box.numel * itemsize, np.uint8)
            reader.read(box, tile_view(data, box.shape, spec.dtype), scratch)
            nonzero += _nonzero_count(data, spec.dtype)
    return nonzero


def _nonzero_count(data: Bytes, dtype: str) -> int:
    """Count the elements that are not zero; -0.0 is zero, except of 8 bits, and NaN is not."""
    itemsize = BY_NAME[dtype].itemsize
    if BY_NAME[dtype].kind == "f" and itemsize in _SIGNED_ZERO:
        bits = data.view(_SIGNED_ZERO[itemsize])
        return int(np.count_nonzero(bits << bits.dtype.type(1)))
    return int(np.count_nonzero((data.reshape(-1, itemsize) != 0).any(axis=1)))
