"""Every source file has a little of every output: each block is read once, and each part sent once."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import md5
from pathlib import Path

import fault_s3
import pytest
import torch
from safetensors.torch import save_file

import ckptcore
from ckptcore.conversion.request_costs import request_costs
from ckptcore.errors import CkptError
from ckptcore.execution import expected_reads
from ckptcore.planning.compose import compose
from ckptcore.planning.request import Request, Settings
from ckptcore.reading.checksums import Records
from ckptcore.store.ahead import ExpectedReads
from ckptcore.store.objects.reader import FolderReader
from ckptcore.store.objects.uploads import PartBuffers

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # aiobotocore leaves its session to the exit
    pytest.mark.timeout(120),
]
KIB = 1 << 10
RANKS, TENSORS = 16, 16
MEANS = Settings(memory=2460 * KIB, workers=1, fingerprint=True)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTCORE_REQUEST_DEADLINE", "4")
    monkeypatch.setattr("ckptcore.store.objects.part_plan.PART", 64 * KIB)
    for place in ("store.objects.blocks.BLOCK", "execution.expected_reads.BLOCK"):
        monkeypatch.setattr(f"ckptcore.{place}", 64 * KIB)
    monkeypatch.setattr("ckptcore.store.objects.blocks._LEAST_BLOCK", 4 * KIB)
    monkeypatch.setattr("ckptcore.store.objects.blocks.GAP", 0)
    monkeypatch.setattr("ckptcore.execution.expected_reads._LEAST_BAND", 16 * KIB)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DCP folder of 16 files, each with some rows of every tensor."""
    folder = tmp_path_factory.mktemp("source")
    torch.manual_seed(5)
    tensors = {f"layers.{n}.weight": torch.randn(128, 512) for n in range(TENSORS)}
    save_file({**tensors, "norm.weight": torch.randn(256)}, folder / "model.safetensors")
    sharded = folder / "sharded"
    ckptcore.convert(
        str(folder / "model.safetensors"), str(sharded), verb="reshard", to="dcp", mesh=f"fsdp={RANKS}"
    )
    return sharded


