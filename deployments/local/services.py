"""The table of services, in the order of their dependencies, with their commands and environments."""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import httpx

from ckptcore.errors import CkptError
from ckptcore.utils.foreign_text import load_json, parse_time
from ckptcore.utils.isolation import attempt
from deployments import POOL, with_project
from deployments.local import postgres
from deployments.local.state import LocalState

WORKER = "local"  # the worker's name on the Prefect server


@dataclass(frozen=True, slots=True)
class Service:
    """One service.

    Attributes:
        name: the name of its log and pid file.
        command: the program and its arguments.
        env: its complete environment.
        is_ready: whether it does its work.
        is_recovering: whether it will be ready without help, for example after a crash of its own.
        must_wait: whether its first program ended only because a killed predecessor still ends.
        how: further arguments of `subprocess.Popen`.
        after: runs once the service is ready, on every `up`.
        patience: seconds for it to end by itself.
    """

    name: str
    command: Callable[[LocalState], Sequence[str]]
    env: Callable[[LocalState], Mapping[str, str]]
    is_ready: Callable[[LocalState], bool]
    how: Callable[[], dict[str, Any]] = dict
    after: Callable[[LocalState], None] = lambda state: None
    patience: float = 15.0
    is_recovering: Callable[[LocalState], bool] = lambda state: False
    must_wait: Callable[[str], bool] = lambda log: False


def client_env(state: LocalState) -> dict[str, str]:
    """Return the environment of every client of Prefect's server and of the catalog."""
    return with_project(_inherited()) | {
        "PREFECT_HOME": str(state.folder / "prefect"),
        "PREFECT_API_URL": state.api,
        "PREFECT_API_AUTH_STRING": f"admin:{state.secrets['PREFECT_PASSWORD']}",
        "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",  # a wrong address must fail, not start a server
        "PREFECT_LOGGING_EXTRA_LOGGERS": "ckptcore",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        "CKPTCORE_CATALOG_URL": state.catalog,
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
        # Prefect's runner creates a folder of a fixed name there, which would belong to its first user.
        "TMPDIR": str(state.folder / "tmp"),
    }


def server_env(state: LocalState) -> dict[str, str]:
    """Return the environment of Prefect's server."""
    return client_env(state) | {
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": state.database("postgresql+asyncpg", "prefect"),
        "PREFECT_SERVER_API_AUTH_STRING": f"admin:{state.secrets['PREFECT_PASSWORD']}",
        # Without it the UI calls port 4200, whatever the server's port is.
        "PREFECT_SERVER_UI_API_URL": state.api,
        # The newer UI loads its settings from a third party, even with telemetry off.
        "PREFECT_SERVER_UI_V2_ENABLED": "false",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # A client's address and scheme are those of its connection, whatever its headers say.
        "FORWARDED_ALLOW_IPS": "",
        # In-memory leases would be lost with the server, and their slots never freed.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        # Only with both `prefect deployment run --watch` shows the log of a run, and so why it failed.
        "PREFECT_SERVER_LOGS_STREAM_OUT_ENABLED": "true",
        "PREFECT_SERVER_LOGS_STREAM_PUBLISHING_ENABLED": "true",
    }


def worker_env(state: LocalState) -> dict[str, str]:
    """Return the environment of the worker and of the runs that it starts."""
    return client_env(state) | {
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "PREFECT_WORKER_WEBSERVER_HOST": "127.0.0.1",
        "PREFECT_WORKER_WEBSERVER_PORT": str(state.choices.ports.worker),
    }


def receiver_env(state: LocalState) -> dict[str, str]:
    """Return the environment of the receiver, including its secrets."""
    hooks = {name: value for name, value in state.secrets.items() if name.startswith("CKPTCORE_HOOK_")}
    # Part of the environment, so that a changed configuration restarts the receiver.
    config = hashlib.sha256(receiver_config(state).encode()).hexdigest()
    return client_env(state) | hooks | {"CKPTCORE_UP_CONFIG": config}


