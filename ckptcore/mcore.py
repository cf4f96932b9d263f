"""Inspect Megatron-Core checkpoints from Python, as its `dist_checkpointing` does, without Megatron.

    from ckptcore import mcore
    checkpoint = mcore.open("/runs/gpt")          # a root, or one iteration
    checkpoint.backend                            # ("torch_dist", 1)
    checkpoint.common_state["args"]["num_layers"]
    checkpoint.tensors_metadata["decoder.layers.self_attention.linear_qkv.weight"].shape
    mcore.remove("/runs/gpt/iter_0000100", "/models/weights-only", ["optimizer."])

It works on `torch_dist` and `zarr` alike. Nothing is unpickled, no process group is needed, and tensor
bytes are read only for values that hold tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from glob import escape
from typing import Any

from ckptcore.api import convert, read
from ckptcore.api import open as open_checkpoint
from ckptcore.conversion.pipeline import Result
from ckptcore.core.manifest import Blob, Manifest, TensorSpec
from ckptcore.core.named_values import restated
from ckptcore.core.object_tree import Named, TensorRef, decode, references
from ckptcore.errors import UnsupportedFormat, UsageError
from ckptcore.formats.megatron.sharded_objects import SHARD
from ckptcore.planning.request import Settings

FORMATS = ("torch_dist", "zarr")
# Kinds of values that are returned as their content.
_OPENED = ("namespace", "bytesio", "bytesioat", "bytetensor", "npscalar")


@dataclass(frozen=True, slots=True)
class ObjectShards:
    """A sharded object: its grid, and the value of each cell.

    Attributes:
        shape: Number of cells in each dim.
        values: Offset -> value in plain types, None where a cell cannot be read.
    """

    shape: tuple[int, ...]
    values: Mapping[tuple[int, ...], Any]


@dataclass(frozen=True)
class Checkpoint:
    """One Megatron-Core checkpoint.

    Attributes:
        manifest: The checkpoint, as `ckptcore.open` returns it.
    """

    manifest: Manifest

    @property
    def backend(self) -> tuple[str, int]:
        """Name and version of the sharded backend, from `metadata.json`."""
        return self.manifest.format, int(self.manifest.origin.get("backend_version", 1))

    @cached_property
    def tensors_metadata(self) -> dict[str, TensorSpec]:
        """Key -> dtype and global shape of every sharded tensor, without those inside objects."""
        inside = {n for b in self.manifest.blobs for n in references(b.tree)}
        return {t.fqn: t for t in self.manifest.tensors if t.fqn not in inside}

    @property
    def sharded_metadata(self) -> dict[str, TensorSpec | tuple[int, ...]]:
        """Key -> dtype and shape of every sharded tensor, or the grid of every sharded object."""
        grids = {
            m["key"]: _version_numbers(m["shape"]) for b in self.manifest.blobs if (m := SHARD.match(b.key))
        }
        return {**self.tensors_metadata, **grids}

    @cached_property
    def sharded_objects(self) -> dict[str, ObjectShards]:
        """Key -> the shards of every sharded object; raises as `ckptcore.read` does for tensors inside."""
        shards_by_key: dict[str, tuple[tuple[int, ...], dict[tuple[int, ...], Any]]] = {}
        for blob in self.manifest.blobs:
            if m := SHARD.match(blob.key):
                cells = shards_by_key.setdefault(m["key"], (_version_numbers(m["shape"]), {}))[1]
                cells[_version_numbers(m["offset"])] = self._value(blob)
        return {key: ObjectShards(shape, values) for key, (shape, values) in shards_by_key.items()}

    @cached_property
    def common_state(self) -> dict[str, Any]:
        """The values common to all ranks: ``args`` (a dict), ``iteration``, ``content_metadata`` and more."""
        blobs = (b for b in self.manifest.blobs if not SHARD.match(b.key) and b.known)
        return {b.key: self._value(b) for b in blobs}

    @property
    def content_metadata(self) -> Any:
        """The trainer's description of the checkpoint's layout (0.13 and later), or None."""
        return self.common_state.get("content_metadata")

    def _value(self, blob: Blob) -> Any:
        return _with_tensors(decode(blob.tree), self.manifest) if blob.known else None


def open(url: str, *, allow_incomplete: bool = False) -> Checkpoint:
    """Open the checkpoint at a path or URL: an iteration's folder, or a root with a tracker file.

    Args:
        url: Path or fsspec URL.
        allow_incomplete: Accept a save that did not finish, or that cannot be proven complete.

    Raises:
        UnsupportedFormat: The format is neither `torch_dist` nor `zarr`.
        CkptError: As `ckptcore.open` raises.
    """
    manifest = open_checkpoint(url, allow_incomplete=allow_incomplete)
    if manifest.format not in FORMATS:
        raise UnsupportedFormat(
            f"cannot open {url} as a Megatron-Core checkpoint: its format is {manifest.format}",
            hint=f"name a checkpoint of format {' or '.join(FORMATS)}",
        )
    return Checkpoint(manifest)


def remove(
    source: str,
    destination: str,
    prefixes: Sequence[str],
    *,
    to: str = "torch_dist",
    settings: Settings | None = None,
) -> Result:
    """Write a copy of a checkpoint without the tensors and objects whose keys start with a prefix.

    The source is not changed.

    Args:
        source: Path or URL of the checkpoint.
        destination: Path or URL of the output.
        prefixes: Prefixes of keys, such as ``optimizer.``.
        to: Output format: ``torch_dist`` or ``zarr``.
        settings: Memory budget, threads and device.

    Raises:
        UsageError: A prefix matches no key, or the format is another one.
        CkptError: As `ckptcore.convert` raises.
    """
    if to not in FORMATS:
        raise UsageError(
            f"to must be {' or '.join(FORMATS)} (got {to!r})", hint="choose a Megatron-Core format"
        )
    globs = tuple(escape(prefix) + "*" for prefix in prefixes)
    return convert(source, destination, to=to, exclude=globs, settings=settings)


def _version_numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def _with_tensors(value: Any, manifest: Manifest) -> Any:
    """Return the value with tensors in place of references and dicts in place of namespaces."""
    if isinstance(value, TensorRef):
        return read(manifest, value.fqn)
    if isinstance(value, Named):
        inner = _with_tensors(value.value, manifest)
        return restated(value.kind, inner) if value.kind in _OPENED else Named(value.kind, inner)
    if isinstance(value, dict):
        return type(value)((k, _with_tensors(v, manifest)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)([_with_tensors(v, manifest) for v in value])
    return value
