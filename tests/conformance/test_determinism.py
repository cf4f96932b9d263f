"""Test that the bytes of an output do not depend on the process, the number of runs, or kills in between."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from samples import contents, read_safetensors, tree_digest

if TYPE_CHECKING:
    from driver import Cli, Outcome

RANKS, ROWS, WIDTH, TENSORS = 4, 1021, 512, 14


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 57 MB in four files, rows cut in four: large enough to be killed midway."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import metadata as m
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    folder = tmp_path_factory.mktemp("killed") / "ckpt"
    torch.manual_seed(1)
    bounds = [(r * ROWS // RANKS, (r + 1) * ROWS // RANKS) for r in range(RANKS)]
    joined = m.Metadata({}, {}, {}, m.StorageMeta())
    for rank, (start, stop) in enumerate(bounds):
        local = {f"model.layers.{t}.weight": torch.randn(stop - start, WIDTH) for t in range(TENSORS)}
        alone = folder.with_name(f"rank{rank}")
        dcp.save(local, checkpoint_id=alone, no_dist=True)
        folder.mkdir(exist_ok=True)
        shutil.move(alone / "__0_0.distcp", folder / f"__{rank}_0.distcp")
        own = dcp.FileSystemReader(alone).read_metadata()
        for fqn, spec in own.state_dict_metadata.items():
            box = m.ChunkStorageMetadata(torch.Size((start, 0)), torch.Size((stop - start, WIDTH)))
            uncut = m.TensorStorageMetadata(spec.properties, torch.Size((ROWS, WIDTH)), [])
            joined.state_dict_metadata.setdefault(fqn, uncut).chunks.append(box)
            joined.planner_data[fqn] = (fqn,)
            info = own.storage_data[m.MetadataIndex(fqn, torch.Size((0, 0)))]
            place = _StorageInfo(f"__{rank}_0.distcp", info.offset, info.length)
            joined.storage_data[m.MetadataIndex(fqn, box.offsets, rank)] = place
    import pickle

    (folder / ".metadata").write_bytes(pickle.dumps(joined))
    return folder


VERBS: dict[str, tuple[str, list[str]]] = {
    "one-file.safetensors": ("consolidate", []),
    "one-file.pt": ("consolidate", []),
    "folder": ("export", ["--max-file-size", "9MB"]),
    "cast": ("export", ["--max-file-size", "5MB", "--dtype", "bf16"]),
}


def convert(cli: Cli, source: Path, dst: Path, *flags: object, **limits: float) -> Outcome:
    verb, options = VERBS[dst.name]
    return cli(verb, source, dst, "--output", "json", *options, *flags, **limits)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def undisturbed(cli: Cli, source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One undisturbed run of each verb, with one worker."""
    folder = tmp_path_factory.mktemp("undisturbed")
    for name in VERBS:
        done = convert(cli, source, folder / name, "--workers", 1)
        assert done.code == 0, done
    return {name: folder / name for name in VERBS}


FLAGS: list[list[object]] = [[], ["--workers", 4], ["--memory", "4MiB", "--workers", 2], ["--no-verify"]]
# `make test` runs each verb and each set of flags once.
PAIRS = [
    pytest.param(name, flags, marks=[] if row == column else pytest.mark.soak)
    for row, name in enumerate(VERBS)
    for column, flags in enumerate(FLAGS)
]


@pytest.mark.parametrize(("name", "flags"), PAIRS)
def test_same_bytes(
    name: str, flags: list[object], cli: Cli, source: Path, undisturbed: dict[str, Path], tmp_path: Path
) -> None:
    """Neither the number of workers, nor the budget, nor verification changes a byte."""
    done = convert(cli, source, tmp_path / name, *flags)
    assert done.code == 0, done
    good, ours = contents(undisturbed[name]), contents(tmp_path / name)
    assert sorted(ours) == sorted(good)
    assert [n for n in good if ours[n] != good[n]] == []


def test_names_in_natural_order(undisturbed: dict[str, Path]) -> None:
    import json

    index = json.loads((undisturbed["folder"] / "model.safetensors.index.json").read_text())
    order = [f"layers.{t}.weight" for t in range(TENSORS)]
    names = [n.removeprefix("model.") for n in index["weight_map"]]
    assert sorted(names) == sorted(order)
    files = [index["weight_map"][n] for n in sorted(index["weight_map"], key=lambda n: int(n.split(".")[-2]))]
    assert files == sorted(files), "tensor 10 is before tensor 2"


def killed_then_resumed(
    cli: Cli, source: Path, good: Path, folder: Path, moments: Iterator[float]
) -> tuple[int, bool]:
    """Kill runs at given moments until one finishes; return the kills, and whether files were reused.

    After every kill there is no output, or a complete one.
    """
    dst = folder / good.name
    kills, reused = 0, False
    for moment in moments:
        done = convert(cli, source, dst, kill_after=moment)
        if done.killed:
            kills += 1
            if dst.exists():
                assert contents(dst) == contents(good), f"half a result after {moment:.3f} s"
                shutil.rmtree(dst) if dst.is_dir() else dst.unlink()
            continue
        assert done.code == 0, done
        break
    else:
        done = convert(cli, source, dst)
        assert done.code == 0, done
    reused = any(f["reused"] for f in done.json["files"])
    assert contents(dst) == contents(good)
    left = [p.name for p in folder.iterdir() if p != dst]
    assert left == [], f"left behind: {left}"
    return kills, reused


