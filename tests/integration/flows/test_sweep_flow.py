"""Sweep as a flow: what the command does, and never what a webhook's flow does at the same time."""

from __future__ import annotations

import shutil
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import observe
import pytest
from observe import TENSORS

from ckptcore.catalog import open_catalog
from ckptcore.catalog import watched_roots as roots

pytestmark = [
    pytest.mark.usefixtures("prefect_api"),
    pytest.mark.xdist_group("prefect"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
DESTINATION = "{root}/../out/{run}/{name}"


@pytest.fixture
def watched(source: Path, catalog: str) -> Path:
    """The folder above a checkpoint, watched."""
    root = source.parent
    with open_catalog(catalog) as known, known.writing() as conn:
        target = {"destination": DESTINATION}
        roots.add(conn, datetime.now(UTC), "r", str(root), targets=[target])
    return root


def conversions(catalog: str) -> list[str]:
    with open_catalog(catalog) as known:
        return [c.state for c in known.conversions(None)]


def test_complete_checkpoints_are_converted_once(watched: Path, catalog: str, tmp_path: Path) -> None:
    from flows.sweep import sweep

    shutil.copytree(watched / "step-7", watched / "step-8")
    (watched / "step-8" / ".metadata").unlink()
    shutil.copytree(watched / "step-7", watched / "step-9")
    dry = sweep(catalog=catalog, min_age="0s", dry_run=True, return_state=True)
    assert (dry.is_completed(), conversions(catalog)) == (True, [])
    state = sweep(catalog=catalog, min_age="0s", return_state=True)
    assert state.is_completed(), state.message
    assert state.message == "1 broken, 2 made"  # in one batch
    for step in (7, 9):
        assert observe.equal(observe.tensors(tmp_path / f"out/run/step-{step}"), TENSORS)
    state = sweep(catalog=catalog, min_age="0s", return_state=True)
    assert (state.message, conversions(catalog)) == ("1 broken, 2 converted", ["succeeded"] * 2)
    with open_catalog(catalog) as known, known.reading() as conn:
        assert roots.get(conn, "r").swept_note == "1 broken, 2 converted"


def test_a_root_thins_the_steps_that_are_converted(tmp_path: Path, catalog: str) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    from flows.sweep import sweep

    tree = {"model": {"w": torch.ones(4)}, "optim": {"state": {"w.exp_avg": torch.ones(4)}}}
    for step in (1, 2):
        dcp.save(tree, checkpoint_id=tmp_path / f"runs/run/step-{step}", no_dist=True)
    with open_catalog(catalog) as known, known.writing() as conn:
        retention, target = {"keep_optimizer_last": 1}, {"destination": DESTINATION}
        root = str(tmp_path / "runs/run")
        roots.add(conn, datetime.now(UTC), "r", root, targets=[target], retention=retention)
    state = sweep(catalog=catalog, min_age="0s", return_state=True)
    assert (state.is_completed(), state.message) == (True, "2 made, 1 thinned")
    with open_catalog(catalog) as known, known.reading() as conn:
        assert roots.get(conn, "r").swept_note == "2 made, 1 thinned"


def test_a_failed_conversion_fails_the_run_with_its_reason(watched: Path, catalog: str) -> None:
    from flows.sweep import sweep

    (watched.parent / "out").write_text("a file where a folder should be")
    state = sweep(catalog=catalog, min_age="0s", return_state=True)
    assert state.is_failed()
    assert "step-7" in state.message
    assert "destination-unwritable" in state.message


@pytest.mark.parametrize("step", ["look", "note", "announce"])
def test_one_root_in_trouble_leaves_the_others_alone(
    watched: Path, catalog: str, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    from flows import sweep as module

    shutil.copytree(watched / "step-7", watched / "step-9")
    with open_catalog(catalog) as known, known.writing() as conn:
        roots.add(conn, datetime.now(UTC), "z", str(watched), targets=[{"destination": f"{DESTINATION}-z"}])
    inner, raised = getattr(module, step), []

    def first(*args: Any, **more: Any) -> None:
        raised.append(args)
        monkeypatch.setattr(module, step, inner)
        raise RuntimeError("unforeseen")

    first.with_options = lambda **_: first  # type: ignore[attr-defined]
    monkeypatch.setattr(module, step, first)
    state = module.sweep(catalog=catalog, min_age="0s", return_state=True)
    assert raised
    made = {"look": "2 made, 1 unread", "note": "4 made, 1 unread", "announce": "4 made"}[step]
    assert (state.message or "").split("\n")[0] == made
    assert state.is_completed() == (step == "announce")
    assert step == "announce" or "unforeseen" in (state.message or "")
    assert set(conversions(catalog)) == {"succeeded"}


def test_a_value_of_one_step_fails_the_run(watched: Path, catalog: str) -> None:
    from flows.sweep import sweep

    state = sweep(catalog=catalog, min_age="0s", meta=["metrics.loss=2.31"], return_state=True)
    assert state.is_failed()
    assert "usage: cannot use meta for metrics.loss" in state.message
    assert conversions(catalog) == []


def race(watched: Path, catalog: str, tmp_path: Path, times: int) -> None:
    """A webhook's flow and a sweep meet at one new checkpoint, so many times.

    The webhook's configuration asks for another output elsewhere; the watched root's target applies.
    """
    from ckptcore.operations.automation import wait as waiting
    from flows.arrived import arrived
    from flows.sweep import sweep

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting, "STEPS", (0.2,))
        for n in range(times):
            if n:
                shutil.copytree(watched / "step-7", watched / f"step-{7 + n}")
            source = watched / f"step-{7 + n}"
            gate = threading.Barrier(2)
            found: dict[str, Any] = {}

            def webhook(source: Path = source, gate: Any = gate, found: dict[str, Any] = found) -> None:
                gate.wait()
                found["webhook"] = arrived(
                    str(source),
                    str(tmp_path / "exports" / source.name),
                    root=str(watched),
                    wait_minutes=0.5,
                    verb="consolidate",
                    dtype="bf16",
                    catalog=catalog,
                    return_state=True,
                )

            thread = threading.Thread(target=webhook)
            thread.start()
            gate.wait()
            found["sweep"] = sweep(catalog=catalog, min_age="0s", return_state=True)
            thread.join()
            assert all(state.is_completed() for state in found.values()), found
            assert conversions(catalog) == ["succeeded"] * (n + 1)
            assert observe.equal(observe.tensors(tmp_path / "out/run" / source.name), TENSORS)
            assert not (tmp_path / "exports").exists()


# By default, processes of `ckptcore sweep` race (operations/test_sweep_races): flows take 20 seconds.
@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_a_webhook_and_a_sweep_race_a_hundred_times(watched: Path, catalog: str, tmp_path: Path) -> None:
    race(watched, catalog, tmp_path, 100)
