"""Test that many files of a source on S3 are proven at once, each as it would be alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import fault_s3
import numpy as np
import pytest

from ckptcore.errors import AlteredInTransit, CkptError, DamagedCheckpoint
from ckptcore.store import open_source_store
from ckptcore.store.ahead import ExpectedReads, StoreProof
from ckptcore.store.objects import small_reads

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # of s3fs
FILES, SIZE, HEAD = 24, 300_000, 1000


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of earlier reads."""
    monkeypatch.setattr(small_reads, "SHARED", small_reads.SmallReads())
    monkeypatch.setattr("ckptcore.store.objects.reader.SHARED", small_reads.SHARED)


@pytest.fixture(params=["crc32", "sha256", None], ids=str)
def server(request: pytest.FixtureRequest) -> Iterator[fault_s3.FaultyS3]:
    with fault_s3.serving(keeps=request.param) as running:
        for n in range(FILES):
            running.put(f"b/src/f{n:02}.bin", bytes([n]) * SIZE)
        yield running


def proof(during: object = None) -> StoreProof:
    """Read all files but their first bytes, as tensors behind a header are read, and prove them."""
    store = open_source_store("s3://b/src")
    paths = tuple(sorted(store.list()))
    files, when = np.arange(len(paths)), np.arange(len(paths), dtype=float)
    begin, end = np.full(len(paths), HEAD), np.full(len(paths), SIZE)
    store.expect(ExpectedReads(paths, files, begin, end, when, when + 1, bare=frozenset(paths)), 64 << 20)
    for path in paths:
        store.read_into(path, HEAD, memoryview(bytearray(SIZE - HEAD)))
    if callable(during):
        during()
    return store.prove()


def test_many_files_are_proven_at_once(server: fault_s3.FaultyS3) -> None:
    if server.keeps == "sha256":
        pytest.skip("these are received completely, one after another: in little memory")
    lock, now, most = threading.Lock(), [0], [0]

    def called() -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.03)
        with lock:
            now[0] -= 1

    def slow() -> None:
        server.fault("GetObject", action="", times=10**9, call=called)

    before = time.monotonic()
    found = proof(slow)
    assert time.monotonic() - before < 30
    every = frozenset(f"f{n:02}.bin" for n in range(FILES))
    if server.keeps is None:
        assert found == StoreProof(frozenset(), every)
        assert most[0] == 0  # nothing is asked for that proves nothing
        return
    assert found == StoreProof(every, frozenset())
    assert most[0] >= 4


def test_a_file_that_was_altered_is_found_among_many(server: fault_s3.FaultyS3) -> None:
    if server.keeps is None:
        pytest.skip("this store keeps no checksum")

    def flip() -> None:
        server.fault("GetObject", path="f07", action="flip", times=1)

    with pytest.raises(CkptError, match=r"f07\.bin") as caught:
        proof(flip)
    assert isinstance(caught.value, AlteredInTransit | DamagedCheckpoint)
