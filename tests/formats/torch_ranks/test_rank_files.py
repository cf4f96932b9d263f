"""Write rank files: torch loads them on every rank, and they read back unchanged."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import warm
from paths import JOBS
from ranks_job import Model
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import ckptcore
from ckptcore.conversion.pipeline import convert
from ckptcore.core.manifest import TensorSpec
from ckptcore.errors import UnsupportedFormat, UsageError
from ckptcore.formats.base import Arrangement
from ckptcore.formats.torch_ranks.writer import arrange
from ckptcore.planning.rank_layout import lay_out
from ckptcore.planning.request import Request
from ckptcore.topology.layout import Mesh, TensorLayout, Topology

if TYPE_CHECKING:
    from driver import Cli

JOB = JOBS / "rank_files_job.py"
MESHES = [
    "fsdp=1",
    "fsdp=2",
    "fsdp=3",
    "fsdp=4",
    "fsdp=2,tp=2",
    "dp_replicate=2,fsdp=2",
    "pp=2,fsdp=2",
    "fsdp=1,tp=2",
    "fsdp=2,ep=2",
]
# A soak: what these cut, others cut as well.
MORE = ("fsdp=2", "fsdp=4", "fsdp=1,tp=2")
BUILTIN = "fsdp=2,tp=2"  # also with the layouts of the built-in rules
RESUMED = ["fsdp=1", "fsdp=3"]


def model() -> dict[str, torch.Tensor]:
    """Uneven, empty and 0-d tensors, and rare dtypes."""
    torch.manual_seed(3)
    return {
        "embed.weight": torch.randn(11, 6),
        "layers.0.up.weight": torch.randn(9, 6).bfloat16(),
        "layers.0.down.weight": torch.randn(6, 9),
        "layers.0.down.bias": torch.randn(6),
        "layers.0.norm": torch.randn(7),
        "layers.1.norm": torch.randn(2, 5),
        "layers.10.scale": torch.randn(1),
        "none": torch.zeros(0, 4),
        "step": torch.tensor(17.0),
        "count": torch.arange(21).reshape(7, 3),
        "mask": torch.rand(9) > 0.5,
        "wave": torch.randn(5, 2, dtype=torch.complex64),
        "eight": torch.randn(6, 3).to(torch.float8_e4m3fn),
        "wide": torch.randint(0, 9, (5,), dtype=torch.uint16),
        "plain": torch.arange(4),
    }


def layouts(axes: dict[str, int]) -> dict[str, TensorLayout]:
    """Layouts of the tensors of `model` on a mesh: sharded parameters, two replicated, pipeline stages."""
    data = tuple(a for a in axes if a in ("dp_replicate", "fsdp"))
    cut = (*(Replicate() for _ in data[1:]), Shard(0))
    stage = {"layers.0": (0,), "layers.1": (1,)} if "pp" in axes else {}
    found = {}
    for name, tensor in model().items():
        at = next(((("pp", s),) for prefix, s in stage.items() if name.startswith(prefix + ".")), ())
        if tensor.ndim and name != "plain":
            found[name] = TensorLayout(data, cut, at)
    if "tp" in axes:
        strided = _StridedShard(0, split_factor=axes["tp"])
        found |= {
            "embed.weight": TensorLayout(("fsdp", "tp"), (strided, Shard(0))),
            "layers.0.up.weight": TensorLayout(("fsdp", "tp"), (strided, Shard(0))),
            "layers.0.down.weight": TensorLayout(("fsdp", "tp"), (Shard(0), Shard(1))),
            "layers.0.down.bias": TensorLayout(("fsdp", "tp"), (Shard(0), Replicate())),
            "count": TensorLayout(("fsdp", "tp"), (Replicate(), Replicate())),
        }
    if "ep" in axes:
        found |= {
            "embed.weight": TensorLayout(("fsdp+ep",), (Shard(0),)),
            "layers.0.up.weight": TensorLayout(("fsdp", "ep"), (Shard(1), Shard(0))),
        }
    return found


def reshard(source: Path, target: Path, mesh: str, found: dict[str, TensorLayout] | None = None) -> None:
    """found: layouts to use, None for those of the built-in rules."""
    topology = None if found is None else Topology(Mesh(tuple(axes_of(mesh).items())), found)
    asked = Request(str(source), str(target), verb="reshard", to="torch_ranks", mesh=mesh)
    convert(asked, catalog_url=False, topology=topology)


def axes_of(mesh: str) -> dict[str, int]:
    return {name: int(size) for name, size in (part.split("=") for part in mesh.split(","))}


def trained() -> dict[str, Any]:
    """A model and its optimizer by name, as returned by get_state_dict."""
    torch.manual_seed(7)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(11)).sum().backward()
        optimizer.step()
    states, weights = get_optimizer_state_dict(model, optimizer), model.state_dict()
    assert all(type(k) is str for k in states["state"])
    return {"model": dict(weights), "optim": states, "extra_state": {"epoch": 3, "sched": {"last": [1.5, 2]}}}


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(
        a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)
    )


def placements(layouts: dict[str, TensorLayout]) -> dict[str, Any]:
    """What the job must find: name -> (axes, torch's placements, stages)."""
    return {
        n: (a.axes, tuple(map(torchs, a.placements)), a.coordinates[0][1] if a.coordinates else ())
        for n, a in layouts.items()
    }


def torchs(placement: Any) -> Any:
    """A placement as an object of torch."""
    made = {"Shard": Shard, "_StridedShard": _StridedShard, "Replicate": Replicate}[type(placement).__name__]
    fields = ("dim", "split_factor")
    return made(**{f: getattr(placement, f) for f in fields if hasattr(placement, f)})


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Load the folder of a mesh with rank files in a job; those that it finds equal get a mark.

    One job serves the meshes of every run, and another one `MORE`.
    """
    made: dict[bool, Path] = {}

    def of(mesh: str) -> Path:
        more = mesh in MORE
        if more not in made:
            made[more] = tmp_path_factory.mktemp("meshes")
            load(made[more], [m for m in MESHES if (m in MORE) is more])
        return made[more] / mesh

    return of


def load(root: Path, meshes: list[str]) -> None:
    truth = model()
    for mesh in meshes:
        (here := root / mesh).mkdir()
        torch.save(truth, here / "truth.pt")
        found = layouts(axes_of(mesh))
        reshard(here / "truth.pt", here / "ckpt", mesh, found=found)
        torch.save(placements(found), here / "placements.pt")
        if mesh == BUILTIN:
            (here / "builtin").mkdir()
            torch.save(llama(), here / "builtin" / "truth.pt")
            reshard(here / "builtin" / "truth.pt", here / "builtin" / "ckpt", mesh)
            found = dict(lay_out(ckptcore.open(str(here / "builtin" / "truth.pt")), mesh).layouts)
            cut = map(torchs, found["model.layers.1.mlp.up_proj.weight"].placements)
            assert _StridedShard(0, split_factor=2) in cut
            torch.save(placements(found), here / "builtin" / "placements.pt")
        if mesh in RESUMED:
            torch.save(trained(), here / "trained.pt")
            reshard(here / "trained.pt", here / "resumed", mesh)
    done = subprocess.run(
        [*warm.python(), str(JOB), str(root)], capture_output=True, text=True, timeout=300, check=False
    )
    (root / "output").write_text(done.stdout[-6000:] + done.stderr[-3000:])


@pytest.mark.alike(1)
@pytest.mark.xdist_group("rank_files")
@pytest.mark.parametrize(
    "mesh", [pytest.param(m, marks=pytest.mark.soak if m in MORE else ()) for m in MESHES]
)
def test_torch_loads_every_ranks_file(mesh: str, loaded: Callable[[str], Path]) -> None:
    """weights_only=True, placements, meshes and process groups as torch's own, whole tensors bit for bit."""
    here = loaded(mesh)
    assert (here / "equal").exists(), (here.parent / "output").read_text()
    truth = model()
    manifest = ckptcore.open(str(here / "ckpt"))
    assert not ckptcore.check(manifest, level="bytes").findings
    assert {t.fqn for t in manifest.tensors} == truth.keys()
    for name, tensor in truth.items():
        assert equal(ckptcore.read(manifest, name), tensor), name
    assert len(list((here / "ckpt").iterdir())) == prod(axes_of(mesh).values()) + 1


@pytest.mark.xdist_group("rank_files")
@pytest.mark.parametrize("mesh", RESUMED)
def test_verls_parts_read_back_by_name(mesh: str, loaded: Callable[[str], Path]) -> None:
    truth, manifest = trained(), ckptcore.open(str(loaded(mesh) / "resumed"))
    wanted = {f"model.{k}": v for k, v in truth["model"].items()}
    for name, states in truth["optim"]["state"].items():
        wanted |= {f"optim.state.{name}.{k}": v for k, v in states.items()}
    assert {t.fqn for t in manifest.tensors} == wanted.keys()
    assert all(equal(ckptcore.read(manifest, n), t) for n, t in wanted.items())
    blobs = {b.key: b.tree for b in manifest.blobs}
    assert blobs["extra_state.epoch"] == 3
    assert blobs["optim.param_groups"][0]["params"] == truth["optim"]["param_groups"][0]["params"]


def llama() -> dict[str, torch.Tensor]:
    """A small Hugging Face model with two layers."""
    torch.manual_seed(5)
    shapes = {
        "self_attn.q_proj": (8, 8),
        "self_attn.k_proj": (4, 8),
        "self_attn.v_proj": (4, 8),
        "self_attn.o_proj": (8, 8),
        "mlp.gate_proj": (12, 8),
        "mlp.up_proj": (12, 8),
        "mlp.down_proj": (8, 12),
        "input_layernorm": (8,),
        "mlp.norm": (8,),
    }
    layers = {f"model.layers.{n}.{k}.weight": torch.randn(s) for n in (0, 1) for k, s in shapes.items()}
    ends = {
        "model.embed_tokens.weight": torch.randn(10, 8),
        "model.norm.weight": torch.randn(8),
        "lm_head.weight": torch.randn(10, 8),
    }
    return {k: v.bfloat16() for k, v in (layers | ends).items()}


def states() -> dict[str, Any]:
    """A model and an optimizer with two groups, in which one parameter has no state yet."""
    weights = {"a": torch.randn(4), "b": torch.randn(4), "c": torch.randn(4)}
    state = {n: {"step": torch.tensor(2.0), "exp_avg": torch.randn(weights[n].shape)} for n in ("c", "a")}
    groups = [{"lr": 0.5, "params": ["b", "c"]}, {"lr": 0.25, "betas": (0.5, 0.75), "params": ["a"]}]
    seed = np.arange(6, dtype=np.uint32)
    return {
        "model": weights,
        "optim": {"state": state, "param_groups": groups},
        "extra_state": {"tables": {"a": seed, "n": 3}},
        "step": 7,
    }


def test_an_optimizer_is_numbered_as_torch_does(tmp_path: Path) -> None:
    """State by number in the order of the groups, with names where the numbers alone would prove nothing."""
    torch.save(truth := states(), tmp_path / "in.pt")
    ckptcore.convert(str(tmp_path / "in.pt"), str(tmp_path / "out"), to="torch_ranks")
    found = torch.load(tmp_path / "out" / "optim_world_size_1_rank_0.pt")
    assert list(found["state"]) == [1, 2]
    assert equal(found["state"][2]["exp_avg"], truth["optim"]["state"]["a"]["exp_avg"])
    assert found["param_groups"] == [
        {"lr": 0.5, "params": [0, 1], "param_names": ["b", "c"]},
        {"lr": 0.25, "betas": (0.5, 0.75), "params": [2], "param_names": ["a"]},
    ]
    assert torch.load(tmp_path / "out" / "step_world_size_1_rank_0.pt") == 7
    assert list(torch.load(tmp_path / "out" / "model_world_size_1_rank_0.pt")) == ["a", "b", "c"]
    extra = torch.load(tmp_path / "out" / "extra_state_world_size_1_rank_0.pt", weights_only=False)
    assert np.array_equal(extra["tables"]["a"], truth["extra_state"]["tables"]["a"])
    found = ckptcore.diff(str(tmp_path / "in.pt"), str(tmp_path / "out"))
    assert not found.tensors
    assert all("param_names" in o.name for o in found.objects), found.objects


def test_a_mesh_of_gpus(tmp_path: Path) -> None:
    """A trainer on GPUs copies from a mesh of GPUs only; the tensors themselves load anywhere."""
    torch.save({"w": torch.arange(10.0)}, tmp_path / "in.pt")
    reshard(tmp_path / "in.pt", tmp_path / "out", "cuda:fsdp=2")
    found = torch.load(tmp_path / "out" / "model_world_size_2_rank_1.pt")["w"]
    assert found.device_mesh.device_type == "cuda"
    assert (found.to_local().device.type, found.to_local().tolist()) == ("cpu", [5.0, 6.0, 7.0, 8.0, 9.0])
    assert equal(ckptcore.read(ckptcore.open(str(tmp_path / "out")), "w"), torch.arange(10.0))
    with pytest.raises(UsageError, match="unknown device 'gpu'"):
        reshard(tmp_path / "in.pt", tmp_path / "other", "gpu:fsdp=2")


@pytest.mark.parametrize(
    "top", ["a\\b", "n" * 300, "\ud800", "a\0b"], ids=["backslash", "long", "surrogate", "nul"]
)
def test_a_key_that_cannot_name_a_file(top: str, tmp_path: Path) -> None:
    """Then each rank has one file with everything, under the same names."""
    state = {"model": {"w": torch.arange(8.0)}, "optimizer": {"x": torch.ones(4)}, top: {"y": torch.zeros(4)}}
    torch.save(state, tmp_path / "in.pt")
    reshard(tmp_path / "in.pt", tmp_path / "out", "fsdp=2")
    assert ckptcore.diff(str(tmp_path / "in.pt"), str(tmp_path / "out")).equal


def test_a_part_of_a_list_is_refused(tmp_path: Path) -> None:
    """Positions have a meaning: a rank without one of a list's tensors cannot have the list."""
    spec = [TensorSpec(f"w.{n}", "float32", (2,)) for n in (0, 1)]
    layouts = {f"w.{n}": TensorLayout(coordinates=(("pp", (n,)),)) for n in (0, 1)}
    paths = {f"w.{n}": ("w", n) for n in (0, 1)}
    with pytest.raises(UnsupportedFormat, match=r"cannot write w\.1: it is in a list"):
        list(arrange(Arrangement(spec, paths=paths, topology=Topology(Mesh((("pp", 2),)), layouts))))


@pytest.mark.xdist_group("rank_files")
def test_damage_to_written_files_is_detected(loaded: Callable[[str], Path], cli: Cli, tmp_path: Path) -> None:
    source = loaded("fsdp=3") / "ckpt"

    def verdict(damage: Callable[[Path], object]) -> tuple[int, set[str]]:
        shutil.rmtree(tmp_path / "x", ignore_errors=True)
        shutil.copytree(source, tmp_path / "x")
        damage(tmp_path / "x")
        done = cli("validate", tmp_path / "x", "--level", "bytes", "--output", "json")
        return done.code, {f["code"] for f in done.json.get("findings", ())}

    one, other = (f"model_world_size_3_rank_{rank}.pt" for rank in (1, 2))
    assert verdict(lambda x: None) == (0, set())
    assert "missing-rank" in verdict(lambda x: (x / one).unlink())[1]
    assert verdict(lambda x: shutil.copy(x / other, x / one))[0] == 1
    assert verdict(lambda x: (x / one).write_bytes((x / one).read_bytes()[:-300]))[0] == 1
    assert "crc-mismatch" in verdict(lambda x: flip(x / one))[1]
    config = '{"FSDP_version": 2, "world_size": 4}'
    assert "mixed-saves" in verdict(lambda x: (x / "fsdp_config.json").write_text(config))[1]


def flip(path: Path) -> None:
    """Change one byte of the largest storage."""
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as opened:
        info = max(opened.infolist(), key=lambda i: i.file_size * ("/data/" in i.filename))
    lengths = (
        int.from_bytes(data[info.header_offset + 26 :][:2], "little"),
        int.from_bytes(data[info.header_offset + 28 :][:2], "little"),
    )
    data[info.header_offset + 30 + sum(lengths) + 1] ^= 4
    path.write_bytes(data)
