"""Test every fault at random moments of writing, publishing, resuming and collecting on an object store."""

from __future__ import annotations

import signal
import time

import fault_s3
import pytest
from fault_matrix import KINDS, PART, STAGES, Kind, Trial, cells, make_source

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # aiobotocore leaves its session
MOMENTS = 20


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits between repeats, and parts of few bytes."""
    monkeypatch.setattr("ckptcore.store.objects.retry._LONGEST_WAIT_S", 0.1)
    monkeypatch.setattr("ckptcore.store.objects.part_plan.PART", PART)


@pytest.fixture(scope="session")  # of the module it would give the whole matrix to one worker
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_source(tmp_path_factory.mktemp("source"))


def tried(kind: Kind, stage: str, source: str, moments: int, seed: str) -> dict[str, int]:
    from fsspec.config import conf

    with pytest.MonkeyPatch.context() as patch, fault_s3.serving(min_part=PART, **kind.habits) as server:
        if kind.rule["action"] in ("stall", "late"):
            # Only these wait for a time-out: a busy machine answers other requests late, too.
            patch.setitem(conf, "s3", {"config_kwargs": {"read_timeout": 1.0}})
        server.stall_s = 1.3
        trial = Trial(server, source, seed)
        for _ in range(moments):
            trial.case(kind, stage)
        return trial.outcomes


SLICE = [cell for stage in STAGES for cell in [c for c in cells() if c[1] == stage][::14]]  # the rest is soak


@pytest.mark.alike(3)
@pytest.mark.xdist_group("fault_matrix_slice")  # each worker converts once without faults
@pytest.mark.parametrize(("name", "stage"), SLICE)
def test_one_moment(name: str, stage: str, source: str) -> None:
    tried(KINDS[name], stage, source, 1, f"{name} {stage} once")


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_stopped_anywhere(number: int, source: str) -> None:
    with fault_s3.serving(min_part=PART) as server:
        trial = Trial(server, source, f"signal {number}")
        for _ in range(MOMENTS):
            trial.stopped(number)
        print(number, trial.outcomes)


@pytest.mark.soak
@pytest.mark.parametrize(("name", "stage"), list(cells()))
def test_right_or_a_clear_error_and_nothing_is_left(name: str, stage: str, source: str) -> None:
    began = time.process_time()
    found = tried(KINDS[name], stage, source, MOMENTS, f"{name} {stage}")
    print(f"{name}, {stage}: {found}, {time.process_time() - began:.1f} s of CPU")
