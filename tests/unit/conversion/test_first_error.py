"""Test that the first error of a conversion on an object store ends what its other threads do."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fault_s3
import pytest
import torch
from safetensors.torch import load, save_file

import ckptcore
from ckptcore.errors import DestinationUnwritable, StorageTrouble
from ckptcore.planning.request import Settings
from ckptcore.store.objects.retry import with_retries
from ckptcore.utils.workers import failed, finishing, run_jobs

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # aiobotocore leaves its session to the exit
    pytest.mark.timeout(120),
]
PART = 64 << 10
EVER = 10**9
SOON_S = 120.0  # far below the deadline of a request, far above what the requests take


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTCORE_REQUEST_DEADLINE", "500")
    monkeypatch.setattr("ckptcore.store.objects.part_plan.PART", PART)


@pytest.fixture
def server() -> Iterator[fault_s3.FaultyS3]:
    with fault_s3.serving(min_part=PART) as running:
        yield running


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {f"layers.{n}.weight": torch.randn(60, 300) for n in range(8)}


@pytest.fixture(params=["local source", "source on S3"])
def source(
    request: pytest.FixtureRequest,
    server: fault_s3.FaultyS3,
    tensors: dict[str, torch.Tensor],
    tmp_path: Path,
) -> str:
    """Outputs of a source on S3 are written in its order, with one line for all files."""
    save_file(tensors, tmp_path / "model.safetensors")
    if request.param == "local source":
        return str(tmp_path)
    server.put("bucket/runs/step/model.safetensors", (tmp_path / "model.safetensors").read_bytes())
    return "s3://bucket/runs/step"


def convert(source: str) -> ckptcore.Result:
    settings = Settings(memory=4 << 20, workers=3)
    return ckptcore.convert(
        source,
        "s3://bucket/models/out",
        verb="export",
        catalog=False,
        settings=settings,
        max_file_size=200 << 10,
    )


def require_right(server: fault_s3.FaultyS3, tensors: dict[str, torch.Tensor]) -> None:
    """The output has the source's tensors, and nothing else is left."""
    found = server.below("bucket/models/")
    assert all(name.startswith("out/") for name in found)
    new = {
        k: v for name, data in found.items() if name.endswith(".safetensors") for k, v in load(data).items()
    }
    assert new.keys() == tensors.keys()
    assert all(torch.equal(new[name], tensors[name]) for name in tensors)
    assert server.uploads == {}


@pytest.mark.alike(2)
@pytest.mark.parametrize("trouble", ["status", "reset"])
def test_a_part_that_is_refused_ends_the_repeats_of_all_others(
    server: fault_s3.FaultyS3, source: str, tensors: dict[str, torch.Tensor], trouble: str
) -> None:
    others = threading.Event()
    denied = {"status": 403, "code": "AccessDenied", "call": lambda: others.wait(10)}
    server.fault("UploadPart", path="00002-of", times=1, **denied)
    server.fault("UploadPart", path="0000[13]", times=EVER, action=trouble, call=others.set)
    started = time.monotonic()
    with pytest.raises(DestinationUnwritable, match="AccessDenied"):
        convert(source)
    assert others.is_set()
    assert time.monotonic() - started < SOON_S
    before = len(server.log)
    time.sleep(0.5)
    assert len(server.log) == before  # nothing is sent without a lease
    assert not server.below("bucket/models/out/")
    server.calm()
    convert(source)
    require_right(server, tensors)


def test_a_wait_of_another_thread_ends_with_the_first_error() -> None:
    waiting = threading.Event()

    def trouble() -> None:
        waiting.set()
        raise ConnectionResetError("reset by peer")

    def job(number: int) -> None:
        if number:
            with_retries(trouble, "s3://bucket/key", deadline=500.0)
        waiting.wait(10)
        raise DestinationUnwritable("the first error")

    started = time.monotonic()
    with pytest.raises(DestinationUnwritable, match="the first error"):
        run_jobs(iter([0, 1]), lambda: job, threads=2)
    assert time.monotonic() - started < SOON_S


def test_the_repeats_of_a_pool_end_with_the_error_of_the_pool_around_it() -> None:
    waiting = threading.Event()

    def trouble() -> None:
        waiting.set()
        raise ConnectionResetError("reset by peer")

    def inner(number: int) -> None:
        with_retries(trouble, "s3://bucket/key", deadline=500.0)

    def job(number: int) -> None:
        if number:
            run_jobs(iter([0]), lambda: inner, threads=1)
        waiting.wait(10)
        raise DestinationUnwritable("the first error")

    started = time.monotonic()
    with pytest.raises(DestinationUnwritable, match="the first error"):
        run_jobs(iter([0, 1]), lambda: job, threads=2)
    assert time.monotonic() - started < SOON_S


def test_requests_behind_a_good_end_of_a_pool_are_repeated() -> None:
    """What its threads began, such as blocks that are read ahead, is used by the next step."""
    from ckptcore.store.objects.client import RequestThreads

    threads, done, sent, found = RequestThreads(1), threading.Event(), list[int](), list[object]()

    def trouble() -> str:
        done.wait(10)
        sent.append(1)
        if len(sent) < 3:
            raise ConnectionResetError("reset by peer")
        return "bytes"

    def job(_: int) -> None:
        found.append(threads.start(lambda _: with_retries(trouble, "s3://bucket/key", deadline=500.0)))

    run_jobs(iter([0]), lambda: job, threads=1)
    done.set()
    (future,) = found
    assert future.result(20) == "bytes"  # type: ignore[attr-defined]


def test_the_error_of_a_thread_alone_is_repeated_to_its_deadline() -> None:
    with pytest.raises(StorageTrouble, match="after"):
        with_retries(lambda: (_ for _ in ()).throw(ConnectionResetError()), "s3://bucket/key", deadline=0.5)


def test_what_ends_a_failed_job_is_still_repeated() -> None:
    """A lease of one of several conversions is ended although another one has failed."""
    began, tries = threading.Event(), []

    def release() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise ConnectionError("for a moment")

    def do(job: int) -> None:
        if job == 0:
            began.wait(20)
            raise ValueError("the first error")
        began.set()
        while not failed():
            time.sleep(0.01)
        with finishing():
            with_retries(release, "s3://bucket/lease", writing=True)
        assert failed()

    with pytest.raises(ValueError, match="the first error"):
        run_jobs(iter((0, 1)), lambda: do, threads=2)
    assert len(tries) == 3
