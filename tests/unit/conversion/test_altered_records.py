"""Test that records of a conversion that arrive altered are never taken for what was sent, or for none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fault_s3
import pytest
import torch
from safetensors.torch import load, save_file

import ckptcore
from ckptcore.errors import AlteredInTransit, StorageTrouble
from ckptcore.store.objects.client import S3Client

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # aiobotocore leaves its session to the exit
    pytest.mark.timeout(120),
]
PART = 64 << 10
EVER = 10**9
OUT = "bucket/models/out/"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTCORE_REQUEST_DEADLINE", "2")
    monkeypatch.setattr("ckptcore.store.objects.part_plan.PART", PART)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of three parts."""
    folder = tmp_path_factory.mktemp("source")
    torch.manual_seed(3)
    tensors = {f"layers.{n}.weight": torch.randn(60, 100) for n in range(7)}
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


@pytest.fixture(scope="module")
def tensors(source: str) -> bytes:
    return (Path(source) / "model.safetensors").read_bytes()


NO_COPIES = [(501, "NotImplemented"), (405, "MethodNotAllowed"), (400, "InvalidRequest")]


@pytest.fixture(params=[None, *NO_COPIES], ids=["copies", "501", "405", "400"])
def server(request: pytest.FixtureRequest) -> Iterator[fault_s3.FaultyS3]:
    """A store that compares no checksum of what it gets."""
    with fault_s3.serving(min_part=PART, checks=False) as running:
        if request.param is not None:
            status, code = request.param
            running.fault("CopyObject", times=EVER, status=status, code=code)
        yield running


def convert(source: str, **given: object) -> ckptcore.Result:
    return ckptcore.convert(source, "s3://bucket/models/out", verb="export", catalog=False, **given)  # type: ignore[arg-type]


def require_right(server: fault_s3.FaultyS3, tensors: bytes) -> None:
    """The output has the source's tensors, and nothing else is left."""
    found = server.below("bucket/")
    assert sorted(found) == ["models/out/README.md", "models/out/model.safetensors"]
    new, old = load(found["models/out/model.safetensors"]), load(tensors)
    assert new.keys() == old.keys()
    assert all(torch.equal(new[name], old[name]) for name in old)
    assert server.uploads == {}


@pytest.mark.grid
@pytest.mark.parametrize("replaced", [False, True])
def test_a_step_that_cannot_be_recorded_does_not_lose_the_one_before(
    server: fault_s3.FaultyS3, source: str, tensors: bytes, replaced: bool
) -> None:
    given: dict[str, object] = {}
    if replaced:
        convert(source, dtype="bfloat16")
        given = {"overwrite": True, "overwrite_in_place": True}
    for _ in range(2 if replaced else 1):  # two steps are recorded over another one, or one
        rule = server.fault("PutObject", path="publishing.json$", action="flip", at=0.6, skip=1, times=4)
        with pytest.raises(AlteredInTransit):
            convert(source, **given)
        assert any(name.endswith("publishing.json") for name in server.below("bucket/"))
        rule.times = 0
    convert(source, **{**given, "overwrite": False})
    require_right(server, tensors)


@pytest.mark.parametrize("replaced", [False, True])
def test_the_next_run_completes_what_could_not_be_recorded_at_all(
    source: str, tensors: bytes, replaced: bool
) -> None:
    with fault_s3.serving(min_part=PART, checks=False) as server:
        given: dict[str, object] = {}
        if replaced:
            convert(source, dtype="bfloat16")
            given = {"overwrite": True, "overwrite_in_place": True}
        server.fault("PutObject", path="publishing.json$", action="flip", at=0.6, skip=1, times=EVER)
        for _ in range(2):
            with pytest.raises(AlteredInTransit) as caught:
                convert(source, **given)
        if not replaced:
            assert "s3://bucket/models/out is complete, but" in caught.value.message
            assert "run the same command again" in str(caught.value.hint)
            assert ckptcore.diff(source, "s3://bucket/models/out").equal
        server.calm()
        convert(source, **{**given, "overwrite": False})
        require_right(server, tensors)


def test_without_copies_an_output_that_cannot_be_recorded_is_explained(source: str, tensors: bytes) -> None:
    from ckptcore.operations.abandoned import collect

    with fault_s3.serving(min_part=PART, checks=False) as server:
        server.fault("CopyObject", times=EVER, status=501, code="NotImplemented")
        server.fault("PutObject", path="ckptcore/publishing.json$", action="flip", at=0.6, skip=1, times=EVER)
        with pytest.raises(AlteredInTransit, match="s3://bucket/models/out is complete, but") as caught:
            convert(source)
        assert ckptcore.diff(source, "s3://bucket/models/out").equal
        server.calm()
        assert "ckptcore gc s3://bucket/models." in str(caught.value.hint)
        collect("s3://bucket/models", older_than_s=0)
        require_right(server, tensors)


@pytest.mark.parametrize("keeps", ["crc32", None])
@pytest.mark.parametrize("times", [2, EVER])
def test_a_record_that_is_read_altered_is_not_taken_for_none(
    source: str, tensors: bytes, keeps: str | None, times: int
) -> None:
    """A published output whose staging prefix could not be removed: its record says whose it is."""
    with fault_s3.serving(min_part=PART, keeps=keeps) as server:
        server.fault("DeleteObject", path="ckptcore/plan", times=EVER, status=403, code="AccessDenied")
        convert(source)
        assert any(name.endswith("publishing.json") for name in server.below("bucket/"))
        server.calm()
        server.fault("GetObject", path="publishing.json$", action="flip", at=0.1, times=times)
        if times == EVER:
            with pytest.raises(StorageTrouble, match=r"publishing\.json after \d requests"):
                convert(source)
            server.calm()
        convert(source)
        require_right(server, tensors)


def test_small_objects_are_proven_where_etags_are_no_md5() -> None:
    with fault_s3.serving(keeps=None) as server:
        server.put("bucket/record", b"as it was written")
        server.objects["bucket/record"].etag = "0" * 32
        client = S3Client("s3://bucket", {})
        server.fault("GetObject", action="flip", times=1)
        assert client.fetch("record") == b"as it was written"
        assert server.count("GetObject") == 4  # two differ, two agree
        server.calm()
        assert client.fetch("record") == b"as it was written"
        assert server.count("GetObject") == 2
