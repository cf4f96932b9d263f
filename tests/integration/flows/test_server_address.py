"""Test that a wrong or silent Prefect server ends each command with one error and its next step."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from paths import ROOT

from ckptcore.errors import UsageError
from flows._prefect import configured, require_address, server_configured

pytestmark = pytest.mark.xdist_group("prefect")
FLOWS = ("consolidate", "convert", "export", "reshard", "resume", "retire", "scrub", "sweep", "arrived")
SERVICES = ("deploy", "worker", "local", "page", "receiver")


def run(module: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=clean | env,
        capture_output=True,
        text=True,
        timeout=120,
    )


@contextmanager
def answering(status: int) -> Iterator[str]:
    """A server that answers every request with a status."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/api"
        server.shutdown()


def nobody() -> str:
    """The address of a port on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"http://127.0.0.1:{listening.getsockname()[1]}/api"


@pytest.mark.alike(4)
@pytest.mark.parametrize("module", [f"flows.{n}" for n in FLOWS] + [f"deployments.{n}" for n in SERVICES])
def test_a_malformed_address_is_one_error(module: str) -> None:
    done = run(module, PREFECT_API_URL="http://[::1")
    assert done.returncode == UsageError.exit_code
    assert done.stderr.splitlines() == [
        "usage: PREFECT_API_URL must be the URL of a Prefect server's API (got 'http://[::1')",
        "next: set PREFECT_API_URL, or the active profile's, to http://HOST:PORT/api",
    ]
    assert done.stdout == ""


@pytest.mark.parametrize(
    "url",
    [
        "nonsense",
        "ftp://h/api",
        "http://",
        "http://h:x/api",
        "http://h:99999/api",
        "http://a..b/api",
        f"http://{'a' * 64}/api",
    ],
)
def test_what_is_no_address(url: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="must be the URL of a Prefect server"):
        require_address({"PREFECT_API_URL": url})
    path = tmp_path / "profiles.toml"
    path.write_text(f'active = "one"\n[profiles.one]\nPREFECT_API_URL = "{url}"\n')
    with pytest.raises(UsageError, match="of the profile 'one' in"):
        require_address({"PREFECT_PROFILES_PATH": str(path)})


def test_credentials_in_an_address_are_left_out() -> None:
    with pytest.raises(UsageError) as caught:
        require_address({"PREFECT_API_URL": "ftp://me:secret@h/api"})
    assert "secret" not in caught.value.message


def test_profiles_are_read_where_prefect_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    one, two = "http://one/api", "http://two/api"
    path.write_text(
        f'active = "one"\n[profiles.one]\nPREFECT_API_URL = "{one}"\n'
        f'[profiles.two]\nPREFECT_API_URL = "{two}"\n[profiles.none]\n'
    )
    env = {"PREFECT_PROFILES_PATH": str(path), "PREFECT_HOME": str(tmp_path / "empty")}
    assert configured(env)[0] == one
    assert server_configured(env)
    assert configured({**env, "PREFECT_PROFILE": "two"})[0] == two
    assert configured({**env, "PREFECT_PROFILE": "none"})[0] == ""
    assert configured({**env, "PREFECT_API_URL": "http://three/api"})[0] == "http://three/api"
    assert configured({"PREFECT_HOME": str(tmp_path / "empty")})[0] == ""
    path.rename(tmp_path / "profiles.toml")
    assert configured({"PREFECT_HOME": str(tmp_path)})[0] == one
    (tmp_path / "profiles.toml").write_text('active = ["one"]\n[profiles.one]\nPREFECT_API_URL = "x"\n')
    assert configured({"PREFECT_HOME": str(tmp_path)}) == ("", "")


@pytest.mark.parametrize(
    ("module", "status"),
    [
        ("flows.convert", 0),
        ("flows.convert", 500),
        pytest.param("flows.convert", 401, marks=pytest.mark.soak),
        pytest.param("flows.convert", 404, marks=pytest.mark.soak),
        pytest.param("flows.sweep", 503, marks=pytest.mark.soak),
    ],
)
def test_a_server_that_does_not_answer_is_one_error(module: str, status: int, tmp_path: Path) -> None:
    given = ["nowhere", str(tmp_path / "out")] if module == "flows.convert" else []
    given += ["--catalog", f"sqlite:///{tmp_path}/catalog.db"]
    if not status:
        done = run(module, *given, PREFECT_API_URL=nobody())
    else:
        with answering(status) as url:
            done = run(module, *given, PREFECT_API_URL=url, PREFECT_CLIENT_MAX_RETRIES="0")
    assert done.returncode == UsageError.exit_code, done.stderr
    assert "Traceback" not in done.stderr
    error, step = done.stderr.splitlines()[-2:]
    verb = "got an error from" if status == 500 else "cannot reach"
    assert error.startswith(f"usage: {verb} the Prefect server at http://127.0.0.1:")
    assert (f"HTTP {status}" if status else "refused") in error or status == 0
    steps = {401: "set PREFECT_API_AUTH_STRING", 500: "look for its reason"}
    assert step.startswith(f"next: {steps.get(status, 'start it, or')}")


def test_a_worker_and_a_deployment_say_that_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    from deployments import worker

    monkeypatch.setattr(worker, "START_SECONDS", 0.0)
    monkeypatch.setenv("PREFECT_API_URL", nobody())
    with pytest.raises(SystemExit) as ended:
        worker.main(["--pool", "ckptcore"])
    assert ended.value.code == UsageError.exit_code
    done = run("deployments.deploy", "--wait", "0", PREFECT_API_URL=nobody())
    assert done.returncode == UsageError.exit_code
    assert "is not ready" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_flow_without_an_entry_names_one() -> None:
    done = run("flows.arrived")
    assert done.returncode == UsageError.exit_code
    assert "next: convert one checkpoint with python -m flows.convert SRC DST" in done.stderr
    done = run("flows.sweep", "--bogus")
    assert done.returncode == UsageError.exit_code
    assert "No such option: --bogus" in done.stderr


def test_a_sweep_by_hand_says_what_it_did(tmp_path: Path, prefect_api: str) -> None:
    catalog = f"sqlite:///{tmp_path}/catalog.db"
    done = run("flows.sweep", "--catalog", catalog, PREFECT_API_URL=prefect_api)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "no checkpoint was found"