def receiver_config(state: LocalState) -> str:
    """Return the receiver's configuration, TOML."""
    return f"""# Written by `make up`; edit deployments/receiver/example.toml for a receiver of your own.
roots = [{_quoted(state.root)}]
destination = {_quoted(state.exports.rstrip("/") + "/{path}")}

[sources.trainer] # POST /hooks/trainer, a Standard Webhooks signature
kind = "standard-webhooks"
secrets = ["CKPTCORE_HOOK_SECRET"]

[sources.curl] # POST /hooks/curl, a bearer token
kind = "bearer"
secrets = ["CKPTCORE_HOOK_TOKEN"]
"""


def user_env(state: LocalState) -> str:
    """Return shell lines that export the addresses and secrets of the system, for ``. env.sh``."""
    env = client_env(state)
    addresses = {
        name: env[name] for name in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING", "CKPTCORE_CATALOG_URL")
    }
    hooks = {name: value for name, value in state.secrets.items() if name.startswith("CKPTCORE_HOOK_")}
    hooks["CKPTCORE_HOOK_URL"] = f"{state.receiver}/hooks/trainer"
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in (addresses | hooks).items())


def _inherited() -> dict[str, str]:
    # Settings of another Prefect server must not leak in. Only variables about this machine are kept.
    kept = ("HOME", "PATH", "LANG", "TZ", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    cloud = ("AWS_", "FSSPEC_", "GOOGLE_", "AZURE_", "SSL_", "LC_")
    return {k: v for k, v in os.environ.items() if k in kept or k.startswith(cloud)}


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def _prefect(state: LocalState) -> list[str]:
    port = str(state.choices.ports.prefect)
    return [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", port]


def _worker_command(state: LocalState) -> list[str]:
    return [
        sys.executable,
        "-m",
        "prefect",
        "worker",
        "start",
        "--pool",
        POOL,
        "--type",
        "process",
        "--name",
        WORKER,
        "--limit",
        str(state.choices.limit),
        "--with-healthcheck",
    ]


def _receiver(state: LocalState) -> list[str]:
    return [
        sys.executable,
        "-m",
        "deployments.receiver",
        str(state.folder / "receiver.toml"),
        "--port",
        str(state.choices.ports.receiver),
    ]


def _works(state: LocalState) -> bool:
    """Return whether the current worker polls for runs: its health check is good before it can do that."""
    if not _answers(f"http://127.0.0.1:{state.choices.ports.worker}/health"):
        return False
    try:
        since = datetime.fromtimestamp((state.folder / "run" / "worker.json").stat().st_mtime, UTC)
        answer = httpx.post(
            f"{state.api}/work_pools/{POOL}/workers/filter",
            json={},
            auth=("admin", state.secrets["PREFECT_PASSWORD"]),
            timeout=5,
        )
        workers = attempt(_heartbeats, answer.text) if answer.status_code == 200 else []
    except (OSError, httpx.HTTPError):
        return False
    return not isinstance(workers, CkptError) and any(heartbeat >= since for heartbeat in workers)


def _heartbeats(answer: str) -> list[datetime]:
    """Return when the worker polled last, by an answer of Prefect's server."""
    rows = load_json(answer)
    return [parse_time(row["last_heartbeat_time"]) for row in rows if row["name"] == WORKER]


SERVICES = (
    Service(
        "postgres",
        command=lambda state: postgres.command(state, postgres.prepare(state)),
        env=lambda state: postgres.ENVIRONMENT,
        is_ready=postgres.is_ready,
        how=lambda: postgres.unprivileged() | {"cwd": "/"},
        after=postgres.make_databases,
        patience=30.0,
        is_recovering=postgres.is_recovering,
        must_wait=postgres.is_still_ending,
    ),
    Service("prefect", _prefect, server_env, lambda state: _answers(f"{state.api}/ready")),
    Service("worker", _worker_command, worker_env, _works),
    Service("receiver", _receiver, receiver_env, lambda state: _answers(f"{state.receiver}/readyz")),
)
