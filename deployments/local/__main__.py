"""``python -m deployments.local up|down|status``"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from dataclasses import fields, replace
from pathlib import Path

from ckptcore.errors import CkptError
from ckptcore.utils import terminal
from deployments.local import process
from deployments.local.lifecycle import down, up
from deployments.local.services import SERVICES
from deployments.local.state import Choices, LocalState, Ports, folder, load

PATIENCE = 60.0  # seconds that runs get to end


def main() -> None:
    """The command line."""
    parser = terminal.parser(prog="python -m deployments.local", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    starting = verbs.add_parser("up", help="start PostgreSQL, Prefect, a worker and the webhook receiver")
    for port in fields(Ports):
        starting.add_argument(
            f"--{port.name}-port", type=int, help=f"default {port.default}; 0 takes a free one"
        )
    starting.add_argument("--root", help="where checkpoints are announced; default STATE/checkpoints")
    starting.add_argument("--exports", help="where they are converted to; default STATE/exports")
    starting.add_argument("--limit", type=int, help="runs at a time; default 2")
    stopping = verbs.add_parser(
        "down", help="end them; runs that do not end in time go on after the next `up`"
    )
    stopping.add_argument("--patience", type=float, default=PATIENCE, help="seconds that runs get to end")
    verbs.add_parser("status", help="which of them run")
    given = parser.parse_args()
    try:
        {"up": _up, "down": _down, "status": _status}[given.verb](given)
    except CkptError as error:
        terminal.block(f"{error.code}: {error.message}\nnext: {error.hint}", err=True, indent="")
        sys.exit(error.exit_code)


def _up(given: argparse.Namespace) -> None:
    terminal.block(told(up(folder(), _choices(given, folder()), _say)), indent="")


def _down(given: argparse.Namespace) -> None:
    down(folder(), given.patience, _say)


def _status(given: argparse.Namespace) -> None:
    state = load(folder())
    found = {
        service.name: state is not None
        and process.known(service.name, state.folder) is not None
        and service.is_ready(state)
        for service in SERVICES
    }
    terminal.write_json(found)
    sys.exit(0 if all(found.values()) else 1)


def _choices(given: argparse.Namespace, at: Path) -> Choices | None:
    """What the arguments change of what was chosen before; None when nothing."""
    state = load(at) if at.exists() else None
    before = state.choices if state is not None else Choices()
    named = {f.name: getattr(given, f"{f.name}_port") for f in fields(Ports)}
    ports = replace(before.ports, **{name: port for name, port in named.items() if port is not None})
    other = {name: getattr(given, name) for name in ("root", "exports", "limit")}
    wanted = replace(
        before, ports=ports, **{name: value for name, value in other.items() if value is not None}
    )
    return None if wanted == before else wanted


def told(state: LocalState) -> str:
    """What a person does next."""
    example = f"{state.root.rstrip('/')}/llama/step-300"
    return f"""
UI       http://127.0.0.1:{state.choices.ports.prefect}   (it asks for PREFECT_API_AUTH_STRING)
secrets  {state.folder}/env.sh
logs     {state.folder}/log

Announce a checkpoint below {state.root}:

  . {state.folder}/env.sh
  curl -H "Authorization: Bearer $CKPTCORE_HOOK_TOKEN" -H 'content-type: application/json' \\
    -d '{{"uri": "{example}", "run": "llama", "step": 300}}' {state.receiver}/hooks/curl

Ask for what came of it:

  {_program()} catalog sql "SELECT run, step, uri FROM latest_exports"

`make down` ends all of it."""


def _program() -> str:
    """``ckptcore`` as a shell finds it from here: the environment that this runs in need not be active."""
    ours = Path(sys.executable).with_name("ckptcore")
    found = shutil.which("ckptcore")
    if not ours.exists() or (found is not None and Path(found).samefile(ours)):
        return "ckptcore"
    here = Path.cwd()
    return shlex.quote(str(ours.relative_to(here) if ours.is_relative_to(here) else ours))


def _say(line: str) -> None:
    terminal.line(line)


if __name__ == "__main__":
    terminal.guard()
    main()
