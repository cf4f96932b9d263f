"""Read DCP's `.metadata`: parse its pickle field by field, with a list of permitted globals."""

from __future__ import annotations

from typing import Any

from ckptcore.core.metadata_budget import meter
from ckptcore.encodings.pickle.library_globals import PATHS
from ckptcore.encodings.pickle.torch_globals import COMMON, DTYPE_GLOBALS
from ckptcore.encodings.pickle.unpickler import Call, Record, loads, record
from ckptcore.errors import MalformedCheckpoint
from ckptcore.formats.base import Source
from ckptcore.store.subfolder import FileRange, explain
from ckptcore.utils.memory import reuse_memory
from ckptcore.utils.text import short_repr

_MAX_METADATA = 4 << 30
_MAX_DIM = 1 << 50
_META = "torch.distributed.checkpoint.metadata"
_MCORE = "megatron.core.dist_checkpointing.strategies.torch"
_CHUNK, _INDEX = ("offsets", "sizes"), ("fqn", "offset", "index")
_PLACE = ("relative_path", "offset", "length", "transform_descriptors")
# Records that are stored in columns when there are many: a tensor's chunks, and the places by name.
_RUNS = {"ChunkStorageMetadata": ("ChunkStorageMetadata",), "_StorageInfo": ("MetadataIndex", "_StorageInfo")}
# Permitted globals by module: class -> the fields kept of its state.
_CLASSES: dict[str, dict[str, tuple[str, ...]]] = {
    _META: {  # torch >= 2.3
        "Metadata": (),
        "TensorStorageMetadata": (),
        "BytesStorageMetadata": (),
        "TensorProperties": (),
        "_MEM_FORMAT_ENCODING": (),
        "StorageMeta": (),
        "ChunkStorageMetadata": _CHUNK,
        "MetadataIndex": _INDEX,
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo": _PLACE},
    # torch 2.1 and 2.2.
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties": (), "MEM_FORMAT_ENCODING": ()},
    # Megatron-Core >= 0.11 adds each rank's plan of its save to the metadata.
    "torch.distributed.checkpoint.planner": {
        "SavePlan": (),
        "WriteItem": ("index", "type", "bytes_io_data", "tensor_data"),
        "TensorWriteData": ("chunk", "properties", "size"),
        "WriteItemType": (),
    },
    # OLMo-core's own storage layer, same fields (olmo_core/distributed/checkpoint/filesystem.py).
    "olmo_core.distributed.checkpoint.filesystem": {"_StorageInfo": _PLACE},
}
TABLE: dict[str, Any] = {
    **{
        f"{module}.{name}": record(
            name, *fields, run=_RUNS.get(name, ()), opens=name == "TensorStorageMetadata"
        )
        for module, names in _CLASSES.items()
        for name, fields in names.items()
    },
    # megatron/core/dist_checkpointing/strategies/torch.py: 0.11 to 0.15, and 0.15.
    f"{_MCORE}.MCoreSavePlan": record("SavePlan"),
    f"{_MCORE}.MCoreMetadata": record("Metadata"),
    **COMMON,
    **DTYPE_GLOBALS,
    **PATHS,
    # Sizes are plain tuples here: metadata holds millions of them.
    "torch.Size": Call("torch.Size", lambda values=(): tuple(values), is_size=True),
}


CARRIED = ".metadata"  # the object of other attributes
# torch/distributed/checkpoint/metadata.py: where and by which call it was saved, which `origin` has in part.
_STORAGE_META = frozenset({"checkpoint_id", "save_id", "load_id", "modules"})
_PLANNED = frozenset({"all_local_plans", "mcore_data"})  # of Megatron-Core, which its own readers take
_OWN = frozenset({"state_dict_metadata", "storage_data", "planner_data", "version", "storage_meta"})


class Metadata:
    """One parsed metadata file.

    Attributes:
        name: Path of the file.
        bound: Size of the file, an upper bound for its counts.
        tensors: ``state_dict_metadata``.
        storage: ``storage_data``, until its places are read.
        paths: ``planner_data``, unchecked.
        version: ``version``, unchecked.
        storage_meta: ``storage_meta``, unchecked.
        extra: Attributes that torch itself does not set.
    """

    def __init__(self, source: Source, name: str) -> None:
        size = source.listing[name]
        if not 0 < size <= _MAX_METADATA:
            raise MalformedCheckpoint(
                f"{name} must have between 1 and {_MAX_METADATA} bytes (got {size})", file=name
            )
        meter().require(size, name)
        reuse_memory(size)  # its memory becomes that of the columns
        data = source.store.read(name, 0, size)
        self.name, self.bound = name, size
        behind: list[int] = []
        top = loads(data, TABLE, label=name, behind=behind)
        if not isinstance(top, Record) or top.kind != "Metadata" or type(top.state) is not dict:
            raise MalformedCheckpoint(f"{name} does not contain torch checkpoint metadata", file=name)
        self.tensors = _mapping(top.state, "state_dict_metadata", name)
        self.storage = _mapping(top.state, "storage_data", name)
        self.paths = top.state.get("planner_data")
        self.version = top.state.get("version")
        self.storage_meta = top.state.get("storage_meta")
        self.extra = {k: v for k, v in top.state.items() if k not in _OWN}
        explain(source.store, name, 0, size - sum(behind))
        self._carry(FileRange(source.store, name, 0, size))

    def _carry(self, content: FileRange) -> None:
        """Record what torch and Megatron-Core do not write here, as values to carry."""
        state = getattr(self.storage_meta, "state", None)
        storage_attributes = (
            {k: v for k, v in state.items() if k not in _STORAGE_META} if type(state) is dict else {}
        )
        content.carry(
            CARRIED, {k: v for k, v in self.extra.items() if k not in _PLANNED} | storage_attributes
        )

    def origin(self) -> dict[str, Any]:
        """Return what the writer recorded about itself."""
        writer: dict[str, Any] = {}
        if isinstance(self.version, str):
            writer["metadata_version"] = self.version
        state = getattr(self.storage_meta, "state", None)
        if type(state) is dict and isinstance(state.get("save_id"), str):
            writer["save_id"] = state["save_id"]
        return writer

    def names(self) -> list[str]:
        """Return every name that a planner saved, if the metadata records them."""
        named = dict.fromkeys(n for n in self.paths if type(n) is str) if type(self.paths) is dict else {}
        plans = self.extra.get("all_local_plans")
        # Each list once: through the pickle's memo, a few bytes can repeat a plan without limit.
        lists = {
            id(items): items
            for plan in (plans if type(plans) is list else ())
            if isinstance(plan, Record)
            and type(plan.state) is dict
            and isinstance(items := plan.state.get("items"), (list, tuple))
        }
        for items in lists.values():
            for item in items:
                index, *_ = row(item, "WriteItem", self.name)
                fqn = row(index, "MetadataIndex", self.name)[0]
                if type(fqn) is str:
                    named[fqn] = None
        return list(named)


def row(value: Any, kind: str, name: str) -> tuple[Any, ...]:
    """Return the declared fields of a record of this class."""
    # A state pickled as a tuple instead of a dict may have any length.
    if (
        type(value) is Record
        and value.kind == kind
        and type(value.state) is tuple
        and len(value.state) == len(value.fields)
    ):
        state: tuple[Any, ...] = value.state
        return state
    raise MalformedCheckpoint(f"{name}: expected a {kind} (got {short_repr(value)})", file=name)


def state_of(value: Any, kind: str, name: str) -> dict[str, Any]:
    """Return the dict state of a record of this class."""
    if isinstance(value, Record) and value.kind == kind and type(value.state) is dict:
        return value.state
    raise MalformedCheckpoint(f"{name}: expected a {kind} (got {short_repr(value)})", file=name)


def _mapping(state: dict[str, Any], key: str, name: str) -> dict[Any, Any]:
    value = state.get(key)
    if type(value) is not dict:
        raise MalformedCheckpoint(f"{name} has no {key}", file=name)
    return value


def dims(value: Any, name: str) -> tuple[int, ...]:
    """Return a size or offset: at most 64 non-negative integers."""
    if type(value) in (tuple, list) and len(value) <= 64:
        for n in value:  # plain loop: metadata holds millions of sizes
            if type(n) is not int or not 0 <= n < _MAX_DIM:
                break
        else:
            return tuple(value)
    raise MalformedCheckpoint(
        f"{name}: a size must be at most 64 non-negative integers (got {short_repr(value)})", file=name
    )
