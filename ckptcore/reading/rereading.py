"""Repeat what reads tensors where bytes were altered on their way from a store.

A record that is read in pieces is known to be altered when its last piece has arrived; a file without
checksums of its own, when the store's checksum is compared at the end. Both are too late for what used the
first pieces. The next answer of the store is mostly right: so the work is done once more, not the command.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ckptcore.errors import AlteredInTransit

_TRIES = 3
_log = logging.getLogger("ckptcore")
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def rereading(work: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Return a function that repeats its work while bytes come altered, at most twice.

    The work reads everything that it uses itself, and can be repeated.
    """

    @functools.wraps(work)
    def repeated(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        for left in reversed(range(_TRIES)):
            try:
                return work(*args, **kwargs)
            except AlteredInTransit as error:
                if not left:
                    raise
                _log.warning("%s; reading once more", error.message)
        raise AssertionError("unreachable")

    return repeated
