"""A run is resumed a bounded number of times, even if it never begins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptcore.catalog import open_catalog
from ckptcore.conversion.registration import fail, start
from ckptcore.errors import WorkerLost, ended_by
from ckptcore.planning.request import Request

pytestmark = [pytest.mark.usefixtures("prefect_api"), pytest.mark.xdist_group("prefect")]


@pytest.fixture
def client() -> Iterator[Any]:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as made:
        yield made


def test_a_run_that_dies_before_it_begins_ends_as_failed(client: Any) -> None:
    from prefect.states import Crashed, Pending

    from flows.resume import _resumed
    from flows.resume import resume as flow

    run = client.create_flow_run(flow, parameters={"flow_run_id": "x"})
    outcomes = []
    for _ in range(8):
        for state in (Pending(), Crashed(message="Process exited with status code: 1")):
            client.set_flow_run_state(run.id, state, force=True)
        outcomes.append(_resumed(run.id, 5))
        assert client.read_flow_run(run.id).run_count == 0  # which counted them, and never grew
    assert ["is resumed" in each for each in outcomes[:5]] == [True] * 4 + [False]
    ended = client.read_flow_run(run.id).state
    assert ended.is_failed()
    assert ended.message.startswith("worker-lost: gave up after ")


def test_the_receiver_starts_no_run_with_invalid_parameters(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from ckptcore.errors import UsageError
    from deployments.receiver import prefect_runs
    from flows.arrived import arrived

    known = client.create_flow_from_name("arrived")
    form = arrived.parameters.model_dump()
    client.create_deployment(known, name="typo", parameter_openapi_schema=form)
    with temporary_settings({PREFECT_API_URL: str(client.api_url)}):
        runs = prefect_runs.PrefectRuns()
        given = {"source": "/a", "destination": "/b"}
        with pytest.raises(UsageError, match="has no parameter 'verbb'"):
            runs.start("arrived/typo", given | {"verbb": "export"}, key="k", name="n", tags=[])
        made = runs.start("arrived/typo", given | {"verb": "export"}, key="k", name="n", tags=[])
        runs.give_up(made, "given up: enough")
        assert runs.states([made])[made].kind == "FAILED"
        runs.close()


@pytest.mark.parametrize("how", [SystemExit(1), SystemExit("aborted"), GeneratorExit()])
def test_a_worker_that_is_ended_is_recorded_as_lost(how: BaseException, tmp_path: Path) -> None:
    url = str(tmp_path / "catalog.sqlite")
    registration = start(Request("/a", "/b"), url)
    fail(registration, how, None)
    with open_catalog(url) as catalog:
        (row,) = catalog.conversions()
    assert (row.error_code, row.state) == (WorkerLost.code, "failed")
    assert type(how).__name__ in str(row.error_message)


def test_errors_of_other_packages_have_no_code() -> None:
    error = ValueError("no")
    error.code = "e3q8"  # type: ignore[attr-defined]  # SQLAlchemy's errors have one
    assert ended_by(error).code == "internal"
