"""Load written checkpoints with OLMo-core's own loaders, at other world sizes than saved them.

Each generation needs its own environment: `CKPTCORE_OLMO_CORE_PYTHON` names the interpreter of
one with ai2-olmo-core==0.1.0, `CKPTCORE_OLMO_CORE_1_PYTHON`, `CKPTCORE_OLMO_CORE_2_PYTHON` and
`CKPTCORE_OLMO_CORE_3_PYTHON` of those with 1.9.0, 2.6.0 and 3.0.0. Without them these tests are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from functools import cache
from math import prod
from pathlib import Path

import library_values
import pytest
import torch
from olmo_samples import sample
from paths import JOBS
from samples import FIXTURES, unpack
from torch.distributed.tensor import Shard

import ckptcore
from ckptcore.conversion.pipeline import convert
from ckptcore.core.manifest import Manifest
from ckptcore.planning.request import Request
from ckptcore.topology.layout import Mesh, TensorLayout, Topology

# release -> the variable that names its interpreter
VARIABLES = {
    "0.1.0": "CKPTCORE_OLMO_CORE_PYTHON",
    "1.9.0": "CKPTCORE_OLMO_CORE_1_PYTHON",
    "2.6.0": "CKPTCORE_OLMO_CORE_2_PYTHON",
    "3.0.0": "CKPTCORE_OLMO_CORE_3_PYTHON",
}


def interpreter(release: str) -> str:
    """Return the interpreter of a release of ai2-olmo-core; skip where there is none."""
    python = os.environ.get(VARIABLES[release], sys.executable)
    if _installed(python) != release:
        pytest.skip(
            f"no ai2-olmo-core {release} in {python}; {VARIABLES[release]} can name another interpreter"
        )
    return python


@cache
def _installed(python: str) -> str:
    """Return the release of ai2-olmo-core of an interpreter, or nothing."""
    probe = "import importlib.metadata as m; print(m.version('ai2-olmo-core'))"
    return subprocess.run([python, "-c", probe], capture_output=True, text=True, check=False).stdout.strip()


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    "name", ["v01_fsdp1_fp32_ws2", "v3_bf16params_ws2", "olmo1_local_ws2", "olmo1_unsharded_safetensors"]
)
def test_restored_by_its_own_loader(
    name: str, ranks: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """0.1.0: a model and its optimizer under FSDP are restored bit for bit from every generation."""
    python = interpreter("0.1.0")
    root = sample(request, name)
    step = next(p for p in root.iterdir() if p.name.startswith("step"))
    ckptcore.convert(str(step), str(tmp_path / "out"), to="olmo_v01", max_file_size=100_000)
    assert run_job(python, "olmo_loader_job.py", ranks, tmp_path / "out", root) >= 60


def columns(manifest: Manifest, *_: object) -> Topology:
    """Shard rows over one axis and columns over another."""
    both, rows = TensorLayout(("fsdp", "tp"), (Shard(0), Shard(1))), TensorLayout(("fsdp",), (Shard(0),))
    found = {t.fqn: both if len(t.shape) > 1 else rows for t in manifest.tensors if t.shape}
    return Topology(Mesh((("fsdp", 2), ("tp", 2))), found)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("mesh", ["fsdp=2", "fsdp=3", "fsdp=4", "fsdp=2,tp=2"])
def test_a_mesh_restored_at_another_size(
    mesh: str, ranks: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """0.1.0 loads the files of one number of ranks on another, model and AdamW bit for bit."""
    python = interpreter("0.1.0")
    root = sample(request, "v01_fsdp1_fp32_ws2")
    step = next(p for p in root.iterdir() if p.name.startswith("step"))
    asked = Request(str(step), str(tmp_path / "out"), verb="reshard", to="olmo_v01", mesh=mesh)
    convert(asked, catalog_url=False, topology=columns if "tp" in mesh else None)
    world = prod(int(part.split("=")[1]) for part in mesh.split(","))
    assert len(list((tmp_path / "out" / "model").glob("rank_*.safetensors"))) == world
    assert run_job(python, "olmo_loader_job.py", ranks, tmp_path / "out", root) >= 60


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", ["v3_bf16params_ws2", "v01_fsdp1_fp32_ws2", "olmo1_local_ws2"])
def test_steps_restored_by_olmo_core_3(
    name: str, ranks: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """3.0.0: a step folder fills DTensors of another mesh, model and optimizer."""
    python = interpreter("3.0.0")
    root = sample(request, name)
    step = next(p for p in root.iterdir() if p.name.startswith("step"))
    ckptcore.convert(str(step), str(tmp_path / "out"), to="olmo_core", max_file_size=100_000)
    if not (tmp_path / "out" / "train").exists():  # the source has no trainer's state
        (tmp_path / "out" / "train").mkdir()
        torch.save({}, tmp_path / "out" / "train" / "rank0.pt")
    assert run_job(python, "olmo_dcp_job.py", ranks, tmp_path / "out", root) >= 80 * ranks


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("mesh", ["fsdp=4", "fsdp=2,tp=2"])
def test_steps_of_a_mesh_restored_by_olmo_core_3(
    mesh: str, ranks: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """3.0.0: a step folder of one number of ranks fills DTensors of another."""
    python = interpreter("3.0.0")
    root = sample(request, "v3_bf16params_ws2")
    step = next(p for p in root.iterdir() if p.name.startswith("step"))
    asked = Request(str(step), str(tmp_path / "out"), verb="reshard", to="olmo_core", mesh=mesh)
    convert(asked, catalog_url=False, topology=columns if "tp" in mesh else None)
    assert len(list((tmp_path / "out" / "model_and_optim").glob("__*.distcp"))) == 4
    assert run_job(python, "olmo_dcp_job.py", ranks, tmp_path / "out", root) >= 80 * ranks


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("release", ["1.9.0", "2.6.0"])
def test_steps_of_a_mesh_restored_by_earlier_releases(
    release: str, ranks: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """1.9.0 and 2.6.0 fill DTensors of another mesh from the same step folder."""
    python = interpreter(release)
    root = sample(request, "v3_bf16params_ws2")
    step = next(p for p in root.iterdir() if p.name.startswith("step"))
    asked = Request(str(step), str(tmp_path / "out"), verb="reshard", to="olmo_core", mesh="fsdp=4")
    convert(asked, catalog_url=False)
    assert run_job(python, "olmo_dcp_job.py", ranks, tmp_path / "out", root) >= 80 * ranks


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 3])
def test_olmo_cores_own_model_trains_on(ranks: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """3.0.0: its model and AdamW under its FSDP: loaded bit for bit, with the losses of a native resume."""
    python = interpreter("3.0.0")
    root = unpack(request.config.rootpath / ".pytest_cache/samples", FIXTURES / "maps/truths.tar.zst")
    step, out = root / "olmo3/step3", tmp_path / "out"
    asked = Request(str(step), str(out), verb="reshard", to="olmo_core", mesh="fsdp=4")
    convert(asked, catalog_url=False)
    given = (str(step / "config.json"), str(step), str(out))
    found = [
        json.loads(line.removeprefix("found: "))
        for text in run_ranks(python, "olmo_train_job.py", ranks, *given)
        for line in text.splitlines()
        if line.startswith("found: ")
    ]
    assert len(found) == ranks
    for rank in found:
        assert rank[str(out)] == rank[str(step)]
        assert len(set(rank[str(out)]["losses"])) == 2
        assert sum("::exp_avg" in name for name in rank[str(out)]["loaded"]) >= 20


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_bare_folder_restored_by_olmo_core_3(
    ranks: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """3.0.0: what was a DCP folder without a step is loaded as one."""
    python = interpreter("3.0.0")
    root = sample(request, "v3_bf16params_ws2")
    bare = next(p for p in root.iterdir() if p.name.startswith("step")) / "model_and_optim"
    asked = Request(str(bare), str(tmp_path / "out"), verb="reshard", to="olmo_core", mesh="fsdp=4")
    convert(asked, catalog_url=False)
    assert (tmp_path / "out" / ".metadata").exists()
    assert run_job(python, "olmo_dcp_job.py", ranks, tmp_path / "out", root) >= 80 * ranks


def test_values_of_libraries_reach_olmo_cores_trainer(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """3.0.0: `Checkpointer.load` returns what a callback keeps in the trainer's state as what it was."""
    python = interpreter("3.0.0")
    root = sample(request, "v3_bf16params_ws2")
    step = tmp_path / "step"
    shutil.copytree(next(p for p in root.iterdir() if p.name.startswith("step")), step)
    kept = library_values.values()
    for file in (step / "train").glob("rank*.pt"):
        state = torch.load(file, weights_only=False)
        torch.save({**state, "callbacks": {"mine": kept}}, file)
    asked = Request(str(step), str(tmp_path / "out"), verb="reshard", to="olmo_core", mesh="fsdp=4")
    convert(asked, catalog_url=False)
    saved = tmp_path / "state.pt"
    assert run_job(python, "olmo_dcp_job.py", 3, tmp_path / "out", root, saved) >= 80 * 3
    found = torch.load(saved, weights_only=False)["callbacks"]["mine"]
    assert found.keys() == kept.keys()
    assert [key for key, value in kept.items() if not library_values.same(found[key], value)] == []


def run_job(python: str, script: str, ranks: int, out: Path, root: Path, *more: Path) -> int:
    """Run the ranks of a job; return the number of tensors that were equal, over all ranks."""
    outputs = run_ranks(python, script, ranks, str(out), str(root), *map(str, more))
    return sum(int(line.split()[1]) for text in outputs for line in text.splitlines() if "equal:" in line)


def run_ranks(python: str, script: str, ranks: int, *given: str) -> list[str]:
    """Run the ranks of a job; return what each printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
    }
    jobs = [
        subprocess.Popen(
            [python, str(JOBS / script), *given],
            env=dict(os.environ) | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [job.communicate(timeout=240)[0] for job in jobs]
    assert all(job.returncode == 0 for job in jobs), "\n".join(outputs)[-3000:]
    return outputs
