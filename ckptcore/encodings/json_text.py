"""Parse JSON from a checkpoint (headers, indices, configs) within the budget of metadata.

Costs are counted from the bytes before anything is parsed. Each object, list and item takes memory that its
few characters do not show, and a header of 90 MB can describe a million tensors.
"""

from __future__ import annotations

from typing import Any

from ckptcore.core.metadata_budget import CONTAINER, meter
from ckptcore.utils.foreign_text import MAX_DEPTH, load_json

# Bytes in all stages, and their time: for a list, a named value, an item after a comma, a character.
_LIST, _NAMED, _ITEM, _CHAR = 512, 512, 48, 6


def parse(raw: bytes | str, label: str, depth: int = MAX_DEPTH) -> Any:
    """Return the value of a JSON text, counted on the reading's meter.

    Args:
        raw: The text.
        label: The file, for messages.
        depth: How deep containers may nest.

    Raises:
        InvalidText: It is not JSON, or an object has a name twice.
        MetadataTooLarge: It costs too much; nothing was built.
    """
    meter().take(cost(raw), label)
    return load_json(raw, unique=True, depth=depth)


def cost(raw: bytes | str) -> int:
    """Estimate the bytes that parsing a text and working with its value take.

    >>> cost('{"a": [1, 2]}')
    2174
    """
    if isinstance(raw, str):
        counts = [raw.count(mark) for mark in "{[:,"]
    else:
        counts = [raw.count(mark) for mark in (b"{", b"[", b":", b",")]
    weights = CONTAINER, _LIST, _NAMED, _ITEM
    return sum(n * weight for n, weight in zip(counts, weights, strict=True)) + _CHAR * len(raw)
