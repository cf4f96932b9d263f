"""Scrub and retire as flows: what the commands do, with the reasons where people look."""

from __future__ import annotations

import shutil
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ckptcore.catalog import open_catalog
from ckptcore.catalog import watched_roots as roots
from ckptcore.conversion.pipeline import convert
from ckptcore.planning.request import Request, Settings

pytestmark = [
    pytest.mark.usefixtures("prefect_api"),
    pytest.mark.xdist_group("prefect"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture
def steps(source: Path, catalog: str, tmp_path: Path) -> list[Path]:
    """Two steps below a watched root, converted with fingerprints into `tmp_path/out`."""
    shutil.copytree(source, source.with_name("step-8"))
    with open_catalog(catalog) as known, known.writing() as conn:
        roots.add(conn, datetime.now(UTC), "r", str(source.parent))
    found = [source, source.with_name("step-8")]
    for each in found:
        request = Request(str(each), str(tmp_path / "out" / each.name))
        convert(request, Settings(memory=64 << 20, fingerprint=True), None, catalog)
    return found


def test_scrub_verifies_and_fails_with_the_damage(steps: list[Path], catalog: str, tmp_path: Path) -> None:
    from flows.scrub import scrub

    state = scrub(share=1.0, catalog=catalog, return_state=True)
    assert (state.is_completed(), state.message) == (True, "4 proven")
    (tmp_path / "out/step-7/model.safetensors").unlink()
    state = scrub(share=1.0, catalog=catalog, return_state=True)
    assert state.is_failed()
    assert "1 damaged, 3 proven" in state.message
    assert "model.safetensors is missing" in state.message
    refused = scrub(share=0.0, catalog=catalog, return_state=True)
    assert refused.message.startswith("usage: ")


def test_retire_deletes_only_with_yes(steps: list[Path], catalog: str) -> None:
    from flows.retire import retire

    loss = ["*"]
    state = retire(keep_last=1, accept_loss=loss, catalog=catalog, return_state=True)
    assert state.is_completed(), state.message
    assert state.message.startswith("1 kept, 1 to retire")
    assert steps[0].exists()
    given = {"keep_last": 1, "accept_loss": loss, "catalog": catalog, "return_state": True}
    state = retire(yes=True, grace="1s", **given)
    assert state.message.startswith("1 kept, 1 retired")
    assert not steps[0].exists()
    assert len(list(steps[0].parent.iterdir())) == 2  # it is set aside
    time.sleep(1.0)
    state = retire(purge=True, **given)
    assert state.message.startswith("1 kept, ")
    assert [p.name for p in steps[0].parent.iterdir()] == ["step-8"]
    assert retire(keep_last=0, catalog=catalog, return_state=True).is_failed()
