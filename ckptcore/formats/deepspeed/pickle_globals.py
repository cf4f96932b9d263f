"""Permit the classes that DeepSpeed pickles, and read one of its files.

Beside what Megatron-LM and torch pickle (client state may hold parsed arguments and random states), a
DeepSpeed file names a few of its own classes. Each becomes a plain value; nothing of DeepSpeed is called.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ckptcore.encodings.pickle.trainer_classes import DEEPSPEED_ENUMS, DEEPSPEED_RECORDS
from ckptcore.encodings.pickle.unpickler import Call
from ckptcore.encodings.torchzip.reader import Objects, SharedTrees, read_objects
from ckptcore.errors import MalformedCheckpoint
from ckptcore.formats.base import Source
from ckptcore.formats.common.trees import kind_of
from ckptcore.formats.megatron.pickle_globals import MEGATRON_TABLE, dataclass_global, enum_global, plain
from ckptcore.store.subfolder import FileRange


def _stage(*args: Any) -> int:
    # deepspeed/runtime/zero/config.py: an IntEnum, pickled by value.
    if len(args) != 1 or type(args[0]) is not int:
        raise ValueError("a ZeRO stage that is no number")
    return args[0]


TABLE: dict[str, Any] = {
    **MEGATRON_TABLE,
    "deepspeed.runtime.zero.config.ZeroStageEnum": Call("ZeroStageEnum", _stage),
    **{name: dataclass_global(name) for name in DEEPSPEED_RECORDS},
    **{name: enum_global(name) for name in DEEPSPEED_ENUMS},
}


@dataclass(frozen=True, slots=True)
class StatesFile:
    """One parsed file.

    Attributes:
        path: Relative to the checkpoint's folder.
        size: Bytes.
        objects: Its tree, with tensors as `StoredView`, and the byte ranges of its storages.
    """

    path: str
    size: int
    objects: Objects

    @property
    def tree(self) -> dict[Any, Any]:
        """The dict that the file holds."""
        tree: dict[Any, Any] = self.objects.tree
        return tree


def shared_trees() -> SharedTrees:
    """Return an empty store for the trees of one checkpoint's files."""
    return SharedTrees(_finished)


def read_file(source: Source, path: str, shared: SharedTrees | None = None) -> StatesFile:
    """Parse one file; no tensor byte is read.

    Args:
        source: The folder.
        path: Of the file.
        shared: From `shared_trees`, where ranks have equal trees; they are not to be changed.

    Raises:
        MalformedCheckpoint: The file is cut, is no torch zip, or holds no dict.
    """
    size = source.listing[path]
    shared = shared_trees() if shared is None else shared
    objects = read_objects(FileRange(source.store, path, 0, size), path, TABLE, shared)
    return StatesFile(path, size, objects)


def _finished(objects: Objects, nbytes: int, path: str) -> Objects:
    refused = list(objects.refused)
    tree = plain(objects.tree, nbytes, path, refused)
    if not isinstance(tree, dict):
        raise MalformedCheckpoint(f"{path} must hold a dict (got {kind_of(tree)})", file=path)
    return replace(objects, tree=tree, refused=tuple(refused))
