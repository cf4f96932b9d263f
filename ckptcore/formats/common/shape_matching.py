"""Match lists of shapes to a row of shapes where only one way exists, in order and each place once.

A place is forced when the first and the last place that an element can have are the same. A forced place is
removed from the choices of all others, until no new place is found. The method is sound but not complete: an
element that stays open may still have one solution, and counts as open.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

Shape = tuple[int, ...]
Places = list[int | None]

# More rounds only fix more places: stopping early leaves places open, and no place wrong.
_ROUNDS = 32


class Row:
    """A row of shapes, indexed for many lookups."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self.length = len(shapes)
        self.front, self.back = _Matches(shapes), _Matches(shapes[::-1])


def forced_places(row: Row, chains: Sequence[Sequence[Shape | None]]) -> list[Places] | None:
    """Find the only possible place of each element of each chain.

    Args:
        row: Shapes to match.
        chains: Lists of shapes, each in the order of the row. A shape of None fits every place.

    Returns:
        Per chain, the places in ``row``, None where a place is open. None when the chains do not fit.

    >>> forced_places(Row([(1,), (2,), (1,)]), [[(2,), (1,)]]), forced_places(Row([(1,), (1,)]), [[(1,)]])
    ([[1, 2]], [[None]])
    >>> forced_places(Row([(1,), (2,)]), [[(2,), (1,)]])
    """
    chain_places: list[Places] = [[None] * len(chain) for chain in chains]
    taken: set[int] = set()
    for _ in range(_ROUNDS if len(chains) > 1 else 1):  # one chain takes nothing from itself
        taken_from_back = {row.length - 1 - p for p in taken}
        for chain, places in zip(chains, chain_places, strict=True):
            first = row.front.places(chain, places, taken)
            mirrored = row.back.places(chain[::-1], _mirrored(places, row.length), taken_from_back)
            if first is None or mirrored is None:
                return None
            last = _mirrored(mirrored, row.length)
            places[:] = [p if p == q else None for p, q in zip(first, last, strict=True)]
        forced = [p for places in chain_places for p in places if p is not None]
        if len(set(forced)) < len(forced):
            return None
        if len(forced) == len(taken):
            break
        taken = set(forced)
    return chain_places


class _Matches:
    """A row as seen from one end."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self._all = range(len(shapes))
        self._by: dict[Shape, list[int]] = {}
        for n, shape in enumerate(shapes):
            self._by.setdefault(shape, []).append(n)

    def places(self, chain: Sequence[Shape | None], fixed: Places, taken: set[int]) -> list[int] | None:
        """Return the first place that each element can have; None when the chain does not fit."""
        first_places: list[int] = []
        next_free = 0
        for shape, place in zip(chain, fixed, strict=True):
            if place is None:
                free = self._all if shape is None else self._by.get(shape, [])
                n = bisect_left(free, next_free)
                while n < len(free) and free[n] in taken:
                    n += 1
                place = free[n] if n < len(free) else -1
            if place < next_free:
                return None
            first_places.append(place)
            next_free = place + 1
        return first_places


def _mirrored(places: Sequence[int | None], length: int) -> Places:
    return [None if p is None else length - 1 - p for p in reversed(places)]
