"""Check that the quick commands start without the heavy libraries."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch.distributed import checkpoint as dcp

from ckptcore.cli import main as cli
from ckptcore.cli.catalog import app as catalog
from ckptcore.reading.payload import late_imports

HEAVY = ("torch", "transformers", "prefect", "numpy.ma")
# What else a verb must not wait for: libraries of other verbs, and stages that it does not go through.
ELSEWHERE = ("sqlalchemy", "alembic", "fsspec", "asyncio", "argparse", "tenacity", "fastapi", "ssl")
# What typer converts the arguments of a verb with, and what that imports.
CONVERTING = ("pydantic", "importlib.metadata", "email")
WRITING = (
    "ckptcore.conversion.pipeline",
    "ckptcore.execution.execute",
    "ckptcore.conversion.staging.staging",
    "ckptcore.conversion.staging.local_staging",
)
OBJECTS = ("ckptcore.conversion.staging.remote_publication",)
# Formats that the checkpoint of these tests is not of.
READERS = (
    "ckptcore.formats.deepspeed.reader",
    "ckptcore.formats.megatron.legacy_reader",
    "ckptcore.formats.torch_ranks.reader",
)
# verb -> what it does not import
WITHOUT: dict[tuple[str, ...], tuple[str, ...]] = {
    ("--version",): (*HEAVY, *ELSEWHERE, *CONVERTING, "numpy", "rich", "ckptcore.formats"),
    ("--help",): (*HEAVY, *ELSEWHERE, *CONVERTING, "numpy", "rich", "ckptcore.formats"),
    ("export", "--help"): (*HEAVY, *ELSEWHERE, "numpy", "rich", "ckptcore.formats", "ckptcore.catalog"),
    ("formats",): (*HEAVY, *ELSEWHERE, *WRITING, *READERS, "ckptcore.catalog"),
    ("plan", "--no-catalog"): (*HEAVY, *ELSEWHERE, *READERS, "ckptcore.catalog.database"),
    ("diff",): (*HEAVY, *ELSEWHERE, *READERS, "ckptcore.catalog.database"),
    ("export",): (*HEAVY, *READERS, *OBJECTS, "fsspec", "argparse", "ckptcore.conversion.foreign_files"),
    ("catalog", "list"): (*HEAVY, "numpy", "fsspec", "argparse", "alembic", "ckptcore.formats"),
    ("inspect",): (
        *HEAVY,
        *ELSEWHERE,
        *WRITING,
        *READERS,
        "ckptcore.planning.request",
        "ckptcore.checking.check",
        "ckptcore.catalog",
    ),
    ("validate", "--no-catalog"): (
        *HEAVY,
        *ELSEWHERE,
        *WRITING,
        *READERS,
        "ckptcore.operations.registered_files",
        "ckptcore.catalog",
    ),
    ("validate",): (*HEAVY, *WRITING, "fsspec", "argparse"),
    ("consolidate",): (
        *HEAVY,
        *OBJECTS,
        "fsspec",
        "argparse",
        "ckptcore.conversion.foreign_files",
        "ckptcore.operations.automation.convert_once",
    ),
}
# verb -> how many modules it imports at most: a twentieth above what it does. Each takes half a millisecond.
MOST = {
    ("--version",): 192,
    ("--help",): 193,
    ("export", "--help"): 298,
    ("formats",): 588,
    ("inspect",): 602,
    ("validate", "--no-catalog"): 611,
    ("validate",): 847,
    ("plan", "--no-catalog"): 720,
    ("diff",): 736,
    ("consolidate",): 920,
    ("export",): 925,
    ("catalog", "list"): 575,
}


def imported(*arguments: str) -> set[str]:
    """What `python -m ckptcore ARGUMENTS` imports, as the interpreter saw it: modules, and their packages."""
    command = [sys.executable, "-X", "importtime", "-m", "ckptcore", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stderr.splitlines()
    output = [line for line in lines if not line.startswith("import time:")]
    assert done.returncode == 0, done.stdout + "\n".join(output)
    modules = {line.split("|")[-1].strip() for line in lines if line not in output}
    return modules | {module.split(".")[0] for module in modules}


def help_of(group: Any, verb: str) -> str:
    """The help of a verb of a command line."""
    with contextlib.redirect_stdout(io.StringIO()) as written:
        group(args=[verb, "--help"], prog_name="ckptcore", standalone_mode=False)
    return written.getvalue()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "step-1"
    names = [f"layers.{n}.weight" for n in range(40)]  # so many that they are read as columns
    dcp.save({name: torch.arange(6.0) for name in names}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("verb", WITHOUT, ids=" ".join)
def test_a_verb_waits_for_nothing_that_it_does_not_use(
    verb: tuple[str, ...], saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTCORE_CATALOG_URL", f"sqlite:///{tmp_path}/catalog.db")
    source, out = str(saved), str(tmp_path / "out")
    places = {
        "inspect": (source,),
        "validate": (source,),
        "plan": (source, out),
        "diff": (source, source),
        "consolidate": (source, f"{out}.pt"),
        "export": (source, out),
    }
    found = imported(*verb, *(places.get(verb[0], ()) if "--help" not in verb else ()))
    assert "ckptcore" in found
    assert sorted(found.intersection(WITHOUT[verb])) == []
    assert len(found) <= MOST[verb]


WORKERS = ("conversion.file_process", "comparison.tensor_processes", "checking.scan")


@pytest.mark.parametrize("worker", WORKERS)
def test_workers_import_nothing_that_composes_plans(worker: str) -> None:
    """A command starts several, and each takes its imports' processor time once more."""
    program = f"import sys, ckptcore.{worker}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    of_plans = {"pydantic", "ckptcore.planning.compose", "ckptcore.naming.maps.matching", "ckptcore.formats"}
    of_plans |= {"ckptcore.encodings.torchzip.reader", "ckptcore.encodings.pickle.unpickler"}
    assert of_plans.union(HEAVY).intersection(done.stdout.split()) == set()


