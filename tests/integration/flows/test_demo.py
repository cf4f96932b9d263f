"""The demo: from nothing to a model whose logits are equal, twice in the same folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT


@pytest.mark.soak
def test_the_demo_runs_twice_and_converts_a_given_checkpoint(tmp_path: Path) -> None:
    quiet = {
        name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "CKPTCORE_"))
    }

    def demo(*options: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "flows.demo", *options],
            cwd=tmp_path,
            env=quiet | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout

    for _ in range(2):
        assert "equal, bit for bit" in demo()
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]

    trained = tmp_path / "demo" / "tiny-llama"
    demo(
        "--src", str(trained / "step-12"), "--dst", str(tmp_path / "own"), "--config", str(trained / "config")
    )
    made = tmp_path / "demo" / "tiny-llama-hf"
    assert (tmp_path / "own" / "model.safetensors").read_bytes() == (made / "model.safetensors").read_bytes()
