"""Read OLMo's ``local`` checkpoints: the flat parameters of each FSDP rank.

``metadata.yaml`` records the world size. ``model/rank{R}.pt`` holds the rank's flat parameters and the
positions of the real ones in them, ``optim/rank{R}.pt`` the optimizer's state dict, whose tensors are
split like the parameters, and ``train/rank{R}.pt`` the trainer's state (olmo/checkpoint.py,
`LocalShardedCheckpointer`). Names: ``model.<fqn>``, ``optim.state.<fqn>.<key>``,
``optim.param_groups.<i>``, ``train.<key>``. Values that several ranks have are compared.

A rank's flat parameters are ``{"modules": [{"name": ..., "handles": [{"flat_param.data": ...,
"flat_param._fqns": ..., ...}]}]}`` (`LocalShardedCheckpointer._get_flat_param_state_to_save`); the attributes
are those of torch's FlatParameter (torch/distributed/fsdp/_flat_param.py). Up to torch 2.0 ``_shard_indices``
and ``_shard_param_offsets`` give the positions, since then ``_shard_param_infos``; both include the last
element.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ckptcore.core.box import flat_start, from_flat_range
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Blob, Manifest, TensorSpec, View
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.object_tree import Named, Refused, RefusedTensor
from ckptcore.encodings.limits import absent
from ckptcore.encodings.pickle.torch_globals import OBJECT_TABLE, StoredView
from ckptcore.encodings.pickle.unpickler import Record, record
from ckptcore.errors import MalformedCheckpoint, NotComplete
from ckptcore.formats.base import Evidence, Format, Reader, Source
from ckptcore.formats.common.join import Part, join
from ckptcore.formats.common.thinning import thin_files
from ckptcore.formats.olmo.common import (
    missing_part,
    model_origin,
    names_by_number,
    open_file,
    plain_groups,
    plain_name,
    require_renamed,
    train_part,
)
from ckptcore.formats.torch_save.tree import TorchTree, add_object, add_odd_piece
from ckptcore.utils.text import count, short_repr

NAME = "olmo_local"
METADATA = "metadata.yaml"
_FILE = re.compile(r"^(model|optim)/rank(\d+)\.pt$")
_WORLD = re.compile(rb"^world_size:\s*(\d{1,7})\s*$", re.MULTILINE)
# torch 2.1 has it in flat_param, later releases in _flat_param; a NamedTuple of five.
TABLE: dict[str, Any] = {
    **OBJECT_TABLE,
    **{
        f"torch.distributed.fsdp.{module}._ShardParamInfo": record("_ShardParamInfo")
        for module in ("flat_param", "_flat_param")
    },
}
_MAX_DIM = 1 << 50


@dataclass(frozen=True, slots=True)
class Slice:
    """A rank's elements ``[start, stop)`` of a parameter, row-major; none when the two are equal.

    Attributes:
        fqn: Name of the parameter.
        shape: Shape of the full parameter.
        start: First element of the parameter.
        stop: Last element of the parameter + 1.
        data: The rank's flat tensor, perhaps one that cannot be read.
        data_start: Position of the first element in it.
    """

    fqn: str
    shape: tuple[int, ...]
    start: int
    stop: int
    data: StoredView | RefusedTensor
    data_start: int


Slices = dict[str, Slice]  # a rank's part of each parameter


def detect(source: Source) -> Evidence | None:
    """Recognise ``model/rankR.pt`` beside ``metadata.yaml`` or ``optim/rankR.pt``."""
    if source.name is not None:
        return None
    counts = {"model": 0, "optim": 0}
    for path in source.listing:
        if m := _FILE.match(path):
            counts[m[1]] += 1
    if not sum(counts.values()) or (METADATA not in source.listing and not all(counts.values())):
        return None
    because = [f"{n} {part}/rankR.pt" for part, n in counts.items() if n]
    return Evidence(NAME, (*because, *([f"found {METADATA}"] if METADATA in source.listing else [])))


def read(source: Source) -> Manifest:
    """Read the manifest of a step folder.

    Raises:
        NotComplete: The save did not finish.
        MalformedCheckpoint: A file is not what OLMo writes.
    """
    require_renamed(source)
    if not {METADATA, "config.yaml"} & source.listing.keys() and not source.recover:
        raise NotComplete(f"{source.store.url} has no {METADATA} and no config.yaml, which are written last")
    files: dict[str, dict[int, str]] = {"model": {}, "optim": {}}
    for path in source.listing:
        if m := _FILE.match(path):
            files[m[1]][int(m[2])] = path
    state = _RankStates(source)
    world = _world_size(source) or 1 + max(r for ranks in files.values() for r in ranks)
    for part, ranks in files.items():
        if ranks or part == "model":
            state.require(part, ranks, world)
    by_rank = {rank: state.model(path) for rank, path in sorted(files["model"].items()) if rank < world}
    for rank, path in sorted(files["optim"].items()):
        if rank in by_rank:
            state.optim(path, by_rank[rank])
    origin: dict[str, Any] = {"world_size": world} | model_origin(["model."])
    parts = [Part(state.builder.build(NAME, source.store.url, origin))]
    findings = [] if files["optim"] else [missing_part("optim", "optim/ beside model/")]
    train = train_part(source)
    if train is not None:
        parts.append(train)
        origin = dict(train.manifest.origin) | origin
    return join(NAME, source.store.url, parts, origin, findings)


class _RankStates:
    """Collect the ranks' tensors and objects."""

    def __init__(self, source: Source) -> None:
        self.source, self.builder = source, Builder()
        self._tensors: dict[str, int] = {}
        self._objects: dict[str, Any] = {}

    def require(self, part: str, ranks: Mapping[int, str], world: int) -> None:
        """Add findings for missing ranks, and for ranks of another save."""
        for rank in absent(ranks, world, 100):
            path = f"{part}/rank{rank}.pt"
            message = f"{path} is missing: {count(world, 'rank')} saved"
            self.builder.report("missing-rank", "files", message, file=path)
        for rank in sorted(r for r in ranks if r >= world):
            message = f"{ranks[rank]} is not part of this save: {count(world, 'rank')} saved"
            self.builder.report("stray-file", "files", message, file=ranks[rank])

    def model(self, path: str) -> Slices:
        """Add a rank's parameters."""
        content, tree = open_file(self.source, self.builder, path, TABLE)
        by_name: Slices = {}
        for part in slices(content, path):
            if part.fqn in by_name:
                raise MalformedCheckpoint(f"{path} has {part.fqn} twice", file=path)
            by_name[part.fqn] = part
            if isinstance(part.data, StoredView):
                self._add(tree, f"model.{part.fqn}", part, part.data, part.data_start, path)
            elif part.stop > part.start or 0 in part.shape:
                add_odd_piece(self.builder, f"model.{part.fqn}", part.data, path)
        return by_name

    def optim(self, path: str, parameters: Slices) -> None:
        """Add a rank's optimizer state; its tensors are split like ``parameters``."""
        content, tree = open_file(self.source, self.builder, path, TABLE)
        state = content.get("state") if isinstance(content, dict) else None
        if not isinstance(state, dict) or "param_groups" not in content:
            raise MalformedCheckpoint(f"{path} must hold an optimizer's state dict", file=path)
        other_entries = {str(k): v for k, v in content.items() if k not in ("state", "param_groups")}
        self.source.carry(path, "optim", other_entries)
        names = names_by_number(content["param_groups"])
        for key, group in plain_groups(content["param_groups"]).items():
            self._object(key, group, path)
        if names is None:
            self._unnamed(path)
            return
        for number, values in state.items():
            fqn = names.get(number) if type(number) is int else None
            if fqn is None or not isinstance(values, dict):
                raise MalformedCheckpoint(
                    f"{path}: no parameter group names {short_repr(number, 40)}", file=path
                )
            for key, value in values.items():
                name = f"optim.state.{fqn}.{key}"
                if isinstance(value, Refused):
                    add_odd_piece(self.builder, name, value, path)
                elif not isinstance(value, StoredView):
                    self._object(name, value, path)
                # A step counter is not split: each rank has all of it.
                elif value.shape == ():
                    self._add(tree, name, Slice(fqn, (), 0, 1, value, 0), value, 0, path)
                elif fqn not in parameters:
                    raise MalformedCheckpoint(f"{path}: {name} belongs to no flat parameter", file=path)
                else:
                    self._add(tree, name, parameters[fqn], value, 0, path)

    def _add(
        self, tree: TorchTree, name: str, part: Slice, data: StoredView, data_start: int, path: str
    ) -> None:
        """Add one rank's elements of a tensor; ``data_start`` is the position of the first in ``data``."""
        numel = part.stop - part.start
        if data is not part.data and data.shape != (numel,):
            raise MalformedCheckpoint(
                f"{path}: {name} must have {count(numel, 'element')} like its parameter "
                f"(got {list(data.shape)})",
                file=path,
            )
        spec = TensorSpec(name, data.dtype, part.shape)
        tensor = self._tensors.get(name)
        if tensor is None:
            tensor = self._tensors[name] = self.builder.tensor(spec)
        elif self.builder.tensors[tensor] != spec:
            first = self.builder.tensors[tensor]
            message = (
                f"{name} is {spec.dtype} {list(spec.shape)} in {path}, and "
                f"{first.dtype} {list(first.shape)} in another rank's file"
            )
            self.builder.report("mixed-saves", "coverage", message, fqn=name, file=path)
            return
        if not numel:
            return
        item, view = tree.place(data, name)
        if view.strides is not None:
            raise MalformedCheckpoint(f"{path}: {name} must be contiguous", file=path)
        width = BY_NAME[data.dtype].itemsize
        for box in from_flat_range(part.shape, part.start, part.stop):
            first_element = data_start + flat_start(part.shape, box.offset) - part.start
            place = View(view.start + first_element * width, None, view.flags)
            self.builder.chunk(tensor, box.offset, box.shape, item, place)

    def _object(self, name: str, value: Any, path: str) -> None:
        if name not in self._objects:
            self._objects[name] = value
            add_object(self.builder, name, value, path)
        elif self._objects[name] != value:
            message = f"object {name} differs between ranks"
            if not any(f.fqn == name and f.code == "rank-object" for f in self.builder.findings):
                self.builder.report("rank-object", "files", message, fqn=name, file=path)

    def _unnamed(self, path: str) -> None:
        if "optim.state" not in self._objects:
            self._objects["optim.state"] = None
            message = f"cannot name the optimizer state of {path}: parameter groups have numbers, no names"
            self.builder.report("refused-tensors", "coverage", message, fqn="optim.state")
            self.builder.blobs.append(Blob("optim.state", -1, known=False))


