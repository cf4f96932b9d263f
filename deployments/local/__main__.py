"""Start, stop or inspect the local system: ``python -m deployments.local up|down|status``."""

from __future__ import annotations

import sys

from ckptcore.errors import CkptError, UsageError
from ckptcore.utils import terminal
from deployments.local.system import CHOICES, VARIABLE, down, filled, folder, status, up
from flows._prefect import end_with


def main() -> None:
    """Run the command line."""
    parser = terminal.parser(prog="python -m deployments.local", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    starting = verbs.add_parser("up", help="start PostgreSQL, Prefect, a worker and the webhook receiver")
    for name, (default, help) in CHOICES.items():
        starting.add_argument(f"--{name.replace('_', '-')}", type=type(default), help=help)
    stopping = verbs.add_parser(
        "down", help="stop everything; runs that do not end in time are resumed by the next `up`"
    )
    stopping.add_argument("--patience", type=float, default=60.0, help="seconds to wait for runs to end")
    verbs.add_parser("status", help="print which services run, as JSON")
    arguments = vars(parser.parse_args())
    try:
        match arguments.pop("verb"):
            case "up":
                state = up(folder(), {name: value for name, value in arguments.items() if value is not None})
                terminal.block(filled("next_steps.txt", state).rstrip(), indent="")
            case "down":
                down(folder(), arguments["patience"])
            case _:
                ready = status(folder())
                terminal.write_json(ready)
                sys.exit(0 if all(ready.values()) else 1)
    except CkptError as error:
        end_with(error)
    except OSError as error:
        end_with(UsageError(f"cannot use {folder()} as the state folder: {error}", hint=f"set {VARIABLE}"))


if __name__ == "__main__":
    terminal.guard()
    main()
