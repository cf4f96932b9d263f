"""What an environment with the wheel alone has: the core dependencies and what they need, and no extra."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from paths import ROOT

PROJECT_CODE = ("deployments", "flows", "tasks")  # an editable install finds them, a wheel does not


@cache
def brought_by(*extras: str) -> frozenset[str]:
    """The distributions that `pip install ckptcore[EXTRAS]` brings, by their normal names."""
    reached: set[str] = set()
    waiting = [("ckptcore", extra) for extra in ("", *extras)]
    visited: set[tuple[str, str]] = set()
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in visited:
            continue
        visited.add((name, extra))
        try:
            required = metadata.requires(name) or ()
        except metadata.PackageNotFoundError:
            continue  # for another platform
        reached.add(name)
        for text in required:
            one = Requirement(text)
            if one.marker is None or one.marker.evaluate({"extra": extra}):
                waiting += [(canonicalize_name(one.name), more) for more in ("", *one.extras)]
    return frozenset(reached)


def foreign_packages() -> list[str]:
    """The packages that are installed here, and would not be in an environment with the wheel alone."""
    providers: Mapping[str, list[str]] = metadata.packages_distributions()
    foreign = [
        package
        for package, names in providers.items()
        if package.isidentifier() and brought_by().isdisjoint(map(canonicalize_name, names))
    ]
    return sorted({*foreign, *PROJECT_CODE})


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout, without a network, and from a copy.

    A build writes the file of the version, which others read meanwhile: mypy, and processes that start.
    """
    copy = folder / "checkout"
    unused = shutil.ignore_patterns(".[!g]*", ".git", "__pycache__", "tests", "docs", "build", "dist")
    shutil.copytree(ROOT, copy, ignore=unused)
    repository = subprocess.run(
        ["git", "rev-parse", "--absolute-git-dir"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    if repository.returncode == 0:  # the version is that of the commit
        (copy / ".git").write_text(f"gitdir: {repository.stdout}", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        capture_output=True,
        text=True,
        cwd=copy,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def make_environment(folder: Path, wheel: Path, *extras: str) -> Path:
    """Make a virtual environment with the wheel, and with links to its dependencies; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index"]
    subprocess.run([*install, "--no-deps", "--disable-pip-version-check", str(wheel)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in brought_by(*extras) - {"ckptcore"}:
        for file in metadata.files(name) or ():
            top = file.parts[0]
            link, place = packages / top, Path(str(file.locate())).parents[len(file.parts) - 1] / top
            if top not in ("..", "__pycache__") and not link.exists():
                link.symlink_to(place.resolve())
    return python