def _world_size(source: Source) -> int | None:
    size = source.listing.get(METADATA)
    if size is None:
        return None
    text = source.store.read(METADATA, 0, min(size, 1 << 16))
    m = _WORLD.search(text)
    if m is None or not int(m[1]):
        raise MalformedCheckpoint(f"{METADATA} must have a world_size above 0", file=METADATA)
    if m[0].strip() == text.strip():  # OLMo writes nothing else there
        source.explain(METADATA)
    return int(m[1])


FORMAT = Format(
    name=NAME,
    title="OLMo `local` checkpoint (flat parameters a rank)",
    recognised_by="`metadata.yaml` beside `model/rankR.pt` and `optim/rankR.pt`",
    detect=detect,
    suffixes=frozenset({"pt"}),
    reader=Reader(read, checksums="CRC-32 per record", objects=True),
    thin=thin_files,
)


def slices(tree: Any, path: str) -> Iterator[Slice]:
    """Yield every parameter of a rank's file, including those without elements in it.

    Args:
        tree: The value of the file.
        path: The file, for messages.

    Raises:
        MalformedCheckpoint: The file has no flat parameters, or their numbers contradict each other.
    """
    try:
        for module in tree["modules"]:
            prefix = plain_name(module["name"]).removesuffix("_fsdp_wrapped_module")
            for handle in module["handles"]:
                for part in _of_handle(handle):
                    fqn = plain_name(f"{prefix.rstrip('.')}.{part.fqn}" if prefix else part.fqn)
                    yield _check_slice(replace(part, fqn=fqn), path)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise MalformedCheckpoint(f"{path} must hold flat parameters: {short_repr(error, 160)}") from error


