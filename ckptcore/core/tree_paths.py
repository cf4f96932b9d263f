"""Record the path of each name in the saved tree.

A name is its path joined with dots. It does not show which dots were part of a dict key, or which elements
were list positions. Paths from savers that record them (DCP's ``planner_data``) are kept compactly: the
lengths of a name's elements give the cuts, and most names share theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptcore.core.manifest import Manifest

Path = tuple[str | int, ...]
_MAX_ELEMENTS = 64


class Paths(Mapping[str, Path]):
    """Name -> path, in the order in which the names were saved.

    Dict keys are text, list positions are ints. Names whose path is unknown are absent.
    """

    def __init__(self) -> None:
        # Names of millions of tensors have few different cuts: layers differ in digits, rarely in lengths.
        # Element lengths, negative for a list position; one row for all names with the same cuts.
        self._cuts: list[tuple[int, ...]] = []
        self._rows: dict[tuple[int, ...], int] = {}
        self._row_of: dict[str, int] = {}

    def __getitem__(self, name: str) -> Path:
        out: list[str | int] = []
        position = 0
        for length in self._cuts[self._row_of[name]]:
            text = name[position : position + abs(length)]
            out.append(text if length >= 0 else int(text))
            position += abs(length) + 1
        return tuple(out)

    def __iter__(self) -> Iterator[str]:
        return iter(self._row_of)

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, name: object) -> bool:
        return name in self._row_of  # without building its path

    @property
    def nest(self) -> bool:
        """Return whether any path has several elements."""
        return any(len(cuts) > 1 for cuts in self._cuts)

    def container(self, name: str) -> str:
        """Return a name up to its path's last element, with the dot; "" where that is all, or unknown."""
        row = self._row_of.get(name)
        cuts = self._cuts[row] if row is not None else ()
        # A container is asked for by name for every tensor, so the path is not built for it.
        return name[: len(name) - abs(cuts[-1])] if len(cuts) > 1 else ""

    def add(self, name: str, path: Any) -> bool:
        """Record a path; False if it is not a valid path, or not the path of this name."""
        if type(path) is not tuple or not 0 < len(path) <= _MAX_ELEMENTS:
            return False
        try:  # nearly all names: one call instead of one per element, for millions of names
            text, cuts = ".".join(path), tuple(map(len, path))
        except TypeError:
            # `join` has refused an element that is no text: a list
            # position is an int, anything else is no path.
            if any(type(e) is not str and (type(e) is not int or e < 0) for e in path):
                return False
            text = ".".join(map(str, path))
            # A list, as a generator costs a call for each of a few elements.
            cuts = tuple([len(e) if type(e) is str else -len(str(e)) for e in path])
        # The path must spell the name, else its cuts say nothing about it.
        if text != name:
            return False
        self._put(name, cuts)
        return True

    def _put(self, name: str, cuts: tuple[int, ...]) -> None:
        self._row_of[name] = self._row(cuts)

    def _row(self, cuts: tuple[int, ...]) -> int:
        row = self._rows.get(cuts)
        if row is None:
            row = self._rows[cuts] = len(self._cuts)
            self._cuts.append(cuts)
        return row

    def form(self, tensors: Sequence[str], objects: Sequence[str]) -> dict[str, Any] | None:
        """Return the JSON form for a manifest with these tensors and objects; None when no path is known.

        Its keys are ``cuts``, rows of element lengths; ``tensors`` and ``objects``, the row of each, -1 where
        unknown; ``order``, how many known names were saved before each known object.
        """
        if not self._row_of:
            return None
        object_names = set(objects)
        # How many names came before: objects and tensors are in two
        # lists, and their common order would be lost.
        before = {name: n for n, name in enumerate(self._row_of) if name in object_names}
        return {
            "cuts": [list(c) for c in self._cuts],
            "tensors": [self._row_of.get(name, -1) for name in tensors],
            "objects": [self._row_of.get(name, -1) for name in objects],
            "order": [before.get(name, -1) for name in objects],
        }

    @classmethod
    def of(cls, manifest: Manifest) -> Paths:
        """Return the paths that a manifest's ``origin`` records."""
        paths = cls()
        form = manifest.origin.get("paths")
        # The record does not describe a manifest whose tensors were regrouped.
        if not form or (len(form["tensors"]), len(form["objects"])) != (
            len(manifest.tensors),
            len(manifest.blobs),
        ):
            return paths
        cuts = [tuple(c) for c in form["cuts"]]
        object_paths = sorted(
            (position, blob.key, row)
            for position, blob, row in zip(form["order"], manifest.blobs, form["objects"], strict=True)
            if row >= 0
        )
        # The next one is at the end, where `pop` takes no time.
        object_paths.reverse()
        rows: dict[int, int] = {}  # row of the record -> row here
        for spec, row in zip(manifest.tensors, form["tensors"], strict=True):
            if row < 0:
                continue
            # An object comes as soon as as many names are there as came before it when it was saved.
            while object_paths and object_paths[-1][0] <= len(paths._row_of):
                _, key, row_of_object = object_paths.pop()
                paths._put(key, cuts[row_of_object])
            if row not in rows:
                rows[row] = paths._row(cuts[row])
            paths._row_of[spec.fqn] = rows[row]
        # Objects behind the last tensor, in their order: the list is reversed.
        for _, key, row_of_object in reversed(object_paths):
            paths._put(key, cuts[row_of_object])
        return paths


def renamed(path: Path, name: str) -> Path | None:
    """Return the path of a name that differs from the path's own inside one dict key; None otherwise.

    >>> renamed(("model", "net.w"), "model.body.w")
    ('model', 'body.w')
    """
    texts = [str(e) for e in path]
    # The part that differs must be inside one key: the texts before and behind it are
    # kept, and the key takes what is between them.
    for n, element in enumerate(path):
        head = "".join(t + "." for t in texts[:n])
        tail = "".join("." + t for t in texts[n + 1 :])
        middle = name[len(head) : len(name) - len(tail)]
        if type(element) is str and middle and name == head + middle + tail:
            return (*path[:n], middle, *path[n + 1 :])
    return None
