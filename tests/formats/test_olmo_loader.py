"""OLMo-core 0.1's own loader on what is written here, at other world sizes than saved it.

Needs ai2-olmo-core==0.1.0 in an environment of its own: `CKPTCORE_OLMO_CORE_PYTHON` names its
interpreter. Without it these tests are skipped.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from olmo_samples import sample

import ckptcore

PYTHON = os.environ.get("CKPTCORE_OLMO_CORE_PYTHON", sys.executable)
JOB = Path(__file__).with_name("olmo_loader_job.py")
PROBE = "import importlib.metadata as m; raise SystemExit(m.version('ai2-olmo-core') != '0.1.0')"


@pytest.fixture(scope="module")
def loader() -> str:
    if subprocess.run([PYTHON, "-c", PROBE], capture_output=True, check=False).returncode:
        pytest.skip(
            f"no ai2-olmo-core 0.1.0 in {PYTHON}; CKPTCORE_OLMO_CORE_PYTHON can name another interpreter"
        )
    return PYTHON


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    "name", ["v01_fsdp1_fp32_ws2", "v3_bf16params_ws2", "olmo1_local_ws2", "olmo1_unsharded_safetensors"]
)
def test_restored_by_its_own_loader(
    name: str, ranks: int, loader: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A model and its optimizer under FSDP are restored bit for bit from every generation."""
    root = sample(request, name)
    step = next(p for p in root.iterdir() if p.name.startswith("step"))
    ckptcore.convert(str(step), str(tmp_path / "out"), to="olmo_v01", max_file_size=100_000)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks),
              "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}  # fmt: skip
    jobs = [
        subprocess.Popen(
            [loader, str(JOB), str(tmp_path / "out"), str(root)],
            env=dict(os.environ) | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    told = [job.communicate(timeout=240)[0] for job in jobs]
    assert all(job.returncode == 0 for job in jobs), "\n".join(told)[-3000:]
    equal = sum(int(line.split()[1]) for text in told for line in text.splitlines() if "equal:" in line)
    assert equal >= 60
