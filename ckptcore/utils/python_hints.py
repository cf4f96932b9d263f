"""Let the next steps of errors speak Python in Python: ``overwrite=True`` instead of ``--overwrite``.

Errors name the options of the command line, because most people meet them there. The Python API has the same
options as keyword arguments, and says them so. Whole commands stay commands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import wraps
from typing import ParamSpec, TypeVar

from ckptcore.errors import CkptError

P = ParamSpec("P")
R = TypeVar("R")

# A command as a whole, or an option with what may be its value: quoted, a placeholder, or a word with a sign
# that English text lacks, or a prefix of names.
_OPTION = re.compile(
    r"`[^`]*`|\bckptcore [a-z].*|--(?P<name>[a-z][a-z-]*[a-z])"
    r"(?P<value>[ =](?:'[^']*'|\"[^\"]*\"|[A-Z]+\b|[\w.*/-]*[\d=*_/](?:[\w.*=/-]|,(?=\w))*|[\w.]+\.(?!\w)))?"
)


_HELP = "`ckptcore COMMAND --help`"


def in_python(
    hint: str, names: Collection[str], switches: Collection[str] = (), literals: Collection[str] = ()
) -> str:
    """Return a hint with keyword arguments instead of options.

    Args:
        hint: The hint of an error.
        names: Of all arguments; another option is another program's.
        switches: Names of those that are True or False.
        literals: Values that some argument accepts by name, such as ``stored``.

    >>> in_python("choose another, or --overwrite", ["overwrite"], ["overwrite"])
    'choose another, or overwrite=True'
    >>> in_python("leave it out with --exclude 'optim.*', or hf download --local-dir DIR", ["exclude"])
    "leave it out with exclude='optim.*', or hf download --local-dir DIR"
    >>> in_python("name another --catalog URL, or pass --no-catalog", ["catalog", "no_catalog"])
    'name another catalog=URL, or pass catalog=False'
    >>> in_python("try --config FOLDER, or --names stored", ["config", "names"], literals=["stored"])
    "try config=FOLDER, or names='stored'"
    """

    def keyword(option: re.Match[str]) -> str:
        if option["name"] is None:
            return option[0]
        name, value = option["name"].replace("-", "_"), option["value"] or ""
        positive = name.removeprefix("no_")
        if positive in switches or (positive != name and positive in names):
            return f"{positive}={positive == name}{value}"
        if name not in names:
            return option[0]
        text = value[1:]
        if not text or text.isupper() or text[0] in "'\"":
            return f"{name}={text}"
        return f"{name}='{text}'"

    if literals:  # quoted, they are values for certain
        hint = re.sub(rf"(--[a-z-]+) ({'|'.join(map(re.escape, literals))})\b", r"\1 '\2'", hint)
    return _OPTION.sub(keyword, hint)


def _note(error: CkptError) -> None:
    """Let a traceback end with the next step: most people see nothing else of an error."""
    note = f"next: {error.hint}"
    if error.hint and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def speaking_python(
    arguments: Callable[[], tuple[Collection[str], Collection[str], Collection[str]]],
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator of functions whose errors name keyword arguments.

    arguments: returns the names, switches and literals of `in_python`, when they are needed.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except CkptError as error:
                hint = error.hint.replace(_HELP, f"`help(ckptcore.{function.__name__})`")
                error.hint = in_python(hint, *arguments())
                _note(error)
                raise

        return call

    return decorate
