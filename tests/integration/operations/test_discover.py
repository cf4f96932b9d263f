"""Test that discovery finds every trainer's step folders, once each, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import fsspec
import pytest
from checkpoints import save
from safetensors.torch import save_file
from torch import arange
from torch import save as torch_save

import ckptcore
from ckptcore.checking.summary import summarize
from ckptcore.errors import SourceUnreadable, UsageError
from ckptcore.operations.discover import discover
from ckptcore.store.listing import survey


def paths(root, **more):
    return [c.path for c in discover(str(root), **more)]


@pytest.fixture
def one(tmp_path):
    return save(tmp_path / "one")


def test_steps_come_oldest_first_and_their_parts_are_none(tmp_path, one):
    root = tmp_path / "runs"
    for name in ("a/step-10", "a/step-9", "b/checkpoint-8", "b/logs", "a/step-10/model_again"):
        shutil.copytree(one, root / name, dirs_exist_ok=True)
    shutil.rmtree(root / "b/logs")
    (root / "b/logs").mkdir()
    (root / "b/logs/events.1").write_bytes(b"x")
    found = discover(str(root))
    assert [(c.path, c.step, c.run, c.format) for c in found] == [
        ("b/checkpoint-8", 8, "b", "dcp"),
        ("a/step-9", 9, "a", "dcp"),
        ("a/step-10", 10, "a", "dcp"),
    ]
    assert found[0].because
    assert found[0].uri == str(root / "b/checkpoint-8")


def test_a_root_with_a_tracker_is_its_steps(tmp_path, one):
    root = tmp_path / "runs" / "llama"
    for name in ("iter_0000010", "iter_0000020"):
        shutil.copytree(one, root / name)
    (root / "latest_checkpointed_iteration.txt").write_text("20")
    (root / "latest_train_state.pt").write_bytes(b"x")
    assert paths(tmp_path / "runs") == ["llama/iter_0000010", "llama/iter_0000020"]
    assert [(c.path, c.run) for c in discover(str(root))] == [
        ("iter_0000010", "llama"),
        ("iter_0000020", "llama"),
    ]


def test_files_that_are_one_save_each(tmp_path):
    root = tmp_path / "checkpoints"
    root.mkdir()
    for name in ("epoch=1-step=200.ckpt", "epoch=0-step=100.ckpt", "last.ckpt", "notes-step-3.txt"):
        torch_save({"w": arange(4)}, root / name)
    save_file({"w": arange(4)}, root / "model-step-50.safetensors")
    found = discover(str(root))
    assert [(c.path, c.step, c.run) for c in found] == [
        ("model-step-50.safetensors", 50, "checkpoints"),
        ("epoch=0-step=100.ckpt", 100, "checkpoints"),
        ("epoch=1-step=200.ckpt", 200, "checkpoints"),
    ]


def test_a_loose_file_does_not_hide_checkpoints_beside_it(tmp_path, one):
    run = tmp_path / "runs" / "llama"
    shutil.copytree(one, run / "last")
    torch_save({"w": arange(4)}, run / "ema.pt")
    assert paths(tmp_path / "runs") == ["llama/last"]
    shutil.rmtree(run / "last")
    (run / "logs").mkdir()
    (run / "logs" / "events").write_bytes(b"x")
    assert paths(tmp_path / "runs") == ["llama"]
    (run / "config.json").write_text("{}")  # a model with its folders
    (run / "original").mkdir()
    torch_save({"w": arange(4)}, run / "original" / "consolidated.00.pth")
    assert paths(tmp_path / "runs") == ["llama"]


@pytest.mark.parametrize("name", ["embedder", "24_legacy"])
def test_modules_that_are_numbered_are_no_steps(tmp_path, name):
    """A model of sentence-transformers has ``1_Pooling/``, and a user's ``24_legacy`` is no step, either."""
    model = tmp_path / "runs" / name
    for folder in (model, model / "2_Dense"):
        folder.mkdir(parents=True)
        save_file({"linear.weight": arange(4)}, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text("{}")
    (model / "modules.json").write_text("[]")
    found = discover(str(tmp_path / "runs"))
    assert [(c.path, c.step, c.format) for c in found] == [(name, None, "safetensors")]
    assert summarize(ckptcore.open(str(model))).step is None


def test_two_models_of_one_step_and_a_step_of_nothing_known(tmp_path, one):
    root = tmp_path / "rl"
    for part in ("actor", "critic"):
        shutil.copytree(one, root / "global_step_5" / part)
    (root / "global_step_6").mkdir()
    (root / "global_step_6" / "half").write_bytes(b"x")
    (root / "global_step_7").mkdir()
    found = discover(str(root))
    assert [(c.path, c.step, c.run, c.format) for c in found] == [
        ("global_step_5/actor", 5, "rl", "dcp"),
        ("global_step_5/critic", 5, "rl", "dcp"),
        ("global_step_6", 6, "rl", ""),
    ]


def test_our_own_and_hidden_folders_are_not_sources(tmp_path, one):
    for name in ("step-1", "exports/step-1", ".step-2.ckptcore/files", ".step-3.ckptcore/files/step-4"):
        shutil.copytree(one, tmp_path / "r" / name)
    root = str(tmp_path / "r")
    assert paths(root, skip={f"{root}/exports/step-1"}) == ["step-1"]
    assert paths(root, skip={f"{root}/exports"}) == ["step-1"]
    assert paths(root) == ["exports/step-1", "step-1"]


def test_globs_are_on_paths(tmp_path, one):
    for name in ("a/step-1", "b/step-1", "b/step-2"):
        shutil.copytree(one, tmp_path / "r" / name)
    assert paths(tmp_path / "r", include=["b/*"]) == ["b/step-1", "b/step-2"]
    assert paths(tmp_path / "r", include=["a/*", "*/step-2"]) == ["a/step-1", "b/step-2"]


def test_a_url_is_listed_once(tmp_path, one, monkeypatch):
    memory = fsspec.filesystem("memory")
    listed = []
    find = type(memory).find
    monkeypatch.setattr(type(memory), "find", lambda *a, **k: listed.append(a[1]) or find(*a, **k))
    for name in ("run/step-1", "run/step-2"):
        for file in one.iterdir():
            memory.pipe_file(f"/sweeps/{name}/{file.name}", file.read_bytes())
    try:
        found = discover("memory://sweeps")
        assert [(c.uri, c.format) for c in found] == [
            ("memory://sweeps/run/step-1", "dcp"),
            ("memory://sweeps/run/step-2", "dcp"),
        ]
        assert len(listed) == 1
        before = found[0].stamp
        memory.pipe_file("/sweeps/run/step-1/.metadata", b"other")
        assert discover("memory://sweeps")[0].stamp != before
    finally:
        memory.rm("/sweeps", recursive=True)


def test_stamps_change_with_any_file(tmp_path, one):
    root = tmp_path / "r"
    shutil.copytree(one, root / "step-1")
    before = discover(str(root))[0].stamp
    assert discover(str(root))[0].stamp == before
    (root / "step-1" / "extra").write_bytes(b"")
    assert discover(str(root))[0].stamp != before


def test_the_listing_is_bounded(tmp_path, one):
    with pytest.raises(UsageError, match="more than 1 files"):
        survey(str(one), max_files=1)
    with pytest.raises(SourceUnreadable):
        discover(str(Path(tmp_path / "nowhere")))
