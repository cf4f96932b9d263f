"""The flow `arrived` waits for an announced checkpoint and converts it once, below allowed roots only."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import observe
import pytest
from observe import TENSORS
from safetensors.torch import save_file

import ckptcore
from ckptcore.catalog import open_catalog
from ckptcore.catalog import watched_roots as roots
from ckptcore.errors import (
    Busy,
    CatalogUnavailable,
    DamagedCheckpoint,
    NotComplete,
    UnsafeContent,
    UsageError,
)
from deployments.receiver.dispatch import PrefectUnavailable

pytestmark = [
    pytest.mark.usefixtures("prefect_api"),
    pytest.mark.xdist_group("prefect"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture
def arrived(tmp_path: Path, catalog: str) -> Any:
    """Return a function that runs the flow and returns its final state. It retries after 0.1 s."""
    from ckptcore.operations.automation import wait as waiting
    from flows.arrived import arrived

    def run(source: Path, **options: Any) -> Any:
        given = {"destination": str(tmp_path / "out"), "root": str(tmp_path), "verb": "consolidate"}
        return arrived(str(source), catalog=catalog, return_state=True, **(given | options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting, "STEPS", (0.1,))
        patch.setattr(waiting, "QUIET", 1.0)
        yield run


def test_a_checkpoint_that_is_still_being_written_is_waited_for(
    arrived: Any, source: Path, tmp_path: Path
) -> None:
    late = tmp_path / "late"

    def arrive() -> None:
        # As a slow copy does it: a folder, half a file, the complete file, the metadata last.
        late.mkdir()
        for path in sorted(source.iterdir(), key=lambda p: p.name == ".metadata"):
            data = path.read_bytes()
            for size in (len(data) // 2, len(data)):
                time.sleep(0.1)  # far less than `QUIET`, even on a slow machine
                (late / path.name).write_bytes(data[:size])

    writer = threading.Timer(0.5, arrive)
    writer.start()
    state = arrived(late, wait_minutes=5)
    writer.join()
    assert state.is_completed(), state.message
    assert observe.equal(observe.tensors(tmp_path / "out"), TENSORS)


def test_a_checkpoint_that_stays_incomplete_fails_with_its_finding(
    arrived: Any, source: Path, tmp_path: Path
) -> None:
    (source / ".metadata").unlink()
    state = arrived(source, wait_minutes=0.005)
    assert state.is_failed()
    assert isinstance(state.result(raise_on_failure=False), NotComplete)
    assert state.message.startswith("not-complete: ")
    assert not (tmp_path / "out").exists()


def test_permanent_damage_is_not_waited_for(arrived: Any, source: Path) -> None:
    meta = source / ".metadata"
    meta.write_bytes(meta.read_bytes()[:-10])
    began = time.monotonic()
    state = arrived(source, wait_minutes=10)
    assert time.monotonic() - began < 300  # far less than the ten minutes that it may wait
    assert isinstance(state.result(raise_on_failure=False), DamagedCheckpoint)


@pytest.mark.parametrize("how", ["link", "dots", "elsewhere"])
def test_a_link_out_of_the_root_is_refused(how: str, arrived: Any, source: Path, tmp_path: Path) -> None:
    root = tmp_path / "allowed"
    root.mkdir()
    (root / "link").symlink_to(source)
    given = {"link": root / "link", "dots": root / ".." / "run" / "step-7", "elsewhere": source}[how]
    state = arrived(given, root=str(root))
    assert isinstance(state.result(raise_on_failure=False), UnsafeContent)
    assert not (tmp_path / "out").exists()


def test_announced_twice_it_is_converted_once(
    arrived: Any, source: Path, tmp_path: Path, catalog: str
) -> None:
    assert arrived(source).is_completed()
    before = observe.contents(tmp_path / "out")
    repeated = arrived(source)
    assert (repeated.is_completed(), repeated.name) == (True, "Already")
    assert observe.contents(tmp_path / "out") == before
    with open_catalog(catalog) as known:
        assert len(known.conversions()) == 1

    # Another save at the same URI was not converted.
    other = tmp_path / "run" / "step-8"
    shutil.copytree(source, other)
    refused = arrived(other)
    assert refused.is_failed()
    assert refused.message.startswith("destination-exists")


def test_a_place_that_was_saved_twice_is_not_taken_for_converted(
    arrived: Any, tmp_path: Path, catalog: str
) -> None:
    source, out = tmp_path / "run" / "step-9", tmp_path / "exports" / "step-9"
    source.mkdir(parents=True)
    save_file(TENSORS, source / "model.safetensors")
    assert arrived(source, destination=str(out)).is_completed()
    before = observe.contents(out)
    # As a run that was restarted from an earlier step: other values in files with the same headers.
    second = {name: tensor + 1 for name, tensor in TENSORS.items()}
    save_file(second, source / "model.safetensors")
    refused = arrived(source, destination=str(out))
    assert (refused.is_failed(), refused.message.split(":")[0]) == (True, "destination-exists")
    assert observe.contents(out) == before
    # A target of a watched root that replaces its outputs has the new values.
    with open_catalog(catalog) as known, known.writing() as conn:
        target = {"verb": "consolidate", "destination": f"{out.parent}/{{name}}", "overwrite": True}
        roots.add(conn, datetime.now(UTC), "r", str(tmp_path / "run"), targets=[target])
    assert arrived(source).is_completed()
    assert observe.equal(observe.tensors(out), second)
    assert arrived(source).name == "Already"


def test_the_announced_run_and_step_are_recorded_if_the_path_names_none(
    arrived: Any, source: Path, tmp_path: Path, catalog: str
) -> None:
    place = source.rename(tmp_path / "final")
    assert arrived(place, run="mistral", step=700).is_completed()
    with open_catalog(catalog) as known:
        found = {(row.kind, row.run, row.step) for row in known.list(run="mistral")}
    assert found == {("source", "mistral", 700), ("derived", "mistral", 700)}


def test_the_announced_run_takes_precedence_and_the_step_in_the_path(
    arrived: Any, source: Path, catalog: str
) -> None:
    assert arrived(source, run="mistral", step=700).is_completed()
    with open_catalog(catalog) as known:
        assert {(row.run, row.step) for row in known.list()} == {("mistral", 7)}


def test_a_run_that_meets_another_waits_for_it(
    arrived: Any, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows import arrived as module

    looks: list[int] = []

    def busy(*_: Any, **__: Any) -> Any:
        raise Busy("another process is at work")

    def made(*_: Any) -> bool:
        looks.append(1)
        return len(looks) > 2

    monkeypatch.setattr(module, "steps", busy)
    monkeypatch.setattr(module, "made_from", made)
    state = arrived(source, wait_minutes=0.1)
    assert (state.is_completed(), state.name, len(looks)) == (True, "Already", 3)


@pytest.mark.parametrize("how", ["before", "behind"])
def test_a_short_outage_of_the_catalog_does_not_fail_the_run(
    how: str, arrived: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows import arrived as _patience
    from flows import arrived as module

    real, tries = module.claim_or_skip, []

    @contextmanager
    def claim_or_skip(*given: Any) -> Iterator[bool]:
        tries.append(how)
        if len(tries) == 1 and how == "before":
            raise CatalogUnavailable("the server is shutting down")
        with real(*given) as mine:
            yield mine
        if len(tries) == 1:
            raise CatalogUnavailable("the server is shutting down")

    monkeypatch.setattr(module, "claim_or_skip", claim_or_skip)
    monkeypatch.setattr(_patience, "PAUSES", (0.01,))
    assert arrived(source).is_completed()
    assert len(tries) == 2
    assert observe.equal(observe.tensors(tmp_path / "out"), TENSORS)


def test_leftovers_of_a_killed_run_are_removed(
    arrived: Any, source: Path, tmp_path: Path, catalog: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks import record

    with monkeypatch.context() as patch:
        patch.setattr(record, "remove_staging", lambda plan_uri: None)  # killed right before
        assert arrived(source).is_completed()
    staging = tmp_path / ".out.ckptcore"
    assert staging.is_dir()
    shutil.copytree(staging, tmp_path / ".out.ckptcore.gone-4242")  # or in the middle of it
    with open_catalog(catalog) as known, known.writing() as conn:
        conn.exec_driver_sql("UPDATE claims SET state = 'taken', ended_at = NULL, due_at = taken_at")
    repeated = arrived(source)
    assert (repeated.is_completed(), repeated.name) == (True, "Already")
    assert sorted(path.name for path in tmp_path.glob(".out*")) == []
    with open_catalog(catalog) as known:
        assert len(known.conversions()) == 1


def test_without_the_server_only_artifacts_are_missing(
    arrived: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows import _write as _writing
    from tasks import check, plan, publish, record

    def away(*_: Any, **__: Any) -> Any:
        raise httpx.ConnectError("refused")

    for module in (check, plan, publish, record, _writing):
        for name in dir(module):
            if name.endswith("_artifact"):
                monkeypatch.setattr(module, name, away)
    assert arrived(source).is_completed()
    assert observe.equal(observe.tensors(tmp_path / "out"), TENSORS)


def test_transient_errors() -> None:
    from tasks.retry import is_transient

    request = httpx.Request("GET", "http://127.0.0.1/")
    status = {c: httpx.HTTPStatusError("", request=request, response=httpx.Response(c)) for c in (404, 500)}
    assert [is_transient(e) for e in (CatalogUnavailable("gone"), httpx.ReadError(""), status[500])] == [
        True
    ] * 3
    assert [is_transient(e) for e in (UsageError("no"), ValueError(), status[404], None)] == [False] * 4


def started(runs: Any, *given: Any, **named: Any) -> str:
    """The id of a run. As the dispatcher does: a busy server replies 503 for a moment."""
    for _ in range(20):
        try:
            return str(runs.start(*given, **named))
        except PrefectUnavailable:
            time.sleep(0.5)
    raise AssertionError("Prefect stays unavailable")


def test_a_deployment_is_run_once_per_key(
    source: Path, tmp_path: Path, catalog: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.client.orchestration import get_client
    from prefect.states import Running

    from deployments.receiver import prefect_runs
    from deployments.receiver.prefect_runs import PrefectRuns
    from flows.arrived import arrived

    with get_client(sync_client=True) as client:
        flow = client.create_flow_from_name("arrived")
        client.create_deployment(
            flow,
            name="arrived",
            parameter_openapi_schema=arrived.parameters.model_dump(),
            job_variables={"env": {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}},
        )
    runs = PrefectRuns()
    given = {"source": str(source), "destination": str(tmp_path / "out"), "root": str(tmp_path), "step": 7}
    first, same, other = (
        started(runs, "arrived/arrived", given, key=key, name="slurm run/step-7", tags=["webhook"])
        for key in ("e1", "e1", "e2")
    )
    assert same == first
    assert other != first
    states = runs.states([first, other, "3d6a2f0e-5c8b-4f0e-9d0a-5a3f6f1f3c11"])
    assert {id: state.kind for id, state in states.items()} == {first: "SCHEDULED", other: "SCHEDULED"}
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(first)
        assert (run.name, json.loads(json.dumps(run.parameters))["step"]) == ("slurm run/step-7", 7)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(UUID(first), Running(), force=True)
    state = runs.states([first])[first]
    assert (state.kind, state.beat) == ("RUNNING", timedelta(seconds=30))
    # Its state is three minutes old, so its events are read: one is recent.
    with monkeypatch.context() as patch:
        patch.setattr(prefect_runs, "is_overlooked", lambda state, now: True)
        assert runs.states([first])[first].since >= state.since
    runs.resume(first, "overlooked")
    assert runs.states([first])[first].message == "overlooked"
    with pytest.raises(UsageError, match="nowhere"):
        runs.start("arrived/nowhere", given, key="e3", name="x", tags=[])
    runs.close()


def test_a_checkpoint_that_is_not_what_the_job_had_is_not_published(
    arrived: Any, source: Path, tmp_path: Path, catalog: str
) -> None:
    right = ckptcore.fingerprint(source)
    wrong = {"live_fingerprint": "f" * 64}
    state = arrived(source, meta=wrong)
    assert state.is_failed()
    assert "is not what the job had in memory" in state.message
    assert not (tmp_path / "out").exists()
    state = arrived(source, meta={"live_fingerprint": right.fingerprint})
    assert state.is_completed(), state.message
    with open_catalog(catalog) as opened:
        for place in (source, tmp_path / "out"):
            training = opened.training(str(place))
            assert training is not None
            assert training.live_verdict == "equal"
