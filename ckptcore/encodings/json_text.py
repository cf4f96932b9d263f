"""JSON that a checkpoint holds: headers, indices, configs. What does it say, and what may it cost to read?

Costs are counted from the bytes before anything is parsed: each object, list and item takes memory that its
few characters do not show, and a header of 90 MB can stand for a million tensors.
"""

from __future__ import annotations

import json
from typing import Any

from ckptcore.core.metadata_budget import CONTAINER, meter

# Bytes in all stages, and the time of them: a list, a named value, what follows a comma, a character.
_LIST, _NAMED, _ITEM, _CHAR = 512, 512, 48, 6


def parse(raw: bytes | str, what: str) -> Any:
    """The value of a JSON text, counted on the reading's meter.

    what: the file, for messages. Raises ValueError (or RecursionError) for what is no JSON, and for names
    that stand twice in an object; `MetadataTooLarge` before anything is built.
    """
    meter().take(cost(raw), what)
    return loads(raw)


def loads(raw: bytes | str) -> Any:
    """As `parse`, without counting: for whoever has looked at `cost`."""
    return json.loads(raw, object_pairs_hook=_no_duplicates)


def cost(raw: bytes | str) -> int:
    """About as many bytes as it takes to parse a text and to work with the value.

    >>> cost('{"a": [1, 2]}')
    2174
    """
    if isinstance(raw, str):
        found = [raw.count(mark) for mark in "{[:,"]
    else:
        found = [raw.count(mark) for mark in (b"{", b"[", b":", b",")]
    weights = CONTAINER, _LIST, _NAMED, _ITEM
    return sum(n * weight for n, weight in zip(found, weights, strict=True)) + _CHAR * len(raw)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found
