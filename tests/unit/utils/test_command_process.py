"""The end of a command: exit functions and threads have theirs, modules are not taken apart."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
from ckptcore.utils.command_process import leave
import atexit, threading, sys

class Module:
    def __del__(self):
        print("taken apart")

module = Module()
module.itself = module
atexit.register(print, "exit function")
threading.Timer(0.1, print, ("thread",)).start()
if "raise" in sys.argv:
    raise ValueError
leave(3)
"""


def ended(*arguments: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout.splitlines()


def test_a_command_waits_for_threads_and_exit_functions_and_leaves() -> None:
    assert ended() == (3, ["thread", "exit function"])


def test_a_process_that_ends_in_another_way_is_taken_apart() -> None:
    assert ended("raise") == (1, ["thread", "exit function", "taken apart"])
