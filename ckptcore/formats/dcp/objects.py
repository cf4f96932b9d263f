"""Read the byte items of a DCP folder: plain values, and the tensors inside them.

Each item is a torch zip of one Python object. The items are at the start of each file, back to back, so they
are read in a few large ranges and parsed in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptcore.core.manifest import Blob, Envelope, Item, TensorSpec, View
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.metadata_budget import meter, passing
from ckptcore.core.object_tree import SCALARS, Named, Refused, TensorRef, encode, weight
from ckptcore.encodings.codecs import decode_small
from ckptcore.encodings.limits import bound_views
from ckptcore.encodings.pickle.torch_globals import OBJECT_TABLE, StoredView, storages_in
from ckptcore.encodings.torchzip.archive import Reader
from ckptcore.encodings.torchzip.reader import Objects, check_view, read_objects
from ckptcore.errors import (
    ChecksumMismatch,
    CkptError,
    MalformedCheckpoint,
    MetadataTooLarge,
    UnsafeContent,
    finding,
)
from ckptcore.store import Readable
from ckptcore.store.subfolder import FileRange

_GAP, _RANGE = 64 << 10, 8 << 20
_CODES = ((ChecksumMismatch, "crc-mismatch"), (UnsafeContent, "bad-path"))
_SHARED = 4  # how many times the bytes of a file may be read for its objects
_NAMESPACE_KINDS = ("namespace", "simplenamespace")
_MAX_OBJECT = 64 << 20  # larger ones are read in place, never into memory at once


@dataclass(frozen=True, slots=True)
class ObjectRules:
    """How a format reads the byte items of its DCP folder.

    Attributes:
        parse: Returns an item's tree.
        adapt: (key, parsed objects, the item's reader) -> (objects that the key means, paths of the parts
            left out).
    """

    adapt: Callable[[str, Objects, Reader], tuple[Objects, tuple[str, ...]]]
    parse: Callable[[FileRange, str], Objects] = read_objects


def _without_refused(key: str, objects: Objects, read: Reader) -> tuple[Objects, tuple[str, ...]]:
    """Leave out the attributes of a namespace that need refused globals; other objects stay complete."""
    tree = objects.tree
    # Only a namespace: its attributes are apart from each other, while a dict with a part left
    # out could be taken for all of what was saved.
    if not objects.refused or not isinstance(tree, Named) or tree.kind not in _NAMESPACE_KINDS:
        return objects, ()
    lost = {name for name, value in tree.value.items() if _has_refused(value)}
    kept_values = {name: value for name, value in tree.value.items() if name not in lost}
    return replace(objects, tree=Named(tree.kind, kept_values)), tuple(
        f"{key}.{name}" for name in sorted(lost)
    )


def _has_refused(tree: Any) -> bool:
    queue, visited = [tree], set[int]()
    # Without recursion, and each container once: the tree may be deep, and may contain itself.
    while queue:
        value = queue.pop()
        if isinstance(value, Refused):
            return True
        if isinstance(value, Named):
            queue.append(value.value)
        elif isinstance(value, (dict, list, tuple)) and id(value) not in visited:
            visited.add(id(value))
            queue += [*value, *value.values()] if isinstance(value, dict) else value
    return False


PLAIN = ObjectRules(adapt=_without_refused)


def add_blobs(
    builder: Builder,
    store: Readable,
    blobs: Mapping[str, Item],
    rank_copies: Sequence[tuple[str, Item]],
    rules: ObjectRules,
) -> None:
    """Add every byte item to the builder, with the tensors inside.

    An item that cannot be read or parsed becomes a finding, and a blob without a tree.

    Args:
        builder: Receives blobs, tensors and findings.
        store: The folder.
        blobs: Key -> item.
        rank_copies: The same objects as saved by other ranks, to compare.
        rules: How to read the items.
    """
    sizes = builder.file_sizes()
    names = builder.file_names()
    _require_apart(names, sizes, [*blobs.values(), *(item for _, item in rank_copies)])
    complete = {k: i for k, i in blobs.items() if i.start + i.length <= (sizes[i.file] or 0)}
    for key, item in blobs.items():
        # Without the bytes the object is still listed: a checkpoint that loses one must not look complete.
        if key not in complete:  # `check` reports the missing or short file
            builder.blobs.append(Blob(key, builder.item(item), known=False))
    for key, item, data in _read_all(store, names, complete):
        item_number = builder.item(item)
        label = f"object {key} in {names[item.file]}"
        try:
            if isinstance(data, CkptError):
                raise data
            # A failure of this object is a finding below; only what
            # concerns the process, such as memory, passes.
            with passing():
                content = _content(store, names[item.file], item, data)
                objects = rules.parse(content, label)
                _leave_unused(content, objects)
                objects, partly = rules.adapt(key, objects, content)
                tree = adopt(builder, key, item, objects, label)
            meter().keep(weight(tree), label)
        except (MalformedCheckpoint, UnsafeContent) as error:
            code = next((c for kind, c in _CODES if isinstance(error, kind)), "malformed-item")
            code = "unsafe-item" if "global" in error.values else code
            builder.report(code, "coverage", error.message, fqn=key, file=names[item.file])
            builder.blobs.append(Blob(key, item_number, known=False))
            continue
        builder.blobs.append(kept(builder, key, item_number, tree, objects, partly, names[item.file]))
    _compare_ranks(builder, store, names, blobs, rank_copies)


def _require_apart(names: Sequence[str], sizes: Sequence[int | None], items: Sequence[Item]) -> None:
    """Raise `MalformedCheckpoint` when items claim the same bytes many times over, as each item is read."""
    claimed: dict[int, int] = {}
    for item in items:
        # Those beyond the end of their file are not read, and so may claim what they like.
        if item.start + item.length <= (sizes[item.file] or 0):  # others are not read
            claimed[item.file] = claimed.get(item.file, 0) + item.length
    for file, length in claimed.items():
        size = sizes[file] or 0
        if length > _SHARED * size + _RANGE:
            raise MalformedCheckpoint(
                f"{names[file]} has {size} bytes, but the metadata places {length} bytes of objects in it",
                file=names[file],
            )


def kept(
    builder: Builder, key: str, item: int, tree: Any, objects: Objects, partly: tuple[str, ...], file: str
) -> Blob:
    """Return the blob of an object, and add findings for what was refused in it.

    Args:
        builder: Receives the findings.
        key: Name of the object.
        item: Number of its item.
        tree: Its tree in JSON form.
        objects: What was parsed.
        partly: The parts left out of the tree; () when none or all of it was left out.
        file: Path of its file.
    """
    if not objects.refused:
        return Blob(key, item, tree)
    named = ", ".join(objects.refused)
    lost = f" for {', '.join(partly[:8])}{', ...' if partly[8:] else ''}: left out" if partly else ""
    builder.report("refused-global", "files", f"object {key} needs {named}{lost}", fqn=key, file=file)
    used = storages_in(objects.tree)
    # Bytes of tensors that only a refused value can hold: the size of what the manifest does not show.
    hidden = sum(length for key, (_, length, _) in objects.storages.items() if key not in used)
    if hidden:
        message = f"cannot read {hidden} bytes of tensors inside object {key}"
        builder.report("refused-tensors", "coverage", message, fqn=key)
    return Blob(key, item, tree if partly else None, objects.refused, known=bool(partly))


def _leave_unused(content: FileRange, objects: Objects) -> None:
    """Record the storages of an item that no tensor in it uses; what is refused may use any of them."""
    unused = objects.storages.keys() - storages_in(objects.tree, refused=True) if not objects.refused else ()
    for key in unused:
        start, length, _ = objects.storages[key]
        content.add_unused(start, start + length, f"storage {key} of a torch zip")


def _compare_ranks(
    builder: Builder,
    store: Readable,
    names: list[str],
    blobs: Mapping[str, Item],
    rank_copies: Sequence[tuple[str, Item]],
) -> None:
    """Add a finding for each object that ranks saved with different values (rank-local metadata)."""
    different: set[str] = set()
    sizes = builder.file_sizes()
    for key, item in rank_copies:
        pair = blobs[key], item
        builder.item(item)  # its range belongs to the checkpoint
        if any(i.start + i.length > (sizes[i.file] or 0) for i in pair):
            continue  # `check` reports the missing or short file
        # Equal bytes are the usual case, and are compared without parsing either.
        with passing():
            first, second = (_in_memory(store, names[i.file], i) for i in pair)
            if first.content != second.content and _values(first) != _values(second):
                different.add(key)
    builder.findings += [
        finding("rank-object", "files", f"object {key} differs between ranks", fqn=key)
        for key in sorted(different)
    ]


def _in_memory(store: Readable, path: str, item: Item) -> FileRange:
    raw = store.read(path, item.start, item.length)
    return FileRange(store, path, item.start, item.length, raw)


def _values(item: FileRange) -> Any:
    """Return the values of an item with its tensors' bytes, because zips of equal values may differ."""
    try:
        objects = read_objects(item, "object", OBJECT_TABLE)
    except MetadataTooLarge:
        raise
    except CkptError:  # the copy in the manifest has its own finding; this one counts as another value
        return item.content
    stored = {key: item(start, n) for key, (start, n, _) in objects.storages.items()}
    return objects.tree, stored, objects.swapped


