"""Test that checkpoints of the installed torch are unchanged after conversions for two random meshes.

Real jobs of several processes write random states from a seed, which is printed (`test_fresh`). Each is cut
for a random mesh by random rules, in a random format, and from there for another. The second is compared with
the job's checkpoint. The tensors that torch's own loader reads from a last one, as DCP, are compared with
those before the job cut them.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest
import warm
from meshes import (
    SETTINGS,
    WRITERS,
    Step,
    glob_of,
    impossible,
    random_mesh,
    random_rules,
    reshard,
    restated,
    unlike,
)
from paths import JOBS
from samples import differences, flatten, read_torch, seed_of, tensors_of

import ckptcore
from ckptcore.errors import CkptError, UnprovenCheckpoint, UnsupportedFormat, UsageError
from ckptcore.topology.mesh_spec import parse_mesh

TRIES = 6  # of a mesh and rules; most are possible


@pytest.mark.parametrize("ranks", [4, pytest.param(2, marks=pytest.mark.soak)])
def test_fresh(ranks: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    one_job(seed_of(request), ranks, 4, 2, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(40))
def test_fresh_many(number: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    seed = seed_of(request) + number
    one_job(seed, random.Random(seed).choice([1, 2, 3, 4, 6]), 8, 4, tmp_path)


def one_job(seed: int, ranks: int, cases: int, pairs: int, folder: Path) -> None:
    """Run a job and convert every checkpoint that it wrote for pairs of meshes."""
    print(f"--seed {seed}, {ranks} ranks, {cases} cases")
    done = subprocess.run(
        [
            *warm.python(),
            str(JOBS / "fresh_job.py"),
            str(seed),
            str(folder),
            "--ranks",
            str(ranks),
            "--cases",
            str(cases),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"the job of --seed {seed} failed:\n{done.stderr[-3000:]}"
    written = sorted(p.parent for p in folder.glob("*/job.json"))
    assert len(written) == cases
    for case in written:
        for number in range(pairs):
            through(case, random.Random(f"{case.name} {number}"), folder / "out")


def through(case: Path, rng: random.Random, out: Path) -> None:
    """Two random formats and meshes, and back."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    source = case / "ckpt"
    names = rng.choice(list(WRITERS)), rng.choice(list(WRITERS))
    if "lightning" in names:  # what Fabric writes beside a DCP folder
        source = shutil.copytree(source, out / "fabric")
        write_meta(source)
        names = "lightning", next((n for n in names if n != "lightning"), "lightning")
    first = cut_somehow(source, out / "first", names[0], rng)
    second = cut_somehow(first.folder, out / "second", names[1], rng)
    gone = first.dropped | second.dropped
    about = f"{case.name}: {names}"
    found = ckptcore.diff(str(source), str(second.folder), settings=SETTINGS)
    wrong = [row for row in unlike(found, gone) if not restated(row, *(WRITERS[n].to for n in names))]
    assert not wrong, f"{about}: {len(wrong)}: {wrong[:5]}"
    last = cut_somehow(second.folder, out / "last", "dcp", rng)
    truth = tensors_of(flatten(read_torch(case / "truth.pt", trusted=True)))
    loaded = tensors_of(loaded_by_torch(last.folder))
    wrong = differences({n: v for n, v in truth.items() if n not in gone}, loaded)
    assert not wrong, f"{about}: {wrong[:5]}"


def cut_somehow(source: Path, target: Path, name: str, rng: random.Random) -> Step:
    """Cut for a random mesh by random rules; exclude by name what the format cannot store."""
    writer, manifest = WRITERS[name], ckptcore.open(str(source))
    names = [t.fqn for t in manifest.tensors]
    out = [t.fqn for t in manifest.tensors if t.dtype in writer.lacks]
    if not writer.objects:  # one state dict: the model, or everything where there is none
        out += [b.key for b in manifest.blobs]
        out += [n for n in names if not n.startswith("model.") and any(m.startswith("model.") for m in names)]
    if not {*names} - {*out}:
        writer, out = WRITERS["dcp"], []
    refused: list[CkptError] = []
    for _ in range(TRIES):
        mesh = random_mesh(rng)
        rules = random_rules(manifest, parse_mesh(mesh), rng, out)
        try:
            return reshard(source, target, writer, mesh, rules, exclude=[glob_of(n) for n in out])
        except (UsageError, UnsupportedFormat) as error:
            refused.append(error)
        except UnprovenCheckpoint as error:  # no mesh gives a checkpoint its order back; DCP needs none
            if not impossible(error, writer, manifest):
                raise
            return cut_somehow(source, target, "dcp", rng)
        except BaseException as error:
            error.add_note(f"{source} ({manifest.format}) as {name} for {mesh}, by\n{rules}")
            raise
    reasons = [e.message for e in refused]
    assert all(impossible(e, writer, manifest) for e in refused), f"{source} as {name}: {reasons}"
    return reshard(source, target, writer, "fsdp=2", exclude=[glob_of(n) for n in out])


def write_meta(folder: Path) -> None:
    import torch

    torch.save({"hparams": {"lr": 0.5}}, folder / "meta.pt")


def loaded_by_torch(folder: Path) -> dict[str, object]:
    """Every tensor that torch's own loader finds in a DCP folder, in one process."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, object] = {}
    planner = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]
    _load_state_dict(state, FileSystemReader(folder), planner=planner, no_dist=True)
    return flatten(state)
