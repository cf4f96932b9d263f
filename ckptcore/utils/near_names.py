"""Find names near one that does not exist, for the next step of an error.

This is of its own: what of a tensor, an option or a path is near is decided in one place.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_LENGTH = 256  # of names compared letter by letter
_POOL = 2_000  # names compared letter by letter: a million would take minutes


def near_names(name: str, names: Iterable[str], most: int = 3) -> tuple[str, ...]:
    """Return the names that may have been meant by another one, the nearest first.

    First those that have or lack a prefix of it, then those that differ by some letters.

    >>> near_names("norm.weight", ["model.norm.weight", "model.norm.bias", "lm_head.weight"])
    ('model.norm.weight',)
    >>> near_names("stpe-20", ["step-10", "step-20"])
    ('step-20', 'step-10')
    >>> near_names("tinny", ["tiny", "tiny"])  # of a root and of a run
    ('tiny',)
    """
    names = list(dict.fromkeys(names))
    longer = [candidate for candidate in names if candidate.endswith((f".{name}", f"/{name}"))]
    shorter = [candidate for candidate in names if name.endswith((f".{candidate}", f"/{candidate}"))]
    related = sorted(longer, key=len) + sorted(shorter, key=len, reverse=True)
    if not related:
        last = name.rpartition(".")[2]
        if len(names) > _POOL:
            names = [candidate for candidate in names if candidate.rpartition(".")[2] == last][:_POOL]
        # The time of a comparison grows with the square of a name's length, which a file decides.
        short = [candidate for candidate in names if len(candidate) <= _LENGTH and len(name) <= _LENGTH]
        related = get_close_matches(name, short, most, 0.7)
    return tuple(related[:most])


def did_you_mean(name: str, names: Iterable[str], otherwise: str = "") -> str:
    """Return the hint of an error about a name: the near ones, or another next step."""
    near = near_names(name, names)
    return f"did you mean {' or '.join(near)}?" if near else otherwise
