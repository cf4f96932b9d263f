"""Live: the receiver and the catalog page as processes of their own, as an operator starts them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import webhooks

ROOT = Path(__file__).parents[2]
NOWHERE = "http://127.0.0.1:9/api"  # nothing answers: events wait in the inbox


@dataclass(frozen=True)
class Live:
    """A running receiver. process: its process. url: where it listens. rows: its inbox. catalog: the file."""

    process: subprocess.Popen[str]
    url: str
    rows: webhooks.Rows
    catalog: Path


@contextmanager
def receiver(folder: Path, *, config: str = webhooks.CONFIG, api: str = NOWHERE) -> Iterator[Live]:
    """A receiver on the catalog in a folder; ended in order, or killed when that takes too long."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "receiver.toml").write_text(config)
    catalog = folder / "catalog.sqlite"
    env = (
        os.environ
        | webhooks.SECRETS
        | {
            "CKPTCORE_CATALOG_URL": str(catalog),
            "PREFECT_API_URL": api,
            "PREFECT_HOME": str(folder / "prefect"),
        }
    )
    command = [sys.executable, "-m", "deployments.receiver", str(folder / "receiver.toml"), "--port", "0"]
    with (folder / "receiver.log").open("a") as log, _running(command, env, log) as (process, line):
        assert line.startswith("listening at "), (folder / "receiver.log").read_text()
        yield Live(process, line.split()[-1], webhooks.Rows(catalog), catalog)


@contextmanager
def page(catalog: Path, token: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The page of a catalog, which exists: the process and its address, without a slash at the end."""
    command = [sys.executable, "-m", "ckptcore.page", "--catalog", str(catalog), "--port", "0"]
    env, path = os.environ | {"CKPTCORE_PAGE_TOKEN": token}, catalog.parent / "page.log"
    with path.open("a") as log, _running(command, env, log) as (process, line):
        assert line.startswith("the catalog page is at "), path.read_text()
        yield process, line.split()[-1].rstrip("/")


@contextmanager
def _running(
    command: list[str], env: dict[str, str], log: IO[str]
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process and the first line that it prints."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
    )
    patience = threading.Timer(120, process.kill)
    patience.start()
    assert process.stdout is not None
    line = process.stdout.readline()
    patience.cancel()
    try:
        yield process, line
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
