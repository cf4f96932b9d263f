"""Megatron-Core checkpoints from Python: what its `dist_checkpointing` package asks, without Megatron.

    from ckptcore import mcore
    checkpoint = mcore.open("/runs/gpt")          # a root, or one iteration
    checkpoint.backend                            # ("torch_dist", 1)
    checkpoint.common_state["args"]["num_layers"]
    checkpoint.tensors_metadata["decoder.layers.self_attention.linear_qkv.weight"].shape
    mcore.remove("/runs/gpt/iter_0000100", "/models/weights-only", ["optimizer."])

Works on `torch_dist` and `zarr` alike. Nothing is unpickled, no process group is needed, and tensor
bytes are read only where a value that is asked for holds a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ckptcore import api
from ckptcore.conversion.pipeline import Result
from ckptcore.core.manifest import Blob, Manifest, TensorSpec
from ckptcore.core.object_tree import Named, TensorRef, decode, references
from ckptcore.errors import UnsupportedFormat, UsageError
from ckptcore.formats.megatron.sharded_objects import SHARD
from ckptcore.planning.request import Settings

FORMATS = ("torch_dist", "zarr")


@dataclass(frozen=True, slots=True)
class ObjectShards:
    """A sharded object: its grid, and what each cell holds.

    shape: cells per dim. values: offset -> value in plain types, None where a cell could not be read.
    """

    shape: tuple[int, ...]
    values: Mapping[tuple[int, ...], Any]


@dataclass(frozen=True)
class Checkpoint:
    """One Megatron-Core checkpoint."""

    manifest: Manifest

    @property
    def backend(self) -> tuple[str, int]:
        """Name and version of the sharded backend, as `metadata.json` tells them."""
        return self.manifest.format, int(self.manifest.origin.get("backend_version", 1))

    @cached_property
    def tensors_metadata(self) -> dict[str, TensorSpec]:
        """Key -> dtype and global shape of every sharded tensor; those inside objects are not among them."""
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
        """Key -> the shards of every sharded object. Raises what `ckptcore.read` does for tensors inside."""
        found: dict[str, tuple[tuple[int, ...], dict[tuple[int, ...], Any]]] = {}
        for blob in self.manifest.blobs:
            if m := SHARD.match(blob.key):
                cells = found.setdefault(m["key"], (_version_numbers(m["shape"]), {}))[1]
                cells[_version_numbers(m["offset"])] = self._value(blob)
        return {key: ObjectShards(shape, values) for key, (shape, values) in found.items()}

    @cached_property
    def common_state(self) -> dict[str, Any]:
        """What is the same for all ranks: ``args`` (a dict), ``iteration``, ``content_metadata``, ..."""
        blobs = (b for b in self.manifest.blobs if not SHARD.match(b.key) and b.known)
        return {b.key: self._value(b) for b in blobs}

    @property
    def content_metadata(self) -> Any:
        """What the trainer tells of the checkpoint's layout (0.13 and later), or None."""
        return self.common_state.get("content_metadata")

    def _value(self, blob: Blob) -> Any:
        return _with_tensors(decode(blob.tree), self.manifest) if blob.known else None


def open(url: str, *, recover: bool = False) -> Checkpoint:
    """The checkpoint at a path or URL: an iteration's folder, or a root with a tracker file.

    Raises `UnsupportedFormat` for anything but `torch_dist` and `zarr`, and what `ckptcore.open` does.
    """
    manifest = api.open(url, recover=recover)
    if manifest.format not in FORMATS:
        raise UnsupportedFormat(
            f"{url} is a checkpoint of format {manifest.format}", hint=f"known here: {', '.join(FORMATS)}"
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
    """Writes the checkpoint anew without the tensors and objects whose keys start with a prefix.

    The source stays as it is. Raises `UsageError` when a prefix fits no key, and what `convert` does.
    """
    if to not in FORMATS:
        raise UsageError(f"{to!r} is no Megatron-Core format", hint=f"one of: {', '.join(FORMATS)}")
    globs = tuple(_escaped(prefix) + "*" for prefix in prefixes)
    return api.convert(source, destination, to=to, exclude=globs, settings=settings)


def _version_numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def _escaped(text: str) -> str:
    """The glob that matches exactly this text."""
    return re.sub(r"([*?[])", r"[\1]", text)


def _with_tensors(value: Any, manifest: Manifest) -> Any:
    """The value with tensors for references, dicts for namespaces."""
    if isinstance(value, TensorRef):
        return api.read(manifest, value.fqn)
    if isinstance(value, Named):
        inner = _with_tensors(value.value, manifest)
        return inner if value.kind in ("namespace", "bytesio", "bytetensor") else Named(value.kind, inner)
    if isinstance(value, dict):
        return type(value)((k, _with_tensors(v, manifest)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)([_with_tensors(v, manifest) for v in value])
    return value
