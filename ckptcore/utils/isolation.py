"""Keep the trouble of one item its own, and that of foreign text, whatever raises it.

Every loop over items (checkpoints of a sweep, events, messages) ends an item by `attempt`, `for_each` or
`error_of`. An item is expected to end with a `CkptError`; any other exception is a defect, and still that of
one item.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

from ckptcore.errors import CatalogUnavailable, CkptError, Interrupted, ended_by
from ckptcore.utils import terminal

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Item = TypeVar("_Item")


def attempt(
    act: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
) -> _Result | CkptError:
    """Return what an act on one item returns, or the error to record for it if it raises any `Exception`.

    What ends the process or the command (`KeyboardInterrupt`, `SystemExit`, `Interrupted`) is raised.

    >>> attempt(int, "7"), attempt(int, "x").code
    (7, 'internal')
    """
    try:
        return act(*args, **kwargs)
    except Exception as error:
        return error_of(error)


def for_each(act: Callable[[_Item], object], items: Iterable[_Item]) -> None:
    """Do an act on each item. The first `Exception` of an item is raised when it was done on the others.

    A catalog that is away, and what ends the command, is raised at once, as it would end every item.
    """
    first: Exception | None = None
    for item in items:
        try:
            act(item)
        except (CatalogUnavailable, Interrupted):
            raise
        except Exception as error:
            first = first or error
    if first is not None:
        raise first


def error_of(error: Exception) -> CkptError:
    """Return the error with a code, a message and a next step that an item ended with.

    The original exception is its ``__cause__``. ``CKPTCORE_TRACEBACK=1`` shows where a defect is.

    Raises:
        Interrupted: The user stopped the command: no further item begins.
    """
    if isinstance(error, Interrupted):
        raise error
    ended = ended_by(error)
    if ended is not error:
        ended.__cause__ = error
        if os.environ.get("CKPTCORE_TRACEBACK"):
            terminal.report(error)
    return ended


def parsed_or_none(parse: Callable[[str], _Result], text: str) -> _Result | None:
    """Return what a parser makes of text from a stranger, or None if it raises, whatever it raises.

    >>> parsed_or_none(int, "7"), parsed_or_none(int, "seven")
    (7, None)
    """
    try:
        return parse(text)
    except Exception:
        return None
