"""Add the tensors and plain values of a torch file's tree to a manifest, under dotted names.

Dicts, and lists with tensors, are walked. A tensor's name is its path joined with dots, and every other leaf
is an object.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Blob, Item, TensorSpec, Unread, View
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.object_tree import Refused, RefusedTensor, encode
from ckptcore.core.tree_paths import Paths
from ckptcore.encodings.limits import bound_views, expands
from ckptcore.encodings.pickle.torch_globals import StoredView
from ckptcore.encodings.torchzip.reader import Objects, check_view, refused_in
from ckptcore.errors import MalformedCheckpoint, NameMismatch, finding
from ckptcore.formats.common.trees import leaves_below

_MAX_TENSORS = 2_000_000


class TorchTree:
    """Add values of one torch file to a builder; storages become raw items, shared ones once.

    Attributes:
        refused: Name -> value that needs refused globals.
        names: All names, of tensors and objects.
        paths: Their paths in the file's tree.
    """

    def __init__(
        self, builder: Builder, file: int, objects: Objects, path: str, paths: Paths | None = None
    ) -> None:
        """Start without values.

        Args:
            builder: Receives the values.
            file: Number of the file in the builder.
            objects: What was parsed.
            path: Path of the file.
            paths: Receives the paths of the names, beside those of other files.
        """
        self._builder, self._file, self._objects, self._path = builder, file, objects, path
        self._items: dict[str, int] = {}
        self.paths = Paths() if paths is None else paths
        self.names: set[str] = set()
        self._unread: set[str] = set()  # storages of tensors that are not read
        self.refused: dict[str, Any] = {}
        self._views: set[StoredView] = set()
        self._bytes, self._stored = 0, sum(n for _, n, _ in objects.storages.values())

    def add(self, name: str, value: Any) -> None:
        """Add a value under ``name``: a tensor, an object, or every leaf of a container with tensors.

        Raises:
            MalformedCheckpoint: A tensor has no storage, or does not fit it.
            NameMismatch: Two values have one name.
        """
        opened: list[tuple[str, str]] = []
        leaves = leaves_below(value, name, StoredView, opened)
        note_opened(self._builder, opened, self._path)
        for path, below, leaf in leaves:
            if path in self.names:
                raise NameMismatch(f"{self._path}: two values have the name {path}")
            self.names.add(path)
            self.paths.add(path, (name, *below))
            if isinstance(leaf, StoredView):
                self.tensor(path, leaf)
            elif isinstance(leaf, RefusedTensor):
                self._unread.update(leaf.storages)
                add_unread(self._builder, path, leaf, self._path)
            elif add_object(self._builder, path, leaf, self._path):
                self.refused[path] = leaf

    def tensor(self, fqn: str, value: StoredView) -> None:
        """Add a full tensor; one that expands what is stored far beyond is a part that is not read."""
        nbytes = prod(value.shape) * BY_NAME[value.dtype].itemsize
        if value not in self._views and expands(self._bytes + nbytes, self._stored):
            _, length, _ = self._objects.storages.get(value.key, (0, 0, None))
            reason = f"it expands {length} stored bytes to {nbytes}, in a file that stores {self._stored}"
            self._builder.unread(fqn, Unread(reason, value.dtype, value.shape, self._path))
            self._unread.add(value.key)
            return
        item, view = self.place(value, fqn)
        number = self._builder.tensor(TensorSpec(fqn, value.dtype, value.shape))
        self._builder.chunk(number, (0,) * len(value.shape), value.shape, item, view)
        if len(self._builder.tensors) > _MAX_TENSORS:
            raise MalformedCheckpoint(f"{self._path} refers to more than 2 * 10^6 tensors")

    def place(self, value: StoredView, fqn: str) -> tuple[int, View]:
        """Return the item of a tensor's storage, and the tensor's view into it."""
        objects, path = self._objects, self._path
        if value.key not in objects.storages:
            raise MalformedCheckpoint(f"{path} has no storage {value.key!r} for {fqn}")
        start, length, crc = objects.storages[value.key]
        if value.key not in self._items:
            self._items[value.key] = self._builder.item(Item(self._file, start, length, crc32=crc))
        if value not in self._views:  # a flat parameter is placed once for each of its parts
            self._views.add(value)
            self._bytes += prod(value.shape) * BY_NAME[value.dtype].itemsize
            bound_views(self._bytes, self._stored, path)
        return self._items[value.key], check_view(value, length, 0, path, objects.swapped)

    def leave_out(self, storages: Iterable[str]) -> None:
        """Note storages of values that are reported as unreadable elsewhere."""
        self._unread.update(storages)

    def require_all(self) -> None:
        """Note the refused values that may contain the unused storages.

        A pickle does not record which of them does, so each is noted. Without any, nothing refers to the
        storages (finding ``unused-bytes``).
        """
        used_storages = self._items.keys() | self._unread
        unused = sum(n for k, (_, n, _) in self._objects.storages.items() if k not in used_storages)
        if unused and self.refused:
            note_hidden(
                self._builder,
                {
                    path: (isinstance(v, Refused), refused_in(v), self._path)
                    for path, v in self.refused.items()
                },
                unused,
            )


def note_opened(builder: Builder, opened: Iterable[tuple[str, str]], file: str) -> None:
    """Note containers of libraries, as (name, kind), that their tensors make plain dicts or lists."""
    for name, kind in opened:
        message = f"{name} ({kind}) holds tensors: it is a dict or list"
        builder.report("restated-value", "files", message, fqn=name, file=file)


def note_hidden(
    builder: Builder, refused: Mapping[str, tuple[bool, tuple[str, ...], str]], nbytes: int
) -> None:
    """Note that ``nbytes`` of tensors are inside refused values, any of which may contain them.

    A value that was refused entirely counts as a tensor that cannot be read. One that was refused in part
    stays an object with tensors inside.

    Args:
        builder: Receives the notes.
        refused: Name -> (whether all of the value was refused, what it needs, its file).
        nbytes: Bytes of the tensors.
    """
    hidden = f"{nbytes} bytes of tensors inside refused values cannot be read"
    builder.unread_instead(
        {
            name: Unread(f"it needs {', '.join(needs)}, and {hidden}", file=file)
            for name, (entire, needs, file) in refused.items()
            if entire
        }
    )
    for name, (_, needs, _) in refused.items():
        message = f"{name} may contain tensors: it needs {', '.join(needs)}, and {hidden}"
        builder.report("refused-tensors", "coverage", message, fqn=name)


def note_hidden_at(builder: Builder, name: str, value: Refused, nbytes: int, file: str) -> None:
    """Note a refused value in the place of a tensor as a tensor that cannot be read."""
    hidden = f"{nbytes} bytes of tensors inside refused values cannot be read"
    builder.unread(name, Unread(f"it needs {value.name}, and {hidden}", file=file))


def add_odd_piece(builder: Builder, fqn: str, value: Refused, file: str) -> None:
    """Note that one rank's piece of a tensor cannot be read, so that the tensor cannot be read either."""
    piece = f"its piece in {file}"
    if isinstance(value, RefusedTensor) and not value.foreign:
        reason = f"is {value.reason}" if value.reason else f"has dtype {value.dtype}, which is not supported"
        builder.withdraw(fqn, Unread(f"{piece} {reason}", value.dtype, file=file))
        return
    builder.withdraw(fqn, Unread(f"{piece} needs {value.name}", file=file))
    builder.report("refused-global", "files", f"{fqn} needs {value.name}", fqn=fqn, file=file)


