"""Start all services in order, each once the one before is ready; stop them without losing a run."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ckptcore.catalog import upgrade
from ckptcore.errors import UsageError
from ckptcore.redaction import ending
from deployments.local import process
from deployments.local.services import SERVICES, Service, client_env, receiver_config, user_env
from deployments.local.state import Choices, LocalState, load, locked, settle, write_private

READY_SECONDS = 180.0  # the first start migrates Prefect's database
ENDING_SECONDS = 60.0  # for the processes of a killed service
LOOK = 0.2
# PostgreSQL: SIGINT rolls open transactions back; SIGTERM would wait for every client to disconnect.
HOW = {"postgres": signal.SIGINT}

Say = Callable[[str], None]


def up(folder: Path, wanted: Choices | None, say: Say) -> LocalState:
    """Start or restart the services that do not run as wanted, and wait until all are ready.

    If one does not start, those that this call started are stopped; those that ran before stay.

    Args:
        folder: the state folder.
        wanted: new choices; None keeps the earlier ones.
        say: called with each line of progress.

    Raises:
        UsageError: a service does not start. The message has the end of its log.
    """
    with locked(folder):
        state = settle(folder, wanted)
        (folder / "receiver.toml").write_text(receiver_config(state))
        write_private(folder / "env.sh", user_env(state))
        for place in (state.root, state.exports):
            if "://" not in place:
                Path(place).mkdir(parents=True, exist_ok=True)
        before = {service.name: process.known(service.name, folder) for service in SERVICES}
        try:
            for service in SERVICES:
                if service.name == "worker":
                    _before_worker(service, state, say)
                _bring_up(service, state, say)
        except BaseException:
            for service in reversed(SERVICES):
                if process.known(service.name, folder) not in (None, before[service.name]):
                    _stop(service, folder, say)
            raise
    return state


def down(folder: Path, patience: float, say: Say) -> None:
    """Stop everything: first the runs, then the processes, in reverse order.

    Args:
        folder: the state folder.
        patience: seconds for runs to end. The next `up` resumes the others.
        say: called with each line of progress.
    """
    state = load(folder)
    if state is None:
        say(f"nothing to stop: no `up` was run in {folder}")
        return
    with locked(folder):
        stopped: str | None = None
        by_name = {service.name: service for service in SERVICES}
        if process.known("prefect", folder) and by_name["prefect"].is_ready(state):
            # Without a worker no run can end.
            wait = patience if process.known("worker", folder) else 0
            stopped = _tried(say, state, f"pause={wait}")
        for service in reversed(SERVICES):
            if service.name == "prefect" and stopped is not None:
                _tried(say, state, f"requeue={stopped}")
            _stop(service, folder, say)


def _before_worker(worker: Service, state: LocalState, say: Say) -> None:
    """Upgrade the catalog, and let the runs that lost their worker continue."""
    before, after = upgrade(state.catalog)
    say(f"catalog: schema {after}" + ("" if before == after else f", was {before or 'none'}"))
    verbs = ["resume"]
    if not _runs(worker, state):
        # End the runs of the last worker, even if it is dead.
        process.end("worker", state.folder, worker.patience)
        verbs = ["requeue", "resume"]
    _run_drainer(state, *verbs)


def _stop(service: Service, folder: Path, say: Say) -> None:
    was = process.known(service.name, folder) is not None
    gently = process.end(service.name, folder, service.patience, HOW.get(service.name, signal.SIGTERM))
    if was:
        say(f"{service.name}: {'stopped' if gently else 'killed'}")


def _bring_up(service: Service, state: LocalState, say: Say) -> None:
    running = process.known(service.name, state.folder)
    if running is not None and _runs(service, state):
        say(f"{service.name}: already running (process {running.pid})")
        service.after(state)
        return
    if running is not None and _recovers(service, state):
        say(f"{service.name}: recovered (process {running.pid})")
        service.after(state)
        return
    process.end(service.name, state.folder, service.patience, HOW.get(service.name, signal.SIGTERM))
    if service.is_ready(state):
        raise UsageError(
            f"cannot start {service.name}: its port is already used by another {service.name}",
            hint="stop that one, or choose other ports: make up UP='--prefect-port 0 --receiver-port 0'",
        )
    command, env = service.command(state), service.env(state)
    started = process.start(service.name, state.folder, command, env, **service.how())
    until = time.monotonic() + READY_SECONDS
    while not service.is_ready(state):
        if (
            started.poll() is not None
            and time.monotonic() < until - READY_SECONDS + ENDING_SECONDS
            and service.must_wait(process.tail(service.name, state.folder))
        ):
            time.sleep(1.0)
            started = process.start(service.name, state.folder, command, env, **service.how())
            continue
        if started.poll() is not None or time.monotonic() > until:
            ended = "ended" if started.poll() is not None else f"is not ready after {READY_SECONDS:.0f} s"
            log = process.tail(service.name, state.folder)
            process.end(service.name, state.folder, service.patience)
            raise UsageError(
                f"{service.name} {ended}:\n{log}", hint=f"{state.folder}/log/{service.name}.log has more"
            )
        time.sleep(LOOK)
    say(f"{service.name}: started (process {started.pid})")
    service.after(state)


def _recovers(service: Service, state: LocalState) -> bool:
    """Wait while a service with the current configuration recovers; return whether it became ready."""
    running = process.known(service.name, state.folder)
    until = time.monotonic() + READY_SECONDS
    if running is None or running.made != process.made_of(service.command(state), service.env(state)):
        return False
    while service.is_recovering(state) and time.monotonic() < until:
        time.sleep(LOOK)
    return service.is_ready(state)


def _tried(say: Say, state: LocalState, argument: str) -> str | None:
    """Return the drainer's output. A failure is only printed: everything must end in any case."""
    try:
        return _run_drainer(state, argument)
    except UsageError as error:
        say(f"{error.message}\nan automation resumes stopped runs once it has missed their heartbeat")
        return None


def _runs(service: Service, state: LocalState) -> bool:
    """Return whether the service runs with the current configuration, and is ready."""
    running = process.known(service.name, state.folder)
    wanted = process.made_of(service.command(state), service.env(state))
    return running is not None and running.made == wanted and service.is_ready(state)


def _run_drainer(state: LocalState, *arguments: str) -> str:
    # A separate process: Prefect reads its settings once, and they differ from this process's.
    command = [sys.executable, "-m", "deployments.local.drain", *arguments]
    done = subprocess.run(command, env=client_env(state), capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(f"`{' '.join(arguments)}` failed: {ending(done.stderr.strip(), 1500)}")
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
