"""`ckptcore catalog page` is one process: whatever ends it ends its server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from paths import ROOT

from ckptcore.catalog import open_catalog


@pytest.mark.alike(1)
@pytest.mark.parametrize(
    ("how", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_signal_ends_command_and_server(how: signal.Signals, code: int, tmp_path: Path) -> None:
    catalog = tmp_path / "catalog.sqlite"
    open_catalog(str(catalog)).close()
    command = [sys.executable, "-m", "ckptcore", "catalog", "page", "--port", "0", "--catalog", str(catalog)]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "CKPTCORE_PAGE_TOKEN": "x" * 24},
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        assert httpx.get(address).status_code == 200
        os.kill(process.pid, how)
        assert process.wait(60) == code
        port = int(address.rstrip("/").rpartition(":")[2])
        # No other process of the command has the socket, so that its port is free.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=10)
        assert process.stdout.read() == ""  # and none keeps its output open


def test_what_cannot_be_served_ends_with_its_code(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "ckptcore",
        "catalog",
        "page",
        "--catalog",
        str(tmp_path / "none.sqlite"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (16, "")
    assert done.stderr.startswith("catalog: ")
