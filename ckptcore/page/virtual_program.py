"""Run a program that shows the files of an export. A command became it: its request is in the environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ckptcore.conversion.virtual_folder import VirtualFolder, open_virtual
from ckptcore.errors import CkptError
from ckptcore.planning.request import Request, Settings
from ckptcore.store.options import use_storage_options
from ckptcore.utils import terminal
from ckptcore.utils.foreign_text import load_json_object

Program = Callable[[Request, Settings, Mapping[str, Any]], None]


def run(variable: str, program: Program) -> None:
    """Run a program until a signal; its errors are lines on stderr, and an exit code.

    Args:
        variable: Name of the variable with the request.
        program: Gets the request, the settings, and all fields of the variable.
    """
    terminal.guard()
    terminal.log_to_stderr()
    try:
        form = load_json_object(os.environ.pop(variable, "").encode())
        if form["storage_options"]:
            use_storage_options(form["storage_options"])
        program(Request.from_dict(form["request"]), Settings(**form["settings"]), form)
    except CkptError as error:
        terminal.block(f"{error.code}: {error.message}\nnext: {error.hint}", err=True, indent="")
        sys.exit(error.exit_code)


@contextmanager
def open_reported(request: Request, settings: Settings) -> Iterator[VirtualFolder]:
    """Open the folder of an export. Findings of it, and what was not verified, are lines on stderr."""
    with open_virtual(request, settings) as folder:
        for finding in folder.warnings:
            terminal.line(f"{finding.severity}: {finding.message}", err=True)
        yield folder
        if folder.unverified:
            terminal.line(
                f"{folder.unverified} stored items were read without a checksum of all of them", err=True
            )