def _read_all(
    store: Readable, names: list[str], blobs: Mapping[str, Item]
) -> Iterator[tuple[str, Item, Any]]:
    """Yield (key, item, its bytes, None for a large one, or the error) in file order."""
    # In file order, so that neighbours share a request; the names' order would be one request for each.
    rows = sorted(blobs.items(), key=lambda row: (row[1].file, row[1].start))
    position = 0
    while position < len(rows):
        first = rows[position][1]
        stop, end = position, first.start
        while stop < len(rows):
            item = rows[stop][1]
            new_end = max(end, item.start + item.length)
            # A gap below 64 KiB is cheaper to read than a request is to send;
            # a range is bounded by what memory holds.
            if item.file != first.file or item.start > end + _GAP or new_end - first.start > _RANGE:
                break
            stop, end = stop + 1, new_end
        if stop == position:  # one object larger than a range
            yield (*rows[position], None)
            position += 1
            continue
        # Damage of one range is a finding for each object in it, while the rest of the folder is read.
        try:
            data: Any = store.read(names[first.file], first.start, end - first.start)
        except UnsafeContent as error:
            data = error
        for key, item in rows[position:stop]:
            begin = item.start - first.start
            yield (key, item, data if isinstance(data, CkptError) else data[begin : begin + item.length])
        position = stop


