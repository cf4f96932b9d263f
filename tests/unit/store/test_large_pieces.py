"""Files larger than what a store reads, writes, copies or compares at a time are complete."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fault_s3
import numpy as np
import pytest

from ckptcore.errors import DamagedCheckpoint
from ckptcore.store import local, local_writer, merged, open_source_store, open_store, remote
from ckptcore.store.local import LocalStore
from ckptcore.store.objects import reader, small_reads
from ckptcore.utils.merged_url import merged_url

MIB = 1 << 20


def data_of(nbytes: int) -> bytes:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8).tobytes()


@pytest.mark.parametrize(
    ("block", "nbytes"), [(10, 0), (10, 9), (10, 10), (10, 35), (local._BLOCK, local._BLOCK + 7)]
)
def test_a_copy_to_another_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, nbytes: int
) -> None:
    monkeypatch.setattr(local, "_BLOCK", block)
    (tmp_path / "from").mkdir()
    with (tmp_path / "from/file").open("wb") as file:  # what is between is a hole
        file.write(b"first")
        file.seek(max(nbytes - 5, 0))
        file.write(b"final")
        file.truncate(nbytes)
    LocalStore(tmp_path / "from").copy_to("file", LocalStore(tmp_path / "to"), "copy")
    assert (tmp_path / "to/copy").read_bytes() == (tmp_path / "from/file").read_bytes()


@pytest.mark.parametrize(("every", "piece"), [(1000, 300), (local_writer._SYNC_EVERY, 1 << 18)])
def test_writeback_is_begun_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, piece: int
) -> None:
    monkeypatch.setattr(local_writer, "_SYNC_EVERY", every)
    monkeypatch.setattr(local_writer, "_file_system", lambda fd: 0)  # not one in memory
    begun: list[int] = []
    monkeypatch.setattr(local_writer, "_SYNC_FILE_RANGE", lambda *given: begun.append(given[-1]))
    data = data_of(10_000)
    writer = LocalStore(tmp_path).writer("file", len(data))
    for at in range(0, len(data), piece):
        writer.write(at, data[at : at + piece])
    writer.commit()
    assert (tmp_path / "file").read_bytes() == data
    assert begun == [2] * (len(data) // (4 * piece) if every == 1000 else 0)


@pytest.mark.parametrize("block", [10, merged._BLOCK])
@pytest.mark.parametrize("blocks", [1, 2])
def test_a_file_in_two_folders_is_compared_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, blocks: int
) -> None:
    monkeypatch.setattr(merged, "_BLOCK", block)
    data = bytearray(data_of(blocks * block + 3))
    nodes = [tmp_path / "one", tmp_path / "two"]
    for node in nodes:
        node.mkdir()
        (node / "file").write_bytes(data)
    source = open_source_store(merged_url(list(map(str, nodes))))
    assert isinstance(source, merged.MergedStore)
    source.require_equal()
    for at in (0, block - 1, block, len(data) - 1):
        other = data.copy()
        other[at] ^= 1
        (nodes[1] / "file").write_bytes(other)
        with pytest.raises(DamagedCheckpoint, match="different bytes"):
            source.require_equal()


@pytest.mark.parametrize(("part", "nbytes"), [(10, 34), (remote._PART, remote._PART + 3)])
def test_a_read_of_several_requests(monkeypatch: pytest.MonkeyPatch, part: int, nbytes: int) -> None:
    monkeypatch.setattr(remote, "_PART", part)
    data = data_of(nbytes)
    store = open_store("memory://large-pieces")
    store.put("file", data)
    for start in (0, 3):
        into = bytearray(nbytes - start)
        store.read_into("file", start, memoryview(into))
        assert into == data[start:]
    store.remove_all()


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[fault_s3.FaultyS3]:
    monkeypatch.setattr(small_reads, "SHARED", small_reads.SmallReads())
    monkeypatch.setattr(reader, "SHARED", small_reads.SHARED)
    with fault_s3.serving() as running:
        yield running


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of s3fs
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize(
    ("small", "block", "nbytes"),
    [(100, 1000, 12_345), (reader._SMALL, reader.BLOCK, 2 * MIB + 5), (reader._SMALL, MIB, 9 * MIB + 5)],
)
def test_reads_of_an_object_that_nobody_expected(
    bucket: fault_s3.FaultyS3,
    monkeypatch: pytest.MonkeyPatch,
    small: int,
    block: int,
    nbytes: int,
    pinned: bool,
) -> None:
    """Small ones by pages; large ones in blocks, several at a time, all of one version."""
    monkeypatch.setattr(reader, "_SMALL", small)
    monkeypatch.setattr(reader, "BLOCK", block)
    data = data_of(nbytes)
    bucket.put("b/src/file", data)
    store = (open_source_store if pinned else open_store)("s3://b/src")
    for length in (1, small - 1, small, block, block + 1, nbytes - 7):
        into = bytearray(min(length, nbytes - 7))
        store.read_into("file", 7, memoryview(into))
        assert into == data[7 : 7 + len(into)]
    store.close()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of s3fs
@pytest.mark.parametrize("nbytes", [MIB - 1, MIB, 2 * MIB + 5])  # a socket takes 1 MiB at a time
def test_an_object_is_sent_and_received_in_pieces(bucket: fault_s3.FaultyS3, nbytes: int) -> None:
    data = data_of(nbytes)
    store = open_store("s3://b/out")
    store.put("file", data)
    assert bucket.below("b/out/") == {"file": data}
    assert store.read("file", 0, nbytes) == data
    store.close()
