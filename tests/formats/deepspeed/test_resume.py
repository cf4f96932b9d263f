"""Torch resumes under FSDP2 from a resharded ZeRO save: the oracle is a real job (zero_resume_job.py)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import samples
import warm
from driver import Cli
from paths import JOBS

ARCHIVE = samples.FIXTURES / "deepspeed.tar.zst"


@pytest.fixture(scope="module")
def corpus(request: pytest.FixtureRequest) -> Path:
    return samples.unpack(request.config.rootpath / ".pytest_cache" / "samples", ARCHIVE)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("z3_bf16_ws4", 2),
        *(
            pytest.param(name, ranks, marks=pytest.mark.soak)
            for name, ranks in (("z3_bf16_ws4", 3), ("z3_fp32_ws2", 4), ("z2_bf16_ws4", 2))
        ),
    ],
)
def test_fsdp2_resumes_with_the_masters_and_moments(
    corpus: Path, tmp_path: Path, cli: Cli, name: str, ranks: int
) -> None:
    cut = cli("reshard", corpus / name / "ckpt", tmp_path / "dcp", "--mesh", f"fsdp={ranks}")
    assert cut.code == 0, cut.stderr
    spec = {
        "ranks": ranks,
        "ckpt": str(tmp_path / "dcp"),
        "weights": str(corpus / name / "expected.safetensors"),
        "moments": str(corpus / name / "expected_optim.safetensors"),
        "step": 3,
        "lr": 0.01,
        "steps": 3,
        "out": str(tmp_path / "results.json"),
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    done = subprocess.run(
        [*warm.python(), str(JOBS / "zero_resume_job.py"), str(tmp_path / "spec.json")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "results.json").read_text())
    assert not any(r["wrong"] for r in results["ranks"]), results["ranks"]
    assert len(results["reference"]) == spec["steps"]
    for each in results["ranks"]:
        losses = [float.fromhex(x) for x in each["losses"]]
        wanted = [float.fromhex(x) for x in results["reference"]]
        # Halves add up exactly; a mean over three ranks is rounded.
        assert losses == (wanted if ranks != 3 else pytest.approx(wanted, rel=1e-5))
