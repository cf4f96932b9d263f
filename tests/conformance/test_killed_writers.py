"""Test that the bytes of every writer do not depend on the process, the number of runs, or kills in between.

`test_determinism` does more, with one source and the writers of uncut files; here every format is written,
consolidated and for meshes, from a source that has what each of them needs.
"""

from __future__ import annotations

import random
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from samples import contents, seed_of, tree_digest

import ckptcore
from ckptcore.planning.request import Settings

if TYPE_CHECKING:
    from driver import Cli, Outcome

LAYERS, ROWS, WIDTH = 6, 301, 256


@dataclass(frozen=True, slots=True)
class Job:
    """A command. arguments: its verb and options. source: one of the sources. suffix: of the destination.
    before: other sources, which the command line has before it."""

    arguments: tuple[str, ...]
    source: str = "job"
    suffix: str = ""
    before: tuple[str, ...] = ()


def _consolidate(to: str, source: str = "job", suffix: str = "") -> Job:
    return Job(("consolidate", "--to", to), source, suffix)


def _mesh(to: str, mesh: str, *options: str, source: str = "job") -> Job:
    return Job(("reshard", "--to", to, "--mesh", mesh, *options), source)


CONSOLIDATED = {
    "safetensors": _consolidate("safetensors"),
    "export": Job(("export", "--max-file-size", "2MB")),
    "merge": Job(("merge", "--decay", "0.75"), "job", before=("trained", "bare")),
    "torch_save": _consolidate("torch_save", suffix=".pt"),
    "dcp": _consolidate("dcp"),
    "torch_ranks": _consolidate("torch_ranks"),
    "torch_dist": _consolidate("torch_dist", "megatron"),
    "zarr": _consolidate("zarr", "megatron"),
    "olmo_core": _consolidate("olmo_core"),
    "olmo_v01": _consolidate("olmo_v01", "bare"),
    "lightning": _consolidate("lightning", "fabric", ".ckpt"),
    "deepspeed_universal": _consolidate("deepspeed_universal", "trained"),
    "deepspeed_universal_zero3": _consolidate("deepspeed_universal_zero3", "trained"),
}
MESHES = {
    "dcp-mesh": _mesh("dcp", "fsdp=2,tp=3"),
    "dcp-safetensors-mesh": _mesh("dcp", "pp=2,fsdp=2", "--serialization", "safetensors"),
    "torch_ranks-mesh": _mesh("torch_ranks", "fsdp=2,tp=3"),
    "torch_dist-mesh": _mesh("torch_dist", "pp=2,tp=2", source="megatron"),
    "olmo_core-mesh": _mesh("olmo_core", "dp_replicate=2,fsdp=3"),
    "olmo_v01-mesh": _mesh("olmo_v01", "fsdp=4", source="bare"),
    "lightning-mesh": _mesh("lightning", "fsdp=3", source="fabric"),
}
JOBS = CONSOLIDATED | MESHES
# Of the others, a kill finds no line that it does not find in these.
_KILLED = frozenset({"export", "merge", "torch_ranks", "zarr", "lightning"})


def weights() -> dict[str, Any]:
    """Tensors with Hugging Face names, which built-in rules cut, and with rows that no mesh divides."""
    import torch

    torch.manual_seed(1)
    found = {"model.embed_tokens.weight": torch.randn(ROWS, WIDTH), "model.norm.weight": torch.randn(WIDTH)}
    for n in range(LAYERS):
        head = f"model.layers.{n}."
        found |= {
            f"{head}self_attn.q_proj.weight": torch.randn(WIDTH, WIDTH),
            f"{head}self_attn.o_proj.weight": torch.randn(WIDTH, WIDTH).bfloat16(),
            f"{head}mlp.up_proj.weight": torch.randn(ROWS, WIDTH),
            f"{head}mlp.down_proj.weight": torch.randn(WIDTH, ROWS),
            f"{head}input_layernorm.weight": torch.randn(WIDTH),
        }
    return found


