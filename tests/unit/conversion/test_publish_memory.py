"""Test what a conversion takes: finishing keeps a few plans, and no process takes more than `plan` said."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
import warm
from safetensors.torch import save_file

import ckptcore
from ckptcore.conversion import publish as finishing
from ckptcore.planning.file_plan import FilePlan
from ckptcore.planning.plan import load_file_plan


@pytest.mark.parametrize("fingerprint", [True, False])
def test_plans_are_not_in_memory_all_at_once(fingerprint: bool, tmp_path: Path) -> None:
    source = tmp_path / "source.safetensors"
    save_file({f"layers.{n}.weight": torch.randn(24, 4) for n in range(10)}, source)
    seen: list[weakref.ref[Any]] = []
    alive = []

    def load(*given: Any) -> FilePlan:
        plan = load_file_plan(*given)
        seen.extend(
            map(weakref.ref, (plan, plan.columns.offset))
        )  # an array over its bytes keeps all of them
        alive.append(sum(ref() is not None for ref in seen))
        return plan

    with mock.patch.object(finishing, "load_file_plan", load):
        ckptcore.convert(
            str(source),
            str(tmp_path / "out"),
            verb="reshard",
            mesh="fsdp=8",
            to="dcp",
            settings=ckptcore.Settings(fingerprint=fingerprint),
        )
    assert len(alive) >= 8
    assert max(alive) <= 6  # of the one that is loaded, and of those that loops still have hold of


# The high-water mark of the process's own memory; `getrusage` counts what its parent had before it.
MEASURED = """
import sys
from ckptcore.cli.main import program
program()(sys.argv[1:], standalone_mode=False)
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
"""


@pytest.mark.alike(1)
@pytest.mark.parametrize(
    ("stored", "options", "torch_needed"),
    [
        (torch.randn(1024, 4096), [], False),
        (torch.randn(1024, 4096), ["--dtype", "fp16"], True),
        pytest.param(torch.randn(1024, 2048, dtype=torch.complex64).conj(), [], True, marks=pytest.mark.soak),
    ],
    ids=["rows", "cast by torch", "conjugate bits"],
)
def test_no_process_takes_more_than_its_plan_says(
    stored: torch.Tensor, options: list[str], torch_needed: bool, tmp_path: Path
) -> None:
    dcp.save({"w": stored}, checkpoint_id=tmp_path / "ckpt")
    way = [str(tmp_path / "ckpt"), str(tmp_path / "out.safetensors"), *options]
    way += ["--memory", "1MiB", "--workers", "2", "--output", "json"]

    def run(*command: str) -> list[str]:
        done = subprocess.run([*command, *way], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    most = json.loads(run(*warm.command(), "plan")[0])["peak_memory"]
    catalog = f"sqlite:///{tmp_path / 'catalog.db'}"
    measured = run(sys.executable, "-P", "-c", MEASURED, "consolidate", "--catalog", catalog)
    taken = int(measured[-1]) << 10
    assert taken <= most
    assert not torch_needed or most < 1.3 * taken  # the figure is not merely large
