"""Announce the last checkpoint of a plain torch job when it ends; needs send.py beside it.

    import torch_exit
    torch_exit.install(run="llama")
    ...
    dcp.save(state, checkpoint_id=path)      # or wait for the future of dcp.async_save
    torch_exit.saved(path, step)             # on every rank; rank 0 announces

With the fingerprint of what the job had in memory, with which a conversion compares the checkpoint:

    live = ckptcore.fingerprint_state(state) # on every rank, before the save
    ...
    torch_exit.saved(path, step, live.as_facts())

The announcement is sent at exit, even after an exception: the last checkpoint was complete before. A job that
is killed announces nothing; the scheduled sweep finds its checkpoints.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping
from typing import Any

from send import announce

_last: dict[str, tuple[int | None, Mapping[str, Any] | None]] = {}
_run = ""


def install(run: str = "") -> None:
    """Announce the last checkpoint at exit, on rank 0. run: the name of the training run."""
    global _run
    _run = run
    if int(os.environ.get("RANK", "0")) == 0:
        atexit.register(_announce)


def saved(
    path: str | os.PathLike[str], step: int | None = None, meta: Mapping[str, Any] | None = None
) -> None:
    """Record that every rank has written its part of a checkpoint. meta: as `send.announce`."""
    _last.clear()
    _last[os.path.abspath(path) if "://" not in str(path) else str(path)] = step, meta


def _announce() -> None:
    for uri, (step, meta) in _last.items():
        try:
            print(f"announced {uri}: {announce(uri, _run, step, meta=meta)}", file=sys.stderr)
        except (OSError, KeyError, ValueError) as error:
            print(f"{uri} was not announced: {error}", file=sys.stderr)
