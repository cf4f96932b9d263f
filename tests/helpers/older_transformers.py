"""Another interpreter, with transformers 4.57, that makes and opens folders."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from paths import HELPERS, JOBS

VARIABLE = "CKPTCORE_TRANSFORMERS4_PYTHON"


class Older:
    """A process that runs `transformers_job` under another interpreter."""

    def __init__(self, python: str) -> None:
        paths = f"{HELPERS}{os.pathsep}{JOBS}"
        self.process = subprocess.Popen(
            [python, str(JOBS / "transformers_job.py")],
            env=os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, **asked: object) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return str(json.loads(self.process.stdout.readline()))

    def compare(self, right: Path, made: Path, base: Path | None) -> str:
        return self.ask(compare=[str(right), str(made)], base=None if base is None else str(base))
