"""The first hour at both ends, in a home of its own: only commands that the documentation has, in its order.

A newcomer has a run under FSDP2 and wants a model; an operator wants conversions to run by themselves. Each
has one home, in which the default catalog fills, and no variable of ours but those that a page sets. Between
the pages come the mistakes that people make, with the answer that sends them the right way.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from doc_pages import DOCS, run
from stack import FREE_PORTS, ROOT, eventually

pytestmark = pytest.mark.soak
NEWCOMER = (
    "how-to/install",
    "tutorial",
    "how-to/fsdp2",
    "how-to/resume",
    "how-to/reshard",
    "how-to/engines",
    "troubleshooting",
)
OPERATOR = ("how-to/operate", "how-to/webhooks", "how-to/catalog-page")
STEP = "runs/tiny/step-10"
# Command -> exit code, and what the answer has; in the folder of the tutorial, in this order.
MISTAKES = (
    (f"export {STEP}", 2, "Missing argument 'DST'"),
    (f"export {STEP}/__0_0.distcp x", 4, f"name the folder: {STEP}"),
    (f"export {STEP} s3://nobucket/z --config config", 9, "cannot reach the destination s3://nobucket/z"),
    ("export runs/tiny/stpe-10 x", 8, f"did you mean {STEP}"),
    (f"export {STEP} x --dtyp bf16", 2, "--dtype"),
    (f"export {STEP} x --dtype bf17", 14, "did you mean bf16?"),
    (f"export {STEP} models/tiny --config config --dtype bf16", 7, "models/tiny exists"),
    (
        f"export {STEP} models/tiny --config config --dtype bf16 --if-exists skip",
        0,
        "already holds the result",
    ),
    ("catalog sql 'SELECT * FROM exports'", 2, "latest_exports"),
    (f"catalog meta {STEP} metrics.loss=abc", 2, "metrics.loss must be a number (got 'abc')"),
    (f"catalog meta {STEP} loss=2.3", 0, "a metric is metrics.loss=VALUE"),
    (f"catalog alias set tiny/prod {STEP}", 23, "is a source"),
    ("catalog alias set tiny/prod models/tiny", 0, "tiny/prod"),
    ("inspect tiny/prod", 0, "tiny/prod is "),
    ("catalog resolve tiny/prod", 0, "models/tiny"),
    (f"diff {STEP} models/tiny", 1, "equal after the cast to bfloat16"),
    (f"reshard {STEP} three --mesh tp=3 --config config", 2, "cannot run 4 attention heads with tp=3"),
    (f"reshard {STEP} three --mesh tp=3", 0, "uneven-mesh"),
    ("sweep", 0, "root add"),
    ("catalog root add tiny runs/tiny --verb export --config nosuch", 2, "nosuch"),
    ("catalog root add tiny runs/tiny --dtype bf17", 14, "did you mean bf16?"),
    ('catalog root add tiny runs/tiny --target \'{"max_file_size": "16KiB"}\'', 0, "tiny"),
    ("catalog root show tiny", 0, "max_file_size"),
    ("catalog root set tiny --dtype bf16", 0, "tiny"),
    ("catalog root add tiny runs/tiny", 2, "ckptcore catalog root set tiny"),
    ("catalog root add other runs/tiny --verb exprt", 2, "did you mean export?"),
    (f"plan {STEP} x --to safetnsors", 2, "did you mean safetensors?"),
    ("mount models/tiny", 2, "Missing argument 'DIR'"),
    ("retire tinny", 2, "did you mean tiny?"),
    ("catalog hold release nobody", 2, "hold list"),
)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


def environment(home: Path) -> dict[str, str]:
    """Return what a fresh shell has, and nothing of this session's."""
    return {
        "HOME": str(home),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "LANG": os.environ.get("LANG", "C.UTF-8"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
        "PYTHONPATH": str(ROOT),  # the checkout, in whose root worker and receiver run
    }


def hour(pages: tuple[str, ...], home: Path, request: pytest.FixtureRequest) -> None:
    for name in pages:
        folder = home / Path(name).name
        folder.mkdir()
        run(DOCS / f"{name}.md", folder, environment(home), request.config.rootpath / ".pytest_cache/samples")


def test_a_newcomer_s_first_half_hour(home: Path, request: pytest.FixtureRequest) -> None:
    hour(NEWCOMER, home, request)
    place = home / "tutorial"
    env = environment(home) | {"CKPTCORE_CATALOG_URL": f"sqlite:///{place}/catalog.sqlite"}
    for command, code, answer in MISTAKES:
        done = subprocess.run(
            f"ckptcore {command}", shell=True, cwd=place, env=env, capture_output=True, text=True
        )
        assert (done.returncode, answer in done.stdout + done.stderr) == (code, True), (
            command,
            done.stdout,
            done.stderr,
        )
    failures = subprocess.run(
        ["ckptcore", "catalog", "list", "--conversions", "--state", "failed", "--output", "json"],
        cwd=place,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "usage" not in {row["error_code"] for row in json.loads(failures.stdout)}


def test_an_operator_s_hour(home: Path, request: pytest.FixtureRequest) -> None:
    hour(OPERATOR, home, request)
    # The pages share a home, and so the default catalog.
    listed = subprocess.run(
        ["ckptcore", "catalog", "root", "list", "--output", "json"],
        env=environment(home),
        capture_output=True,
        text=True,
        check=True,
    )
    assert {row["name"] for row in json.loads(listed.stdout)} == {"tiny", "llama"}


@pytest.fixture
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, str], str]]:
    """What `make up` printed, and the environment of a shell that reads its env.sh; ended by `make down`."""
    pytest.importorskip("psycopg")
    state = Path("/tmp") / f"ckptcore-hours-{os.getpid()}"
    home = tmp_path_factory.mktemp("operator")
    env = environment(home) | {"CKPTCORE_STATE": str(state)}
    command = [sys.executable, "-m", "deployments.local"]
    done = subprocess.run([*command, "up", *FREE_PORTS], env=env, cwd=ROOT, capture_output=True, text=True)
    try:
        assert done.returncode == 0, done.stdout + done.stderr
        sourced = subprocess.run(
            ["bash", "-c", f". {state}/env.sh; env -0"],
            env=environment(home),
            capture_output=True,
            check=True,
        )
        pairs = (entry.partition("=") for entry in sourced.stdout.decode().split("\0") if entry)
        yield {name: value for name, _, value in pairs}, done.stdout
    finally:
        subprocess.run(
            [*command, "down", "--patience", "5"], env=env, cwd=ROOT, check=True, capture_output=True
        )
        shutil.rmtree(state, ignore_errors=True)


def test_make_up_is_one_list_of_addresses_and_status_needs_only_env_sh(
    up: tuple[dict[str, str], str],
) -> None:
    env, printed = up
    status = subprocess.run(
        [sys.executable, "-m", "deployments.local", "status"],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert set(json.loads(status.stdout).values()) == {True}
    addresses = [word for word in printed.split() if word.startswith("http://")]
    pages = [address for address in addresses if "catalog" in address]
    assert pages
    assert eventually(lambda: httpx.get(pages[0], follow_redirects=True).status_code in (200, 401), 60)