@pytest.fixture(scope="module")
def wanted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the same conversion writes from a local folder."""
    out = tmp_path_factory.mktemp("wanted") / "out"
    convert(str(source), str(out))
    return {f.name: f.read_bytes() for f in out.iterdir() if f.name != "README.md"}


@pytest.fixture
def server(source: Path) -> Iterator[fault_s3.FaultyS3]:
    with fault_s3.serving(min_part=64 * KIB) as running:
        for file in source.iterdir():
            data = file.read_bytes()
            running.objects[f"bucket/src/{file.name}"] = fault_s3.Stored(data, md5(data).hexdigest())
        yield running


def convert(source: str, target: str, **given: object) -> ckptcore.Result:
    means = {"settings": MEANS, **given}
    return ckptcore.convert(source, target, verb="export", max_file_size=1 << 20, catalog=False, **means)  # type: ignore[arg-type]


def written(server: fault_s3.FaultyS3) -> dict[str, bytes]:
    found = server.below("bucket/out/")
    return {name.rpartition("/")[2]: data for name, data in found.items() if not name.endswith("README.md")}


def test_every_block_is_read_once_and_every_part_sent_once(
    server: fault_s3.FaultyS3, wanted: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    beyond: list[int] = []
    take = PartBuffers.take

    def counted(self: PartBuffers, nbytes: int, *, must: bool) -> bytearray | None:
        found = take(self, nbytes, must=must)
        if must:
            beyond.append(nbytes)
        return found

    monkeypatch.setattr(PartBuffers, "take", counted)
    asked = Request("s3://bucket/src", "s3://bucket/out", verb="export", max_file_size=1 << 20)
    composed = compose(asked, ckptcore.open(asked.source))
    costs = request_costs(composed.plan, composed.files, asked.source, asked.destination, MEANS)
    assert costs is not None
    server.calm()
    convert(asked.source, asked.destination)
    assert written(server) == wanted
    assert beyond == []  # the parts that are open at the same time are those that were planned
    data = [n for n in server.objects if n.startswith("bucket/src/") and n.endswith(".distcp")]
    assert len(data) == RANKS
    nbytes = sum(len(server.objects[n].data) for n in data)
    reads = [p for m, p, _, _, _ in server.log if m == "GET" and p.endswith(".distcp")]
    assert len(reads) < 1.5 * nbytes / (64 * KIB)  # three tensors fill three quarters of a block
    parts = [q for m, _, q, _, _ in server.log if m == "PUT" and "partNumber" in q]
    small = 4  # values that are no tensors, in the files of some ranks
    assert costs.get <= len(reads) <= costs.get + small
    uploads = len(parts) + server.count("POST")
    assert uploads <= costs.put <= uploads + 3  # and the small files
    files = [len(data) for name, data in wanted.items() if name.endswith(".safetensors")]
    assert len(parts) == sum(-(-n // (64 * KIB)) for n in files)
    others = len(server.log) - len(reads) - len(parts)
    assert others * 164 / len(files) < 20_000  # 1,024 files -> 164 outputs


def test_every_block_is_read_once_for_local_files(
    server: fault_s3.FaultyS3, wanted: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    means = Settings(memory=4096 * KIB, workers=8)  # the files of all workers need more
    asked = Request("s3://bucket/src", str(out), verb="export", max_file_size=1 << 20)
    composed = compose(asked, ckptcore.open(asked.source))
    costs = request_costs(composed.plan, composed.files, asked.source, asked.destination, means)
    assert costs is not None
    server.calm()
    convert(asked.source, str(out), settings=means)
    assert {f.name: f.read_bytes() for f in out.iterdir() if f.name != "README.md"} == wanted
    reads = server.count("GetObject", path=r"\.distcp$")
    assert costs.get <= reads <= costs.get + 4, (costs.get, reads)


def test_an_interrupted_run_goes_on(server: fault_s3.FaultyS3, wanted: dict[str, bytes]) -> None:
    server.fault("PUT", query="partNumber", action="status", status=403, code="AccessDenied", skip=20)
    with pytest.raises(CkptError, match="AccessDenied"):
        convert("s3://bucket/src", "s3://bucket/out")
    sent = server.count("PUT", "partNumber")
    server.calm()
    convert("s3://bucket/src", "s3://bucket/out")
    assert written(server) == wanted
    assert server.uploads == {}
    assert server.count("PUT", "partNumber") < sum(map(len, wanted.values())) / (64 * KIB) - sent / 2


@pytest.mark.alike(1)
@pytest.mark.parametrize("rows", [0, 100, 300])  # of 257; a file has 64
def test_more_ranges_than_are_declared_are_read_as_they_come(
    server: fault_s3.FaultyS3, wanted: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr("ckptcore.execution.expected_reads.MOST_ROWS", rows)
    declared: list[int] = []
    expect = FolderReader.expect

    def noted(self: FolderReader, reads: ExpectedReads, memory: int) -> None:
        declared.append(len(reads))
        expect(self, reads, memory)

    monkeypatch.setattr(FolderReader, "expect", noted)
    awaited: list[int] = []
    monkeypatch.setattr(expected_reads, "bare_files", lambda items, files: {f.path for f in files})
    monkeypatch.setattr(Records, "await_proof", lambda self, numbers: awaited.extend(numbers))
    result = convert("s3://bucket/src", "s3://bucket/out")
    assert written(server) == wanted
    assert sum(file.unverified for file in result.files) == 0
    assert len(awaited) <= rows  # the store's checksums prove only what was declared
    assert bool(awaited) == (rows > 64)
    assert max(declared) <= rows
    assert bool(max(declared)) == bool(rows)
