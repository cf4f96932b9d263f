"""Let `torch.distributed.checkpoint.load` read every format that ckptcore opens, whatever its topology.

    import torch.distributed.checkpoint as dcp
    dcp.load(state, storage_reader=ckptcore.StorageReader("/runs/gpt/iter_0000100"))

torch's planner compares names and sizes, and cuts what each rank needs. It is offered every tensor as one
chunk, so each item of its plan is a box of a full tensor, which is read from the stored chunks that hold it.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

# The base class is torch's: this module is imported when `ckptcore.StorageReader` is first used.
import torch
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint import storage as torch_storage
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from ckptcore.api import Several, speaks_python
from ckptcore.api import open as open_checkpoint
from ckptcore.checking.check import require_complete
from ckptcore.core.box import Box
from ckptcore.core.manifest import Blob, Manifest
from ckptcore.core.object_tree import references
from ckptcore.errors import CkptError, NameMismatch, UnsupportedDtype, UsageError
from ckptcore.loading.live_tensors import require_cast, require_kind
from ckptcore.loading.load_into import full_tensor, require_decoded
from ckptcore.loading.plain_values import NotBuilt, built, find, leaf_names
from ckptcore.planning.compose import map_export
from ckptcore.planning.request import STORED, Request
from ckptcore.reading.fill_memory import Fill, fill_memory
from ckptcore.reading.state_dict import require_readable
from ckptcore.store import Store, open_source_store
from ckptcore.utils.near_names import did_you_mean
from ckptcore.utils.text import some


class StorageReader(torch_storage.StorageReader):
    """A `torch.distributed.checkpoint.StorageReader` for a checkpoint of any format.

    Each rank reads only the boxes that it asks for, in pieces of 16 MiB, into the memory of its tensors.
    Everything except checksums is checked before any rank fills anything: the checkpoint is complete, each
    requested value can be read, and quantised codes are not cast. Stored pickles are not executed: plain
    values are built from their manifest.

    Args:
        source: A manifest, or a path or URL, or several of one checkpoint.
        names: The naming scheme of the state dict, as for an export (``hf-hub``): the model part alone has
            these names. Or its names by the stored ones, as a mapping from name in the state dict to stored
            name; names that it lacks are the stored ones. None: the stored names.
        verify: Whether stored checksums are verified.

    Raises:
        SourceUnreadable: There is nothing at the URL, or it cannot be read.
        UnknownFormat: Nothing there is a checkpoint of a known format.
        NotComplete: The save has not finished.
        DamagedCheckpoint: The metadata cannot be used, or (with a naming scheme) the model part is damaged.
        AmbiguousModel: With a naming scheme: several parts could be the model.
        NameMismatch: With a naming scheme: no map fits. With a mapping: the checkpoint lacks a stored name.
        UsageError: There is no such naming scheme.
    """

    def __init__(
        self, source: Several | Manifest, names: str | Mapping[str, str] | None = None, *, verify: bool = True
    ) -> None:
        self._names, self._verify = names, verify
        self._open(source)

    @speaks_python
    def _open(self, source: Several | Manifest) -> None:
        manifest = source if isinstance(source, Manifest) else open_checkpoint(source)
        self._stored_names: Mapping[str, str] = {}
        if isinstance(self._names, str) and self._names != STORED:
            manifest = _under_scheme(manifest, self._names)
        elif isinstance(self._names, Mapping):
            self._stored_names = dict(self._names)
        self._manifest = manifest
        self._objects: Mapping[str, Blob] = {blob.key: blob for blob in manifest.blobs}
        self._metadata = _metadata(manifest, self._stored_names)

    @property
    def checkpoint_id(self) -> str:
        """Return the URL of the checkpoint."""
        return self._manifest.root

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Report whether there is a checkpoint of a known format."""
        try:
            open_checkpoint(checkpoint_id)
        except CkptError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Open another checkpoint, if one is named."""
        if checkpoint_id:
            self._open(checkpoint_id)

    def read_metadata(self) -> torch_metadata.Metadata:
        """Return every tensor as one chunk, and the name of every plain value."""
        return self._metadata

    def set_up_storage_reader(
        self, metadata: torch_metadata.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: every rank has opened the checkpoint."""

    @speaks_python
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Check that everything in the plan can be read. torch ends all ranks when one refuses.

        Raises:
            DamagedCheckpoint: Something in the plan is incomplete or damaged.
            UnreadablePart: A tensor in the plan cannot be read.
            UnsupportedDtype: This torch has no such dtype.
            NameMismatch: The reader refused a value in the plan.
        """
        manifest = self._manifest
        stored = {self._stored(item) for item in plan.items}
        require_readable(manifest, sorted(stored))
        values = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        forms = self._forms(values)
        required_names = stored.union(*(references(form) for form in forms))
        # A value may be a leaf of a larger object, whose blob must be complete.
        objects = {name[:end] for name in required_names for end, letter in enumerate(name) if letter == "."}
        require_complete(manifest, (required_names | objects).__contains__)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are: each rank reads its own."""
        return plans

    @speaks_python
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill this rank's tensors, and hand over its plain values.

        Raises:
            UsageError: A tensor cannot be filled, or quantised codes would be cast.
            UnsupportedDtype: torch does not cast the stored dtype.
            DamagedCheckpoint: A checksum fails. Tensors are partly filled, plain values are unchanged.
        """
        manifest = self._manifest
        values = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        tensors = [item for item in plan.items if item.type == LoadItemType.TENSOR]
        targets = [(item, planner.resolve_tensor(item).detach()) for item in tensors]
        fills = [self._fill(item, memory) for item, memory in targets]
        dtypes = [(fill.row, fill.out.dtype) for fill in fills]
        live = [
            (item.dest_index.fqn, *row_and_dtype) for item, row_and_dtype in zip(tensors, dtypes, strict=True)
        ]
        require_decoded(manifest, live)
        with closing(open_source_store(manifest.root, manifest.versions)) as store:
            # Plain values first, because an error in them leaves every tensor unchanged.
            saved = [self._serialized(form, store) for form in self._forms(values)]
            fill_memory(manifest, store, fills, verify=self._verify)
        for item, memory in targets:
            planner.commit_tensor(item, memory)
        for item, buffer in zip(values, saved, strict=True):
            planner.load_bytes(item, buffer)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _stored(self, item: ReadItem) -> str:
        name = item.storage_index.fqn
        return self._stored_names.get(name, name)

    def _fill(self, item: ReadItem, memory: torch.Tensor) -> Fill:
        """Return the box of an item, with the memory for it, once both are known to fit."""
        name, row = item.dest_index.fqn, self._manifest.index[self._stored(item)]
        spec, lengths = self._manifest.tensors[row], tuple(item.lengths)
        chunk = item.storage_index.offset or (0,) * len(lengths)
        box = Box(tuple(a + b for a, b in zip(chunk, item.storage_offsets, strict=True)), lengths)
        if tuple(memory.shape) != lengths or not Box.full(spec.shape).contains(box):
            raise NameMismatch(
                f"cannot load {name}: its part {box} of {list(spec.shape)} must have a memory of "
                f"{list(lengths)} (got {list(memory.shape)})",
                hint="check the load planner, which returns the memory",
            )
        require_kind(name, memory)
        if memory.is_meta:
            raise UsageError(
                f"cannot load into {name}: it is on the meta device",
                hint="try module.to_empty(device=...) first",
            )
        require_cast(name, spec.dtype, memory)
        return Fill(row, box, memory)

    def _forms(self, items: Sequence[ReadItem]) -> list[Any]:
        """Return the JSON form of the value of each item, once it is known that it can be built."""
        forms, refused = [], dict[str, str]()
        for item in items:
            name = self._stored(item)
            if name in self._manifest.index:  # torch offers no other way to say that a dtype is unknown
                dtype = self._manifest.tensors[self._manifest.index[name]].dtype
                raise UnsupportedDtype(
                    f"cannot load {name}: torch {torch.__version__} has no dtype {dtype}",
                    hint="try a newer torch, or leave it out of the state dict",
                )
            try:
                place = find(self._objects, name)
                if place is not None:
                    built(place[1], lambda fqn: None)
                    forms.append(place[1])
                else:
                    refused[name] = "it is not in the checkpoint"
            except NotBuilt as error:
                refused[name] = str(error)
        if refused:
            listed = [f"{name} ({reason})" for name, reason in refused.items()]
            raise NameMismatch(
                f"cannot load {len(refused)} of {len(items)} plain values: refused by the reader: "
                f"{some(listed, 5)}",
                hint="leave them out of the state dict",
                missing=[*refused],
            )
        return forms

    def _serialized(self, form: Any, store: Store) -> io.BytesIO:
        """Return a plain value as planners take it: what `torch.save` writes."""
        buffer = io.BytesIO()
        torch.save(built(form, partial(full_tensor, self._manifest, store, self._verify)), buffer)
        buffer.seek(0)
        return buffer


def _under_scheme(manifest: Manifest, scheme: str) -> Manifest:
    """Return the model part under the names of a scheme, over the same stored chunks."""
    request = Request(manifest.root, "memory://state-dict", verb="export", names=scheme)  # nothing is written
    return map_export(request, manifest).mapped.manifest


def _metadata(manifest: Manifest, stored_names: Mapping[str, str]) -> torch_metadata.Metadata:
    """Describe a manifest as torch does, with one chunk a tensor.

    What cannot be read is offered, too: without it torch would say that it is missing.
    """
    offered: dict[str, Any] = {name: torch_metadata.BytesStorageMetadata() for name in manifest.unread}
    for blob in manifest.blobs:
        offered |= dict.fromkeys(leaf_names(blob), torch_metadata.BytesStorageMetadata())
    for spec in manifest.tensors:
        kind = getattr(torch, spec.dtype, None)
        if kind is None:
            offered[spec.fqn] = torch_metadata.BytesStorageMetadata()
            continue
        size = torch.Size(spec.shape)
        full = torch_metadata.ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        properties = torch_metadata.TensorProperties(dtype=kind)
        offered[spec.fqn] = torch_metadata.TensorStorageMetadata(properties, size, [full])
    lacking = [stored for stored in stored_names.values() if stored not in offered]
    if lacking:
        raise NameMismatch(
            f"names maps to {len(lacking)} names that the checkpoint lacks: {some(lacking, 5)}",
            hint=did_you_mean(lacking[0], offered, "`manifest.tensors` lists the names"),
            missing=lacking,
        )
    offered |= {name: offered[stored] for name, stored in stored_names.items()}
    meta = torch_metadata.StorageMeta(checkpoint_id=manifest.root)
    return torch_metadata.Metadata(offered, storage_meta=meta)
