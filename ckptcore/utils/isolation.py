"""Keep the trouble of one item its own, and that of foreign text, whatever raises it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ckptcore.errors import CkptError, ended_by

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def attempt(
    act: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
) -> _Result | CkptError:
    """Return what an act on one item returns, or the error to record for it if it raises any `Exception`.

    A loop over items calls this for each of them: what a library raises for one item, documented or not, has
    a code, a message and a next step, and the other items go on. The original exception is the ``__cause__``
    of the returned error. What ends the process (`KeyboardInterrupt`, `SystemExit`) is raised.

    >>> attempt(int, "7"), attempt(int, "x").code
    (7, 'internal')
    """
    try:
        return act(*args, **kwargs)
    except Exception as error:
        ended = ended_by(error)
        if ended is not error:
            ended.__cause__ = error
        return ended


def parsed_or_none(parse: Callable[[str], _Result], text: str) -> _Result | None:
    """Return what a parser makes of text from a stranger, or None if it raises, whatever it raises.

    >>> parsed_or_none(int, "7"), parsed_or_none(int, "seven")
    (7, None)
    """
    value = attempt(parse, text)
    return None if isinstance(value, CkptError) else value
