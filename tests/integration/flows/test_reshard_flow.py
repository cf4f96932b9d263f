"""Reshard as a flow: one source, several meshes, read and checked once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import observe
import pytest
import torch
import torch.distributed.checkpoint as dcp
from observe import TENSORS

from ckptcore.catalog import open_catalog
from ckptcore.errors import CatalogError, CkptError

pytestmark = [
    pytest.mark.usefixtures("prefect_api"),
    pytest.mark.xdist_group("prefect"),  # one server for all of them
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


TWICE = {"destination": "out", "mesh": "fsdp=2", "also": [{"destination": "out/", "mesh": "fsdp=3"}]}


@pytest.fixture
def reshard() -> Any:
    """The flow; Prefect is imported when the server is up."""
    from flows.reshard import reshard

    return reshard


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """What torch's own loader reads."""
    found = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


def test_several_meshes_of_one_source(
    reshard: Any, source: Path, tmp_path: Path, catalog: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    from tasks import check as checked

    validate = checked.validate
    monkeypatch.setattr(checked, "validate", lambda *a: read.append("checked") or validate(*a))
    also = [{"destination": str(tmp_path / "three"), "mesh": "fsdp=3"}]
    state = reshard(
        str(source), str(tmp_path / "two"), "fsdp=2", also=also, catalog=catalog, return_state=True
    )
    assert state.is_completed(), state.message
    assert read == ["checked"]
    for name, ranks in (("two", 2), ("three", 3)):
        assert observe.equal(loaded(tmp_path / name), TENSORS)
        assert {p.name for p in (tmp_path / name).iterdir()} == {
            ".metadata",
            *(f"__{r}_0.distcp" for r in range(ranks)),
        }
    lineage = open_catalog(catalog).lineage(str(source))
    assert [step.conversion.made_for for step in lineage.descendants] == [
        "reshard for fsdp=2",
        "reshard for fsdp=3",
    ]


def test_a_target_that_fails_does_not_stop_the_others(
    reshard: Any, source: Path, tmp_path: Path, catalog: str
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").write_text("not to be lost")
    also = [{"destination": str(tmp_path / "fine"), "mesh": "fsdp=2"}]
    state = reshard(
        str(source), str(tmp_path / "taken"), "fsdp=2", also=also, catalog=catalog, return_state=True
    )
    assert state.is_failed()
    assert "taken" in state.message
    assert observe.equal(loaded(tmp_path / "fine"), TENSORS)
    runs = open_catalog(catalog).conversions()
    assert sorted((r.destination_uri.rpartition("/")[2], r.state) for r in runs) == [
        ("fine", "succeeded"),
        ("taken", "failed"),
    ]


def test_a_target_that_cannot_begin_leaves_no_other_running(
    reshard: Any, source: Path, tmp_path: Path, catalog: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows import convert

    inner = convert.start

    def start(request: Any, *more: Any) -> Any:
        if request.destination.endswith("odd"):
            raise CatalogError("no row for it")
        return inner(request, *more)

    monkeypatch.setattr(convert, "start", start)
    also = [{"destination": str(tmp_path / "odd"), "mesh": "fsdp=2"}]
    state = reshard(
        str(source), str(tmp_path / "fine"), "fsdp=2", also=also, catalog=catalog, return_state=True
    )
    assert "no row for it" in state.message
    assert [r.state for r in open_catalog(catalog).conversions()] == ["failed"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "a target is required"),
        ({"destination": "out", "mesh": ""}, "mesh"),
        ({"destination": "out", "mesh": "warp=2"}, "warp"),
        (TWICE, "same or nested destinations"),
    ],
)
def test_invalid_options_fail_before_any_work(
    reshard: Any,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, Any],
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    state = reshard(str(source), **given, catalog=f"sqlite:///{tmp_path}/c.sqlite", return_state=True)
    assert state.is_failed()
    assert expected in state.message
    assert not (tmp_path / "out").exists()
    with pytest.raises(CkptError):
        state.result()
