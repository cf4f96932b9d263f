"""Say in one line where flows run, where they cannot. Nothing is imported here but the standard library.

Flows are project code of Prefect: they run from a checkout or from the image, and no wheel has them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def complete_environment() -> Iterator[None]:
    """Import what flows need at their start.

    Raises:
        ModuleNotFoundError: It is not installed, or the package `tasks` is another one. Where a flow is run
            as a command, the process ends with the same line.
    """
    try:
        tasks = find_spec("tasks")
        if tasks is None or tasks.origin is None or Path(tasks.origin).resolve().parents[1] != ROOT:
            raise _Elsewhere("the package `tasks` beside it is not what Python finds first", name="tasks")
        if find_spec("prefect") is None:
            raise _Elsewhere("prefect is not installed", name="prefect")
        yield
    except ModuleNotFoundError as error:
        why = str(error) if isinstance(error, _Elsewhere) else f"{error.name} is not installed"
        line = (
            f"flows cannot run here: {why}. They run in a checkout of ckptcore or in its image: its root "
            f"({ROOT}) is the working directory, or in PYTHONPATH, of a Python with "
            "`pip install 'ckptcore[flows]'`"
        )
        if sys.argv[:1] == ["-m"]:  # until the module of `python -m` is found
            sys.exit(line)
        raise ModuleNotFoundError(line, name=error.name) from error


def is_command() -> bool:
    """Return whether this process was started as ``python -m flows.NAME``, while it imports the package."""
    # Until the module is found, its place in `sys.argv` has "-m".
    return sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)].removeprefix("-m").startswith("flows.")


class _Elsewhere(ModuleNotFoundError):
    pass
