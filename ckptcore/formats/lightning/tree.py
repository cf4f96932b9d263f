"""Read the torch zip of a dict that Lightning writes, value by value.

`torch.save` writes `meta.pt` of a sharded checkpoint, and a full checkpoint file, from any values of the
user's module, callbacks and hyperparameters (lightning/pytorch/strategies/fsdp.py,
trainer/connectors/checkpoint_connector.py). Values of classes that are not permitted are left out one by one,
by name; all others stay.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ckptcore.core.manifest import Blob, Envelope, Item, Manifest
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.named_values import CONTAINERS, content_of, with_content
from ckptcore.core.object_tree import Named, Refused, RefusedTensor
from ckptcore.core.tree_paths import Paths
from ckptcore.encodings.limits import bound_views
from ckptcore.encodings.pickle.torch_globals import OBJECT_TABLE, StoredView
from ckptcore.encodings.pickle.unpickler import Call
from ckptcore.encodings.torchzip.reader import Objects, read_objects
from ckptcore.errors import UnsupportedFormat, finding
from ckptcore.formats.base import Source
from ckptcore.formats.common.trees import kind_of
from ckptcore.formats.dcp.objects import adopt
from ckptcore.formats.torch_save.tree import add_unread, note_hidden_at
from ckptcore.store.subfolder import FileRange

META, VERSION = "meta.pt", "pytorch-lightning_version"
_MAX_LISTED = 100
_MODELS = ("state_dict", "model")


def _no_arguments(*args: Any) -> dict[Any, Any]:
    if args:
        raise ValueError("AttributeDict with arguments")
    return {}


# A container of hyperparameters, Lightning's own: a dict with attributes
# (fabric/utilities/data.py; before 2.0 in the packages pytorch_lightning and lightning_fabric).
TABLE: dict[str, Any] = {
    **OBJECT_TABLE,
    **{
        f"{module}.AttributeDict": Call("AttributeDict", _no_arguments)
        for module in (
            "lightning.fabric.utilities.data",
            "lightning_fabric.utilities.data",
            "lightning.pytorch.utilities.parsing",
            "pytorch_lightning.utilities.parsing",
        )
    },
}


@dataclass(frozen=True, slots=True)
class Contents:
    """A parsed file.

    Attributes:
        objects: Everything that was parsed.
        tree: The dict, without refused values.
        lost: (path of a value, what was refused of it).
    """

    objects: Objects
    tree: dict[Any, Any]
    lost: tuple[tuple[tuple[Any, ...], Refused], ...]


def contents(source: Source, name: str) -> Contents:
    """Parse a file.

    Raises:
        MalformedCheckpoint: The file cannot be parsed.
        UnsafeContent: The file names globals that are not permitted.
        UnsupportedFormat: The file does not contain a dict.
    """
    store, size = source.store, source.listing[name]
    objects = read_objects(FileRange(store, name, 0, size), name, TABLE)
    if not isinstance(objects.tree, dict):
        raise UnsupportedFormat(f"{name} must contain a dict (got {kind_of(objects.tree)})")
    lost: list[tuple[tuple[Any, ...], Refused]] = []
    tree = _without_refused(objects.tree, (), lost)
    return Contents(objects, tree if isinstance(tree, dict) else {}, tuple(lost))


def read_tree(source: Source, name: str, read: Contents, format: str, origin: dict[str, Any]) -> Manifest:
    """Return the manifest of a file: each top-level value is an object, the tensors inside are tensors.

    Args:
        source: The folder of the file.
        name: Path of the file.
        read: Its parsed content.
        format: Name of the format.
        origin: Origin of the manifest.

    Raises:
        MalformedCheckpoint: The tensors are far larger than the file.
    """
    builder = Builder()
    size = source.listing[name]
    file = builder.file(name, size)
    item = Item(file, 0, size, Envelope.TORCHZIP)
    paths = Paths()
    for key, value in read.tree.items():
        form = adopt(builder, str(key), item, replace(read.objects, tree=value), name)
        builder.blobs.append(Blob(str(key), -1, form))
        paths.add(str(key), (str(key),))
    _add_findings(builder, read, name)
    bound_views(sum(t.nbytes for t in builder.tensors), size, name)
    form = paths.form([t.fqn for t in builder.tensors], [b.key for b in builder.blobs])
    return builder.build(format, source.store.url, origin | ({"paths": form} if form else {}))


def _add_findings(builder: Builder, read: Contents, name: str) -> None:
    """Add findings about what was left out, and about tensors inside it."""
    used = {v.key for v in _views(read.tree)} | {
        key for _, v in read.lost if isinstance(v, RefusedTensor) for key in v.storages
    }
    hidden = sum(n for k, (_, n, _) in read.objects.storages.items() if n and k not in used)
    left_out: list[tuple[tuple[Any, ...], Refused]] = []
    for path, value in read.lost:
        where = ".".join(map(str, path))
        if isinstance(value, RefusedTensor):
            add_unread(builder, where, value, name)
        elif hidden and path[0] in _MODELS:  # probably a weight
            note_hidden_at(builder, where, value, hidden, name)
        else:
            left_out.append((path, value))
    for path, value in left_out[:_MAX_LISTED]:
        where = ".".join(map(str, path))
        builder.findings.append(
            finding("refused-global", "files", f"{where} needs {value.name}: left out", fqn=where, file=name)
        )
    if len(left_out) > _MAX_LISTED:
        unlisted = len(left_out) - _MAX_LISTED
        builder.findings.append(
            finding("refused-global", "files", f"{unlisted} more values of {name} are left out", file=name)
        )
    if hidden:
        gone = sorted({str(path[0]) for path, _ in left_out}) or ([] if read.lost else [name])
        # The pickle does not record the owner: each candidate must be left out by name.
        builder.findings += [
            finding(
                "refused-tensors",
                "coverage",
                f"{key} or another of {name}: cannot read {hidden} bytes of tensors inside refused values",
                fqn=key,
                file=name,
            )
            for key in gone
        ]


def _without_refused(value: Any, path: tuple[Any, ...], lost: list[tuple[tuple[Any, ...], Refused]]) -> Any:
    """Return a value without the dict entries and attributes that need refused globals.

    A sequence with such an element is left out completely, because positions have a meaning.

    Args:
        value: Any parsed value.
        path: Its path in the tree.
        lost: Receives (path, what was refused).

    Returns:
        The value, or `Refused` for a value that is left out.
    """
    if isinstance(value, Refused):
        return value
    if isinstance(value, Call):  # a class of the allow-list that is a value itself
        return Refused(value.name)
    if isinstance(value, Named):
        if value.kind == "ndarray" and "refused" in value.value:
            return Refused(value.value["refused"])
        if value.kind in CONTAINERS:
            inside = _without_refused(content_of(value.kind, value.value), path, lost)
            if isinstance(inside, Refused):
                return inside
            return Named(value.kind, with_content(value.kind, value.value, inside))
        if isinstance(value.value, dict) and value.kind != "ndarray":
            return Named(value.kind, _without_refused(value.value, path, lost))
        return value.value if isinstance(value.value, Refused) else value
    if isinstance(value, dict):
        permitted = type(value)()
        for k, v in value.items():
            new = k if isinstance(k, Refused) else _without_refused(v, (*path, k), lost)
            if isinstance(new, Refused):
                lost.append(((*path, k.name if isinstance(k, Refused) else k), new))
            else:
                permitted[k] = new
        return permitted
    if isinstance(value, (list, tuple)):
        items = [_without_refused(v, (*path, n), lost) for n, v in enumerate(value)]
        refused = next((v for v in items if isinstance(v, Refused)), None)
        return refused or (items if isinstance(value, list) else tuple(items))
    if isinstance(value, (set, frozenset)):
        return next((v for v in value if isinstance(v, Refused)), value)
    return value


def _views(tree: Any) -> list[StoredView]:
    views, queue = [], [tree]
    while queue:
        value = queue.pop()
        if isinstance(value, StoredView):
            views.append(value)
        elif isinstance(value, Named):
            queue.append(value.value)
        elif isinstance(value, dict):
            queue += value.values()
        elif isinstance(value, (list, tuple)):
            queue += value
    return views
