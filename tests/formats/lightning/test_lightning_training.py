"""Checkpoints of real Lightning runs: every strategy is read bit for bit, and numbers get their names.

Needs an interpreter with lightning; ``CKPTCORE_LIGHTNING_PYTHON`` names it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_cases import differences, lightning_python, official
from paths import JOBS

import ckptcore
from ckptcore.conversion.pipeline import validate
from ckptcore.core.manifest import Manifest

JOB = JOBS / "lightning_train_job.py"
pytestmark = [pytest.mark.xdist_group("lightning"), pytest.mark.timeout(1200)]

# strategy, optimizers -> which of its optimizers are named
FULL: dict[tuple[str, str], list[bool]] = {
    ("single", "adamw"): [True],
    ("single", "sgd"): [True],
    ("single", "rmsprop"): [True],
    ("single", "adafactor"): [True],
    ("single", "named"): [True],
    # Without the frozen parameters, and with a buffer of their shape, vectors could be in other places.
    ("single", "decay"): [False],
    ("single", "two"): [False, True],
    ("fsdp_full", "adamw"): [True],
    ("fsdp_full", "decay"): [True],
    ("mp_full", "decay"): [True],
    ("mp_full", "two"): [True, True],
}
SHARDED = [
    ("trainer", "fsdp", "sgd"),
    ("trainer", "fsdp_grad", "adamw"),
    ("trainer", "fsdp_none", "adamw"),
    ("trainer", "hybrid", "adamw"),
    ("trainer", "mp", "two"),
    ("fabric", "fsdp", "adamw"),
    ("fabric", "hybrid", "sgd"),
    ("fabric", "mp", "decay"),
]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Run three steps, once for all tests; return the checkpoint, with its truth beside it."""
    python = lightning_python()

    def run(verb: str, kind: str, optimizers: str, start: Path | None = None, steps: int = 3) -> Path:
        path = tmp_path_factory.mktemp(f"{verb}_{kind}_{optimizers}") / "last.ckpt"
        command = [
            python,
            "-W",
            "ignore",
            JOB,
            verb,
            kind,
            optimizers,
            steps,
            path,
            *([start] if start else []),
        ]
        done = subprocess.run(
            [str(c) for c in command],
            cwd=path.parent,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return path

    return run


def load(path: Path | str) -> dict[str, Any]:
    return dict(torch.load(path, weights_only=False))


def named(manifest: Manifest) -> dict[int, dict[int, str]]:
    rows = manifest.origin["lightning"].get("parameters", {})
    return {int(n): {int(i): name for i, name in row.items()} for n, row in rows.items()}


@pytest.mark.parametrize(("kind", "optimizers"), FULL)
def test_numbers_of_a_full_checkpoint(kind: str, optimizers: str, train: Callable[..., Path]) -> None:
    """Named as in the run, or not at all; each named state belongs to that parameter."""
    path = train("trainer", kind, optimizers)
    manifest, truth, saved = ckptcore.open(str(path)), load(f"{path}.truth"), load(path)
    assert validate(manifest, "bytes").ok
    found = named(manifest)
    wanted = FULL[kind, optimizers]
    assert [n in found for n in range(len(wanted))] == wanted
    unproven = [f.fqn for f in manifest.findings if f.code == "unnamed-states"]
    assert unproven == [f"optimizer_states.{n}" for n, proven in enumerate(wanted) if not proven]
    for n, names in found.items():
        right = truth["optimizers"][n]
        assert names == right["numbers"]
        states = saved["optimizer_states"][n]["state"]
        assert {names[i] for i in states} == set(right["state"])
        for i, state in states.items():
            assert differences(right["state"][names[i]], state, names[i]) == []
    assert differences(truth["model"], dict(saved["state_dict"])) == []


@pytest.mark.parametrize(("verb", "kind", "optimizers"), SHARDED)
def test_a_sharded_folder(
    verb: str, kind: str, optimizers: str, train: Callable[..., Path], tmp_path: Path
) -> None:
    """Read and consolidated: equal to the run's state, and to Lightning's own consolidation."""
    folder = train(verb, kind, optimizers)
    truth = load(f"{folder}.truth")
    manifest = ckptcore.open(str(folder))
    assert manifest.format == "lightning"
    assert validate(manifest, "bytes").findings == ()
    ckptcore.convert(str(folder), str(tmp_path / "one.ckpt"), to="lightning")
    ours = load(tmp_path / "one.ckpt")
    assert differences(official(folder), ours) == []
    model = ours["state_dict" if verb == "trainer" else "model"]
    assert differences(truth["model"], {k: model[k] for k in truth["model"]}) == []
    states = ours["optimizer_states"] if verb == "trainer" else [ours["optimizer"]]
    for right, state in zip(truth["optimizers"], states, strict=True):
        assert state["state"].keys() == right["state"].keys()
        for name, own in right["state"].items():
            assert differences(own, {k: state["state"][name][k] for k in own}, name) == []


def test_copies_of_a_hybrid_run_are_in_its_files(train: Callable[..., Path]) -> None:
    """2 x 2 ranks: each chunk is stored once, and all four ranks store some."""
    folder = train("trainer", "hybrid", "adamw")
    manifest = ckptcore.open(str(folder))
    data = {f.path for f in manifest.files if f.path.endswith(".distcp")}
    assert data == {f"__{r}_0.distcp" for r in range(4)}
    chunks = manifest.chunks_of(manifest.index["model.net.embed.weight"])
    assert sorted(c.box.offset for c in chunks) == [(0, 0), (6, 0)]


@pytest.mark.parametrize(
    ("verb", "kind", "mesh", "later_kind"),
    [
        ("trainer", "fsdp", "fsdp=4", "fsdp4"),
        ("trainer", "fsdp", "fsdp=1", "fsdp_alone"),
        ("trainer", "fsdp", "dp_replicate=2,fsdp=2", "hybrid"),
        ("trainer", "mp", "fsdp=4", "mp4"),
        ("trainer", "mp", "fsdp=1", "mp_alone"),
        ("trainer", "mp", "fsdp=3", "mp"),
        ("fabric", "fsdp", "fsdp=4", "fsdp4"),
        ("fabric", "fsdp", "fsdp=3", "fsdp_alone"),
        ("fabric", "mp", "fsdp=4", "mp"),
        ("fabric", "mp", "fsdp=1", "mp"),
    ],
)
def test_a_run_of_another_size_resumes_from_the_written_folder(
    verb: str, kind: str, mesh: str, later_kind: str, train: Callable[..., Path], tmp_path: Path
) -> None:
    """Saved on two ranks, written for a mesh, resumed on one, two and four as from the original."""
    folder = train(verb, kind, "adamw")
    ckptcore.convert(str(folder), str(tmp_path / "out"), verb="reshard", to="lightning", mesh=mesh)
    ours, theirs = (train(verb, later_kind, "adamw", start, 5) for start in (tmp_path / "out", folder))
    for moment in ("start.truth", "truth"):
        different = differences(load(f"{theirs}.{moment}"), load(f"{ours}.{moment}"))
        assert [d for d in different if ": keys" not in d] == []  # the order of names is the metadata's
    begin = load(f"{ours}.start.truth")
    assert begin.get("step", 3) == 3
    if later_kind != "hybrid":  # whose moments torch's own loader gives other values
        different = differences(load(f"{folder}.truth")["optimizers"], begin["optimizers"])
        assert [d for d in different if ": keys" not in d] == []


@pytest.mark.parametrize(("verb", "kind"), [("trainer", "fsdp"), ("trainer", "mp"), ("fabric", "fsdp")])
def test_a_run_resumes_from_the_written_file(
    verb: str, kind: str, train: Callable[..., Path], tmp_path: Path
) -> None:
    """From four steps' state in one file: the same model and optimizer on every parameter."""
    folder = train(verb, kind, "adamw")
    ckptcore.convert(str(folder), str(tmp_path / "one.ckpt"), to="lightning")
    later = train(verb, kind, "adamw", tmp_path / "one.ckpt", 5)
    end, begin = load(f"{folder}.truth"), load(f"{later}.start.truth")
    assert differences(end["model"], begin["model"]) == []
    assert differences(end["optimizers"], begin["optimizers"]) == []
    assert begin.get("step", 3) == 3
