"""Parse JSON from a checkpoint (headers, indices, configs) within the budget of metadata.

Costs are counted from the bytes before anything is parsed. Each object, list and item takes memory that its
few characters do not show, and a header of 90 MB can describe a million tensors.
"""

from __future__ import annotations

import json
from typing import Any

from ckptcore.core.metadata_budget import CONTAINER, meter

# Bytes in all stages, and their time: for a list, a named value, an item after a comma, a character.
_LIST, _NAMED, _ITEM, _CHAR = 512, 512, 48, 6


def parse(raw: bytes | str, what: str) -> Any:
    """Return the value of a JSON text, counted on the reading's meter.

    Args:
        raw: The text.
        what: The file, for messages.

    Raises:
        ValueError: It is not JSON (also RecursionError), or an object has a name twice.
        MetadataTooLarge: It costs too much; nothing was built.
    """
    meter().take(cost(raw), what)
    return loads(raw)


def loads(raw: bytes | str) -> Any:
    """Parse without counting, after the caller has checked `cost`."""
    if isinstance(raw, bytes) and _colons_are_of_names(raw):
        names = 0

        def count(found: dict[str, Any]) -> dict[str, Any]:
            nonlocal names
            names += len(found)
            return found

        value = json.loads(raw, object_hook=count)
        # A colon is behind a name, or inside a text. As many names as colons: none was there twice.
        if names == raw.count(b":"):
            return value
    return json.loads(raw, object_pairs_hook=_no_duplicates)


def _colons_are_of_names(raw: bytes) -> bool:
    """Guess whether names can be counted by their colons, so that large headers are not parsed twice."""
    return b'\\"' not in raw and raw.count(b":") == raw.count(b'":')


def cost(raw: bytes | str) -> int:
    """Estimate the bytes that parsing a text and working with its value take.

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
        raise ValueError("an object has a name twice")
    return found
