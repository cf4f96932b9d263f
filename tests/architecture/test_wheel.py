"""Check what the wheel holds, that its core dependencies are enough, and which version it says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import core_environment
import pytest
import torch
from paths import ROOT
from torch.distributed import checkpoint as dcp

import ckptcore
from ckptcore.catalog.database import HEAD
from ckptcore.utils import version
from ckptcore.utils.extras import PACKAGES

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BUILT = re.compile(r"\d+\.\d+\.\d+(\.dev\d+)?(\+g[0-9a-f]{7,40}(\.d\d{8})?)?")
# Run with what to hide, a checkpoint and a folder for outputs.
PROGRAM = """
import sys
hidden, source, out = sys.argv[1].split(","), sys.argv[2], sys.argv[3]
sys.modules.update(dict.fromkeys(hidden))  # as if they were not installed
import torch, ckptcore
weight = torch.zeros(2, 3)
ckptcore.load_into(ckptcore.open(source), {"layers.0.weight": weight})
assert weight.flatten().tolist() == [0, 1, 2, 3, 4, 5], weight
from ckptcore.__main__ import main
from ckptcore.catalog.migrate import upgrade
assert main(["inspect", source]) == 0
assert main(["export", source, out + "/model", "--catalog", f"sqlite:///{out}/c.db"]) == 0
assert main(["catalog", "list", "--catalog", f"sqlite:///{out}/c.db"]) == 0
upgrade(f"sqlite:///{out}/new.db")
print(*sorted(name for name in hidden if sys.modules[name] is not None))
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "step-1"
    dcp.save({"layers.0.weight": torch.arange(6.0).reshape(2, 3)}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return core_environment.build_wheel(tmp_path_factory.mktemp("dist"))


def test_the_wheel_holds_one_package_and_its_migrations(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names, built = set(archive.namelist()), archive.read("ckptcore/utils/_version.py").decode()
    revisions = {path.name for path in (ROOT / "alembic" / "versions").glob("*.py")}
    assert revisions
    assert {f"ckptcore/_migrations/versions/{name}" for name in revisions} <= names
    assert {
        "ckptcore/_migrations/env.py",
        "ckptcore/_migrations/script.py.mako",
        "ckptcore/page/templates/base.html",
        "ckptcore/page/static/page.css",
        "ckptcore/py.typed",
        "ckptcore/topology/families/hf.toml",
    } <= names
    # Anything else at the top would land beside the user's own packages.
    (metadata,) = {name.split("/")[0] for name in names} - {"ckptcore"}
    named = re.fullmatch(r"ckptcore-(.*)\.dist-info", metadata)
    assert named is not None
    assert BUILT.fullmatch(named[1])
    assert f'__version__ = "{named[1]}"' in built


def test_the_library_needs_no_extra(saved: Path, tmp_path: Path) -> None:
    # torch brings jinja2, too.
    hidden = sorted(
        {*core_environment.foreign_packages(), *(p for names in PACKAGES.values() for p in names)}
    )
    # What the extras bring, and the tools of tests; what the core brings is not hidden.
    assert {"fastapi", "jinja2", "prefect", "transformers", "uvicorn", "pytest", "flows"} <= set(hidden)
    assert {"numpy", "torch", "s3fs", "sqlalchemy", "ckptcore"}.isdisjoint(hidden)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, ",".join(hidden), str(saved), str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == ""


def test_core_dependencies_are_few_and_each_has_its_reason() -> None:
    names = [re.split(r"[<>=]", text)[0] for text in PROJECT["dependencies"]]
    assert len(names) <= 18
    design = (ROOT / "DESIGN.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([a-z0-9-]+)` \| ", design, re.MULTILINE) == names


def test_extras_are_those_that_errors_name() -> None:
    extras = PROJECT["optional-dependencies"]
    assert set(extras) - {"all", "dev", "docs", "fuzz"} == set(PACKAGES)
    (everything,) = extras["all"]
    assert set(everything.removeprefix("ckptcore[").removesuffix("]").split(",")) == set(PACKAGES)


@pytest.mark.parametrize(
    ("extra", "package", "arguments"),
    [
        ("page", "jinja2", ("catalog", "page", "--port", "0")),
        ("gs", "gcsfs", ("inspect", "gs://bucket/step-1")),
        ("az", "adlfs", ("validate", "az://bucket/step-1")),
        ("hub", "huggingface_hub", ("inspect", "hf://user/model")),
        ("sign", "model_signing", ("verify-signature", ".", "--key", "public.pem", "--signature", "a.sig")),
        ("postgres", "psycopg", ("catalog", "list", "--catalog", "postgresql+psycopg://127.0.0.1:1/c")),
    ],
)
def test_a_verb_names_the_extra_that_it_lacks(
    extra: str, package: str, arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    # The page is another process than the command: what hides a package must be inherited.
    text = f"raise ModuleNotFoundError(\"No module named '{package}'\", name='{package}')"
    (tmp_path / f"{package}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "ckptcore", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 19, done.stderr
    assert done.stderr.startswith("missing-dependency: ")
    assert f"pip install 'ckptcore[{extra}]'" in done.stderr


@pytest.mark.parametrize("module", ["flows.export", "deployments.worker"])
def test_project_code_says_in_one_line_where_it_runs(module: str, tmp_path: Path) -> None:
    program = f"import sys; sys.modules['prefect'] = None; sys.argv = ['-m']; import {module.split('.')[0]}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("flows cannot run here: prefect is not installed. They run in a checkout")
    assert str(ROOT) in line
    assert "pip install 'ckptcore[flows]'" in line


def test_another_package_called_tasks_is_not_taken_for_ours(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "flows.export", "--help"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "the package `tasks` beside it is not what Python finds first" in done.stderr


def run(*command: str | Path, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a program outside of any checkout, with nothing of this process's environment that finds one."""
    env = {"PATH": os.environ["PATH"], "HOME": str(how["cwd"])} | how.pop("env", {})
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False, **how)


@pytest.mark.soak
def test_a_plain_environment_has_what_a_training_job_needs(wheel: Path, saved: Path, tmp_path: Path) -> None:
    python = core_environment.make_environment(tmp_path / "venv", wheel)
    command, work = python.with_name("ckptcore"), tmp_path / "work"
    work.mkdir()
    found = run(python, "-c", "import ckptcore; print(ckptcore.__file__, ckptcore.__version__)", cwd=work)
    place, stated = found.stdout.split()
    assert Path(place).is_relative_to(tmp_path / "venv")
    assert wheel.name.split("-")[1] == stated
    assert run(command, "--version", cwd=work).stdout == f"ckptcore {stated}\n"

    job = [python, ROOT / "tests" / "jobs" / "plain_load_job.py", saved]
    done = run(*job, cwd=work)
    assert done.stdout.splitlines() == ["[0.0, 1.0, 2.0]", "[3.0, 4.0, 5.0]"], done.stderr

    catalog = ("--catalog", f"sqlite:///{work}/c.db")
    done = run(command, "catalog", "upgrade", *catalog, cwd=work)
    assert done.stdout == f"the catalog went from schema none to {HEAD}\n", done.stderr
    done = run(command, "export", saved, work / "model", *catalog, cwd=work)
    assert done.returncode == 0, done.stderr
    assert f"- exported by: ckptcore {stated}\n" in (work / "model" / "README.md").read_text()
    rows = run(command, "catalog", "sql", "SELECT tool_version FROM conversion", *catalog, cwd=work)
    assert stated in rows.stdout

    done = run(command, "catalog", "page", *catalog, cwd=work)
    assert (done.returncode, done.stderr.count("pip install 'ckptcore[page]'")) == (19, 1), done.stderr
    done = run(python, "-m", "flows.export", saved, work / "other", cwd=work)
    assert done.returncode == 1
    assert done.stderr.endswith("No module named 'flows')\n")
    assert done.stderr.count("\n") == 1
    done = run(python, "-m", "flows.export", saved, work / "other", cwd=ROOT)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "prefect is not installed. They run in a checkout" in done.stderr


@pytest.mark.soak
def test_flows_run_from_a_root_like_the_images(wheel: Path, saved: Path, tmp_path: Path) -> None:
    python = core_environment.make_environment(tmp_path / "venv", wheel, "flows")
    root, work = tmp_path / "root", tmp_path / "work"
    work.mkdir()
    for name in core_environment.PROJECT_CODE:
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    env = {"PYTHONPATH": str(root), "CKPTCORE_CATALOG_URL": f"sqlite:///{work}/c.db"}
    done = run(python, "-m", "flows.export", saved, work / "model", cwd=work, env=env)
    assert done.returncode == 0, done.stderr
    assert (work / "model" / "model.safetensors").is_file()
    done = run(python, "-m", "deployments.receiver", "--help", cwd=root, env=env)
    assert done.returncode == 0, done.stderr
    done = run(python, "-c", "import flows.export, ckptcore; print(ckptcore.__file__)", cwd=work, env=env)
    assert str(tmp_path / "venv") in done.stdout


def test_a_checkout_has_the_version_of_its_commit() -> None:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        assert ckptcore.__version__ == version.NEXT  # an unpacked archive
        return
    asked = ["git", "-c", "safe.directory=*", "rev-parse", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, cwd=ROOT, check=True).stdout.strip()
    assert version.checked_out(ROOT / ".git") == commit
    assert ckptcore.__version__ == f"{version.NEXT}+g{commit[:9]}"
    assert BUILT.fullmatch(ckptcore.__version__)
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'fallback-version = "{version.NEXT}"' in text


def test_the_commit_is_found_wherever_git_keeps_it(tmp_path: Path) -> None:
    def git(folder: Path, *arguments: str) -> str:
        own = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
        command = ["git", *own, "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    main, second = tmp_path / "main", tmp_path / "second"
    main.mkdir()
    git(main, "init", "-q", "-b", "trunk/one")
    assert version.checked_out(main / ".git") is None  # no commit yet
    for number in range(3):
        git(main, "commit", "-q", "--allow-empty", "-m", str(number))
    first, last = git(main, "rev-parse", "HEAD~2"), git(main, "rev-parse", "HEAD")
    assert version.checked_out(main / ".git") == last
    git(main, "worktree", "add", "-q", "-b", "other", str(second), first)
    assert version.checked_out(second / ".git") == first
    git(main, "pack-refs", "--all")
    assert version.checked_out(main / ".git") == last
    assert version.checked_out(second / ".git") == first
    git(second, "checkout", "-q", "--detach", last)
    assert version.checked_out(second / ".git") == last
    assert version.checked_out(tmp_path / ".git") is None
    (main / ".git" / "HEAD").write_text("ref: refs/heads/none")
    assert version.checked_out(main / ".git") is None
