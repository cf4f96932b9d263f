"""Permit the classes that DeepSpeed pickles, and read one of its files.

Beside what Megatron-LM and torch pickle (client state may hold parsed arguments and random states), a
DeepSpeed file names a few of its own classes. Each becomes a plain value; nothing of DeepSpeed is called.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ckptcore.core.object_tree import Named
from ckptcore.encodings.pickle.unpickler import Call, Record
from ckptcore.encodings.torchzip.reader import Objects, read_objects
from ckptcore.errors import MalformedCheckpoint
from ckptcore.formats.base import Source
from ckptcore.formats.megatron.pickle_globals import MEGATRON_TABLE, plain


def _instance(name: str) -> Call:
    return Call(name, lambda *args: Record("dataclass", (name,)))


def _stage(*args: Any) -> int:
    # deepspeed/runtime/zero/config.py: an IntEnum, pickled by value.
    if len(args) != 1 or type(args[0]) is not int:
        raise ValueError("a ZeRO stage that is no number")
    return args[0]


def _enum(name: str) -> Call:
    def build(*args: Any) -> Named:
        if len(args) != 1 or type(args[0]) not in (int, str):
            raise ValueError(f"{name} of something else than one value")
        return Named("enum", [name, args[0]])

    return Call(name, build)


TABLE: dict[str, Any] = {
    **MEGATRON_TABLE,
    "deepspeed.runtime.zero.config.ZeroStageEnum": Call("ZeroStageEnum", _stage),
    # deepspeed/runtime/fp16/loss_scaler.py
    **{
        f"deepspeed.runtime.fp16.loss_scaler.{name}": _instance(f"deepspeed.{name}")
        for name in ("LossScaler", "DynamicLossScaler", "LossScalerBase")
    },
    "deepspeed.runtime.fp16.loss_scaler.LossScaleProfile": _enum("deepspeed.LossScaleProfile"),
    # deepspeed/utils/tensor_fragment.py; a dataclass
    "deepspeed.utils.tensor_fragment.fragment_address": _instance("deepspeed.fragment_address"),
    # deepspeed/checkpoint/universal_checkpoint.py and constants; a dataclass of universal folders
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape": _instance("deepspeed.SubparamShape"),
    # deepspeed/runtime/zero/offload_config.py: in ds_config of some versions
    "deepspeed.runtime.zero.offload_config.OffloadDeviceEnum": _enum("deepspeed.OffloadDeviceEnum"),
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


def read_file(source: Source, path: str, *, table: dict[str, Any] | None = None) -> StatesFile:
    """Parse one file; no tensor byte is read.

    Raises:
        MalformedCheckpoint: The file is cut, is no torch zip, or holds no dict.
    """
    size = source.listing[path]
    found = read_objects(
        lambda start, n: source.store.read(path, start, n), size, path, TABLE if table is None else table
    )
    refused = list(found.refused)
    tree = plain(found.tree, size, path, refused)
    if not isinstance(tree, dict):
        raise MalformedCheckpoint(f"{path} must hold a dict (got {type(tree).__name__})", file=path)
    return StatesFile(path, size, replace(found, tree=tree, refused=tuple(refused)))
