"""The commands that `make up` and the README print work as printed."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from local_system import state
from paths import ROOT

from ckptcore.utils import terminal
from deployments import with_project
from deployments.local import system

FOLDER = ROOT / "deployments"


def program(tmp_path: Path) -> str:
    """Return the program of the catalog query that `make up` prints."""
    (line,) = re.findall(
        r"^  (\S+ catalog sql .*)$", system.filled("next_steps.txt", state(tmp_path)), re.MULTILINE
    )
    return shlex.split(line)[0]


def test_make_up_prints_a_command_that_a_shell_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Path(sys.executable).with_name("ckptcore")
    if not ours.exists():
        pytest.skip("ckptcore is not installed here")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # the environment of Python is not active
    for place in (ROOT, tmp_path):
        monkeypatch.chdir(place)
        assert os.access(program(tmp_path), os.X_OK)
    monkeypatch.setenv("PATH", f"{ours.parent}:/usr/bin:/bin")
    assert program(tmp_path) == "ckptcore"


def test_make_up_prints_the_full_announcement(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What the terminal prints has no secrets; the name of a variable is none."""
    terminal.block(system.filled("next_steps.txt", state(tmp_path)), indent="")
    assert '-H "Authorization: Bearer $CKPTCORE_HOOK_TOKEN" -H' in capfd.readouterr().out


def test_processes_find_the_project_wherever_they_start() -> None:
    env = with_project({"PATH": "/bin"})
    assert env == {"PATH": "/bin", "PYTHONPATH": str(ROOT)}
    assert with_project(env) == env
    assert with_project({"PYTHONPATH": "/own:"})["PYTHONPATH"] == f"{ROOT}:/own"
    assert system.machine_env()["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)


def test_the_readme_creates_what_the_units_need() -> None:
    readme = (FOLDER / "README.md").read_text()
    (steps,) = re.findall(r"```sh\n(useradd --system .*?)```", readme, re.DOTALL)
    units = {unit.name: unit.read_text() for unit in (FOLDER / "systemd").glob("*.service")}
    for name, text in units.items():
        (user,) = re.findall(r"^User=(\w+)$", text, re.MULTILINE)
        assert f"nologin {user}\n" in steps
        assert name.removesuffix(".service") in steps
        for named in re.findall(r"/etc/ckptcore/(\w+\.\w+)", text):
            assert named in steps, (name, named)
        for place in re.findall(r"^ReadWritePaths=-(\S+)$", text, re.MULTILINE):
            assert f"install -d -o {user} -g {user} {place} " in steps
        (home,) = set(re.findall(r"^ExecStart=(/opt/\w+)/bin/", text, re.MULTILINE))
        assert f"python3 -m venv {home}\n" in steps
