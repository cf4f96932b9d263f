"""Command: from a terminal, in processes of their own. Quiet, honest exit codes, nothing left."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import observe
import pytest
import typer.main
from observe import ONE_FILE_EACH, TENSORS
from paths import ROOT
from prefect import Flow
from prefect.utilities.callables import parameter_schema

from ckptcore.catalog import open_catalog
from ckptcore.cli.main import program
from ckptcore.conversion.pipeline import convert
from ckptcore.errors import Interrupted, SourceUnreadable, UsageError
from ckptcore.planning.request import Request
from ckptcore.utils.units import parse_size
from flows._command import parse
from flows._options import option_of

OPTIONS = [f"--{name.replace('_', '-')}={value}" for name, value in ONE_FILE_EACH.items()]
pytestmark = pytest.mark.xdist_group("prefect")

# The flow in a process that is killed when two batches are written and the third is about to be.
KILLED = """
import os, signal, sys
from tasks import write
real, calls = write.execute, []
def execute(*arguments, **more):
    calls.append(1)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments, **more)
write.execute = execute
from flows._command import main
from flows.convert import convert
main(convert, sys.argv[1:])
"""

# The flow with a write that takes an hour, and Ctrl-C in its first second.
INTERRUPTED = """
import os, signal, sys, threading, time
from tasks import write
def execute(plan_uri, indices, settings, progress, **more):
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
    for done in range(36_000):
        progress("write", done, 36_000)
        time.sleep(0.1)
write.execute = execute
from flows._command import main
from flows.convert import convert
main(convert, sys.argv[1:])
"""


def run(what: str, *arguments: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a module, or a program text, in a process of its own."""
    kind = "-m" if what.startswith("flows.") else "-c"
    return subprocess.run(
        [sys.executable, kind, what, *arguments],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )


def alive(word: str, marker: str) -> list[bytes]:
    """Command lines with `word` of live processes with `marker` in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line, env = ((folder / name).read_bytes() for name in ("cmdline", "environ"))
        except OSError:  # it has ended, or belongs to another user
            continue
        if word.encode() in line and marker.encode() in env:
            found.append(line)
    return found


@pytest.mark.soak  # test_resume_deployment kills a run of a deployment
def test_killed_between_files_and_restarted(
    prefect_api: str, source: Path, tmp_path: Path, catalog: str
) -> None:
    target, options = tmp_path / "out", [*OPTIONS, "--catalog", catalog, "--workers", "1"]
    env = os.environ | {"PREFECT_API_URL": prefect_api}
    killed = run(KILLED, str(source), str(target), *options, env=env)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not target.exists()
    staged = {path.name: path.stat() for path in (tmp_path / ".out.ckptcore" / "files").glob("*.safetensors")}
    assert len(staged) == 2

    done = run("flows.convert", str(source), str(target), *options, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("1 of 1 files kept from an earlier run") == 2
    for name, before in staged.items():
        after = (target / name).stat()
        assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns), name
    assert observe.equal(observe.tensors(target), TENSORS)

    undisturbed = tmp_path / "again"
    request = Request(str(source), str(undisturbed), max_file_size=parse_size(ONE_FILE_EACH["max_file_size"]))
    convert(request, catalog_url=False)
    assert observe.contents(target) == observe.contents(undisturbed)


@pytest.mark.soak
def test_a_reshard_killed_between_files_writes_the_missing_ones(
    prefect_api: str, source: Path, tmp_path: Path, catalog: str
) -> None:
    target, mesh = tmp_path / "out", "fsdp=4"
    options = ["--mesh", mesh, "--batch", "1KiB", "--catalog", catalog, "--workers", "1"]
    env = os.environ | {"PREFECT_API_URL": prefect_api}
    program = KILLED.replace("flows.convert import convert", "flows.reshard import reshard as convert")
    killed = run(program, str(source), str(target), *options, env=env)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not target.exists()
    staged = {path.name: path.stat() for path in (tmp_path / ".out.ckptcore" / "files").glob("*.distcp")}
    assert len(staged) == 2

    done = run("flows.reshard", str(source), str(target), *options, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("1 of 1 files kept from an earlier run") == 2
    for name, before in staged.items():
        after = (target / name).stat()
        assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns), name

    undisturbed = tmp_path / "again"
    convert(Request(str(source), str(undisturbed), verb="reshard", mesh=mesh), catalog_url=False)
    assert observe.contents(target) == observe.contents(undisturbed)


def test_ctrl_c_ends_the_running_batches_too(
    prefect_api: str, source: Path, tmp_path: Path, catalog: str
) -> None:
    env = os.environ | {"PREFECT_API_URL": prefect_api}
    done = run(INTERRUPTED, str(source), str(tmp_path / "out"), "--catalog", catalog, env=env)
    assert done.returncode == Interrupted.exit_code, done.stderr
    assert done.stderr.splitlines()[-1] == f"stopped; {Interrupted.default_hint}"
    assert "Traceback" not in done.stderr
    (failed,) = open_catalog(catalog).conversions()
    assert (failed.state, failed.error_code) == ("failed", Interrupted.code)


def test_without_setup_a_failure_is_short_and_non_zero(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")} | {
        "HOME": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "CKPTCORE_CATALOG_URL": f"sqlite:///{tmp_path / 'catalog.sqlite'}",
        "PREFECT_API_URL": "",
    }
    done = run("flows.convert", str(tmp_path / "nowhere"), str(tmp_path / "out"), env=env)
    assert done.returncode == SourceUnreadable.exit_code, done.stderr
    assert "source-unreadable" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) < 15, done.stderr
    database = tmp_path / "state" / "ckptcore" / "prefect" / "prefect.db"
    with closing(sqlite3.connect(database)) as recorded:  # though the server ended with the run
        assert recorded.execute("SELECT state_type FROM flow_run").fetchall() == [("FAILED",)]
    assert not (tmp_path / ".prefect").exists()
    assert alive("uvicorn", str(tmp_path)) == []


@pytest.mark.soak
def test_wrong_arguments_leave_no_server_behind(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    done = run("flows.convert", "a", "b", "--batch", "much", env=env | {"XDG_STATE_HOME": str(tmp_path)})
    assert done.returncode == UsageError.exit_code, done.stderr
    assert "Traceback" not in done.stderr
    assert alive("uvicorn", str(tmp_path)) == []


@pytest.mark.soak  # `test_without_setup_a_failure_is_short_and_non_zero` sees one end with its run
def test_the_server_does_not_outlive_a_killed_process(tmp_path: Path) -> None:
    dies = (
        "import os, signal; from flows._prefect import serve_while_alive; serve_while_alive();"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    home = str(tmp_path / "prefect")
    # stderr is shared with the server: `run` returns only when that has ended too.
    killed = run(dies, env=os.environ | {"PREFECT_HOME": home, "PREFECT_API_URL": ""})
    assert killed.returncode == -signal.SIGKILL
    assert observe.eventually(lambda: alive("uvicorn", home) == [])


def test_a_module_is_a_command_with_help() -> None:
    done = run("flows.export", "--help", env=os.environ | {"COLUMNS": "200"})
    assert done.returncode == 0
    assert "Usage: python -m flows.export" in done.stdout
    assert "it is copied, and names and shapes are compared with it" in " ".join(done.stdout.split())


def flow_of(name: str) -> Flow[..., Any]:
    found: Flow[..., Any] = getattr(importlib.import_module(f"flows.{name}"), name)
    return found


@pytest.mark.parametrize("name", ["convert", "consolidate", "export", "reshard"])
def test_the_signature_is_the_command_line(name: str) -> None:
    flow = flow_of(name)
    given = parse(flow, ["a", "b"])
    assert given == {
        name: {"source": "a", "destination": "b"}.get(name, parameter.default)
        for name, parameter in inspect.signature(flow.fn).parameters.items()
    }


# What a flow has in other forms: its own parameters, retries, claims.
OF_COMMANDS = ("places", "src", "dst", "wait", "if_exists", "output")


@pytest.mark.parametrize("verb", ["consolidate", "export", "reshard"])
def test_a_flow_has_the_options_of_its_command(verb: str) -> None:
    command = typer.main.get_command(program()).commands[verb]  # type: ignore[attr-defined]
    known = {p.name: p for p in command.params if p.name not in OF_COMMANDS}
    flow = inspect.signature(flow_of(verb).fn).parameters
    alone = {"batch", "engine", *(("verify_export", "push") if verb == "export" else ())}
    assert set(known) | alone == set(flow) - {"source", "destination", "also"}
    for name, option in known.items():
        assert option.default == flow[name].default, name
        assert option.help == option_of(flow[name]).help, name


def test_command_line_values_reach_the_flow(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nfqn = "*"\n')
    line = ["a", "--also", '{"destination": "c", "mesh": "fsdp=2"}', "--include", "x", "--include", "y"]
    more = ["--sharding", str(rules), "--no-digest", "--fingerprint", "--workers", "3", "--tie", "a=b"]
    given = parse(flow_of("reshard"), [*line, *more])
    assert [target.destination for target in given["also"]] == ["c"]
    assert (list(given["include"]), list(given["tie"])) == (["x", "y"], ["a=b"])
    assert given["sharding"] == rules.read_text()
    assert (given["digest"], given["fingerprint"], given["workers"]) == (False, True, 3)
    assert (
        parse(flow_of("reshard"), ["a", "b", "--sharding", rules.read_text()])["sharding"]
        == rules.read_text()
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["only-a-source"],
        ["a", "b", "--no-such-option"],
        ["a", "b", "--verb", "x"],
        ["a", "b", "--workers", "0"],
        ["a", "b", "--device", "tpu"],
    ],
)
def test_a_wrong_command_line_is_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(flow_of("convert"), arguments)
    assert stopped.value.code == UsageError.exit_code
    assert "see `python -m flows.convert --help`" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["convert", "consolidate", "export", "reshard", "arrived", "sweep", "scrub", "retire", "resume"]
)
def test_a_form_describes_every_parameter(name: str) -> None:
    schema = parameter_schema(flow_of(name)).model_dump()
    assert {n for n, of_one in schema["properties"].items() if not of_one.get("description")} == set()


def test_a_form_shows_choices_and_limits() -> None:
    properties = parameter_schema(flow_of("convert")).model_dump()["properties"]
    assert properties["verb"]["enum"] == ["consolidate", "export"]
    assert {"minimum": 1, "type": "integer"} in properties["workers"]["anyOf"]
    assert re.fullmatch(properties["device"]["pattern"], "cuda:1")
    assert parameter_schema(flow_of("reshard")).model_dump()["properties"]["serialization"]["enum"]


def test_an_empty_text_is_no_wish_for_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    from flows.convert import convert as flow

    for option in ("--to", "--catalog", "--config"):
        with pytest.raises(SystemExit) as ended:
            parse(flow, ["a", "b", option, ""])
        assert ended.value.code == 2
        assert f"Invalid value for '{option}': must not be empty" in capsys.readouterr().err