def add_unread(builder: Builder, name: str, value: RefusedTensor, file: str) -> None:
    """Add a refused tensor of a file as one that cannot be read."""
    reason = f"{value.reason} is not supported" if value.reason else f"dtype {value.dtype} is not supported"
    why = Unread(reason, value.dtype, value.shape, file)
    if not value.foreign:
        builder.unread(name, why)
        return
    builder.unread(name, why, (value.name,))
    builder.findings += [
        finding("refused-global", "files", f"object {name} needs {value.name}", fqn=name),
        finding(
            "refused-tensors", "coverage", f"cannot read the values of {name}: it is {value.reason}", fqn=name
        ),
    ]


def add_object(builder: Builder, fqn: str, value: Any, path: str) -> bool:
    """Add a plain value, and return whether it needs refused globals.

    Such a value becomes a finding, and a blob without a tree.

    Args:
        builder: Receives the value.
        fqn: Its name.
        value: The value.
        path: Path of its file.
    """
    names = refused_in(value)
    if names:
        builder.report("refused-global", "files", f"object {fqn} needs {', '.join(names)}", fqn=fqn)
        builder.blobs.append(Blob(fqn, -1, None, names, known=False))
        return True
    try:
        builder.blobs.append(Blob(fqn, -1, encode(value)))
    except (TypeError, RecursionError) as error:
        raise MalformedCheckpoint(f"{path}: object {fqn}: {error}") from error
    return False