def _content(store: Readable, path: str, item: Item, data: bytes | None) -> FileRange:
    if not item.codec:
        return FileRange(store, path, item.start, item.length, data)
    raw = store.read(path, item.start, item.length) if data is None else data
    plain = decode_small(item.codec, raw, _MAX_OBJECT, path)
    meter().keep(len(plain) // 4, path)  # small items may expand to large ones, which takes time
    return FileRange(store, path, item.start, len(plain), plain, item.length)


def adopt(builder: Builder, key: str, item: Item, objects: Objects, label: str) -> Any:
    """Return the tree in JSON form, and add its tensors to the builder under ``key.path``.

    Args:
        builder: Receives the tensors.
        key: Name of the object.
        item: The item that contains it.
        objects: What was parsed.
        label: Name of the item in messages.

    Raises:
        MalformedCheckpoint: The tree is too deep, refers to a missing storage or to too many tensors, or has
            values without a JSON form.
    """
    tensors: list[tuple[TensorSpec, Item, View]] = []

    def walk(value: Any, path: str, depth: int) -> Any:
        # 200 levels are far below Python's limit, which a walk of three
        # functions for each level would reach first.
        if depth > 200:
            raise MalformedCheckpoint(f"{label} nests deeper than 200 levels")
        if isinstance(value, StoredView):
            if value.key not in objects.storages:
                raise MalformedCheckpoint(f"{label} has no storage {value.key!r}")
            start, length, crc = objects.storages[value.key]
            view = check_view(value, length, 0, label, objects.swapped)
            # Behind a codec no byte of the tensor has a place of its own: the item is all of it, and
            # the view a place in what it expands to.
            if item.codec:
                place = Item(item.file, item.start, item.length, Envelope.RAW, item.codec)
                view = View(view.start + start, view.strides, view.flags)
            else:
                place = Item(item.file, item.start + start, length, Envelope.RAW, "", crc)
            tensors.append((TensorSpec(path, value.dtype, value.shape), place, view))
            if len(tensors) > 1_000_000:
                raise MalformedCheckpoint(f"{label} refers to more than 10^6 tensors")
            return TensorRef(path)
        if type(value) in SCALARS:
            return value
        # Most containers hold scalars alone, such as lists of steps: no copy of them is made.
        if isinstance(value, (dict, list, tuple)):
            inside = value.values() if isinstance(value, dict) else value
            if set(map(type, inside)) <= SCALARS:
                return value
        if isinstance(value, dict):
            kind = type(value)
            return kind((k, walk(v, f"{path}.{k}", depth + 1)) for k, v in value.items())
        if isinstance(value, (list, tuple)):
            return type(value)(walk(v, f"{path}.{i}", depth + 1) for i, v in enumerate(value))
        if isinstance(value, Named) and isinstance(value.value, (dict, list, tuple)):
            return Named(value.kind, walk(value.value, path, depth + 1))
        return value

    # Only `encode` knows which values have a JSON form.
    try:
        tree = encode(walk(objects.tree, key, 0))
    except TypeError as error:
        raise MalformedCheckpoint(f"{label}: {error}") from error
    # Views of one storage may overlap without limit: a small item must not become a large tensor.
    stored = sum(n for _, n, _ in objects.storages.values())
    bound_views(sum(spec.nbytes for spec, _, _ in tensors), stored, label)
    for spec, place, view in tensors:
        number = builder.tensor(spec)
        builder.chunk(number, (0,) * len(spec.shape), spec.shape, builder.item(place), view)
    return tree
