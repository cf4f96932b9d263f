"""Check that folders hold what their names promise, and nothing that shadows another module."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from pathspec import PathSpec

ROOT = Path(__file__).parents[2]
TOP = ("ckptcore", "tasks", "flows", "deployments")


@pytest.mark.soak  # `make test` begins with `make check`, which asks the same
def test_layers_are_kept() -> None:
    # In a process of its own: the linter configures logging, which disables every logger there is.
    lint = "from importlinter import cli; raise SystemExit(cli.lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", lint], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout


def test_alembic_folder_does_not_shadow_the_library() -> None:
    assert (ROOT / "alembic" / "env.py").is_file()
    assert not (ROOT / "alembic" / "__init__.py").exists()
    done = subprocess.run(
        [sys.executable, "-c", "import alembic; print(alembic.__file__)"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert Path(done.stdout.strip()).is_relative_to(sysconfig.get_path("purelib"))


def test_tests_hold_no_packages() -> None:
    # With an __init__.py beside the tests of flows, `import flows` inside a test would find the tests.
    assert list((ROOT / "tests").rglob("__init__.py")) == []


@pytest.mark.parametrize("folder", ["flows", "tasks"])
def test_file_names_shadow_no_module(folder: str) -> None:
    # Prefect puts the flow file's own folder first on sys.path: flows/tasks.py would answer
    # for `tasks`, flows/torch.py for torch.
    names = [path.stem for path in (ROOT / folder).glob("*.py") if path.stem != "__init__"]
    assert names
    # A folder without code (demo/, where `make demo` works) has a spec, but no origin.
    specs = {name: importlib.util.find_spec(name) for name in names}
    assert [name for name, spec in specs.items() if spec is not None and spec.origin is not None] == []


def test_python_files_are_small() -> None:
    # One concept a file: it was 600 lines, which made a hundred modules with one importer each.
    texts = [*sources(), *((path, path.read_text()) for path in sorted((ROOT / "tests").rglob("*.py")))]
    sizes = {str(path.relative_to(ROOT)): text.count("\n") for path, text in texts}
    assert {path: lines for path, lines in sizes.items() if lines > 900} == {}


def test_small_modules_say_why_they_are_apart() -> None:
    # In flows/ and tasks/ a file is a flow, a verb or a means of theirs; __main__ is where a program begins.
    small = [
        str(path.relative_to(ROOT))
        for path, text in sources()
        if text.count("\n") < 40 and path.stem not in ("__init__", "__main__")
        if path.parent.name not in ("flows", "tasks") and "of its own" not in text
    ]
    assert small == []


def test_a_class_name_means_one_thing() -> None:
    # Decision 83. Rows of the catalog are called like their tables; a Target is in stored schemas twice.
    found: dict[str, list[str]] = {}
    for path, text in sources():
        if path.parent.name == "versions" or path.name == "models.py":
            continue
        for name in re.findall(r"^class ([A-Za-z]\w*)", text, re.MULTILINE):
            found.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1 and name != "Target"} == {}


def test_modules_say_what_they_are_for() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path, text in sources()
        if not text.startswith('"""') and ast.get_docstring(ast.parse(text)) is None
    ]
    assert silent == []


def test_secrets_get_neither_into_the_image_nor_into_git() -> None:
    secret = (
        "deployments/compose.env",
        "deployments/kubernetes/server.env",
        "deployments/.env",
        "deployments/exports/model.safetensors",
        "deployments/checkpoints/step-1/a.distcp",
    )
    # The Dockerfile copies whole folders; what this file names is not there for it.
    kept_out = PathSpec.from_lines("gitignore", (ROOT / ".dockerignore").read_text("utf-8").splitlines())
    assert tuple(kept_out.match_files(secret)) == secret
    needed = ("deployments/compose.env.example", "tasks/read.py", "alembic/env.py")
    assert list(kept_out.match_files(needed)) == []
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return  # an unpacked archive
    ignored = subprocess.run(
        ["git", "check-ignore", *secret], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert tuple(ignored.stdout.split()) == secret


def sources() -> list[tuple[Path, str]]:
    """Path and text of every Python file that is not empty, of the three packages."""
    found = [(path, path.read_text(encoding="utf-8")) for top in TOP for path in (ROOT / top).rglob("*.py")]
    assert found
    return [(path, text) for path, text in found if text.strip()]


def test_constraints_pin_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        wanted += [requirement for requirement in extra if plain(requirement) != "ckptcore"]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all("==" in pin and "@" not in pin and "+" not in pin for pin in pins)
    pinned = {plain(pin) for pin in pins}
    assert {plain(requirement) for requirement in wanted} <= pinned


def plain(requirement: str) -> str:
    """The distribution's normal name: of ``"moto[server]>=5"`` it is ``"moto"``."""
    name = requirement
    for mark in "[<>=!~;":
        name = name.split(mark)[0]
    return name.strip().lower().replace("_", "-").replace(".", "-")
