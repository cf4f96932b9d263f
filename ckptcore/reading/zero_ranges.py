"""Read ranges that are padding if all of their bytes are zero.

A module of its own, because readers of files and of items both ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from ckptcore.core.byte_ledger import UnusedBytes
from ckptcore.errors import CkptError
from ckptcore.store import Readable

_BLOCK = 1 << 20


def is_zero(read: Callable[[int, int], bytes], start: int, end: int) -> bool:
    """Report whether all bytes of a range are zero. read: (first byte, count) -> these bytes."""
    return all(
        block.count(0) == len(block)
        for first in range(start, end, _BLOCK)
        for block in (read(first, min(_BLOCK, end - first)),)
    )


def without_padding(unused: Iterable[UnusedBytes], store: Readable) -> Iterator[UnusedBytes]:
    """Yield unused bytes but for those that are padding; what cannot be read may hold anything.

    Raises:
        CkptError: A file cannot be read now, and a retry may help.
    """
    for span in unused:
        try:
            if not (span.padding and is_zero(partial(store.read, span.file), span.start, span.end)):
                yield replace(span, padding=False)
        except CkptError as error:
            if error.transient:
                raise
            yield replace(span, padding=False)
