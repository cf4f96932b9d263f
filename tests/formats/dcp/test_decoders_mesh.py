"""Checkpoints with the names of Hugging Face's and torchtitan's decoders, for every mesh by built-in rules.

The sources are fresh: saved by real jobs (decoders_job.py) on meshes that no target has, in the ways in which
trainers lay out model and optimizer. The command line reshards them with nothing but ``--mesh``. The
oracle is a real job of that mesh: what `torch.distributed.checkpoint.load` and `ckptcore.load_into` give it,
its next steps, and what it saves itself: the same chunks, in files of ranks that have them.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import warm
from driver import Cli
from paths import JOBS
from torch.distributed.checkpoint import FileSystemReader

import ckptcore
from ckptcore.conversion.pipeline import validate

pytestmark = pytest.mark.xdist_group("decoders")  # the sources are saved once
JOB = JOBS / "decoders_job.py"
Case = dict[str, Any]
Box = tuple[tuple[int, ...], tuple[int, ...]]

# Name -> (family, keys, dtype, the mesh it is saved on).
SOURCES = {
    "hf-nested": ("hf", "nested", "bfloat16", "fsdp=3,tp=2"),
    "hf-top": ("hf", "top", "float32", "fsdp=5"),
    "titan-flattened": ("torchtitan", "flattened", "float32", "fsdp=5"),
    "titan": ("torchtitan", "torchtitan", "float32", "pp=2,fsdp=1,tp=2"),
}
MESHES = (
    "fsdp=1",
    "fsdp=2",
    "fsdp=3",
    "fsdp=4",
    "fsdp=8",
    "fsdp=2,tp=2",
    "dp_replicate=2,fsdp=2",
    "fsdp=2,tp=2,pp=2",
)
# By default: a source with stages onto two axes (uneven cuts by fsdp=3 are in test_dcp_mesh).
ALWAYS = ("fsdp=2,tp=2", ("titan",))
CASES = [
    pytest.param(*ALWAYS, id=f"{ALWAYS[0]}-families"),
    *(pytest.param(mesh, tuple(SOURCES), id=mesh, marks=pytest.mark.soak) for mesh in MESHES),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """A source by name; one job saves all sources of a mesh, on the first request."""
    root = tmp_path_factory.mktemp("decoders")
    cases: dict[str, Case] = {}

    def of(name: str) -> Case:
        if name not in cases:
            mesh = SOURCES[name][3]
            mine = {
                n: {"family": family, "keys": keys, "dtype": dtype, "original": str(root / n)}
                for n, (family, keys, dtype, on) in SOURCES.items()
                if on == mesh
            }
            for rows in run(root, mesh, list(mine.values())):
                assert [row["wrong"] for row in rows] == [[]] * len(rows)
            cases.update(mine)
        return cases[name]

    return of


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("mesh", "names"), CASES)
def test_jobs_resume(
    mesh: str, names: tuple[str, ...], saved: Callable[[str], Case], cli: Cli, tmp_path: Path
) -> None:
    cases = []
    for name in names:
        case = saved(name)
        out = tmp_path / name
        done = cli("reshard", case["original"], out, "--to", "dcp", "--mesh", mesh)
        assert done.code == 0, done
        assert validate(ckptcore.open(str(out)), "bytes").ok
        cases.append({**case, "written": str(out), "saved": str(tmp_path / f"saved-{name}")})
    for name, case, rows in zip(names, cases, run(tmp_path, mesh, cases), strict=True):
        assert [row["wrong"] for row in rows] == [[]] * len(rows), name
        for row in rows:
            losses = row["losses"]
            assert losses["written"] == losses["original"] == losses["load_into"], name
        assert any(len(row["losses"]["original"]) == 3 for row in rows)
        as_torch_saves(case, [row["parts"] for row in rows])


def as_torch_saves(case: Case, parts: list[dict[str, Box]]) -> None:
    """Require that the folder equals the job's own save: names, chunks, and files of ranks that have them.

    parts: per rank, its part of each tensor.
    """
    ours, theirs = (stored_parts(Path(case[k])) for k in ("written", "saved"))
    more = ours.keys() - theirs.keys()  # stages save no groups where these have no names of parameters
    assert not theirs.keys() - ours.keys()
    assert all(n.startswith("optim.param_groups.") for n in more), more
    for name, (kind, boxes) in theirs.items():
        assert ours[name][0] == kind, name
        assert ours[name][1].keys() == boxes.keys(), name
        for box, rank in ours[name][1].items():
            having = [r for r, of_rank in enumerate(parts) if as_box(of_rank.get(name)) == box]
            assert rank in having, (name, box)
            assert boxes[box] in having, (name, box)


def stored_parts(folder: Path) -> dict[str, tuple[Any, dict[Box, int]]]:
    """Name -> (its entry in `.metadata`, the rank in whose file each of its boxes is).

    Bytes have no boxes. Empty parts are left out: torch writes one, which no loader reads.
    """
    metadata = FileSystemReader(folder).read_metadata()
    found: dict[str, tuple[Any, dict[Box, int]]] = {}
    places = {(i.fqn, i.offset): int(s.relative_path.split("_")[2]) for i, s in metadata.storage_data.items()}
    for name, entry in metadata.state_dict_metadata.items():
        path = (metadata.planner_data or {})[name]
        if not hasattr(entry, "chunks"):
            found[name] = ("bytes", path), {}
            continue
        boxes = {
            (tuple(c.offsets), tuple(c.sizes)): places[name, c.offsets]
            for c in entry.chunks
            if 0 not in c.sizes
        }
        found[name] = (entry.properties.dtype, tuple(entry.size), path), boxes
    return found


def as_box(pair: Any) -> Box | None:
    return None if pair is None else (tuple(pair[0]), tuple(pair[1]))


def run(folder: Path, mesh: str, cases: list[Case]) -> list[list[dict[str, Any]]]:
    """The reports of a job's ranks about each case."""
    order = ("pp", "dp_replicate", "fsdp", "tp")
    sizes = {a: int(n) for a, n in (part.split("=") for part in mesh.split(","))}
    out, spec = folder / "report.json", folder / "spec.json"
    axes = [[a, sizes[a]] for a in order if a in sizes]
    spec.write_text(json.dumps({"axes": axes, "cases": cases, "out": str(out)}))
    ran = subprocess.run(
        [*warm.python(), str(JOB), str(spec)], capture_output=True, text=True, timeout=1000, check=False
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: list[list[dict[str, Any]]] = json.loads(out.read_text())
    return found
