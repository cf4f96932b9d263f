"""File plans: what does a worker need to write one output file, and nothing else?

A `FilePlan` names the tensors of its file, whole or the boxes of them that one rank's file holds; the
chunks that overlap those (*reads*), in the coordinates of the whole tensor; and the items and files
of the source that lie under them. It is one frame, readable alone on any worker. Inside it is columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptcore.core import columnar_file as frame
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Chunks, Derived, Ints, Items, StoredFile, dump_derived, load_derived
from ckptcore.formats.base import Literal
from ckptcore.planning.plan_table import Literals, PlannedTensor, Tensors

__all__ = ["COMPARE", "PLACE", "FilePlan", "PlannedTensor"]
PLACE, COMPARE = 0, 1


@dataclass(frozen=True)
class FilePlan:
    """Everything a worker needs to write one file.

    index, path, nbytes, commit: see `FileLayout`. held: its tensors. known: its known bytes.
    reads: chunk columns grouped by tensor; ``reads.item`` points into items. op: int8 per read,
    PLACE or COMPARE. items, files: the parts of the source this file needs; number: what the items are
    called in the source's manifest. source: its root URL.
    derived: tensor -> how it is computed. inputs: what from, as stored; their reads are grouped
    behind those of the tensors.
    """

    index: int
    path: str
    nbytes: int
    commit: bool
    source: str
    held: Tensors
    known: Literals
    reads: Chunks
    op: npt.NDArray[np.int8]
    items: Items
    number: Ints
    files: tuple[StoredFile, ...]
    derived: Mapping[int, Derived] = field(default_factory=dict)
    inputs: tuple[PlannedTensor, ...] = ()

    @cached_property
    def tensors(self) -> tuple[PlannedTensor, ...]:
        """Its tensors, in file order."""
        return tuple(self.held.rows())

    @cached_property
    def literals(self) -> tuple[Literal, ...]:
        """Its known bytes, in file order."""
        return tuple(self.known.rows())

    @cached_property
    def bytes_in(self) -> int:
        """Source bytes of the elements it reads."""
        if not len(self.reads):
            return 0
        of, rank = self.reads.tensor, self.reads.lo.shape[1]
        count = len(self.held) + len(self.inputs)
        lo, hi = np.zeros((count, rank), np.int64), np.ones((count, rank), np.int64)
        width = np.ones(count, np.int64)
        held, own = len(self.held), min(rank, self.held.offset.shape[1])
        lo[:held, :own] = self.held.offset[:, :own]
        hi[:held, :own] = lo[:held, :own] + self.held.shape[:, :own]
        width[:held] = np.array([BY_NAME[d].itemsize for d in self.held.dtypes], np.int64)[
            self.held.source_dtype
        ]
        for n, t in enumerate(self.inputs, held):
            lo[n, : len(t.shape)], hi[n, : len(t.shape)] = t.offset, t.box.end
            width[n] = BY_NAME[t.source_dtype].itemsize
        begin = np.maximum(self.reads.lo, lo[of])
        end = np.minimum(self.reads.lo + self.reads.shape, hi[of])
        return int((width[of] * np.prod(end - begin, axis=1)).sum())

    @cached_property
    def requests(self) -> int:
        """Ranges of source files that it reads; items that touch count as one range."""
        items = self.items
        if not len(items):
            return 0
        order = np.lexsort((items.start, items.file))
        file, start = items.file[order], items.start[order]
        end = start + items.length[order]
        return 1 + int(((file[1:] != file[:-1]) | (start[1:] > end[:-1])).sum())

    @property
    def weight(self) -> int:
        """About how many bytes of memory it takes."""
        text = sum(map(len, self.known.texts))
        return 200 * (len(self.reads) + len(self.held) + len(self.known.text)) + text

    @cached_property
    def digest(self) -> bytes:
        """BLAKE3 of what is in the frame, whatever the compression makes of it."""
        return frame.digest(*self._parts())

    @property
    def dumped(self) -> bytes:
        """The frame of this file's plan: what is saved."""
        return frame.dump(*self._parts())

    def _parts(self) -> tuple[dict[str, Any], dict[str, frame.Array]]:
        r, i = self.reads, self.items
        told, arrays = self.held.parts()
        head = {
            "index": self.index,
            "path": self.path,
            "nbytes": self.nbytes,
            "commit": self.commit,
            "source": self.source,
            "tensors": told,
            "files": [[f.path, f.size] for f in self.files],
            "codecs": list(i.codecs),
            "member": [[k, v] for k, v in sorted(i.member.items())],
        }
        if self.derived:
            head["derived"] = dump_derived(self.derived)
            head["inputs"] = [[t.name, t.dtype, list(t.shape)] for t in self.inputs]
        arrays |= self.known.parts()
        arrays |= {
            "first": r.first,
            "lo": r.lo,
            "shape": r.shape,
            "item": r.item,
            "op": self.op,
            "i.file": i.file,
            "i.start": i.start,
            "i.length": i.length,
            "i.envelope": i.envelope,
            "i.codec": i.codec,
            "i.crc32": i.crc32,
            "number": self.number,
        }
        if r.view is not None:
            arrays["view"] = r.view
        return head, arrays

    @classmethod
    def load(cls, data: bytes) -> FilePlan:
        """The plan of a frame; raises `MalformedCheckpoint`."""
        h, a = frame.load(data)
        return cls(
            h["index"],
            h["path"],
            h["nbytes"],
            h["commit"],
            h["source"],
            Tensors.load(h["tensors"], a),
            Literals.load(a),
            Chunks(a["first"], a["lo"], a["shape"], a["item"], a.get("view")),
            a["op"],
            Items(
                a["i.file"],
                a["i.start"],
                a["i.length"],
                a["i.envelope"],
                a["i.codec"],
                a["i.crc32"],
                tuple(h["codecs"]),
                dict(h["member"]),
            ),
            a["number"],
            tuple(StoredFile(p, s) for p, s in h["files"]),
            load_derived(h.get("derived", [])),
            tuple(whole(*row) for row in h.get("inputs", [])),
        )


def whole(name: str, dtype: str, shape: tuple[int, ...]) -> PlannedTensor:
    """A tensor that is read as it is stored, to compute another one."""
    return PlannedTensor(name, dtype, tuple(shape), 0, dtype, (0,) * len(shape), tuple(shape))
