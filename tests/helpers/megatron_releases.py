"""Releases of megatron-core, each in a folder of its own, for jobs that load what was written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RELEASES = ["0.11.0", "0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2"]


def release_folder(release: str, factory: pytest.TempPathFactory) -> Path:
    """Return a release's folder: $CKPTCORE_MCORE/RELEASE, or installed by pip; skip where it is not had."""
    ready = Path(os.environ.get("CKPTCORE_MCORE", "/nonexistent")) / release
    if ready.is_dir():
        return ready
    folder = factory.mktemp("release") / release
    line = ["-m", "pip", "install", "--quiet", "--no-deps", "--ignore-requires-python", "--target"]
    done = subprocess.run(
        [sys.executable, *line, str(folder), f"megatron-core=={release}"], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"megatron-core {release} cannot be installed here")
    return folder