def _megatron_name(name: str) -> str:
    for old, new in (
        ("model.embed_tokens.", "embedding.word_embeddings."),
        ("model.norm.", "decoder.final_layernorm."),
        ("model.layers.", "decoder.layers."),
        ("self_attn.q_proj", "self_attention.linear_qkv"),
        ("self_attn.o_proj", "self_attention.linear_proj"),
        ("mlp.up_proj", "mlp.linear_fc1"),
        ("mlp.down_proj", "mlp.linear_fc2"),
    ):
        name = name.replace(old, new)
    return name


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """``job``: model and values; ``bare``: the model alone; ``fabric``: the first with Fabric's file;
    ``trained``: masters with the optimizer; ``megatron``: the first under names of Megatron-Core."""
    import torch
    import torch.distributed.checkpoint as dcp

    root = tmp_path_factory.mktemp("writers")
    model = weights()
    found = {name: root / name for name in ("job", "bare", "fabric", "trained", "megatron")}
    masters = {name: value.float() for name, value in model.items()}
    states = {
        name: {"exp_avg": value + 1, "exp_avg_sq": value * value, "step": torch.tensor(7.0)}
        for name, value in masters.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained = {"model": masters, "optim": {"state": states}}
        dcp.save(trained, checkpoint_id=found["trained"], no_dist=True)
        dcp.save({"model": model, "extra": {"step": 7}}, checkpoint_id=found["job"], no_dist=True)
        megatron = {_megatron_name(name): value for name, value in model.items()}
        dcp.save({"model": megatron, "extra": {"step": 7}}, checkpoint_id=found["megatron"], no_dist=True)
        dcp.save(model, checkpoint_id=found["bare"], no_dist=True)
        dcp.save({"model": model}, checkpoint_id=found["fabric"], no_dist=True)
    torch.save({"step": 7, "hparams": {"lr": 0.5}}, found["fabric"] / "meta.pt")
    return found


@dataclass(frozen=True)
class Good:
    """An undisturbed run. folder: its output. seconds: how long it took."""

    folder: Path
    seconds: float


@pytest.fixture(scope="module")
def undisturbed(
    cli: Cli, sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Good]:
    """Results, made on first use."""

    class Runs(dict[str, Good]):
        def __missing__(self, name: str) -> Good:
            folder = tmp_path_factory.mktemp(name)
            done = run(cli, sources, name, folder, "--workers", 1)
            assert done.code == 0, done
            self[name] = Good(output(name, folder), done.seconds)
            return self[name]

    return Runs()


def output(name: str, folder: Path) -> Path:
    return folder / f"out{JOBS[name].suffix}"


def run(
    cli: Cli, sources: dict[str, Path], name: str, folder: Path, *flags: object, **limits: Any
) -> Outcome:
    job = JOBS[name]
    verb, *options = job.arguments
    places = (*(sources[other] for other in job.before), sources[job.source], output(name, folder))
    return cli(verb, *places, *options, "--output", "json", *flags, **limits)


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


# `make test` runs each writer once, of a mesh, with four workers.
@pytest.mark.parametrize("name", [*MESHES, *(pytest.param(n, marks=pytest.mark.soak) for n in CONSOLIDATED)])
def test_same_bytes(
    name: str, cli: Cli, sources: dict[str, Path], undisturbed: dict[str, Good], tmp_path: Path
) -> None:
    """Four workers and a small budget write what one worker writes."""
    done = run(cli, sources, name, tmp_path, "--workers", 4, "--memory", "4MiB")
    assert done.code == 0, done
    good, ours = contents(undisturbed[name].folder), contents(output(name, tmp_path))
    assert sorted(ours) == sorted(good)
    assert [n for n in good if ours[n] != good[n]] == []


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in _KILLED else [pytest.mark.soak]) for n in JOBS]
)
def test_killed_and_resumed(
    name: str,
    cli: Cli,
    sources: dict[str, Path],
    undisturbed: dict[str, Good],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Two kill -9 at random moments, then a run that finishes."""
    kill_many(name, 2, cli, sources, undisturbed[name], tmp_path, seed_of(request))


@pytest.mark.soak
@pytest.mark.parametrize("name", JOBS)
def test_killed_and_resumed_many(
    name: str,
    cli: Cli,
    sources: dict[str, Path],
    undisturbed: dict[str, Good],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Twenty kills in one run, and twenty runs with one kill each."""
    seed = seed_of(request)
    for number, kills in enumerate([20, *[1] * 20]):
        (folder := tmp_path / str(number)).mkdir()
        kill_many(name, kills, cli, sources, undisturbed[name], folder, seed + number)


def kill_many(
    name: str, kills: int, cli: Cli, sources: dict[str, Path], good: Good, folder: Path, seed: int
) -> None:
    """After every kill there is no output, or a complete one; after the last run nothing else is left."""
    print(f"--seed {seed}")
    rng = random.Random(seed)
    expected = contents(good.folder)
    before = tree_digest(sources[JOBS[name].source])
    dst = output(name, folder)
    killed = 0
    for _ in range(kills):
        # From the middle of the start-up to the end of an undisturbed run.
        done = run(cli, sources, name, folder, kill_after=rng.uniform(0.05, good.seconds))
        assert done.killed or done.code == 0, done
        killed += done.killed
        if dst.exists():
            assert contents(dst) == expected, "half a result"
            remove(dst)
    done = run(cli, sources, name, folder)
    assert done.code == 0, done
    assert contents(dst) == expected
    left = [p.name for p in folder.iterdir() if p != dst]
    assert left == [], f"left behind: {left}"
    assert tree_digest(sources[JOBS[name].source]) == before
    print(f"{killed} kills")


@pytest.mark.alike(3)
@pytest.mark.parametrize("name", MESHES)
def test_finished_files_are_kept(
    name: str, sources: dict[str, Path], undisturbed: dict[str, Good], tmp_path: Path
) -> None:
    """Files that a stopped job finished are not rewritten, unless they were changed."""
    job = JOBS[name]
    names, values = job.arguments[1::2], job.arguments[2::2]
    options: dict[str, Any] = dict(zip((n.removeprefix("--") for n in names), values, strict=True))
    asked = str(sources[job.source]), str(output(name, tmp_path))
    ready = ckptcore.prepare(*asked, verb="reshard", **options)
    assert len(ready.files) > 2
    ckptcore.execute(ready, [0, 1], settings=Settings(workers=1))
    staged = sorted((tmp_path / ".out.ckptcore" / "files").rglob("*.*"))
    staged = [p for p in staged if p.is_file()]
    assert len(staged) == 2
    before = {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in staged}
    spoilt = max(staged, key=lambda p: p.stat().st_size)
    with spoilt.open("r+b") as data:
        data.seek(spoilt.stat().st_size // 2)
        data.write(b"\xee" * 8)
    done = ckptcore.convert(*asked, verb="reshard", settings=Settings(workers=1), **options)
    assert sum(r.reused for r in done.files) == 1
    kept = next(p.name for p in staged if p != spoilt)
    found = next(p.stat() for p in Path(asked[1]).rglob(kept))
    assert (found.st_ino, found.st_mtime_ns) == before[kept]
    assert contents(Path(asked[1])) == contents(undisturbed[name].folder)