def test_what_workers_import_starts_no_thread() -> None:
    """A fork server imports it and forks the workers; with a second thread, each imports it once more."""
    names = [*(f"ckptcore.{worker}" for worker in WORKERS), *late_imports(observed=True), "torch"]
    program = (
        f"import {', '.join(names)}; from ckptcore.utils import process_pool as p; print(p._thread_count())"
    )
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env
    )
    assert done.stdout.strip() == "1"


def test_names_of_what_is_not_imported_are_right() -> None:
    named = {name for names in WITHOUT.values() for name in names}
    assert [name for name in sorted(named) if importlib.util.find_spec(name) is None] == []


@pytest.mark.parametrize("given", [None, "3"])
def test_numpy_starts_no_threads_in_a_command(given: str | None) -> None:
    program = "from ckptcore.utils.command_process import start_quickly as s; s(); import os, sys, numpy; "
    program += "threads = len(os.listdir('/proc/self/task')) if sys.platform == 'linux' else 1; "
    program += "print(os.environ['OPENBLAS_NUM_THREADS'], threads)"
    env = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    env |= {"OPENBLAS_NUM_THREADS": given} if given else {}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env
    )
    threads, started = done.stdout.split()
    assert threads == (given or "1")
    assert started == "1" or given


def test_patterns_of_credentials_are_not_compiled_before_they_are_needed() -> None:
    program = "import ckptcore.cli.main, ckptcore.redaction as r; print(r._compiled.cache_info().currsize)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"


@pytest.mark.parametrize("verb", cli.COMMANDS)
def test_only_the_called_command_is_built(verb: str) -> None:
    alone = typer.main.get_command(cli.program(verb, "--help"))
    complete = typer.main.get_command(cli.program())
    assert list(alone.commands) == [verb]
    assert help_of(alone, verb) == help_of(complete, verb)


@pytest.mark.parametrize("name", sorted(typer.main.get_command(catalog).commands))
def test_only_the_called_command_of_the_catalog_is_built(name: str) -> None:
    alone = typer.main.get_command(cli.program("catalog", name)).commands["catalog"]
    complete = typer.main.get_command(catalog)
    assert list(alone.commands) == [name]
    assert help_of(alone, name) == help_of(complete, name)


@pytest.mark.parametrize("given", [[], ["--help"], ["--version"], ["nothing"], ["--output", "inspect"]])
def test_without_a_verb_all_of_them_are_there(given: list[str]) -> None:
    assert list(typer.main.get_command(cli.program(*given)).commands) == list(cli.COMMANDS)
