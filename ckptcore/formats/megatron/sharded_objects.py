"""Read the objects of Megatron-Core's checkpoints as plain values.

A non-tensor value is either a ShardedObject, stored on its own under ``<key>/shard_<offset>_<shape>``
(megatron/core/dist_checkpointing/mapping.py), or part of the *common* state: one dict for all
ranks, in ``common.pt`` until 0.18 and in the object ``common_state/shard_0_1`` since 0.19.
torch_dist stores an object as a list of one element.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ckptcore.core.manifest import Blob, Item, Manifest
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.object_tree import Named, Refused
from ckptcore.encodings.pickle.torch_globals import StoredView, storages_in
from ckptcore.encodings.torchzip.archive import Reader
from ckptcore.encodings.torchzip.reader import Objects, check_view
from ckptcore.encodings.zarr_v2 import cell
from ckptcore.errors import ChecksumMismatch, Finding, MalformedCheckpoint, finding
from ckptcore.formats.base import Source
from ckptcore.formats.common.trees import kind_of
from ckptcore.formats.dcp.objects import ObjectRules, adopt, kept
from ckptcore.formats.megatron.pickle_globals import read_megatron
from ckptcore.store.subfolder import FileRange
from ckptcore.utils.crc32 import crc32
from ckptcore.utils.text import count

COMMON_FILE = "common.pt"
COMMON_KEY = "common_state/shard_0_1"
EXTRA_STATE = "_extra_state"
SHARD = re.compile(
    r"^(?P<key>.+)/shard_(?P<offset>\d{1,18}(?:\.\d{1,18})*)_(?P<shape>\d{1,18}(?:\.\d{1,18})*)$"
)
_MAX_BYTES = 64 << 20  # of an object's tensor that becomes bytes


def listed(key: str, objects: Objects, read: Reader) -> tuple[Objects, tuple[str, ...]]:
    """Return an object of torch_dist, without the list of one element around it."""
    tree = objects.tree
    inner = tree[0] if SHARD.match(key) and type(tree) is list and len(tree) == 1 else tree
    return plain(key, replace(objects, tree=inner), read)


def plain(key: str, objects: Objects, read: Reader) -> tuple[Objects, tuple[str, ...]]:
    """Return an object without its refused values, and the paths of those.

    Transformer Engine 2.0 and later stores ``_extra_state`` as a byte tensor that is itself a
    pickle. It is not a weight and is never opened: it becomes ``Named("bytetensor", bytes)``.
    """
    tree, lost, names = _pruned(objects.tree)
    if EXTRA_STATE in key and isinstance(tree, StoredView) and tree.dtype == "uint8":
        tree = Named("bytetensor", _bytes_of(tree, objects, read, key))
    refused = tuple(dict.fromkeys((*objects.refused, *names)))
    storages = {} if isinstance(tree, Named) and tree.kind == "bytetensor" else objects.storages
    return replace(objects, tree=tree, refused=refused, storages=storages), lost


LISTED = ObjectRules(parse=read_megatron, adapt=listed)  # torch_dist
BARE = ObjectRules(parse=read_megatron, adapt=plain)  # plain DCP folders of Megatron-LM


def add_file(builder: Builder, source: Source, path: str, key: str | None) -> None:
    """Add a torch file as one object, or its top-level dict as an object per key.

    A file that cannot be parsed becomes a finding, and a blob without a tree.

    Args:
        builder: Gets the objects.
        source: The folder.
        path: The file in it.
        key: Name of the object, or None for an object per key of the file's dict.
    """
    size = source.listing[path]
    item = Item(builder.file(path, size), 0, size)
    item_number = builder.item(item)
    content = FileRange(source.store, path, 0, size)
    try:
        objects = read_megatron(content, path)
        parts = {key: objects.tree} if key is not None else _common(objects.tree, path)
        reachable = set[str]()
        for name, tree in parts.items():
            used = storages_in(tree)
            reachable |= used
            mine = {k: v for k, v in objects.storages.items() if k in used}
            part, lost = plain(name, replace(objects, tree=tree, refused=(), storages=mine), content)
            form = adopt(builder, name, item, part, f"{name} in {path}")
            builder.blobs.append(kept(builder, name, item_number, form, part, lost, path))
        hidden = sum(n for k, (_, n, _) in objects.storages.items() if k not in reachable)
        if hidden:
            message = (
                f"cannot read {count(hidden, 'byte')} of tensors in {path}: they are inside "
                f"{', '.join(objects.refused)}"
            )
            builder.report("refused-tensors", "coverage", message, fqn=key, file=path)
    except MalformedCheckpoint as error:
        code = "crc-mismatch" if isinstance(error, ChecksumMismatch) else "malformed-item"
        builder.report(code, "coverage", error.message, fqn=key, file=path)
        builder.blobs.append(Blob(key or path, item_number, known=False))


def _common(tree: Any, path: str) -> dict[str, Any]:
    if not isinstance(tree, dict) or any(type(k) is not str for k in tree):
        raise MalformedCheckpoint(f"{path} must hold a dict of common state (got {kind_of(tree)})")
    return tree


def spread_common(manifest: Manifest) -> Manifest:
    """Return the manifest with the object ``common_state`` split into one object per key."""
    blobs: list[Blob] = []
    for blob in manifest.blobs:
        entries = _entries(blob.tree) if blob.key == COMMON_KEY and blob.known else None
        if entries is None:
            blobs.append(blob)
        else:
            blobs += [Blob(k, blob.item, v, blob.refused) for k, v in entries]
    return replace(manifest, blobs=tuple(blobs))


def common_name(name: str) -> str:
    """Return the name of a tensor without the prefix of the common state."""
    return name.removeprefix(COMMON_KEY + ".")


def grids(blobs: Sequence[Blob]) -> Iterator[Finding]:
    """Yield a finding for every sharded object whose grid of shards is incomplete."""
    shapes_by_key: dict[str, dict[tuple[int, ...], set[tuple[int, ...]]]] = {}
    for blob in blobs:
        m = SHARD.match(blob.key)
        if m:
            offset, shape = (tuple(map(int, m[g].split("."))) for g in ("offset", "shape"))
            shapes_by_key.setdefault(m["key"], {}).setdefault(shape, set()).add(offset)
    for key, shapes in shapes_by_key.items():
        if len(shapes) > 1:
            yield finding(
                "overlap",
                "coverage",
                f"object {key} is stored in grids of different shapes: {', '.join(map(_dotted, shapes))}",
                fqn=key,
            )
        for shape, offsets in shapes.items():
            if all(len(o) == len(shape) + 1 for o in offsets):
                # 0.5 dropped the last number of a name in two dims: the cells give that dim's extent.
                shape = (*shape, 1 + max(o[-1] for o in offsets))
            yield from _shard_grid_findings(key, shape, offsets)


def _shard_grid_findings(
    key: str, shape: tuple[int, ...], offsets: set[tuple[int, ...]]
) -> Iterator[Finding]:
    """Yield findings for shards of an object that are outside its grid, and for cells without a shard."""
    inside = {
        o for o in offsets if len(o) == len(shape) and all(a < n for a, n in zip(o, shape, strict=True))
    }
    for offset in sorted(offsets - inside)[:3]:
        yield finding(
            "out-of-bounds",
            "coverage",
            f"object {key}: shard {_dotted(offset)} is outside its grid {_dotted(shape)}",
            fqn=key,
        )
    total = prod(shape)
    if len(inside) == total:
        return
    cells = (cell(shape, n) for n in range(min(total, len(inside) + 3)))
    missing = [_dotted(c) for c in cells if c not in inside][:3]
    yield finding(
        "hole",
        "coverage",
        f"object {key} lacks {total - len(inside)} of {count(total, 'shard')}"
        f"{': ' + ', '.join(missing) if missing else ''}",
        fqn=key,
    )


def _dotted(dims: tuple[int, ...]) -> str:
    return ".".join(map(str, dims))


def _entries(tree: Any) -> list[tuple[str, Any]] | None:
    """Return (key, value) pairs of the JSON form of a dict with text keys."""
    if not isinstance(tree, dict):
        return None
    if "$" not in tree:
        return list(tree.items())
    if tree["$"] in ("dict", "odict") and all(isinstance(k, str) for k, _ in tree["items"]):
        return [(k, v) for k, v in tree["items"]]
    return None


def _pruned(tree: Any) -> tuple[Any, tuple[str, ...], list[str]]:
    """Return (the tree without refused values, their paths, their classes); a refused tree as it is."""
    lost: list[str] = []
    names: list[str] = []

    def visit(value: Any, path: str) -> Any:
        if isinstance(value, Refused):
            lost.append(path.lstrip("."))
            names.append(value.name)
            return value
        if isinstance(value, Named):
            inner = visit(value.value, path) if isinstance(value.value, (dict, list, tuple)) else value.value
            return inner if isinstance(inner, Refused) else Named(value.kind, inner)
        if isinstance(value, dict):
            kind = OrderedDict if isinstance(value, OrderedDict) else dict
            pairs = [(k, visit(v, f"{path}.{k}")) for k, v in value.items() if not isinstance(k, Refused)]
            return kind((k, v) for k, v in pairs if not isinstance(v, Refused))
        if isinstance(value, (list, tuple)):
            inside = [visit(v, f"{path}.{i}") for i, v in enumerate(value)]
            gone = next((v for v in inside if isinstance(v, Refused)), None)
            return gone if gone is not None else type(value)(inside)  # positions must not change
        return value

    kept_tree = visit(tree, "")
    return kept_tree, () if isinstance(kept_tree, Refused) else tuple(lost), names


def _bytes_of(view: StoredView, objects: Objects, read: Reader, label: str) -> bytes:
    if view.key not in objects.storages:
        raise MalformedCheckpoint(f"{label} has no storage {view.key!r}")
    start, length, crc = objects.storages[view.key]
    place = check_view(view, length, 0, label, objects.swapped)
    count = prod(view.shape)
    if place.strides is not None or len(view.shape) != 1 or length > _MAX_BYTES:
        raise MalformedCheckpoint(f"cannot read {label}: {count} bytes of extra state in an unknown layout")
    raw = read(start, length)
    if crc is not None and crc32(raw) != crc:
        raise ChecksumMismatch(f"CRC-32 of {label} must be {crc:08x} (got {crc32(raw):08x})")
    return raw[place.start : place.start + count]
