"""Compare all stored bytes with their checksums, and replicas with each other.

Every item is read once, in blocks, on a few threads. Memory: three blocks a worker.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from ckptcore.checking.unused import unused_findings
from ckptcore.core.box import Box, flat_start
from ckptcore.core.byte_ledger import UnusedBytes
from ckptcore.core.coverage import replicas
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Manifest, is_row_major, view_of
from ckptcore.core.unused_bytes import unread_padding
from ckptcore.errors import (
    CkptError,
    DamagedCheckpoint,
    Finding,
    SourceUnreadable,
    UnreadablePart,
    UnsafeContent,
    finding,
)
from ckptcore.reading.equality import differing, index_in, mismatch
from ckptcore.reading.expected_items import expect_items, item_reads
from ckptcore.reading.gather import Bytes, tile_view
from ckptcore.reading.interleave import Interleaver
from ckptcore.reading.payload import Payload, StoredChunk, resolve
from ckptcore.reading.rereading import rereading
from ckptcore.reading.unused_in_items import unused_in_blobs
from ckptcore.reading.zero_ranges import without_padding
from ckptcore.store import Store
from ckptcore.store.ahead import ReadsAhead
from ckptcore.utils.crc32 import crc32
from ckptcore.utils.dataclass import dataclass
from ckptcore.utils.workers import Progress, ProgressMeter

SHA256 = "sha256"  # the key in `Manifest.origin`: file -> hex
_BLOCK = 4 << 20
_AHEAD = 256 << 20  # bytes of blocks of a remote store


@rereading
def scan(
    manifest: Manifest,
    store: Store,
    *,
    skip_files: set[str | None],
    values: bool,
    workers: int,
    progress: Progress | None,
) -> tuple[list[Finding], int, set[str]]:
    """Read every chunk and compare it with its checksum and its replicas.

    For a derived tensor, its inputs are read.

    Args:
        manifest: The checkpoint.
        store: Where its files are read.
        skip_files: Files that are not read, because a finding already reports them.
        values: Count NaN and Inf, too.
        workers: Number of threads.
        progress: Called with the number of bytes read.

    Returns:
        The findings, the number of items without a checksum, and the files that contain such items.
    """
    manifests = [manifest, *([manifest.inputs] if manifest.inputs is not None else [])]
    num_chunks, unverified = sum(len(m.chunks) for m in manifests), 0
    total = sum(t.nbytes for m in manifests for n, t in enumerate(m.tensors) if n not in m.derived)
    meter = ProgressMeter(progress, "validate", total)
    findings: list[Finding] = []
    bare: set[str] = set()
    for each in manifests:
        state = _Scan(each, store, skip_files, values, meter)
        rows = each.chunks.item[each.chunks.item >= 0]
        expect_items(store, item_reads(each.items, each.files, rows), _AHEAD)
        with ThreadPoolExecutor(max_workers=max(1, workers)) as pool:
            for found in pool.map(state.chunk, range(len(each.chunks)), chunksize=1):
                findings += found
            findings += _merged(each, [d for found in pool.map(state.pair, replicas(each)) for d in found])
        left = [*state.unused, *unused_in_blobs(each, store, skip_files)]
        left += unread_padding(manifest) if each is manifest else ()
        readable = [one for one in left if one.file not in skip_files]
        findings += unused_findings(without_padding(readable, store), "bytes")
        if isinstance(store, ReadsAhead):  # the store may keep checksums where the format has none
            for path in store.prove().proven:
                state.bare.pop(path, None)
        unverified += sum(state.bare.values())
        bare |= state.bare.keys()
        if values:
            findings += state.value_findings()
    if unverified:
        findings.append(
            finding(
                "no-checksum",
                "bytes",
                f"{unverified} of {num_chunks} stored chunks have no checksum: "
                "their layout is correct, their bytes cannot be verified",
            )
        )
    return findings, unverified, bare


def mismatches(manifest: Manifest, store: Store) -> Iterator[Finding]:
    """Yield a finding for every file whose SHA-256 differs from the one that the checkpoint records.

    Each listed file is read once, in blocks of 4 MiB. The reader reports missing files.
    """
    for path, wanted in dict(manifest.origin.get(SHA256) or {}).items():
        size = store.size(path)
        if size is None:
            continue
        total = hashlib.sha256()
        for at in range(0, size, _BLOCK):
            total.update(store.read(path, at, min(_BLOCK, size - at)))
        if total.hexdigest() != wanted:
            yield finding(
                "digest-mismatch",
                "bytes",
                f"{path} has SHA-256 {total.hexdigest()[:16]}..., the checkpoint records {wanted[:16]}...",
                file=path,
            )


@dataclass(frozen=True, slots=True)
class Differing:
    """Two replicas of a chunk that are not equal bit for bit.

    Attributes:
        fqn: The tensor.
        paths: The files of the two replicas; conversions read the first.
        first: The first differing element: its row-major position in the tensor, and its index.
        count: Number of differing elements.
    """

    fqn: str
    paths: tuple[str, str]
    first: tuple[int, tuple[int, ...]]
    count: int


def _merged(manifest: Manifest, found: Sequence[Differing]) -> list[Finding]:
    """Return one finding for each tensor and pair of files: a tensor may have thousands of chunks."""
    groups: dict[tuple[str, tuple[str, str]], list[Differing]] = {}
    for one in found:
        groups.setdefault((one.fqn, one.paths), []).append(one)
    findings = []
    for (fqn, paths), parts in groups.items():
        numel = manifest.tensors[manifest.index[fqn]].numel
        _, index = min(part.first for part in parts)
        findings.append(mismatch(fqn, paths, index, sum(part.count for part in parts), numel))
    return findings


class _Scan:
    """The state that the workers of one scan share."""

    def __init__(
        self, manifest: Manifest, store: Store, skip: set[str | None], values: bool, meter: ProgressMeter
    ) -> None:
        self.manifest, self.store, self.skip, self.values = manifest, store, skip, values
        self.bare: Counter[str] = Counter()  # file -> its items without a checksum
        self.unused: dict[UnusedBytes, None] = {}  # of items, in the order of chunks
        self._records: dict[tuple[str | None, int], bool] = {}
        self._bad_values: dict[str, list[int]] = {}
        self._lock = threading.Lock()
        self._local = threading.local()
        self._meter = meter

    def chunk(self, row: int) -> list[Finding]:
        """Return the findings on one chunk's item."""
        payload, name, path = self._open(row)
        if isinstance(payload, list):
            return payload
        if payload is None:
            return []
        if payload.unused:
            with self._lock:
                self.unused |= dict.fromkeys(payload.unused)
        try:
            found = self._verify(payload, name, path)
            if self.values and not found:
                self._look(payload, row)
        except DamagedCheckpoint as error:
            return list(error.findings)
        except CkptError as error:
            return _as_findings(error, name, path)
        else:
            return found
        finally:
            payload.close()

    def pair(self, rows: tuple[int, int]) -> list[Differing]:
        """Return where two replicas of a box differ; an empty list if they are equal."""
        opened = [self._open(row) for row in rows]
        payloads = [p for p, _, _ in opened if isinstance(p, Payload)]
        try:
            if len(payloads) < 2:
                return []  # `chunk` reports it
            return self._compare((payloads[0], payloads[1]), rows, (opened[0][2], opened[1][2]))
        finally:
            for payload in payloads:
                payload.close()

    def _compare(
        self, payloads: tuple[Payload, Payload], rows: tuple[int, int], paths: tuple[str, str]
    ) -> list[Differing]:
        spec = self.manifest.tensors[int(self.manifest.chunks.tensor[rows[0]])]
        itemsize = BY_NAME[spec.dtype].itemsize
        first: tuple[int, tuple[int, ...]] | None = None
        count = 0
        both = zip(self._tiles(payloads[0], rows[0], 0), self._tiles(payloads[1], rows[1], 1), strict=True)
        for (box, a), (_, b) in both:
            found = differing(a, b, itemsize)
            if found is None:
                continue
            count += found[1]
            index = index_in(box, found[0])
            place = flat_start(spec.shape, index), index
            first = min(first or place, place)
        if first is None:
            return []
        return [Differing(spec.fqn, paths, first, count)]

    def value_findings(self) -> list[Finding]:
        """Return one finding for each tensor with NaN or Inf."""
        return [
            finding("not-finite", "values", f"{name}: {nan} NaN and {inf} Inf of {numel} elements", fqn=name)
            for name, (nan, inf, numel) in sorted(self._bad_values.items())
        ]

    def _open(self, row: int) -> tuple[Payload | list[Finding] | None, str, str]:
        manifest, chunks = self.manifest, self.manifest.chunks
        spec = manifest.tensors[int(chunks.tensor[row])]
        if chunks.item[row] < 0:
            return None, spec.fqn, ""
        item = manifest.items[int(chunks.item[row])]
        path = manifest.files[item.file].path
        if path in self.skip:
            return None, spec.fqn, path
        rank = len(spec.shape)
        shape = tuple(chunks.shape[row, :rank].tolist())
        index, view = int(chunks.item[row]), view_of(chunks, row, rank)
        chunk = StoredChunk(index, path, item, spec.dtype, shape, view, spec.fqn)
        try:
            payload = resolve(chunk, self.store)
        except DamagedCheckpoint as error:
            return list(error.findings), spec.fqn, path
        except CkptError as error:
            return _as_findings(error, spec.fqn, path), spec.fqn, path
        return payload, spec.fqn, path

    def _verify(self, payload: Payload, name: str, path: str) -> list[Finding]:
        key = payload.path, payload.record_start
        with self._lock:
            if payload.path is not None and key in self._records:
                return []  # tensors may share a storage
            self._records[key] = True
        if payload.crc32 is None:
            with self._lock:
                self.bare[path] += 1
        crc = self._crc(payload)
        if crc != payload.crc32 and payload.crc32 is not None and payload.forget is not None:
            # Bits may flip on the way from a store: it is asked once more before anything is called damaged.
            payload.forget(path, payload.record_start, payload.record_length)
            crc = self._crc(payload)
        self._meter.add(payload.record_length)
        if payload.crc32 is not None and crc != payload.crc32:
            return [
                finding(
                    "crc-mismatch",
                    "bytes",
                    f"{name}: bytes in {path} must have CRC-32 {payload.crc32:08x} (got {crc:08x})",
                    fqn=name,
                    file=path,
                )
            ]
        return []

    def _crc(self, payload: Payload) -> int:
        """Read a record; return its CRC-32, or 0 where there is none to compare it with."""
        crc = 0
        for at in range(0, payload.record_length, _BLOCK):
            block, _ = self._buffers(min(_BLOCK, payload.record_length - at))
            payload.read_into(payload.record_start + at, block)
            crc = crc32(block, crc) if payload.crc32 is not None else 0
        return crc

    def _look(self, payload: Payload, row: int) -> None:
        spec = self.manifest.tensors[int(self.manifest.chunks.tensor[row])]
        dtype = BY_NAME[spec.dtype]
        if dtype.kind not in "fc":
            return
        import torch

        kind = getattr(torch, spec.dtype)
        nan = inf = 0
        for _, block in self._tiles(payload, row, 0, as_stored=True):
            values = torch.from_numpy(block).view(kind)
            values = values.float() if dtype.itemsize == 1 else values
            bad = values.numel() - int(torch.isfinite(values).sum())
            if bad:
                n = int(torch.isnan(values).sum())
                nan, inf = nan + n, inf + bad - n
        if nan or inf:
            with self._lock:
                seen = self._bad_values.setdefault(spec.fqn, [0, 0, spec.numel])
                seen[0] += nan
                seen[1] += inf

    def _tiles(
        self, payload: Payload, row: int, slot: int, *, as_stored: bool = False
    ) -> Iterator[tuple[Box, Bytes]]:
        """Yield the elements of a chunk a block at a time, row-major or with dims ordered as stored."""
        manifest, chunks = self.manifest, self.manifest.chunks
        spec = manifest.tensors[int(chunks.tensor[row])]
        rank, itemsize = len(spec.shape), BY_NAME[spec.dtype].itemsize
        chunk_box = Box(tuple(chunks.lo[row, :rank].tolist()), tuple(chunks.shape[row, :rank].tolist()))
        if as_stored and payload.strides:
            placed = sorted(
                zip(payload.strides, chunk_box.offset, chunk_box.shape, strict=True), reverse=True
            )
            steps, offset, shape = (tuple(column) for column in zip(*placed, strict=True))
            chunk_box = Box(offset, shape)
            payload = replace(payload, strides=None if is_row_major(shape, steps) else steps)
        for box in chunk_box.tiles(_BLOCK // itemsize):
            buffer = np.frombuffer(self._buffers(_BLOCK)[slot], np.uint8)
            tile = tile_view(buffer, box.shape, spec.dtype)
            into = Interleaver(tile, box, spec.dtype, self._scratch())
            into.put(payload, chunk_box, box, None)
            into.flush()
            yield box, buffer[: box.numel * itemsize]

    def _buffers(self, count: int) -> tuple[memoryview, memoryview]:
        if not hasattr(self._local, "pair"):
            self._local.pair = bytearray(_BLOCK), bytearray(_BLOCK)
        a, b = self._local.pair
        return memoryview(a)[:count], memoryview(b)[:count]

    def _scratch(self) -> Bytes:
        if not hasattr(self._local, "scratch"):
            self._local.scratch = np.empty(_BLOCK, np.uint8)
        scratch: Bytes = self._local.scratch
        return scratch


def _as_findings(error: CkptError, name: str, path: str) -> list[Finding]:
    """Turn damage into a finding; raise errors that are not about the checkpoint (no permission, say)."""
    if isinstance(error, UnsafeContent):
        code = "unsafe-item" if "global" in error.values else "bad-path"
        return [finding(code, "bytes", error.message, fqn=name, file=path)]
    if isinstance(error, UnreadablePart):
        return list(error.findings)
    if isinstance(error, SourceUnreadable) and "file" not in error.values:
        raise error
    if error.transient:
        raise error
    return [finding("malformed-item", "bytes", error.message, fqn=name, file=path)]
