"""Compare all stored bytes with their checksums, and replicas with each other.

Every item is read once, in blocks, on a few threads. Memory: three blocks a worker.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from ckptcore.checking.unused import unused_findings
from ckptcore.core.box import Box, flat_start
from ckptcore.core.byte_ledger import UnusedBytes
from ckptcore.core.coverage import replicas
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.file_sums import FileSums
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
from ckptcore.reading.payload import Payload, StoredChunk, late_imports, resolve
from ckptcore.reading.rereading import rereading
from ckptcore.reading.unused_in_items import unused_in_blobs
from ckptcore.reading.zero_ranges import without_padding
from ckptcore.store import Store, open_source_store
from ckptcore.store.ahead import ReadsAhead
from ckptcore.utils.command_process import process_count
from ckptcore.utils.crc32 import crc32
from ckptcore.utils.process_pool import Begun, ProcessPool, batches
from ckptcore.utils.workers import CountedMeter, Progress, ProgressMeter

SHA256 = "sha256"  # the key in `Manifest.origin`: file -> hex
_BLOCK = 4 << 20
_PER_WORKER = 3 * _BLOCK
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
    # Inputs of derived tensors are a manifest of their own, with the stored bytes.
    manifests = [manifest, *([manifest.inputs] if manifest.inputs is not None else [])]
    num_chunks, unverified = sum(len(m.chunks) for m in manifests), 0
    total = sum(t.nbytes for m in manifests for n, t in enumerate(m.tensors) if n not in m.derived)
    meter = ProgressMeter(progress, "validate", total)
    findings: list[Finding] = []
    bare: set[str] = set()
    for part in manifests:
        state = _Scan(part, store, skip_files, values, meter)
        rows = part.chunks.item[part.chunks.item >= 0]
        expect_items(store, item_reads(part.items, part.files, rows), _AHEAD)
        pairs = list(replicas(part))
        by_chunk, by_pair = _in_processes(state, pairs, workers) or state.read(
            range(len(part.chunks)), pairs, workers
        )
        findings += [problem for chunk_findings in by_chunk for problem in chunk_findings]
        findings += _merge_findings(
            part, [difference for pair_differences in by_pair for difference in pair_differences]
        )
        # Bytes that no chunk has: nobody else reads them, and each may have been damaged.
        in_items = sorted(state.unused, key=lambda span: (span.file, span.start))
        left = [*in_items, *unused_in_blobs(part, store, skip_files)]
        left += unread_padding(manifest) if part is manifest else ()
        # A file that a finding reports already is not read, so its bytes are no further news.
        readable = [span for span in left if span.file not in skip_files]
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
    for path, recorded in dict(manifest.origin.get(SHA256) or {}).items():
        size = store.size(path)
        if size is None:
            continue
        total = hashlib.sha256()
        # In blocks, since a file may be larger than memory.
        for offset in range(0, size, _BLOCK):
            total.update(store.read(path, offset, min(_BLOCK, size - offset)))
        if total.hexdigest() != recorded:
            yield finding(
                "digest-mismatch",
                "bytes",
                f"{path} has SHA-256 {total.hexdigest()[:16]}..., the checkpoint records {recorded[:16]}...",
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


def _merge_findings(manifest: Manifest, differences: Sequence[Differing]) -> list[Finding]:
    """Return one finding for each tensor and pair of files: a tensor may have thousands of chunks."""
    groups: dict[tuple[str, tuple[str, str]], list[Differing]] = {}
    for difference in differences:
        groups.setdefault((difference.fqn, difference.paths), []).append(difference)
    findings = []
    for (fqn, paths), parts in groups.items():
        numel = manifest.tensors[manifest.index[fqn]].numel
        _, index = min(part.first for part in parts)
        findings.append(mismatch(fqn, paths, index, sum(part.count for part in parts), numel))
    return findings


_Rows = tuple[list[int], list[tuple[int, int]]]  # chunks, and pairs of replicas
_Outcome = tuple[list[list[Finding]], list[list[Differing]]]
"""Findings by chunk, and differences by pair of replicas."""


@dataclass(frozen=True, slots=True)
class _Report:
    """What one process has counted; see `_Scan`."""

    bare: Counter[str]
    unused: dict[UnusedBytes, None]
    bad_values: dict[str, list[int]]
    sums: FileSums | None


@dataclass(frozen=True, slots=True)
class _Setup:
    """What a process begins with.

    Attributes:
        manifest: The checkpoint.
        observe: Whether the reads of its files are observed.
        skip: Files that are not read.
        values: Count NaN and Inf, too.
        workers: Its threads.
    """

    manifest: Manifest
    observe: bool
    skip: set[str | None]
    values: bool
    workers: int


def _in_processes(state: _Scan, pairs: Sequence[tuple[int, int]], workers: int) -> _Outcome | None:
    """Read the chunks in several processes, if that is faster; each reads all chunks of a file.

    Chunks of a file may share a record, which is read once.
    """
    manifest = state.manifest
    if manifest.root != state.store.url or state.store.local is None:
        return None
    items, chunks = manifest.items, manifest.chunks
    files = np.where(chunks.item >= 0, items.file[chunks.item], -1) if len(items) else chunks.item
    sizes = np.bincount(items.file, items.length, len(manifest.files)).astype(int)
    count = process_count(workers, workers * _PER_WORKER, int(sizes.sum()), len(np.unique(files)))
    if count == 1:
        return None
    order = np.argsort(files, kind="stable")
    cuts = np.flatnonzero(np.diff(files[order])) + 1
    groups = [rows.tolist() for rows in np.split(order, cuts)]
    weights = [int(sizes[files[rows[0]]]) if files[rows[0]] >= 0 else 0 for rows in groups]
    jobs: list[_Rows] = [
        ([row for rows in batch for row in rows], []) for batch in batches(groups, weights, count)
    ]
    step = max(1, len(pairs) // (8 * count))
    jobs += [([], list(pairs[start : start + step])) for start in range(0, len(pairs), step)]
    shared = replace(manifest, sums=None), manifest.sums is not None
    setup = _Setup(*shared, state.skip, state.values, max(1, workers // count))
    by_chunk: dict[int, list[Finding]] = {}
    by_pair: dict[tuple[int, int], list[Differing]] = {}
    with ProcessPool(__name__, [setup] * count, imports=late_imports(observed=setup.observe)) as pool:
        for job, outcome in pool.run(jobs, state.meter.add):
            by_chunk.update(zip(job[0], outcome[0], strict=True))
            by_pair.update(zip(job[1], outcome[1], strict=True))
        state.join(pool.finish())
    return [by_chunk[row] for row in range(len(chunks))], [by_pair[pair] for pair in pairs]


def begin(setup: _Setup, finished: Callable[[int], None]) -> Begun:
    """Open the checkpoint in a process."""
    manifest = replace(setup.manifest, sums=FileSums() if setup.observe else None)
    store = open_source_store(manifest.root, manifest.versions)
    store.observer = manifest.sums
    state = _Scan(manifest, store, setup.skip, setup.values, CountedMeter(finished))

    def read(job: _Rows) -> tuple[_Rows, _Outcome]:
        return job, state.read(*job, setup.workers)

    return read, state.report


class _Scan:
    """The state that the workers of one scan share."""

    def __init__(
        self, manifest: Manifest, store: Store, skip: set[str | None], values: bool, meter: ProgressMeter
    ) -> None:
        self.manifest, self.store, self.skip, self.values = manifest, store, skip, values
        self.bare: Counter[str] = Counter()  # file -> its items without a checksum
        self.unused: dict[UnusedBytes, None] = {}  # of items, as threads read them
        self._records: dict[tuple[str | None, int], bool] = {}
        self._bad_values: dict[str, list[int]] = {}
        self._lock = threading.Lock()
        self._local = threading.local()
        self.meter = meter

    def read(self, rows: Sequence[int], pairs: Sequence[tuple[int, int]], workers: int) -> _Outcome:
        """Return what is found in chunks, and in pairs of replicas, read in some threads."""
        with ThreadPoolExecutor(max_workers=max(1, workers)) as pool:
            return list(pool.map(self.chunk, rows)), list(pool.map(self.pair, pairs))

    def report(self) -> _Report:
        """Return what this process has counted, for `join` in another one."""
        return _Report(self.bare, self.unused, self._bad_values, self.manifest.sums)

    def join(self, reports: Sequence[_Report]) -> None:
        """Add what other processes have counted, each in files of its own."""
        for report in reports:
            self.bare += report.bare
            self.unused |= report.unused
            for name, (nan, inf, numel) in report.bad_values.items():
                counts = self._bad_values.setdefault(name, [0, 0, numel])
                counts[0], counts[1] = counts[0] + nan, counts[1] + inf
            if report.sums is not None and self.manifest.sums is not None:
                self.manifest.sums.add(report.sums)

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
            findings = self._verify(payload, name, path)
            if self.values and not findings:
                self._look(payload, row)
        except DamagedCheckpoint as error:
            return list(error.findings)
        except CkptError as error:
            return _as_findings(error, name, path)
        else:
            return findings
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
        tile_pairs = zip(
            self._tiles(payloads[0], rows[0], 0), self._tiles(payloads[1], rows[1], 1), strict=True
        )
        for (box, a), (_, b) in tile_pairs:
            difference = differing(a, b, itemsize)
            if difference is None:
                continue
            count += difference[1]
            index = index_in(box, difference[0])
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
        self.meter.add(payload.record_length)
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
        for offset in range(0, payload.record_length, _BLOCK):
            block, _ = self._buffers(min(_BLOCK, payload.record_length - offset))
            payload.read_into(payload.record_start + offset, block)
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
                counts = self._bad_values.setdefault(spec.fqn, [0, 0, spec.numel])
                counts[0] += nan
                counts[1] += inf

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
