"""Run the tests of `make quick` on other Pythons, and on the lowest versions that pyproject.toml allows.

    python run.py [--folder DIR] [--keep] [--list FILE] lowest | PYTHON ...

Each argument is one environment: ``lowest`` is this Python with every direct dependency at its lower bound,
anything else an interpreter, with the versions of constraints.txt. `debian_python.py` makes interpreters that
the machine does not have. An environment takes up to 8 GB of downloads: PyPI's torch brings CUDA's libraries.
It is removed afterwards. One line for each environment; exit status 1 where tests failed.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOWEST = "lowest"
_EXTRAS = ("flows", "hf", "dev", "docs")
_BOUNDED = ("flows", "page", "hf")  # extras whose lower bounds are pinned, too
_REPORTED = ("torch", "numpy", "prefect", "sqlalchemy", "pydantic", "fsspec", "safetensors")
_BOUND = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)(?:\[[^]]*\])?[^;]*?>=\s*(?P<bound>[0-9][0-9A-Za-z.]*)")


def lower_bounds(project: str) -> list[str]:
    """Return a pin for each lower bound of the dependencies and of the extras `_BOUNDED`.

    >>> lower_bounds('[project]\\ndependencies = ["numpy>=1.26", "fastapi<0.151", "sqlalchemy>=2.0.36,<2.1"]')
    ['numpy==1.26', 'sqlalchemy==2.0.36']
    """
    tables = tomllib.loads(project)["project"]
    extras = tables.get("optional-dependencies", {})
    wanted = [*tables["dependencies"], *(text for name in _BOUNDED for text in extras.get(name, ()))]
    found = [match for text in wanted if (match := _BOUND.match(text))]
    return [f"{match['name']}=={match['bound']}" for match in found]


def prepare(name: str, folder: Path) -> Path:
    """Make an environment; return its interpreter."""
    base, python = sys.executable if name == LOWEST else name, folder / "venv" / "bin" / "python"
    tools = folder / "tools"
    call(sys.executable, "-m", "pip", "install", "--quiet", "--target", tools, "uv")
    uv = tools / "bin" / "uv"
    call(uv, "venv", "--quiet", "--python", base, folder / "venv")
    if name == LOWEST:
        pins = folder / "lowest.txt"
        pins.write_text("\n".join([*lower_bounds((ROOT / "pyproject.toml").read_text()), ""]))
    else:
        pins = ROOT / "constraints.txt"
    wanted = ("--constraints", pins, "--editable", f"{ROOT}[{','.join(_EXTRAS)}]")
    call(uv, "pip", "install", "--cache-dir", folder / "cache", "--python", python, *wanted)
    return python


def versions(python: Path) -> str:
    """Return the versions of the interpreter and of the packages that matter most."""
    code = f"""
import importlib.metadata as m, json, platform
print(json.dumps([platform.python_version(), *(f"{{p}} {{m.version(p)}}" for p in {_REPORTED!r})]))
"""
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return ", ".join(json.loads(done.stdout))


def run_tests(python: Path, listed: Path, jobs: int, *, old: bool) -> tuple[int, str]:
    """Run a list of tests; return the exit status and pytest's last line.

    old: Packages are old ones, whose warnings are not errors: nobody mends them.
    """
    wanted = ["-m", "pytest", "-n", str(jobs), "-q", "-k", "not postgresql", "-p", "no:cacheprovider"]
    wanted += ["-W", "ignore"] if old else []
    with subprocess.Popen(
        [python, *wanted, f"@{listed}"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as tests:
        last = ""
        for line in tests.stdout or ():
            print(line, end="", flush=True)
            last = line.strip() or last
    return tests.returncode, last.strip("= ")


def call(*command: str | Path) -> None:
    subprocess.run(list(command), check=True, cwd=ROOT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environments", nargs="+", metavar="lowest|PYTHON")
    parser.add_argument("--folder", type=Path, help="where environments are made (default: a temporary one)")
    parser.add_argument("--keep", action="store_true", help="keep environments, and use those that are there")
    parser.add_argument("--list", type=Path, default=ROOT / "tests" / "quick.txt", dest="listed")
    parser.add_argument("--jobs", type=int, default=3)
    given = parser.parse_args()
    top = given.folder or Path(tempfile.mkdtemp(prefix="ckptcore-versions-"))
    lines, failed = [], 0
    for name in given.environments:
        folder = top / re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            python = folder / "venv" / "bin" / "python"
            if not python.exists():
                python = prepare(name, folder)
            status, last = run_tests(python, given.listed, given.jobs, old=name == LOWEST)
            lines.append(f"{name}: {versions(python)}: {last}")
            failed += status != 0
        finally:
            if not given.keep:
                shutil.rmtree(folder)
    if given.folder is None and not given.keep:
        shutil.rmtree(top)
    print(*lines, sep="\n", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
