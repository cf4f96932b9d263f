"""Test that `torch.distributed.checkpoint` fills FSDP2 modules of 2 ranks from other formats."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import fault_s3
import pytest
import warm
from driver import REPOSITORY
from paths import FIXTURES, JOBS
from s3_samples import upload
from samples import ARCHIVES, unpack

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning"
)  # aiobotocore leaves its session to the exit
MAPS = FIXTURES / "maps" / "truths.tar.zst"


def test_ranks_are_filled_from_every_format(pytestconfig: pytest.Config) -> None:
    """Megatron, DeepSpeed ZeRO-3, a hub folder here and on S3, and Megatron under the hub's names; bit for
    bit, and a name that the checkpoint lacks ends both ranks. The saving ranks were 4, 4, 4 and 2."""
    cache = pytestconfig.rootpath / ".pytest_cache" / "samples"
    archives = {path.name.split(".")[0]: path for path in (*ARCHIVES, MAPS)}
    core, zero, maps = (unpack(cache, archives[name]) for name in ("megatron-core", "deepspeed", "truths"))
    llama, hub = core / "root_torch_dist_llama_0.19.2", FIXTURES / "torch" / "hf_sharded_4r"
    cases = [
        (llama / "iter_0000100", llama / "expected.safetensors", "stored"),
        (zero / "z3_bf16_ws4" / "ckpt", zero / "z3_bf16_ws4" / "expected.safetensors", "stored"),
        (hub / "ckpt", hub / "expected.safetensors", "stored"),
        (maps / "gpt_llama_tp2pp2_0.19.2" / "ckpt", maps / "hf_llama" / "model.safetensors", "hf-hub"),
    ]
    with fault_s3.serving() as server:
        upload(hub / "ckpt", "s3://bucket/hub")
        s3 = ("s3://bucket/hub", hub / "expected.safetensors", "stored")
        done = job([*cases, s3], server.environment)
    assert done.returncode == 0, done.stderr[-3000:]
    filled = done.stdout.splitlines()
    assert [line.split(": ")[0] for line in filled] == [str(source) for source, *_ in [*cases, s3]]


def job(
    cases: list[tuple[Path | str, Path, str]], environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    argv = [str(each) for case in cases for each in case]
    return subprocess.run(
        [*warm.python(), str(JOBS / "storage_reader_job.py"), *argv],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=dict(os.environ) | environment | {"PYTHONPATH": str(REPOSITORY)},
    )
