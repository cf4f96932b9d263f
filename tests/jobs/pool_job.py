"""The work of a `ProcessPool` in the tests of pools; it imports no more than a pool does."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from ckptcore.errors import DiskFull


def begin(
    setup: dict[str, Any], finished: Callable[[int], None]
) -> tuple[Callable[[Any], Any], Callable[[], Any]]:
    """``setup`` has the folder where workers say what they do, and what comes of a job by its name."""
    folder, done = Path(setup["folder"]), list[int]()

    def do(job: int) -> tuple[int, int]:
        act = setup.get(str(job))
        if act == "full":  # once the other worker waits: one that ends before its job leaves nothing
            until = time.monotonic() + 60
            while not (folder / "waits").exists() and time.monotonic() < until:
                time.sleep(0.01)
            raise DiskFull("no room", path="there", free=7)
        if act == "defect":
            raise KeyError("a defect")
        if act == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if act == "kills-server":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        if act == "stops-server":
            os.kill(os.getppid(), signal.SIGSTOP)
        if act == "waits":
            try:
                (folder / "waits").write_text(str(os.getpid()))
                time.sleep(60)
            except KeyboardInterrupt:
                (folder / "cleaned").touch()
                raise
        if act == "meets":  # until another worker has such a job, too: a fast one would do all of them
            imported = import_module(setup["module"]).PID if "module" in setup else ""
            (folder / f"meets-{os.getpid()}").write_text(f"{imported} {os.getppid()}")
            until = time.monotonic() + 60
            while len(list(folder.glob("meets-*"))) < 2 and time.monotonic() < until:
                time.sleep(0.01)
        logging.getLogger("ckptcore").info("job %s", job)
        finished(job)
        done.append(job)
        return job, os.getpid()

    return do, lambda: done