@pytest.mark.parametrize("name", VERBS)
def test_killed_and_resumed(
    name: str, cli: Cli, source: Path, undisturbed: dict[str, Path], tmp_path: Path
) -> None:
    """Three kill -9 at random moments, then a run that finishes: the same bytes."""
    kill_many(name, 3, cli, source, undisturbed[name], tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("name", VERBS)
def test_killed_and_resumed_many(
    name: str, cli: Cli, source: Path, undisturbed: dict[str, Path], tmp_path: Path
) -> None:
    """Twenty kills in one run, and twenty runs with one kill each."""
    kill_many(name, 20, cli, source, undisturbed[name], tmp_path / "a")
    for number in range(20):
        kill_many(name, 1, cli, source, undisturbed[name], tmp_path / str(number))


def kill_many(name: str, kills: int, cli: Cli, source: Path, good: Path, folder: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    rng = random.Random(seed)
    print(f"{name}: kills from seed {seed}")
    folder.mkdir(exist_ok=True)
    timing = convert(cli, source, folder / name)
    assert timing.code == 0, timing
    out = folder / name
    shutil.rmtree(out) if out.is_dir() else out.unlink()
    before = tree_digest(source)
    # From the middle of the start-up to the end of an undisturbed run.
    moments = (rng.uniform(0.05, timing.seconds) for _ in range(kills))
    count, _ = killed_then_resumed(cli, source, good, folder, moments)
    print(f"{count} kills")
    assert tree_digest(source) == before


def killed_with_a_finished_file(cli: Cli, source: Path, dst: Path) -> Path:
    """Kill runs of one worker, later and later, until one leaves a finished file; return its folder."""
    timing = convert(cli, source, dst, "--workers", 1)
    assert timing.code == 0, timing
    shutil.rmtree(dst)
    staging = dst.with_name(f".{dst.name}.ckptcore")
    for attempt in range(60):
        done = convert(cli, source, dst, "--workers", 1, kill_after=timing.seconds * (0.2 + 0.015 * attempt))
        if dst.exists():
            assert done.killed or done.code == 0
            shutil.rmtree(dst)
        elif list(staging.glob("receipts/*.json")) and list(staging.glob("files/*.safetensors")):
            return staging
        shutil.rmtree(staging, ignore_errors=True)
    pytest.fail("no run was killed with a finished file")


def test_resume_reuses_finished_files(
    cli: Cli, source: Path, undisturbed: dict[str, Path], tmp_path: Path
) -> None:
    """Files that a killed run finished are not rewritten."""
    dst = tmp_path / "folder"
    staging = killed_with_a_finished_file(cli, source, dst)
    finished = len(list(staging.glob("receipts/*.json")))
    done = convert(cli, source, dst)
    assert done.code == 0, done
    assert sum(f["reused"] for f in done.json["files"]) == finished
    assert contents(dst) == contents(undisturbed["folder"])


def test_resume_distrusts_what_it_finds(
    cli: Cli, source: Path, undisturbed: dict[str, Path], tmp_path: Path
) -> None:
    """A finished file that was changed after its run is rewritten."""
    dst = tmp_path / "folder"
    staging = killed_with_a_finished_file(cli, source, dst)
    staged = list(staging.glob("files/*.safetensors"))
    for file in staged:
        with file.open("r+b") as data:
            data.seek(file.stat().st_size - 100)
            data.write(b"\xee" * 8)
    done = convert(cli, source, dst)
    assert done.code == 0, done
    assert contents(dst) == contents(undisturbed["folder"])


def test_no_resume_starts_anew(cli: Cli, source: Path, undisturbed: dict[str, Path], tmp_path: Path) -> None:
    dst = tmp_path / "folder"
    killed_with_a_finished_file(cli, source, dst)
    done = convert(cli, source, dst, "--no-resume")
    assert done.code == 0, done
    assert not any(f["reused"] for f in done.json["files"])
    assert contents(dst) == contents(undisturbed["folder"])


def test_values_are_right(source: Path, undisturbed: dict[str, Path]) -> None:
    """The reference of the other tests equals what torch wrote."""
    import torch
    from samples import value
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, torch.Tensor] = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(state, FileSystemReader(source), planner=planner, no_dist=True)
    truth = {k: value(v) for k, v in state.items()}
    assert len(truth) == TENSORS
    assert read_safetensors(undisturbed["one-file.safetensors"]) == truth
    exported = read_safetensors(undisturbed["folder"])
    assert sorted(v[2] for v in exported.values()) == sorted(v[2] for v in truth.values())
