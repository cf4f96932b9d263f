"""Match names with globs, and find globs that match given names and no others."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

_MOST = 8  # globs in a message


def matches(name: str, globs: Sequence[str]) -> bool:
    """Report whether any glob matches; ``*`` crosses dots."""
    return any(fnmatchcase(name, g) for g in globs)


def escaped(name: str) -> str:
    """Return the glob that matches this name alone.

    >>> escaped("model.w[0]")
    'model.w[[]0]'
    """
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def covering(names: Sequence[str], unmatched: Collection[str]) -> list[str]:
    """Return globs that match every one of ``names`` and none of ``unmatched``, few where possible.

    It tries one glob for all, one for each last part of a dotted name, and the names themselves.

    >>> covering(["a.0.scale", "a.1.scale"], ["a.0.w"])
    ['a.*.scale']
    >>> covering(["a.0.w", "b.s"], ["a.1.w"])
    ['a.0.w', 'b.s']
    """
    common = _around(names, unmatched)
    if common:
        return [common]
    ends: dict[str, list[str]] = {}
    for name in names:
        ends.setdefault(name.rpartition(".")[2], []).append(name)
    globs: list[str] = []
    for group in ends.values():
        glob = _around(group, unmatched) if len(ends) > 1 else None
        globs += [glob] if glob else map(escaped, group)
    return globs


def leave_out(names: Sequence[str], unmatched: Collection[str] = (), *, left: bool = True) -> str:
    """Return the hint for tensors or objects of these names that cannot be read, while ``unmatched`` can.

    Args:
        names: What cannot be read.
        unmatched: Names that no glob may match.
        left: Whether any tensor is left without them.

    >>> leave_out(["a"])
    "leave it out with --exclude 'a'; everything else can be converted"
    """
    if not left:
        return "load it where its classes are installed, and save a state dict: no other tensor is here"
    globs = covering(names, unmatched) if names[1:] else [escaped(n) for n in names]
    options = " ".join(f"--exclude '{g}'" for g in globs[:_MOST])
    return f"leave it out with {options}{', ...' if globs[_MOST:] else ''}; everything else can be converted"


def _around(names: Sequence[str], unmatched: Collection[str]) -> str | None:
    """Return the common beginning and end of names as one glob; None where it matches another name."""
    if len(names) < 2:
        return escaped(names[0]) if names else None
    head = _shared(names)
    # Behind the common beginning: both may not share characters of the shortest name.
    tail = _shared([n[len(head) :][::-1] for n in names])[::-1]
    glob = f"{escaped(head)}*{escaped(tail)}"
    return None if any(fnmatchcase(n, glob) for n in unmatched) else glob


def _shared(names: Sequence[str]) -> str:
    """Return the common beginning of all names, which is that of the first and the last of them."""
    first, last = min(names), max(names)
    return next((first[:n] for n, c in enumerate(first) if last[n : n + 1] != c), first)
