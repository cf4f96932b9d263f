"""An announced checkpoint that is not complete yet does not occupy a worker."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import observe
import pytest
from observe import TENSORS

from ckptcore.catalog import open_catalog
from ckptcore.errors import Busy

pytestmark = [
    pytest.mark.usefixtures("prefect_api"),
    pytest.mark.xdist_group("prefect"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture
def announced(source: Path, tmp_path: Path, catalog: str) -> Any:
    """A run of a deployment, for an announcement; begins it as a worker's process would, each time it is
    called, and gives the run as the server knows it then. Prefect waits until it is due."""
    from prefect.client.orchestration import get_client
    from prefect.exceptions import Abort
    from prefect.flow_engine import run_flow

    from ckptcore.operations.automation import wait as waiting
    from flows import arrived as _later
    from flows.arrived import arrived

    given = {
        "source": str(source),
        "destination": str(tmp_path / "out"),
        "root": str(tmp_path),
        "verb": "consolidate",
        "wait_minutes": 0.02,
        "catalog": catalog,
    }
    with get_client(sync_client=True) as client:
        flow = client.create_flow_from_name("arrived")
        form = arrived.parameters.model_dump()
        deployment = client.create_deployment(flow, name="later", parameter_openapi_schema=form)
        id = client.create_flow_run_from_deployment(deployment, parameters=given).id

        def begin() -> Any:
            run = client.read_flow_run(id)
            with contextlib.suppress(Abort):
                run_flow(arrived, flow_run=run, parameters=run.parameters, return_type="state")
            return client.read_flow_run(id)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_later, "AT_LEAST", 0.0)
            patch.setattr(waiting, "QUIET", 0.1)
            patch.setattr(waiting, "STEPS", (0.5, 1.0))
            yield begin


def test_a_run_is_rescheduled_until_the_checkpoint_is_complete(
    announced: Any, source: Path, tmp_path: Path
) -> None:
    from tasks.retry import start_count

    metadata = (source / ".metadata").rename(tmp_path / "metadata")
    for n, seconds in enumerate((0.5, 1.0), start=1):
        before = datetime.now(UTC)
        run = announced()
        # Its process has ended and occupies no slot; Prefect starts it again after the pause.
        assert (run.state.type.value, run.state.name) == ("SCHEDULED", "AwaitingRetry"), run.state
        assert "not-complete" in run.state.message
        due = run.next_scheduled_start_time
        assert before + timedelta(seconds=seconds / 2) <= due  # Prefect estimates the clock skew
        assert due <= datetime.now(UTC) + timedelta(seconds=seconds)
        assert (run.run_count, start_count(run)) == (n, 0)  # waiting is not a failure: `resume` counts those
    metadata.rename(source / ".metadata")
    run = announced()
    assert run.state.is_completed(), run.state.message
    assert observe.equal(observe.tensors(tmp_path / "out"), TENSORS)
    assert start_count(run) == 1


def test_the_last_try_reports_the_finding(announced: Any, source: Path) -> None:
    (source / ".metadata").unlink()
    assert [announced().state.name for _ in range(3)] == ["AwaitingRetry", "AwaitingRetry", "Failed"]
    assert announced().state.message.startswith("not-complete: ")


def test_a_run_that_meets_another_is_rescheduled(announced: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from flows import arrived as module

    def busy(*_: Any) -> Any:
        raise Busy("another process is at work")

    with monkeypatch.context() as patch:
        patch.setattr(module, "claim_or_skip", busy)
        run = announced()
    assert run.state.name == "AwaitingRetry", run.state
    assert "busy: another process is at work" in run.state.message
    assert announced().state.is_completed()


def test_waiting_does_not_count_as_a_crash(announced: Any, source: Path, catalog: str) -> None:
    from prefect.client.orchestration import get_client
    from prefect.states import Crashed

    from flows.resume import resume

    metadata = (source / ".metadata").rename(source.parent / "metadata")
    announced()
    run = announced()
    assert run.state.name == "AwaitingRetry", run.state
    metadata.rename(source / ".metadata")
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, Crashed(message="killed"), force=True)
        message = resume(str(run.id), most=1, return_state=True).message
        assert message.endswith(": start 1"), message
    assert announced().state.is_completed()
    with open_catalog(catalog) as known:
        assert len(known.conversions()) == 1
