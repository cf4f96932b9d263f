"""Showing: how does a value from a file stand in a message, in bounded time?"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any


def shown(value: object, length: int = 80) -> str:
    """``repr``, shortened, for values that nobody has checked yet.

    Plain ``repr`` of tuples that share their parts through a pickle's memo can take 2**n steps.

    >>> shown((1, "a"), 5), shown([[[[[0]]]]])
    ("(1, '", '[[[[...]]]]')
    """
    return _SHORT.repr(value)[:length]


def some(names: Sequence[str], count: int = 3) -> str:
    """The first of many names, and how many there are.

    >>> some(["a", "b"]), some(["a", "b", "c", "d"])
    ('a, b', 'a, b, c and 1 more')
    """
    told = ", ".join(shown(n)[1:-1] for n in names[:count])
    return told if len(names) <= count else f"{told} and {len(names) - count} more"


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxtuple, self.maxlist, self.maxdict = 4, 8, 8, 6
        self.maxset = self.maxfrozenset = 6
        self.maxstring, self.maxlong, self.maxother = 300, 80, 200

    def repr_instance(self, x: Any, level: int) -> str:
        # A dataclass's own repr goes as deep as its fields do.
        return f"{type(x).__name__}(...)" if is_dataclass(x) else super().repr_instance(x, level)


_SHORT = _Short()
