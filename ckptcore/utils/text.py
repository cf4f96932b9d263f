"""Shorten values from files for messages, in bounded time."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any

from ckptcore.redaction import beginning, redacted


def short_repr(value: object, length: int = 80) -> str:
    """Return a shortened ``repr`` of an unchecked value.

    Plain ``repr`` of tuples that share their parts through a pickle's memo can take 2**n steps.

    >>> short_repr((1, "a"), 5), short_repr([[[[[0]]]]])
    ("(1, '", '[[[[...]]]]')
    >>> short_repr(1 << 20_000)
    'an integer of 20001 bits'
    """
    return beginning(_SHORT.repr(value), length)


def some(names: Sequence[str], count: int = 3) -> str:
    """Return the first of many names, and how many more there are.

    >>> some(["a", "b"]), some(["a", "b", "c", "d"])
    ('a, b', 'a, b, c and 1 more')
    """
    first = [short_repr(n)[1:-1] for n in names[:count]]
    return listed([*first, *names[count:]], count)


def listed(texts: Sequence[str], count: int = 5) -> str:
    """Return the first of many texts as they are, and how many more there are.

    >>> listed(["a", "b"], 2), listed(["a", "b", "c"], 2)
    ('a, b', 'a, b and 1 more')
    """
    first = ", ".join(texts[:count])
    return first if len(texts) <= count else f"{first} and {len(texts) - count} more"


def count(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural.

    >>> count(1, "file"), count(2, "file")
    ('1 file', '2 files')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxtuple, self.maxlist, self.maxdict = 4, 8, 8, 6
        self.maxset = self.maxfrozenset = 6
        self.maxstring, self.maxlong, self.maxother = 300, 80, 200

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > 8 * self.maxlong:  # repr takes quadratic time, and refuses even longer integers
            return f"an integer of {x.bit_length()} bits"
        return super().repr_int(x, level)

    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(redacted(x), level)

    def repr_instance(self, x: Any, level: int) -> str:
        if hasattr(type(x), "in_messages"):  # what a value of a file is called in a message
            return str(x.in_messages())
        # A dataclass's own repr recurses as deep as its fields.
        return f"{type(x).__name__}(...)" if is_dataclass(x) else super().repr_instance(x, level)


_SHORT = _Short()
