"""Export as a flow: what it published is held against its source, and the catalog knows the verdict."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import observe
import pytest
from fake_hub import FakeHub, fake_hub
from paths import FIXTURES

from ckptcore.catalog import open_catalog
from ckptcore.catalog.types import ConversionDetail, ConversionRow
from ckptcore.errors import OutputMismatch, UnprovenCheckpoint, UsageError

pytestmark = [
    pytest.mark.usefixtures("prefect_api"),
    pytest.mark.xdist_group("prefect"),  # one server for all of them
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

VERL = FIXTURES / "torch" / "verl_fsdp2_4r" / "ckpt" / "global_step_10"


@pytest.fixture
def export() -> Any:
    """The flow; Prefect is imported when the server is up."""
    from flows.export import export

    return export


def newest(catalog: str) -> ConversionRow:
    with open_catalog(catalog) as opened:
        found = opened.show(opened.conversions()[0].id)
    assert isinstance(found, ConversionDetail)
    return found.conversion


def test_an_export_is_verified_and_its_verdict_recorded(
    export: Any, source: Path, tmp_path: Path, catalog: str
) -> None:
    state = export(str(source), str(tmp_path / "out"), catalog=catalog, return_state=True)
    assert state.is_completed()
    proof = state.result().proof
    # There is no config.json: names cannot be verified.
    found = {"elements": "ok", "names": "not-done", "fingerprints": "ok", "finite": "ok"}
    assert {check.name: check.verdict for check in proof.checks} == found
    row = newest(catalog)
    assert {name: each["verdict"] for name, each in row.export_checks.items()} == found
    assert row.export_verdict == "unproven"
    assert "verify_export" in row.timings
    found = observe.artifacts(state.state_details.flow_run_id)
    assert "export-verification" in found


def test_an_export_that_differs_from_its_source_fails_and_is_not_the_newest(
    export: Any, source: Path, tmp_path: Path, catalog: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptcore.comparison import verify_export as module

    verify = module.verify_export

    def spoil(request_url: str, *given: Any) -> Any:
        file = Path(request_url) / "model.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        return verify(request_url, *given)

    monkeypatch.setattr(module, "verify_export", spoil)
    state = export(str(source), str(tmp_path / "out"), catalog=catalog, return_state=True)
    assert state.is_failed()
    assert isinstance(state.result(raise_on_failure=False), OutputMismatch)
    assert "is published but does not match its source: fingerprints: " in state.message
    row = newest(catalog)
    assert (row.state, row.export_verdict) == ("succeeded", "failed")
    with open_catalog(catalog) as opened, opened.reading() as conn:
        assert conn.exec_driver_sql("SELECT uri FROM latest_exports").all() == []


def test_verification_is_optional(export: Any, source: Path, tmp_path: Path, catalog: str) -> None:
    state = export(
        str(source), str(tmp_path / "out"), catalog=catalog, verify_export=False, return_state=True
    )
    assert state.result().proof is None
    assert newest(catalog).export_verdict is None


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as hub:
        for name, value in hub.environment("").items():
            if name in ("HF_ENDPOINT", "HF_TOKEN"):
                monkeypatch.setenv(name, value)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        yield hub


@pytest.mark.usefixtures("asked_here")
def test_a_proven_export_is_pushed_to_the_branch_of_its_step(
    export: Any, tmp_path: Path, catalog: str, hub: FakeHub
) -> None:
    out = tmp_path / "out"
    url = "hf://org/model.v1@step-{step}"
    state = export(str(VERL), str(out), catalog=catalog, push=url, return_state=True)
    assert state.is_completed(), state.message
    assert hub.at("step-10") == {file.name: file.read_bytes() for file in out.iterdir()}
    assert "push" in observe.artifacts(state.state_details.flow_run_id)
    with open_catalog(catalog) as opened:
        assert [row.verb for row in opened.conversions()] == ["push", "export"]


def test_an_export_that_nothing_proves_is_not_pushed(
    export: Any, source: Path, tmp_path: Path, catalog: str, hub: FakeHub
) -> None:
    options = {"catalog": catalog, "push": "hf://org/model.v1@a", "return_state": True}
    state = export(str(source), str(tmp_path / "out"), **options)
    assert isinstance(state.result(raise_on_failure=False), UnprovenCheckpoint)
    assert hub.asked == []
    for wrong in ({"push": "hf://org"}, {"verify_export": False}):
        state = export(str(source), str(tmp_path / "other"), **(options | wrong))
        assert isinstance(state.result(raise_on_failure=False), UsageError)
    assert not (tmp_path / "other").exists()
