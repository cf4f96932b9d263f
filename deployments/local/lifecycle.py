"""Lifecycle: everything up, in order and ready; everything down, with nothing lost and nothing left."""

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
LOOK = 0.2
# PostgreSQL: SIGINT rolls open transactions back; SIGTERM would wait for every client to leave.
HOW = {"postgres": signal.SIGINT}

Say = Callable[[str], None]


def up(folder: Path, wanted: Choices | None, say: Say) -> LocalState:
    """Start what does not run, mend what half runs, and wait until all of it is ready.

    Raises `UsageError` with the last words of what does not come up.
    """
    with locked(folder):
        state = settle(folder, wanted)
        (folder / "receiver.toml").write_text(receiver_config(state))
        write_private(folder / "env.sh", user_env(state))
        for place in (state.root, state.exports):
            if "://" not in place:
                Path(place).mkdir(parents=True, exist_ok=True)
        for service in SERVICES:
            if service.name == "worker":
                before, after = upgrade(state.catalog)
                say(f"catalog: schema {after}" + ("" if before == after else f", was {before or 'none'}"))
                verbs = ["resume"]
                if not _runs(service, state):
                    # Its runs end with it, also those that a dead one left.
                    process.end("worker", folder, service.patience)
                    verbs = ["requeue", "resume"]
                _run_drainer(state, *verbs)
            _bring_up(service, state, say)
    return state


def down(folder: Path, patience: float, say: Say) -> None:
    """End everything: first the work, then the processes, in the opposite order.

    patience: seconds that runs get to end; those that do not go on after the next `up`.
    """
    state = load(folder)
    if state is None:
        say(f"nothing was ever up in {folder}")
        return
    with locked(folder):
        stopped: str | None = None
        by_name = {service.name: service for service in SERVICES}
        if process.known("prefect", folder) and by_name["prefect"].is_ready(state):
            # Without a worker nobody ends a run.
            wait = patience if process.known("worker", folder) else 0
            stopped = _tried(say, state, f"pause={wait}")
        for service in reversed(SERVICES):
            if service.name == "prefect" and stopped is not None:
                _tried(say, state, f"requeue={stopped}")
            was = process.known(service.name, folder) is not None
            gently = process.end(
                service.name, folder, service.patience, HOW.get(service.name, signal.SIGTERM)
            )
            if was:
                say(f"{service.name}: {'stopped' if gently else 'killed'}")


def _bring_up(service: Service, state: LocalState, say: Say) -> None:
    running = process.known(service.name, state.folder)
    if running is not None and _runs(service, state):
        say(f"{service.name}: runs already (process {running.pid})")
        service.after(state)
        return
    process.end(service.name, state.folder, service.patience, HOW.get(service.name, signal.SIGTERM))
    if service.is_ready(state):
        raise UsageError(
            f"somebody else's {service.name} answers at the port that is ours",
            hint="end it, or name other ports: make up UP='--prefect-port 0 --receiver-port 0'",
        )
    command, env = service.command(state), service.env(state)
    started = process.start(service.name, state.folder, command, env, **service.how())
    until = time.monotonic() + READY_SECONDS
    while not service.is_ready(state):
        if started.poll() is not None or time.monotonic() > until:
            ended = "ended" if started.poll() is not None else f"is not ready after {READY_SECONDS:.0f} s"
            words = process.tail(service.name, state.folder)
            process.end(service.name, state.folder, service.patience)
            raise UsageError(
                f"{service.name} {ended}:\n{words}", hint=f"{state.folder}/log/{service.name}.log has more"
            )
        time.sleep(LOOK)
    say(f"{service.name}: started (process {started.pid})")
    service.after(state)


def _tried(say: Say, state: LocalState, argument: str) -> str | None:
    """What the drainer answers; everything is to end in any case, so a failure is only told."""
    try:
        return _run_drainer(state, argument)
    except UsageError as error:
        say(f"{error.message}\nruns that are stopped now go on after the heartbeat's automation has seen it")
        return None


def _runs(service: Service, state: LocalState) -> bool:
    """Whether it runs as it is wanted now."""
    running = process.known(service.name, state.folder)
    wanted = process.made_of(service.command(state), service.env(state))
    return running is not None and running.made == wanted and service.is_ready(state)


def _run_drainer(state: LocalState, *arguments: str) -> str:
    # A process of its own: Prefect reads its settings once, and these are not ours.
    command = [sys.executable, "-m", "deployments.local.drain", *arguments]
    done = subprocess.run(command, env=client_env(state), capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(f"`{' '.join(arguments)}` failed: {ending(done.stderr.strip(), 1500)}")
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
