"""Start, stop or inspect the local system: ``python -m deployments.local up|down|status``."""

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

PATIENCE = 60.0  # seconds for runs to end


def main() -> None:
    """Run the command line."""
    parser = terminal.parser(prog="python -m deployments.local", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    starting = verbs.add_parser("up", help="start PostgreSQL, Prefect, a worker and the webhook receiver")
    for port in fields(Ports):
        starting.add_argument(
            f"--{port.name}-port", type=int, help=f"default {port.default}; 0 picks a free port"
        )
    starting.add_argument("--root", help="folder of announced checkpoints; default STATE/checkpoints")
    starting.add_argument("--exports", help="folder of converted checkpoints; default STATE/exports")
    starting.add_argument("--limit", type=int, help="concurrent runs; default 2")
    stopping = verbs.add_parser(
        "down", help="stop everything; runs that do not end in time are resumed by the next `up`"
    )
    stopping.add_argument("--patience", type=float, default=PATIENCE, help="seconds to wait for runs to end")
    verbs.add_parser("status", help="print which services run, as JSON")
    given = parser.parse_args()
    try:
        {"up": _up, "down": _down, "status": _status}[given.verb](given)
    except CkptError as error:
        terminal.block(f"{error.code}: {error.message}\nnext: {error.hint}", err=True, indent="")
        sys.exit(error.exit_code)


def _up(given: argparse.Namespace) -> None:
    terminal.block(next_steps(up(folder(), _choices(given, folder()), _say)), indent="")


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
    """Return the earlier choices with the arguments' changes, or None if nothing changes."""
    state = load(at) if at.exists() else None
    before = state.choices if state is not None else Choices()
    named = {f.name: getattr(given, f"{f.name}_port") for f in fields(Ports)}
    ports = replace(before.ports, **{name: port for name, port in named.items() if port is not None})
    other = {name: getattr(given, name) for name in ("root", "exports", "limit")}
    wanted = replace(
        before, ports=ports, **{name: value for name, value in other.items() if value is not None}
    )
    return None if wanted == before else wanted


def next_steps(state: LocalState) -> str:
    """Return the addresses and first commands to print after `up`."""
    example = f"{state.root.rstrip('/')}/llama/step-300"
    return f"""
UI       http://127.0.0.1:{state.choices.ports.prefect}   (it asks for PREFECT_API_AUTH_STRING)
secrets  {state.folder}/env.sh
logs     {state.folder}/log

Announce a checkpoint below {state.root}:

  . {state.folder}/env.sh
  curl -H "Authorization: Bearer $CKPTCORE_HOOK_TOKEN" -H 'content-type: application/json' \\
    -d '{{"uri": "{example}", "run": "llama", "step": 300}}' {state.receiver}/hooks/curl

Query the results:

  {_program()} catalog sql "SELECT run, step, uri FROM latest_exports"

`make down` stops everything."""


def _program() -> str:
    """Return the command for ``ckptcore`` here: its environment need not be active in the user's shell."""
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