def _of_handle(handle: Any) -> Iterator[Slice]:
    data = handle["flat_param.data"]
    if type(data) is not RefusedTensor and (type(data) is not StoredView or len(data.shape) != 1):
        raise TypeError("flat_param.data is not a flat tensor")
    names, shapes = handle["flat_param._fqns"], [_checked_shape(s) for s in handle["flat_param._shapes"]]
    places = _by_indices(handle) if "flat_param._shard_indices" in handle else _by_infos(handle)
    by_number = dict(places)
    if len(names) != len(shapes) or (by_number and max(by_number) >= len(names)):
        raise ValueError("names, shapes and places of a flat parameter differ in number")
    for n, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        start, stop, data_start = by_number.get(n, (0, 0, 0))
        yield Slice(_checked_name(name), shape, start, stop, data, data_start)


def _by_indices(handle: Any) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """Yield (parameter, (start, stop, first in the flat tensor)) of torch up to 2.0: back to back."""
    first, data_start = handle["flat_param._shard_indices"][0], 0
    for n, (start, last) in enumerate(handle["flat_param._shard_param_offsets"]):
        yield first + n, (start, last + 1, data_start)
        data_start += last + 1 - start


def _by_infos(handle: Any) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """Yield the same for torch 2.1 and later, where each parameter has its position."""
    infos = handle["flat_param._shard_param_infos"]
    if len(infos) != len(handle["flat_param._fqns"]):
        raise ValueError("_shard_param_infos does not list every parameter")
    for n, info in enumerate(infos):
        fields = info.args if type(info) is Record else info
        inside, data_start, numel, start, last = fields
        if inside is True:
            if last + 1 - start != numel:
                raise ValueError(f"elements {start} to {last} are not {numel}")
            yield n, (start, last + 1, data_start)
        elif inside is not False:
            raise TypeError(f"{short_repr(fields)} is not a position")


def _check_slice(part: Slice, path: str) -> Slice:
    numbers = (part.start, part.stop, part.data_start)
    if any(type(n) is not int for n in numbers):
        raise TypeError(f"{short_repr(numbers)} are not integers")
    if not 0 <= part.start <= part.stop <= prod(part.shape):
        raise MalformedCheckpoint(
            f"{path}: elements [{part.start}, {part.stop}) are outside {part.fqn} {list(part.shape)}"
        )
    if isinstance(part.data, RefusedTensor):
        return part
    if not 0 <= part.data_start <= part.data.shape[0] - (part.stop - part.start):
        raise MalformedCheckpoint(
            f"{path}: {part.fqn} needs {part.stop - part.start} elements at {part.data_start} of a flat "
            f"parameter of {part.data.shape[0]}"
        )
    return part


def _checked_shape(value: Any) -> tuple[int, ...]:
    dims = value.value if type(value) is Named and value.kind == "size" else value
    if any(type(n) is not int or not 0 <= n < _MAX_DIM for n in dims) or len(dims) > 64:
        raise ValueError(f"{short_repr(dims)} is not a shape")
    return tuple(dims)


def _checked_name(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{short_repr(value, 40)} is not a name")
    return value
