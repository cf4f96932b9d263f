"""Fingerprinting: what does a checkpoint that exists hold, read once, in bounded memory?

Workers share the boxes of all tensors, also of one large tensor; a box is read, verified on the way, and
summed (`ckptcore.fingerprints.sums`), on a device where one is named. At the end every record with a checksum
that was touched is verified as a whole, and the files must still be those that were opened.

Peak memory: the interpreter, torch where tensors are computed or turned, and ``Settings.memory``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ckptcore.checking.check import require_whole
from ckptcore.comparison.tensor_compare import Opened, telling
from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Manifest
from ckptcore.errors import UsageError
from ckptcore.execution.device import Lane, host_buffer, lane_on, sum_held
from ckptcore.execution.execute import tile_bytes
from ckptcore.execution.tiles import READ, TILES
from ckptcore.fingerprints.sums import (
    ZERO,
    Fingerprinted,
    add,
    checkpoint_fingerprint,
    map_digest,
    tensor_fingerprint,
)
from ckptcore.naming.model_part import find_model, in_model
from ckptcore.naming.rename import is_kept, remap
from ckptcore.planning.request import Settings
from ckptcore.reading.box_reader import BoxReader
from ckptcore.reading.gather import Bytes, tile_view
from ckptcore.utils.threads import work_together

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Fingerprints:
    """What a checkpoint holds.

    fingerprint: of all tensors that were taken. map_digest: of what was done to names and what was left
    out. tensors: (FQN, dtype, shape, fingerprint) of each. renamed: (stored name, name). unverified: stored
    items that were read and have no checksum.
    """

    fingerprint: str
    map_digest: str
    tensors: tuple[Fingerprinted, ...]
    renamed: tuple[tuple[str, str], ...]
    unverified: int

    def as_dict(self) -> dict[str, Any]:
        """The JSON face."""
        rows = [
            {"fqn": fqn, "dtype": dtype, "shape": list(shape), "fingerprint": each}
            for fqn, dtype, shape, each in self.tensors
        ]
        return {
            "fingerprint": self.fingerprint,
            "map_digest": self.map_digest,
            "unverified": self.unverified,
            "tensors": rows,
        }


def fingerprint(
    manifest: Manifest,
    settings: Settings,
    progress: Progress | None = None,
    *,
    model: bool = False,
    model_prefix: str | None = None,
    include: tuple[str, ...] = (),
    exclude: tuple[str, ...] = (),
    rename: tuple[tuple[str, str], ...] = (),
) -> Fingerprints:
    """The fingerprint of a checkpoint; see `ckptcore.api.fingerprint`."""
    inside = in_model(manifest, model_prefix) if model else str
    require_whole(manifest, lambda name: is_kept(name, include, exclude) and inside(name) is not None)
    options: dict[str, Any] = {"include": include, "exclude": exclude, "rename": rename}
    if model:
        part = find_model(manifest, model_prefix)
        options |= {"prefix": part.prefix, "also": part.foreign, "unwrap": True}
    mapped = remap(manifest, **options)
    if not mapped.manifest.tensors:
        raise UsageError("no tensor is left", hint="look at --include, --exclude and --model-prefix")
    opened = Opened(manifest.root, mapped.manifest)
    try:
        tensors = tuple(_Reading(opened, settings, progress).run())
        opened.finish()
    finally:
        opened.store.close()
    done = map_digest(mapped.renamed, [d.fqn for d in mapped.dropped], ())
    return Fingerprints(checkpoint_fingerprint(tensors), done, tensors, mapped.renamed, opened.unverified)


class _Open:
    """A tensor while it is read: its reader, its sum, how many boxes are under way."""

    def __init__(self, opened: Opened, row: int) -> None:
        self.row, self.spec = row, opened.manifest.tensors[row]
        self.reader = BoxReader(opened.manifest, row, opened.store, opened.records)
        self.under_way, self.whole, self.total = 0, False, ZERO


class _Reading:
    """The workers and the shared state of one reading."""

    def __init__(self, opened: Opened, settings: Settings, progress: Progress | None) -> None:
        self._opened, self._threads, self._device = opened, settings.threads, settings.device
        self._tile = tile_bytes(settings)
        self._progress, self._done = progress, 0
        self._stream = self._boxes()
        self._take, self._lock = threading.Lock(), threading.Lock()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._open: set[_Open] = set()
        self._found: dict[int, str] = {}

    def run(self) -> Iterator[Fingerprinted]:
        """Runs to the end; raises the first error of any worker."""
        try:
            work_together(self._threads, self._work, self._stop.set)
        finally:
            for each in list(self._open):
                each.reader.close()
        if self._error is not None:
            raise self._error
        for row, spec in enumerate(self._opened.manifest.tensors):
            yield spec.fqn, spec.dtype, spec.shape, self._found[row]

    def _boxes(self) -> Iterator[tuple[_Open, Box]]:
        usual = min(self._tile, max(TILES // self._threads, 1 << 20))
        read = max(READ // self._threads, 64 << 10)
        for row, spec in enumerate(self._opened.manifest.tensors):
            each = _Open(self._opened, row)
            with self._lock:
                self._open.add(each)
            limit = min(self._tile, max(usual, self._opened.beside(row) * read))
            for box in Box.whole(spec.shape).tiles(limit // BY_NAME[spec.dtype].itemsize):
                with self._lock:
                    each.under_way += 1
                yield each, box
            with self._lock:
                each.whole = True
                finished = not each.under_way
            if finished:
                self._close(each)

    def _work(self) -> None:
        try:
            tile, scratch = (host_buffer(self._tile, self._device) for _ in range(2))
            lane = lane_on(self._device, self._tile)
            while not self._stop.is_set():
                with self._take:
                    taken = next(self._stream, None)
                if taken is None:
                    break
                self._sum(*taken, tile, scratch, lane)
        except BaseException as error:  # carried to `run`, which raises it
            with self._lock:
                self._error = self._error or error
            self._stop.set()

    def _sum(self, each: _Open, box: Box, tile: Bytes, scratch: Bytes, lane: Lane | None) -> None:
        spec = each.spec
        elements = tile[: box.numel * BY_NAME[spec.dtype].itemsize]
        with telling(self._opened.label):
            each.reader.read(box, tile_view(tile, box.shape, spec.dtype), scratch)
        found = sum_held(lane, spec.dtype, spec.shape, box, elements, scratch)
        with self._lock:
            each.total = add(each.total, found)
            each.under_way -= 1
            finished = each.whole and not each.under_way
            self._done += len(elements)
            if self._progress is not None:
                self._progress("read", self._done, self._opened.manifest.nbytes)
        if finished:
            self._close(each)

    def _close(self, each: _Open) -> None:
        each.reader.close()
        with self._lock:
            self._found[each.row] = tensor_fingerprint(each.spec.dtype, each.spec.shape, each.total)
            self._open.discard(each)
