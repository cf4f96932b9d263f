"""Write DCP folders, and load them with torch: several releases, one rank and more."""

from __future__ import annotations

import json
import pickletools
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import warm
from paths import JOBS
from samples import FIXTURES, differences, read_safetensors, read_torch, tensors_of

if TYPE_CHECKING:
    from driver import Cli

NESTED = FIXTURES / "torch" / "dcp_nested_2r"
ODD = FIXTURES / "torch" / "dcp_odd_dtypes_2r"
DIMS = FIXTURES / "torch" / "dcp_dims_4r"

META = "torch.distributed.checkpoint.metadata"
# Classes and functions that torch 2.4 has; dtypes are checked by module.
KNOWN_TO_2_4 = {
    f"{META}.{name}"
    for name in (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "_MEM_FORMAT_ENCODING",
    )
} | {"torch.distributed.checkpoint.filesystem._StorageInfo", "torch.Size", "torch.serialization._get_layout"}
FIELDS_OF_2_4 = {
    "state_dict_metadata",
    "planner_data",
    "storage_data",
    "storage_meta",
    "properties",
    "size",
    "chunks",
    "offsets",
    "sizes",
    "fqn",
    "offset",
    "index",
    "relative_path",
    "length",
}

# Every rank loads its rows of every tensor, as FSDP2 shards them.
SHARDED_LOAD = """
import json, os, sys, hashlib, warnings, torch
import torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, zeros
warnings.simplefilter("ignore")
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
wanted = json.loads(sys.argv[2])
state = {n: zeros(s, dtype=getattr(torch, d), device_mesh=mesh, placements=[Shard(0)]) for n, d, s in wanted}
dcp.load(state, checkpoint_id=sys.argv[1])
whole = {n: t.full_tensor() for n, t in state.items()}
if dist.get_rank() == 0:
    raw = {n: t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for n, t in whole.items()}
    print(json.dumps({n: hashlib.sha256(b).hexdigest() for n, b in raw.items()}))
sys.stdout.flush()
dist.barrier()  # gloo aborts a rank whose peer has gone
os._exit(0)  # and its threads can abort an interpreter that is taken down
"""


@pytest.fixture(params=[NESTED, ODD, DIMS], ids=lambda p: p.name)
def dcp_sample(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.mark.soak
def test_torch_converts_written_folders(cli: Cli, tmp_path: Path) -> None:
    asked: list[Path] = []
    for sample in (NESTED, ODD, DIMS):
        out = tmp_path / sample.name
        # Some names of files are one, some are many.
        done = cli("consolidate", sample / "ckpt", out, "--to", "dcp", "--max-file-size", "2KB")
        assert done.code == 0, done
        asked += (out, out.with_suffix(".pt"))
    assert len(list((tmp_path / DIMS.name).glob("*.distcp"))) > 2
    subprocess.run([*warm.python(), JOBS / "torch_save_job.py", *asked], check=True, timeout=180)
    for sample in (NESTED, ODD, DIMS):
        truth = read_safetensors(sample / "expected.safetensors")
        found = tensors_of(read_torch(tmp_path / f"{sample.name}.pt", trusted=True))
        assert differences(truth, found) == [], sample.name


# By default forked ranks load what we wrote, in test_recipes; torchrun takes longer to begin.
@pytest.mark.soak
def test_another_world_size_loads_a_written_folder(cli: Cli, tmp_path: Path) -> None:
    import hashlib

    done = cli("consolidate", DIMS / "ckpt", tmp_path / "out", "--to", "dcp", "--max-file-size", "2KB")
    assert done.code == 0, done
    assert len(list((tmp_path / "out").glob("*.distcp"))) > 2
    truth = {k: v for k, v in read_safetensors(DIMS / "expected.safetensors").items() if v[1]}
    wanted = [(k, d, s) for k, (d, s, _) in truth.items()]
    job = tmp_path / "job.py"
    job.write_text(SHARDED_LOAD)
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "3",
            "--standalone",
            str(job),
            str(tmp_path / "out"),
            json.dumps(wanted),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(next(x for x in ran.stdout.splitlines() if x.startswith("{")))
    assert found == {k: hashlib.sha256(raw).hexdigest() for k, (_, _, raw) in truth.items()}


@pytest.mark.parametrize("verb", [("consolidate",), ("reshard", "--mesh", "fsdp=3")], ids=lambda v: v[0])
def test_metadata_has_only_globals_of_torch_2_4(
    verb: tuple[str, ...], cli: Cli, dcp_sample: Path, tmp_path: Path
) -> None:
    done = cli(verb[0], dcp_sample / "ckpt", tmp_path / "out", "--to", "dcp", *verb[1:])
    assert done.code == 0, done
    names, fields = globals_and_texts((tmp_path / "out" / ".metadata").read_bytes())
    plain = {n for n in names if n not in KNOWN_TO_2_4}
    assert all(n.startswith("torch.") and n.count(".") == 1 for n in plain), plain  # dtypes
    assert {"transform_descriptors", "version", "modules"} & fields == set()
    assert fields >= FIELDS_OF_2_4 - {"index"}


def test_a_rewrite_gives_the_same_files(cli: Cli, dcp_sample: Path, tmp_path: Path) -> None:
    """Also from a written folder: names, paths and objects survive, and equal input gives equal bytes."""
    first, second = tmp_path / "a", tmp_path / "b"
    assert cli("consolidate", dcp_sample / "ckpt", first, "--to", "dcp").code == 0
    assert cli("consolidate", first, second, "--to", "dcp").code == 0
    assert {p.name: p.read_bytes() for p in first.iterdir()} == {
        p.name: p.read_bytes() for p in second.iterdir()
    }
    assert cli("validate", second, "--level", "bytes").code == 0


def globals_and_texts(data: bytes) -> tuple[set[str], set[str]]:
    """(module.name of every global, every text) that a pickle's opcodes name."""
    texts: list[str] = []
    memo: dict[int, str | None] = {}
    names: set[str] = set()
    recent: list[str] = []
    for op, arg, _ in pickletools.genops(data):
        if op.name in ("SHORT_BINUNICODE", "BINUNICODE"):
            assert isinstance(arg, str)
            texts.append(arg)
            recent.append(arg)
        elif op.name == "MEMOIZE":
            memo[len(memo)] = recent[-1] if recent else None
        elif op.name in ("BINGET", "LONG_BINGET"):
            recent.append(memo.get(arg) or "")
        elif op.name == "STACK_GLOBAL":
            names.add(f"{recent[-2]}.{recent[-1]}")
        elif op.name == "GLOBAL":
            names.add(str(arg).replace(" ", "."))
    return names, set(texts)
