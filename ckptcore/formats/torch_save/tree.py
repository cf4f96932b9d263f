"""A torch file's tree: its tensors and plain values, put into a manifest under dotted names.

Dicts (and lists that hold tensors) are walked; a tensor's name is its path joined with dots, and
every other leaf is an object.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Blob, Item, TensorSpec, Unread, View
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.object_tree import Refused, RefusedTensor, encode
from ckptcore.encodings.limits import bound_views
from ckptcore.encodings.pickle.torch_globals import StoredView
from ckptcore.encodings.torchzip.reader import Objects, check_view, refused_in
from ckptcore.errors import MalformedCheckpoint, NameMismatch, UnsupportedFormat, finding
from ckptcore.formats.common.trees import leaves_below

_MAX_TENSORS = 2_000_000


class TorchTree:
    """Adds values of one torch file to a builder; storages become raw items, shared ones once."""

    def __init__(self, builder: Builder, file: int, objects: Objects, what: str) -> None:
        self._builder, self._file, self._objects, self._what = builder, file, objects, what
        self._items: dict[str, int] = {}
        self._names: set[str] = set()
        self._unread: set[str] = set()  # storages of tensors that are not read
        self.refused: dict[str, Any] = {}  # name -> value that needs refused globals
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
            elif isinstance(leaf, RefusedTensor):
                self._unread.update(leaf.storages)
                add_unread(self._builder, path, leaf, self._what)
            elif add_object(self._builder, path, leaf, self._what):
                self.refused[path] = leaf

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
        """Notes the parts that can hold storages which were not reached: refused classes hold them.

        Nothing in a pickle tells which of them: each may be meant. Raises `UnsupportedFormat` when no part
        can.
        """
        known = self._items.keys() | self._unread
        unused = sum(n for k, (_, n, _) in self._objects.storages.items() if k not in known)
        if not unused:
            return
        if not self.refused:
            raise UnsupportedFormat(
                f"{self._what} holds {unused} bytes of tensors that nothing in it refers to",
                hint="save a plain dict of tensors",
            )
        note_hidden(
            self._builder,
            {path: (isinstance(v, Refused), refused_in(v), self._what) for path, v in self.refused.items()},
            unused,
        )


def note_hidden(
    builder: Builder, refused: Mapping[str, tuple[bool, tuple[str, ...], str]], nbytes: int
) -> None:
    """Notes that ``nbytes`` of tensors can only be inside values that were refused, and may be in any of
    them.

    refused: name -> (whether all of the value was refused, what it needs, its file). Such a value is taken
    for a tensor that cannot be read; one that is refused in part is an object with tensors inside.
    """
    held = f"{nbytes} bytes of tensors inside what is refused cannot be taken out"
    builder.unread_instead(
        {
            name: Unread(f"it needs {', '.join(needs)}, and {held}", file=file)
            for name, (whole, needs, file) in refused.items()
            if whole
        }
    )
    for name, (_, needs, _) in refused.items():
        message = f"{name} may hold tensors: it needs {', '.join(needs)}, and {held}"
        builder.findings.append(finding("refused-tensors", "cover", message, fqn=name))


def note_hidden_at(builder: Builder, name: str, value: Refused, nbytes: int, file: str) -> None:
    """Notes a value that was refused where a tensor belongs, as one that cannot be read."""
    held = f"{nbytes} bytes of tensors inside what is refused cannot be taken out"
    builder.unread(name, Unread(f"it needs {value.name}, and {held}", file=file))


def add_odd_piece(builder: Builder, fqn: str, value: Refused, file: str) -> None:
    """Notes that one rank's piece of a tensor cannot be read, and so the tensor cannot, whatever others
    hold of it."""
    piece = f"its piece in {file}"
    if isinstance(value, RefusedTensor) and not value.foreign:
        reason = f"is {value.what}" if value.what else f"is of dtype {value.dtype}, which is not held"
        builder.withdraw(fqn, Unread(f"{piece} {reason}", value.dtype, file=file))
        return
    builder.withdraw(fqn, Unread(f"{piece} needs {value.name}", file=file))
    builder.findings.append(
        finding("refused-global", "files", f"{fqn} needs {value.name}", fqn=fqn, file=file)
    )


def add_unread(builder: Builder, name: str, value: RefusedTensor, file: str) -> None:
    """Adds a refused tensor of a file as one that cannot be read."""
    reason = f"{value.what} is not read" if value.what else f"dtype {value.dtype} is not held"
    why = Unread(reason, value.dtype, value.shape, file)
    if not value.foreign:
        builder.unread(name, why)
        return
    builder.unread(name, why, (value.name,))
    builder.findings += [
        finding("refused-global", "files", f"object {name} needs {value.name}", fqn=name),
        finding(
            "refused-tensors", "cover", f"{name} is {value.what}: its values cannot be taken out", fqn=name
        ),
    ]


def add_object(builder: Builder, fqn: str, value: Any, what: str) -> bool:
    """Adds a plain value; gives whether it needs refused globals: it becomes a finding and a blob without
    tree."""
    names = refused_in(value)
    if names:
        builder.findings.append(
            finding("refused-global", "files", f"object {fqn} needs {', '.join(names)}", fqn=fqn)
        )
        builder.blobs.append(Blob(fqn, -1, None, names, known=False))
        return True
    try:
        builder.blobs.append(Blob(fqn, -1, encode(value)))
    except (TypeError, RecursionError) as error:
        raise MalformedCheckpoint(f"{what}: object {fqn}: {error}") from error
    return False
