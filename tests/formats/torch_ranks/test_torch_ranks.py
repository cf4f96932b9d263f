"""Read one torch file per rank: files of real jobs bit for bit, and wrong ones are refused."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grids
import old_pickles as old
import pytest
import ranks_job
import torch
import warm
from paths import JOBS
from samples import differences, flatten, read_torch, tensors_of

import ckptcore
from ckptcore import api
from ckptcore.checking.check import check
from ckptcore.core.manifest import Manifest
from ckptcore.core.object_tree import decode
from ckptcore.errors import (
    AmbiguousModel,
    MalformedCheckpoint,
    UnreadablePart,
    UnsafeContent,
    UnsupportedFormat,
)
from ckptcore.formats import open_source, read_manifest
from ckptcore.naming.model_part import find_model

if TYPE_CHECKING:
    from driver import Cli

JOB = JOBS / "ranks_job.py"
OWN = ("extra_state.", "rng", "random_states.")  # what each rank has its own of
CASES = [(n, case) for n in (4, 3, 2) for case in ranks_job.cases(n) if case != "fsdp1_local"]
SHORT = grids.sliced([row for row in CASES if row[0] != 3], lambda row: row)
MORE = [pytest.param(*row, marks=pytest.mark.soak) for row in CASES if row[0] == 3]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The folder of a job's cases, by its number of ranks; each job runs once."""
    made: dict[int, Path] = {}

    def job(ranks: int) -> Path:
        if ranks not in made:
            folder = made[ranks] = tmp_path_factory.mktemp(f"job{ranks}")
            command = [*warm.python(), str(JOB), str(folder), "--ranks", str(ranks), "--seed", str(ranks)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            assert done.returncode == 0, done.stderr[-3000:]
        return made[ranks]

    return job


@pytest.mark.xdist_group("torch_ranks")
@pytest.mark.parametrize(("ranks", "case"), [*SHORT, *MORE])
def test_equals_the_tensors_of_the_job(
    ranks: int, case: str, jobs: Callable[[int], Path], cli: Cli, tmp_path: Path
) -> None:
    here = jobs(ranks) / case
    done = cli("consolidate", here / "ckpt", tmp_path / "out.pt", "--to", "torch_save", "--output", "json")
    assert done.code == 0, done
    found = tensors_of(flatten(read_torch(tmp_path / "out.pt")))
    truth = tensors_of(flatten(read_torch(here / "truth.pt", trusted=True)))
    assert not differences(truth, found)
    assert all(n in truth or n.startswith(OWN) for n in found), sorted(found.keys() - truth.keys())
    checked = cli("validate", here / "ckpt", "--level", "bytes", "--output", "json")
    assert checked.code == 0, checked
    assert not [f for f in checked.json["findings"] if f["severity"] == "error"]


@pytest.mark.xdist_group("torch_ranks")
def test_the_model_is_found(jobs: Callable[[int], Path]) -> None:
    for case, prefix in {
        "fsdp2": "model.",
        "fsdp1_sharded": "model.",
        "fsdp2_tp": "",
        "nodcp": "model.",
        "stages": "",
        "full": "model.",
    }.items():
        assert find_model(read(jobs(4) / case / "ckpt")).prefix == prefix, case


@pytest.mark.xdist_group("torch_ranks")
def test_objects_of_all_ranks(jobs: Callable[[int], Path]) -> None:
    found = objects(read(jobs(2) / "fsdp2" / "ckpt"))
    assert found["extra_state.epoch"] == 2
    assert [found[f"extra_state.rng.random.rank{r}"] for r in (0, 1)] == [(3, 0), (3, 1)]
    group = found["optim.param_groups"][0]
    assert group["params"] == [
        "embed.weight",
        "up.weight",
        "up.bias",
        "down.weight",
        "down.bias",
        "scale",
    ] or set(group["params"]) == {"scale", "embed.weight", "up.weight", "up.bias", "down.weight", "down.bias"}
    found = objects(read(jobs(2) / "nodcp" / "ckpt"))
    assert found["scheduler.last_epoch"] == 2
    assert found["random_states.step"] == 2


@pytest.mark.xdist_group("torch_ranks")
def test_local_state_dicts_are_refused(jobs: Callable[[int], Path], cli: Cli, tmp_path: Path) -> None:
    """Also under Accelerate's names, and by its exit code."""
    with pytest.raises(UnsupportedFormat, match="does not record their names, shapes"):
        read(jobs(2) / "fsdp1_local" / "ckpt")
    (tmp_path / "ckpt").mkdir()
    for rank in range(2):
        path = jobs(2) / "fsdp1_local" / "ckpt" / f"model_rank_{rank}.pt"
        shutil.copy(path, tmp_path / "ckpt" / f"pytorch_model_fsdp_rank{rank}.bin")
    done = cli("inspect", tmp_path / "ckpt", "--output", "json")
    assert done.code == 5, done
    assert "does not record their names, shapes" in done.json["error"]["message"]


def _remove(folder: Path) -> None:
    next(folder.rglob("*rank*1.*")).unlink()


def _remove_last(folder: Path) -> None:
    max(folder.rglob("*rank*.*")).unlink()


def _copy_rank(folder: Path) -> None:
    kinds = ("model", "pytorch_model", "rank")
    first, second = sorted(p for p in folder.rglob("*rank*.*") if p.name.startswith(kinds))[:2]
    shutil.copyfile(first, second)


def _cut(folder: Path) -> None:
    path = next(folder.rglob("*rank*1.*"))
    path.write_bytes(path.read_bytes()[:-200])


def _empty(folder: Path) -> None:
    next(folder.rglob("*rank*1.*")).write_bytes(b"")


DAMAGES = [_remove, _remove_last, _copy_rank, _cut, _empty]


@pytest.mark.grid
@pytest.mark.xdist_group("torch_ranks")
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("case", ["fsdp2", "fsdp1_sharded", "fsdp1_mesh", "hsdp", "nodcp", "fsdp2_tp"])
def test_damage_is_detected(
    case: str, damage: Callable[[Path], None], jobs: Callable[[int], Path], cli: Cli, tmp_path: Path
) -> None:
    shutil.copytree(jobs(4) / case / "ckpt", tmp_path / "ckpt")
    damage(tmp_path / "ckpt")
    done = cli("consolidate", tmp_path / "ckpt", tmp_path / "out", "--output", "json")
    assert done.code == 1, done
    assert not (tmp_path / "out").exists()
    assert cli("validate", tmp_path / "ckpt", "--output", "json").code == 1


@pytest.mark.xdist_group("torch_ranks")
def test_a_flipped_byte_is_detected(jobs: Callable[[int], Path], cli: Cli, tmp_path: Path) -> None:
    shutil.copytree(jobs(4) / "fsdp2" / "ckpt", tmp_path / "ckpt")
    path = next((tmp_path / "ckpt").rglob("model_*_rank_2.pt"))
    with zipfile.ZipFile(path) as opened:
        largest = max(opened.infolist(), key=lambda i: i.file_size * ("/data/" in i.filename))
    data = bytearray(path.read_bytes())
    head = largest.header_offset
    names = int.from_bytes(data[head + 26 : head + 28], "little")
    extra = int.from_bytes(data[head + 28 : head + 30], "little")
    data[head + 30 + names + extra + 5] ^= 1
    path.write_bytes(data)
    done = cli("consolidate", tmp_path / "ckpt", tmp_path / "out", "--output", "json")
    assert done.code == 1, done


@pytest.mark.xdist_group("torch_ranks")
def test_missing_ranks_are_named(jobs: Callable[[int], Path], tmp_path: Path) -> None:
    shutil.copytree(jobs(4) / "fsdp1_sharded" / "ckpt", tmp_path / "ckpt")
    (tmp_path / "ckpt" / "rank3.pt").unlink()
    found = [f for f in read(tmp_path / "ckpt").findings if f.code == "missing-rank"]
    assert [f.file for f in found] == ["rank3.pt"]


@pytest.mark.xdist_group("torch_ranks")
def test_components(jobs: Callable[[int], Path], tmp_path: Path) -> None:
    """One component is found from the folder above; several are ambiguous."""
    root = tmp_path / "global_step_3"
    shutil.copytree(jobs(2) / "fsdp2" / "ckpt" / "global_step_3" / "actor", root / "actor")
    assert read(tmp_path).num_tensors == read(root).num_tensors == read(root / "actor").num_tensors
    shutil.copytree(root / "actor", root / "critic")
    with pytest.raises(AmbiguousModel, match="actor, critic"):
        read(root)


@pytest.mark.xdist_group("torch_ranks")
def test_two_saves_in_one_folder(jobs: Callable[[int], Path], tmp_path: Path) -> None:
    actor = jobs(2) / "fsdp2" / "ckpt" / "global_step_3" / "actor"
    shutil.copytree(actor, tmp_path / "a")
    shutil.copy(actor / "model_world_size_2_rank_0.pt", tmp_path / "a" / "model_world_size_8_rank_0.pt")
    with pytest.raises(AmbiguousModel, match="2 and 8 ranks"):
        read(tmp_path / "a")
    shutil.copytree(actor, tmp_path / "b")
    (tmp_path / "b" / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 4}')
    assert "mixed-saves" in {f.code for f in read(tmp_path / "b").findings}


def save_each(folder: Path, states: list[Any], name: str = "model_rank{}.pt") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for rank, state in enumerate(states):
        torch.save(state, folder / name.format(rank))
    return folder


def test_plain_tensors_that_differ(tmp_path: Path) -> None:
    """Parts without a record of how they fit together are not merged."""
    folder = save_each(tmp_path / "a", [{"w": torch.full((4,), float(r))} for r in range(2)])
    found = read(folder)
    assert [(f.code, f.fqn) for f in found.findings] == [
        ("unmerged-tensor", "w.rank0"),
        ("unmerged-tensor", "w.rank1"),
    ]
    assert "cannot merge w: it is a plain tensor in every rank's file" in found.findings[0].message
    with pytest.raises(UnreadablePart, match="how the parts fit together"):
        ckptcore.convert(str(folder), str(tmp_path / "out"))
    folder = save_each(tmp_path / "b", [{"w": torch.zeros(4 + r), "v": torch.ones(2)} for r in range(2)])
    ckptcore.convert(str(folder), str(tmp_path / "out"), exclude=["w.rank*"])
    assert [t.fqn for t in ckptcore.open(str(tmp_path / "out")).tensors] == ["v"]


def test_steps_that_differ(tmp_path: Path) -> None:
    """Files of two steps, as far as their values show it."""
    same = {"w": torch.ones(3)}
    folder = save_each(tmp_path / "a", [{**same, "step": r} for r in range(2)])
    assert [f.code for f in read(folder).findings] == ["mixed-saves"]
    states = [{**same, "state": {"w": {"step": torch.tensor(float(r))}}} for r in range(2)]
    assert [f.code for f in read(save_each(tmp_path / "b", states)).findings] == ["mixed-saves"]
    folder = save_each(tmp_path / "c", [{**same, "note": f"rank {r}"} for r in range(2)])
    manifest = read(folder)
    assert [f.code for f in manifest.findings] == ["rank-object"]
    assert objects(manifest) == {"note.rank0": "rank 0", "note.rank1": "rank 1"}


def test_replicas_are_compared(cli: Cli, tmp_path: Path) -> None:
    """Without a checksum, only the bytes show that two ranks differ."""
    try:
        torch.serialization.set_crc32_options(False)
        states = [{"w": torch.zeros(100_000)}, {"w": torch.ones(100_000)}]
        folder = save_each(tmp_path / "ckpt", states)
    finally:
        torch.serialization.set_crc32_options(True)
    done = cli("consolidate", folder, tmp_path / "out", "--output", "json")
    assert done.code == 1, done
    assert "replica-mismatch" in done.stdout


def optimizer_names(
    folder: Path, parts: dict[str, Any], states: Any, groups: Any
) -> tuple[set[str], list[str]]:
    """The names of the moments in the ranks' optimizer, and the findings."""
    optim = {"state": states, "param_groups": groups}
    manifest = read(save_each(folder, [{"model": parts, "optim": optim}] * 2, "rank{}.pt"))
    names = {t.fqn for t in manifest.tensors if t.fqn.startswith("optim.state.")}
    return {n.split(".")[2] for n in names}, [f.code for f in manifest.findings]


def test_numbers_get_names_where_they_are_proven(tmp_path: Path) -> None:
    parts = {"decay": torch.ones(3, 2), "plain": torch.ones(3)}
    states = {0: {"exp_avg": torch.ones(3, 2)}, 1: {"exp_avg": torch.ones(3)}}
    both = {"decay", "plain"}
    for n, (groups, names) in enumerate(
        [
            ([{"params": [0, 1], "lr": 0.1}], both),
            ([{"params": [0], "lr": 0.1}, {"params": [1], "lr": 0.1}], both),
            ([{"params": [0, 1], "param_names": ["decay", "plain"]}], both),
            ([{"params": [0], "lr": 0.1}], {"decay"}),
        ]
    ):
        used = {i: v for i, v in states.items() if i < sum(len(g["params"]) for g in groups)}
        assert optimizer_names(tmp_path / str(n), parts, used, groups) == (names, []), groups


def test_numbers_stay_where_names_are_not_proven(tmp_path: Path) -> None:
    """Two of one shape in two groups: they could be swapped."""
    parts = {"a": torch.ones(3), "b": torch.ones(3)}
    states = {n: {"exp_avg": torch.full((3,), float(n))} for n in range(2)}
    apart = [{"params": [0], "lr": 0.1}, {"params": [1], "lr": 0.2}]
    assert optimizer_names(tmp_path / "a", parts, states, apart) == ({"0", "1"}, ["unnamed-states"])
    named = [{**g, "param_names": [n]} for g, n in zip(apart, "ba", strict=True)]
    assert optimizer_names(tmp_path / "b", parts, states, named) == ({"a", "b"}, [])
    fewer = [{"params": [0], "lr": 0.1}]
    assert optimizer_names(tmp_path / "c", parts, {0: states[0]}, fewer) == ({"0"}, ["unnamed-states"])


@pytest.mark.parametrize("release", old.MODULES)
def test_older_releases(release: str, tmp_path: Path) -> None:
    """DTensors under the module names of earlier releases."""
    full = torch.arange(35.0).reshape(7, 5)
    ranks = torch.arange(4, dtype=torch.int32 if release == "2.6" else torch.int64).reshape(2, 2)
    tmp_path = tmp_path / "ckpt"
    tmp_path.mkdir()
    for rank in range(4):
        at = [rank // 2, rank % 2]
        rows = [full[:4], full[4:]][at[1]]
        two = [("Replicate", {}), ("Shard", {"dim": 0})]
        both = [("Shard", {"dim": 1}), ("Shard", {"dim": 0})]
        state = {
            "a": old.dtensor(release, rows, (7, 5), ranks, at, two),
            "b": old.dtensor(release, [rows[:, :3], rows[:, 3:]][at[0]], (7, 5), ranks, at, both),
            "c": old.dtensor(release, torch.zeros(0), (7, 5), ranks[:1], None, both)
            if at[0]
            else old.dtensor(release, rows, (7, 5), ranks[:1], [0, at[1]], two),
        }
        old.save(state, tmp_path / f"model_rank_{rank}.pt")
    manifest = read(tmp_path)
    assert manifest.origin["world_size"] == 4
    assert check(manifest, level="coverage").findings == ()
    for name in "abc":
        assert torch.equal(api.read(manifest, name), full), name


def test_a_coordinate_of_another_rank(tmp_path: Path) -> None:
    """The mesh records which rank wrote a file; its name must not name another."""
    full, ranks = torch.arange(8.0), torch.arange(2)
    (tmp_path / "ckpt").mkdir()
    for rank, at in ((0, 1), (1, 0)):
        state = {
            "a": old.dtensor("2.6", full[4 * at : 4 * at + 4], (8,), ranks, [at], [("Shard", {"dim": 0})])
        }
        old.save(state, tmp_path / "ckpt" / f"model_rank_{rank}.pt")
    assert "item-mismatch" in {f.code for f in read(tmp_path / "ckpt").findings}


def test_local_tensors_that_do_not_fit(tmp_path: Path) -> None:
    shard = [("Shard", {"dim": 0})]
    state = {"a": old.dtensor("2.6", torch.zeros(3), (8,), torch.arange(2), [0], shard)}
    (tmp_path / "ckpt").mkdir()
    for rank in range(2):
        old.save(state, tmp_path / "ckpt" / f"model_rank_{rank}.pt")
    with pytest.raises(MalformedCheckpoint, match=r"4 of 8 elements of a dim by its placements \(got 3\)"):
        read(tmp_path / "ckpt")


def test_partial_placements_are_refused(tmp_path: Path) -> None:
    partial = [("_Partial", {"reduce_op": "sum"})]
    state = {"a": old.dtensor("2.1", torch.zeros(8), (8,), torch.arange(1), [0], partial)}
    (tmp_path / "ckpt").mkdir()
    old.save(state, tmp_path / "ckpt" / "model_rank_0.pt")
    with pytest.raises(UnsupportedFormat, match="summand"):
        read(tmp_path / "ckpt")


@pytest.mark.parametrize(
    ("function", "args"),
    [
        ("__builtin__.getattr", (old.Global("torch.distributed.tensor.DTensor"), "__class__")),
        ("__builtin__.getattr", ("text", "ProcessGroupState")),
    ],
)
def test_getattr_reaches_no_other_class(function: str, args: tuple[Any, ...], tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    old.save({"a": old.Called(old.Global(function), args)}, tmp_path / "ckpt" / "model_rank_0.pt")
    with pytest.raises((UnsafeContent, MalformedCheckpoint)):
        read(tmp_path / "ckpt")


@pytest.mark.soak
def test_a_thousand_ranks(tmp_path: Path) -> None:
    full = torch.arange(4000.0)
    ranks = torch.arange(1000)
    (tmp_path / "ckpt").mkdir()
    for rank in range(1000):
        piece = full[4 * rank : 4 * rank + 4]
        state = {"a": old.dtensor("2.6", piece, (4000,), ranks, [rank], [("Shard", {"dim": 0})]), "step": 7}
        old.save(state, tmp_path / "ckpt" / f"model_world_size_1000_rank_{rank}.pt")
    manifest = read(tmp_path / "ckpt")
    assert (manifest.num_tensors, len(manifest.chunks), len(manifest.blobs)) == (1, 1000, 1)
    assert check(manifest, level="coverage").findings == ()


def read(folder: Path) -> Manifest:
    return read_manifest(open_source(str(folder)))


def objects(manifest: Manifest) -> dict[str, Any]:
    return {b.key: decode(b.tree) for b in manifest.blobs}
