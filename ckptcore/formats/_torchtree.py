"""A torch file's tree: its tensors and plain values, put into a manifest under dotted names.

Dicts (and lists that hold tensors) are walked; a tensor's name is its path joined with dots, and
every other leaf is an object.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ckptcore.builder import Builder
from ckptcore.dtype import BY_NAME
from ckptcore.errors import MalformedCheckpoint, NameMismatch, UnsupportedFormat, finding
from ckptcore.formats._bounds import bound_views
from ckptcore.formats._torchtables import StoredView
from ckptcore.formats._torchzip import Objects, check_view, refused_in
from ckptcore.formats._trees import leaves_below
from ckptcore.manifest import Blob, Item, TensorSpec, View
from ckptcore.objects import encode

_MAX_TENSORS = 2_000_000


class TorchTree:
    """Adds values of one torch file to a builder; storages become raw items, shared ones once."""

    def __init__(self, builder: Builder, file: int, objects: Objects, what: str) -> None:
        self._builder, self._file, self._objects, self._what = builder, file, objects, what
        self._items: dict[str, int] = {}
        self._names: set[str] = set()
        self._views: set[StoredView] = set()
        self._bytes, self._stored = 0, sum(n for _, n, _ in objects.storages.values())

    def add(self, name: str, value: Any) -> None:
        """Adds a value under ``name``: a tensor, an object, or every leaf of what holds tensors.

        Raises `MalformedCheckpoint`, and `NameMismatch` when a name is taken.
        """
        for path, _, leaf in leaves_below(value, name, StoredView):
            if path in self._names:
                raise NameMismatch(f"{self._what}: two values are called {path}")
            self._names.add(path)
            if isinstance(leaf, StoredView):
                self.tensor(path, leaf)
            else:
                add_object(self._builder, path, leaf, self._what)

    def tensor(self, fqn: str, value: StoredView) -> None:
        """Adds one tensor, whole."""
        item, view = self.place(value, fqn)
        at = self._builder.tensor(TensorSpec(fqn, value.dtype, value.shape))
        self._builder.chunk(at, (0,) * len(value.shape), value.shape, item, view)
        if len(self._builder.tensors) > _MAX_TENSORS:
            raise MalformedCheckpoint(f"{self._what} refers to more than 2 * 10^6 tensors")

    def place(self, value: StoredView, fqn: str) -> tuple[int, View]:
        """The item of a tensor's storage, and the tensor's view into it."""
        objects, what = self._objects, self._what
        if value.key not in objects.storages:
            raise MalformedCheckpoint(f"{what} has no storage {value.key!r} for {fqn}")
        start, length, crc = objects.storages[value.key]
        if value.key not in self._items:
            self._items[value.key] = self._builder.item(Item(self._file, start, length, crc32=crc))
        if value not in self._views:  # a flat parameter is placed once for each of its parts
            self._views.add(value)
            self._bytes += prod(value.shape) * BY_NAME[value.dtype].itemsize
            bound_views(self._bytes, self._stored, what)
        return self._items[value.key], check_view(value, length, 0, what, objects.swapped)

    def require_all(self) -> None:
        """Raises `UnsupportedFormat` when storages were not reached: refused classes hold them."""
        unused = [n for k, (_, n, _) in self._objects.storages.items() if n and k not in self._items]
        if unused:
            told = ", ".join(self._objects.refused) or "a class that is not known here"
            raise UnsupportedFormat(
                f"{self._what} holds {sum(unused)} bytes of tensors inside {told}: they cannot be taken out",
                hint="save a plain dict of tensors",
            )


def add_object(builder: Builder, fqn: str, value: Any, what: str) -> None:
    """Adds a plain value; one that needs refused globals becomes a finding and a blob without tree."""
    names = refused_in(value)
    if names:
        builder.findings.append(
            finding("refused-global", "files", f"object {fqn} needs {', '.join(names)}", fqn=fqn)
        )
        builder.blobs.append(Blob(fqn, -1, None, names, known=False))
        return
    try:
        builder.blobs.append(Blob(fqn, -1, encode(value)))
    except (TypeError, RecursionError) as error:
        raise MalformedCheckpoint(f"{what}: object {fqn}: {error}") from error
