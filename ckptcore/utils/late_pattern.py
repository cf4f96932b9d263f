"""Compile regular expressions when they are first used.

A module of its own, for modules of every room. They have a hundred expressions, of which a command uses a
quarter. Compiling the others took a fiftieth of a small conversion.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, AnyStr

if TYPE_CHECKING:

    def late_pattern(expression: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
        """Return the pattern of an expression."""

else:

    class late_pattern:
        """A `re.Pattern` that is compiled for its first match. Functions of `re` do not take it."""

        def __init__(self, expression: str | bytes, flags: int = 0) -> None:
            self._compile = lambda: re.compile(expression, flags)

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):  # a copy or a pickle asks before there is anything to ask
                raise AttributeError(name)
            # `re` keeps what it has compiled.
            attribute = self.__dict__[name] = getattr(self._compile(), name)
            return attribute
