"""Read ZeRO's optimizer partitions: master weights and moments under the names of their parameters.

ZeRO-1, ZeRO-2 and BF16_Optimizer: the parameters of a group follow each other in a flat buffer, which is
cut into equal partitions, one a rank. A parameter may span ranks, and cuts ignore rows (deepspeed/runtime/
zero/stage_1_and_2.py, runtime/bf16_optimizer.py). ZeRO-3: each parameter is cut by itself into
``ceil(numel / ranks)`` elements a rank, and a rank's pieces follow each other (zero/stage3.py). The order is
that of ``param_shapes``. The module's order and ``param_slice_mappings`` differ from it under
``round_robin_gradients``. Elements behind the last parameter are padding: uninitialised memory.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

from ckptcore.core.object_tree import Named, Refused
from ckptcore.encodings.pickle.torch_globals import StoredView
from ckptcore.encodings.torchzip.reader import SharedTrees
from ckptcore.errors import MalformedCheckpoint, UnsupportedFormat
from ckptcore.formats.base import Source
from ckptcore.formats.common.shard_pieces import ShardPlacement
from ckptcore.formats.deepspeed.assembly import Assembly, FileTensor, PlacedBuffer
from ckptcore.formats.deepspeed.file_names import CheckpointFiles
from ckptcore.formats.deepspeed.rank_files import ModelStates, RankGrid, StatesFile, config_value, read_file
from ckptcore.utils.text import short_repr

STATE = "optimizer.state"
MASTER = "fp32"  # what the universal form calls a master weight
_EXPERT = re.compile(r"^(?P<layer>.*\bdeepspeed_experts\.)(?P<expert>[0-9]{1,9})(?P<rest>\..*)$")
_MAX_EXPERT_RANKS = 4096
# States with an element for each of the parameter's: a buffer of another size is damage.
_ELEMENTWISE = frozenset(
    {MASTER, "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "exp_inf", "sum", "square_avg"}
)
_MASTERS = ("single_partition_of_fp32_groups", "fp32_flat_groups")
# Where each rank's partition is, which the manifest says by itself.
LAYOUT = frozenset(
    {
        *_MASTERS,
        "base_optimizer_state",
        "optimizer_state_dict",
        "param_slice_mappings",
        "group_paddings",
        "param_alignment_paddings",
        "partition_count",
        "ds_zero_partition_groups",
    }
)


# Keys of a file; the model-state files have the last two as well.
_BESIDE_STATE = frozenset({"optimizer_state_dict", "ds_config", "ds_version"})
Shape = tuple[int, ...]
_ALIGNED = 2  # `nccl_start_alignment_factor`: a group is filled up to a multiple of this many elements a rank


@dataclass(frozen=True, slots=True)
class Group:
    """A parameter group of one model-parallel rank.

    Attributes:
        number: Its place among the groups, or sub-groups of ZeRO-3.
        parameters: In the order of the flat buffer.
        ranks: How many partitions the buffer has.
        experts: Expert-parallel ranks that hold other experts of the same group, 1 for no MoE group.
        blocks: Whether the ranks that share experts are consecutive.
    """

    number: int
    parameters: tuple[FlatParameter, ...]
    ranks: int
    experts: int = 1
    blocks: bool = False

    def place(self, dp: int) -> tuple[int, int]:
        """Return (expert-parallel rank, number of the partition) of a data-parallel rank.

        deepspeed/utils/groups.py, `_get_expert_parallel_ranks`: expert-parallel groups are consecutive ranks,
        so those that share experts are ``experts`` apart; ``use_data_before_expert_parallelism`` swaps this.
        """
        if self.experts == 1:
            return 0, dp
        return divmod(dp, self.ranks) if self.blocks else divmod(dp, self.experts)[::-1]


def read_partitions(
    source: Source, files: CheckpointFiles, states: ModelStates, shared: SharedTrees
) -> dict[tuple[int, int], StatesFile]:
    """Read the optimizer files: (data-parallel rank, model-parallel rank) -> file.

    Those of a model-parallel rank without a model-state file are left out: nothing names what they hold.
    ``shared`` is from `shared_trees`.
    """
    world, named = states.world, {mp for _, mp in states.files}
    return {
        (dp, mp): read_file(source, path, shared)
        for (dp, mp), path in files.optim.items()
        if dp < world.dp and mp < world.mp and mp in named
    }


def parameter_shapes(file: StatesFile) -> list[dict[str, tuple[int, ...]]]:
    """Return ``param_shapes`` of a model-state file: FQN -> shape, a dict for each group.

    Raises:
        MalformedCheckpoint: It is no list of dicts of shapes.
    """
    stored = file.tree.get("param_shapes")
    return group_shapes([] if stored is None else [stored] if isinstance(stored, dict) else stored, file.path)


def group_shapes(groups: Any, path: str) -> list[dict[str, tuple[int, ...]]]:
    """Return a list of dicts FQN -> shape as plain values; raise `MalformedCheckpoint` for anything else."""
    shapes_by_group: list[dict[str, tuple[int, ...]]] = []
    listed_names: set[str] = set()
    for group in groups if isinstance(groups, (list, tuple)) else [None]:
        if not isinstance(group, dict):
            raise MalformedCheckpoint(f"{path}: shapes of parameters must be a list of dicts", file=path)
        shapes_by_group.append({})
        for name, shape in group.items():
            dims = shape.value if isinstance(shape, Named) else shape
            if type(name) is not str or not isinstance(dims, (tuple, list)):
                raise MalformedCheckpoint(f"{path}: shapes name {short_repr(name, 60)}", file=path)
            if any(type(n) is not int or not 0 <= n < 1 << 50 for n in dims):
                raise MalformedCheckpoint(f"{path}: {name} has shape {short_repr(dims, 60)}", file=path)
            if name in listed_names:
                raise MalformedCheckpoint(f"{path}: shapes name {short_repr(name, 60)} twice", file=path)
            listed_names.add(name)
            shapes_by_group[-1][name] = tuple(dims)
    return shapes_by_group


def global_expert(name: str, rank: int, local: int) -> str:
    """Return the name of an expert's parameter in the whole model.

    Files of a rank count its own experts from 0 (deepspeed/moe/layer.py, deepspeed/runtime/engine.py
    `_save_moe_checkpoint`).

    Args:
        name: As the rank's ``param_shapes`` has it.
        rank: Expert-parallel rank.
        local: Experts that each rank has in this layer.
    """
    match = _EXPERT.match(name)
    if match is None:
        return name
    return f"{match['layer']}{int(match['expert']) + rank * local}{match['rest']}"


class Partitions:
    """Adds the optimizer partitions of one model-parallel rank.

    Args:
        assembly: Where tensors are added.
        world: The ranks of the job.
        files: Data-parallel rank -> optimizer file.
        model: The model-state file of the same model-parallel rank.
        placements: Of a parameter of this rank by its name, or None for one that is not merged.
        master: Parameter -> name that its master weight gets.
        cuts: Parameter -> elements at which any model-parallel rank's partitions begin (`starts`). Several
            ranks may hold one parameter (tied stages, replicated weights), each cut elsewhere.
    """

    def __init__(
        self,
        assembly: Assembly,
        world: RankGrid,
        files: Mapping[int, StatesFile],
        model: StatesFile,
        placements: Mapping[str, ShardPlacement | None],
        master: Mapping[str, str],
        cuts: Mapping[str, Sequence[int]],
    ) -> None:
        self._cuts = cuts
        self._assembly, self._world, self._files = assembly, world, files
        self._model, self._placements, self._master = model, placements, master
        self._state = {dp: _optimizer(file) for dp, file in files.items()}
        self._is_zero3 = any("fp32_flat_groups" in s for s in self._state.values())
        self._shapes = parameter_shapes(model)
        self._master_groups = {dp: self._masters(dp) for dp in self._state}
        self._local = _local_experts(self._shapes)

    def add(self) -> None:
        """Add every master weight, moment and object."""
        for group in self._groups():
            members = self._members(group)
            masters = {dp: self._of_group(dp, self._master_groups[dp], group.number) for dp in self._state}
            self._partitioned(group, members, MASTER, masters)
            inner = {dp: self._inner(dp, group.number) for dp in self._state}
            for key in dict.fromkeys(k for values in inner.values() for k in values):
                values = {dp: v[key] for dp, v in inner.items() if key in v}
                self._add_state(group, members, str(key), values)
        for dp, state in self._state.items():
            self._add_objects(dp, state)

    def starts(self, shared: Collection[str]) -> Iterator[tuple[str, int]]:
        """Yield where partitions begin in those of the ``shared`` parameters that this rank has."""
        for group in self._groups():
            if not any(p.name in shared for p in group.parameters):
                continue
            for ranks in self._members(group).values():
                values = {dp: self._of_group(dp, self._master_groups[dp], group.number) for dp in ranks}
                lengths = {
                    group.place(dp)[1]: v.shape[0]
                    for dp, v in values.items()
                    if isinstance(v, StoredView) and len(v.shape) == 1
                }
                try:
                    cut = cut_each if self._is_zero3 else cut_together
                    for f in cut(group.parameters, group.ranks, lengths) if lengths else ():
                        if f.parameter.name in shared:
                            yield from ((f.parameter.name, n) for n in (f.start, f.stop))
                except UnfitPartition:  # `add` says so
                    continue

    def _groups(self) -> Iterator[Group]:
        """Yield the parameter groups; raise where ranks or files disagree about them."""
        shapes = self._shapes
        first, state = next(iter(self._state.items()))
        masters = self._master_groups[first]
        path = self._files[first].path
        if len(masters) != len(shapes):
            raise MalformedCheckpoint(
                f"{path} has {len(masters)} groups of master weights, {self._model.path} has {len(shapes)} "
                "groups of parameters: they are of different saves",
                file=path,
            )
        for dp, rank_state in self._state.items():
            for key in ("param_alignment_paddings", "partition_count"):
                if rank_state.get(key) != state.get(key):
                    raise MalformedCheckpoint(
                        f"{self._files[dp].path} has another {key} than {path}: they are of different saves",
                        file=self._files[dp].path,
                    )
        paddings = state.get("param_alignment_paddings")
        blocks = config_value(self._model.tree, "use_data_before_expert_parallelism") is True
        for number, group in enumerate(shapes):
            behind = _paddings(paddings, number, len(group), path)
            ranks = _count(state.get("partition_count"), number, self._world.dp, path)
            if self._is_zero3 and ranks != self._world.dp:
                raise MalformedCheckpoint(
                    f"{path} has parts of {ranks} ranks, {self._model.path} is of {self._world.dp} "
                    "data-parallel ranks: they are of different saves",
                    file=path,
                )
            if self._world.dp % ranks:
                raise MalformedCheckpoint(
                    f"{path}: group {number} has {ranks} partitions for {self._world.dp} data-parallel ranks",
                    file=path,
                )
            parameters = tuple(
                FlatParameter(name, shape, pad)
                for (name, shape), pad in zip(group.items(), behind, strict=True)
            )
            experts = self._world.dp // ranks if not self._is_zero3 else 1
            yield Group(number, parameters, ranks, experts, blocks)

    def _members(self, group: Group) -> dict[int, list[int]]:
        """Return expert-parallel rank -> data-parallel ranks that have its partitions, and a file."""
        members: dict[int, list[int]] = {e: [] for e in range(min(group.experts, _MAX_EXPERT_RANKS))}
        for dp in sorted(self._state):
            members.setdefault(group.place(dp)[0], []).append(dp)
        return members

    def _add_state(
        self, group: Group, members: Mapping[int, list[int]], key: str, values: Mapping[int, Any]
    ) -> None:
        tensors = {dp: v for dp, v in values.items() if isinstance(v, StoredView)}
        if len(tensors) == len(values) and all(v.shape == () for v in tensors.values()):
            for rank, ranks in members.items():
                names = [f"{STATE}.{name}.{key}" for name in self._names(group, rank)]
                copies = [FileTensor(self._files[dp], tensors[dp]) for dp in ranks if dp in tensors]
                self._assembly.scalars(names, copies)
        elif tensors or any(isinstance(v, Refused) for v in values.values()):
            self._partitioned(group, members, key, values)
        else:
            for dp, value in values.items():
                self._assembly.object(f"optimizer.groups.{group.number}.{key}", value, self._files[dp].path)

    def _names(self, group: Group, rank: int) -> list[str]:
        return [global_expert(p.name, rank, self._local.get(_layer(p.name), 0)) for p in group.parameters]

    def _partitioned(
        self, group: Group, members: Mapping[int, list[int]], key: str, values: Mapping[int, Any]
    ) -> None:
        """Add a state that is partitioned over ranks; keep raw buffers where no parameter fits."""
        for rank, ranks in members.items():
            names = dict(zip((p.name for p in group.parameters), self._names(group, rank), strict=True))
            odd = [dp for dp in ranks if dp in values and not isinstance(values[dp], StoredView)]
            for dp in ranks if odd else ():
                file, value = self._files[dp], values.get(dp)
                if isinstance(value, StoredView):
                    self._assembly.place(FileTensor(file, value), key)
                    continue
                for name in names.values() if dp in odd else ():
                    self._assembly.odd(self._target(name, key), value, file.path)
            if odd:
                continue
            # A partition's number is the place of its rank among those that share it.
            of = {group.place(dp)[1]: dp for dp in ranks if dp in values}
            buffers = {n: values[dp] for n, dp in of.items()}
            if any(len(v.shape) != 1 for v in buffers.values()):
                self._keep_raw(group, key, {of[n]: v for n, v in buffers.items()})
                continue
            lengths = {n: v.shape[0] for n, v in buffers.items()}
            try:
                cut = cut_each if self._is_zero3 else cut_together
                fragments = list(cut(group.parameters, group.ranks, lengths)) if lengths else []
            except UnfitPartition as error:
                if key not in _ELEMENTWISE:
                    self._keep_raw(group, key, {of[n]: v for n, v in buffers.items()})
                    continue
                path = self._files[of[next(iter(buffers))]].path
                self._require_in_memory(path)
                raise MalformedCheckpoint(
                    f"cannot find the parameters of group {group.number} in {key} of {path}: {error}. Its "
                    "files are of different saves, or cut",
                    file=path,
                ) from error
            for parameter in group.parameters:
                placement = self._placements.get(parameter.name)
                if placement is not None:
                    dtype = next((v.dtype for v in buffers.values()), "float32")
                    self._assembly.declare(self._target(names[parameter.name], key), dtype, placement.shape)
            placed = {  # one may be padding alone
                n: self._assembly.place(FileTensor(self._files[of[n]], value), key)
                for n, value in buffers.items()
            }
            if key == MASTER:
                self._require_places(group, fragments, of)
            for fragment in fragments:
                self._add_fragment(fragment, names, key, placed[fragment.rank])

    def _require_places(self, group: Group, fragments: Sequence[Fragment], of: Mapping[int, int]) -> None:
        """Note files that list the slices of another rank's partition: files were exchanged, or copied.

        ``param_slice_mappings`` has (elements, first of them in the buffer) of each parameter. Under
        round-robin gradients its order is not the buffer's, and it decides nothing; otherwise only a list
        that is exactly another rank's is damage. ZeRO-3 stores none.
        """
        if config_value(self._model.tree, "zero_optimization", "round_robin_gradients") is True:
            return
        names = {p.name for p in group.parameters}
        slices: dict[int, dict[str, tuple[int, int]]] = {n: {} for n in of}
        for f in fragments:
            slices[f.rank][f.parameter.name] = f.stop - f.start, f.buffer_start
        for n, dp in of.items():
            listed = _listed_slices(self._state[dp].get("param_slice_mappings"), group.number)
            if not listed or listed == slices[n]:
                continue
            unexpected = next((name for name in listed if name not in names), None)
            if unexpected is not None:
                path = self._files[dp].path
                message = (
                    f"{path} lists {short_repr(unexpected, 80)}, {self._model.path} has no such parameter"
                )
                self._assembly.builder.report("mixed-saves", "files", message, file=path)
                continue
            owner = next((m for m, rank_slices in slices.items() if rank_slices == listed), None)
            if owner is not None:
                path = self._files[dp].path
                message = f"{path} lists the slices of {self._files[of[owner]].path} (group {group.number})"
                self._assembly.builder.report("mixed-saves", "files", message, file=path)

    def _require_in_memory(self, path: str) -> None:
        """Raise `UnsupportedFormat` where buffers are empty because they were offloaded to NVMe."""
        for part in ("offload_optimizer", "offload_param"):
            if config_value(self._model.tree, "zero_optimization", part, "device") == "nvme":
                raise UnsupportedFormat(
                    f"cannot read {path}: its optimizer is offloaded to NVMe ({part}), and the swap files in "
                    "offloaded_tensors/ name no parameters",
                    hint="save the model in the job: engine.save_16bit_model(DIR), with "
                    "stage3_gather_16bit_weights_on_model_save",
                )

    def _add_fragment(self, f: Fragment, names: Mapping[str, str], key: str, buffer: PlacedBuffer) -> None:
        placement = self._placements.get(f.parameter.name)
        if placement is None:
            return
        target = self._target(names[f.parameter.name], key)
        cuts = self._cuts.get(f.parameter.name, ())
        inside = cuts[bisect_right(cuts, f.start) : bisect_left(cuts, f.stop)]
        for start, stop in pairwise([f.start, *inside, f.stop]):
            buffer_start = f.buffer_start + start - f.start
            self._assembly.run(target, buffer, buffer_start, f.parameter.shape, start, stop, placement)

    def _target(self, name: str, key: str) -> str:
        return self._master.get(name, f"{STATE}.{name}.{key}") if key == MASTER else f"{STATE}.{name}.{key}"

    def _keep_raw(self, group: Group, key: str, values: Mapping[int, StoredView]) -> None:
        """Keep state that is no flat partition as each rank has it."""
        for dp, value in values.items():
            file = self._files[dp]
            name = f"optimizer.groups.{group.number}.{key}/{file.path.removesuffix('.pt')}"
            self._assembly.tensor(name, FileTensor(file, value))
        message = f"{key} of group {group.number} has no flat buffers, and stays as ranks have it"
        self._assembly.builder.report("flat-buffers", "coverage", message)

    # --- what a file holds ---

    def _masters(self, dp: int) -> list[Any]:
        masters = next((self._state[dp][k] for k in _MASTERS if k in self._state[dp]), None)
        if not isinstance(masters, (list, tuple)):
            path = self._files[dp].path
            raise MalformedCheckpoint(f"{path} holds no list of master weights", file=path)
        return list(masters)

    def _of_group(self, dp: int, values: Sequence[Any], number: int) -> Any:
        if number >= len(values):
            path = self._files[dp].path
            raise MalformedCheckpoint(f"{path} has no group {number}: it is of another save", file=path)
        value = values[number]
        # ZeRO-3 with offloading keeps a list of buffers for each sub-group.
        return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value

    def _inner(self, dp: int, number: int) -> Mapping[Any, Any]:
        """Return the base optimizer's state of one group; empty before the first step."""
        state = self._state[dp]
        base = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
        if isinstance(base, (list, tuple)):  # elastic_checkpoint: a dict for each group, without padding
            group_state = base[number] if number < len(base) else {}
        else:
            states = base.get("state") if isinstance(base, dict) else None
            group_state = states.get(number, {}) if isinstance(states, dict) else {}
        return group_state if isinstance(group_state, dict) else {}

    def _add_objects(self, dp: int, state: Mapping[str, Any]) -> None:
        file = self._files[dp]
        base = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
        if isinstance(base, dict):
            for key, value in base.items():
                if key != "state" or not isinstance(value, dict):
                    self._assembly.value(
                        f"optimizer.{key}", self._name_parameters(key, value), file, per_file=True
                    )
        elif isinstance(base, Refused):
            self._assembly.object("optimizer.base_optimizer_state", base, file.path)
        for key, value in state.items():
            if key not in LAYOUT:
                self._assembly.value(f"optimizer.{key}", value, file, per_file=True)
        add_more(self._assembly, file)

    def _name_parameters(self, key: Any, value: Any) -> Any:
        """Return parameter groups with names in place of the numbers of their buffers."""
        if key != "param_groups" or not isinstance(value, (list, tuple)) or self._world.mp > 1:
            return value
        shapes = self._shapes
        named_groups, used_numbers = [], set[int]()
        for group in value:
            numbers = group.get("params") if isinstance(group, dict) else None
            if not isinstance(numbers, list) or any(
                type(n) is not int or not 0 <= n < len(shapes) for n in numbers
            ):
                return value
            # A number twice in one group, or in two groups, names nothing.
            if len({*numbers} | used_numbers) != len(numbers) + len(used_numbers):
                return value
            used_numbers.update(numbers)
            experts = isinstance(group, dict) and group.get("moe")
            names = [name for n in numbers for name in shapes[n]]
            named_groups.append(group if experts else {**group, "params": names})
        return named_groups


def add_more(assembly: Assembly, file: StatesFile) -> None:
    """Add what DeepSpeed itself does not write beside the optimizer's state."""
    for key, value in file.tree.items():
        if key not in _BESIDE_STATE:
            assembly.value(f"optim_states.{key}", value, file, per_file=True)


def _listed_slices(mappings: Any, number: int) -> dict[str, tuple[int, int]] | None:
    """Return parameter -> (elements, first in the buffer) of a group, or None where that is not recorded."""
    of_group = mappings[number] if isinstance(mappings, (list, tuple)) and number < len(mappings) else None
    if not isinstance(of_group, dict):
        return None
    slices: dict[str, tuple[int, int]] = {}
    for name, address in of_group.items():
        fields = address.value[1] if isinstance(address, Named) and address.kind == "record" else None
        count, start = (
            (fields.get(k) for k in ("numel", "start")) if isinstance(fields, dict) else (None, None)
        )
        if type(name) is not str or type(count) is not int or type(start) is not int:
            return None
        slices[name] = count, start
    return slices


def _optimizer(file: StatesFile) -> dict[str, Any]:
    state = file.tree.get("optimizer_state_dict")
    if not isinstance(state, dict):
        raise MalformedCheckpoint(f"{file.path} holds no optimizer_state_dict", file=file.path)
    return state


def _paddings(paddings: Any, number: int, count: int, path: str) -> Sequence[int]:
    if paddings is None or paddings == []:  # before 0.19.7
        return [0] * count
    of_group = paddings[number] if isinstance(paddings, (list, tuple)) and number < len(paddings) else None
    if (
        not isinstance(of_group, (list, tuple))
        or len(of_group) != count
        or any(type(n) is not int or not 0 <= n < 1 << 40 for n in of_group)
    ):
        raise MalformedCheckpoint(
            f"{path}: param_alignment_paddings of group {number} are not those of {count} parameters",
            file=path,
        )
    return list(of_group)


def _count(value: Any, number: int, dp: int, path: str) -> int:
    if isinstance(value, (list, tuple)):
        value = value[number] if number < len(value) else None
    if value is None:
        return dp
    if type(value) is not int or not 0 < value <= dp:
        raise MalformedCheckpoint(
            f"{path}: partition_count is {short_repr(value, 40)} for {dp} ranks", file=path
        )
    return value


def _layer(name: str) -> str:
    match = _EXPERT.match(name)
    return match["layer"] if match else ""


def _local_experts(shapes: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return MoE layer -> experts that one rank has of it, which may be spread over groups."""
    experts_by_layer: dict[str, int] = {}
    for name in (n for group in shapes for n in group):
        if m := _EXPERT.match(name):
            experts_by_layer[m["layer"]] = max(experts_by_layer.get(m["layer"], 0), 1 + int(m["expert"]))
    return experts_by_layer


@dataclass(frozen=True, slots=True)
class FlatParameter:
    """A parameter of a group.

    Attributes:
        name: FQN.
        shape: Of what one model-parallel rank has, elements.
        padding: Elements of alignment behind it (``param_alignment_paddings``).
    """

    name: str
    shape: Shape
    padding: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Fragment:
    """A run of a parameter's elements in one rank's flat buffer.

    Attributes:
        parameter: Whose elements.
        rank: Data-parallel rank, by its place in the group.
        start, stop: Row-major elements of the parameter.
        buffer_start: The first of them in the rank's buffer, elements.
    """

    parameter: FlatParameter
    rank: int
    start: int
    stop: int
    buffer_start: int


class UnfitPartition(ValueError):
    """Sizes of buffers that the parameters of their group do not have."""


def cut_together(
    parameters: Sequence[FlatParameter], ranks: int, lengths: Mapping[int, int]
) -> Iterator[Fragment]:
    """Yield the fragments of a group that is cut as one buffer (ZeRO-1, ZeRO-2, BF16_Optimizer).

    Args:
        parameters: Of the group, in the order of ``param_shapes``.
        ranks: How many partitions the buffer has.
        lengths: Rank -> elements in its buffer, of the ranks whose file is there. Padding at the end of the
            last ranks is stripped from masters, and not from moments.

    Raises:
        UnfitPartition: The buffers have not the size that the parameters need.
    """
    total = sum(p.numel + p.padding for p in parameters)
    size = max(lengths.values(), default=0)
    if 0 not in lengths:  # the others may be stripped: only a full partition tells the size
        size = max(size, -(-total // (ranks * _ALIGNED)) * _ALIGNED)
    # Behind the last parameter there is only padding: a longer rest is a parameter of another save.
    limit = ranks * max([_ALIGNED, *(p.padding + 1 for p in parameters)])
    for rank, length in lengths.items():
        real = min(max(total - rank * size, 0), size)
        if length < real or length > size:
            raise UnfitPartition(f"rank {rank} holds {length} elements where its part of {total} has {real}")
    if not 0 <= ranks * size - total <= max(limit, ranks * _ALIGNED):
        raise UnfitPartition(f"{ranks} partitions of {size} elements for parameters of {total} elements")
    position, present_ranks = 0, sorted(lengths)
    for parameter in parameters:
        begin, end = position, position + parameter.numel
        # Ranks by their files: a file may record a job of far more ranks.
        first, last = (
            (bisect_left(present_ranks, n) for n in (begin // size, -(-end // size)))
            if end > begin
            else (0, 0)
        )
        for rank in present_ranks[first:last]:
            low, high = max(begin, rank * size), min(end, (rank + 1) * size)
            yield Fragment(parameter, rank, low - begin, high - begin, low - rank * size)
        position = end + parameter.padding


def cut_each(
    parameters: Sequence[FlatParameter], ranks: int, lengths: Mapping[int, int]
) -> Iterator[Fragment]:
    """Yield the fragments of a group whose parameters are cut one by one (ZeRO-3).

    Args:
        parameters: Of the (sub-)group, in the order of ``param_shapes``.
        ranks: How many data-parallel ranks there are.
        lengths: Rank -> elements in its buffer, of the ranks whose file is there.

    Raises:
        UnfitPartition: A buffer has not the size that the parameters need.
    """
    total = sum(-(-p.numel // ranks) for p in parameters)
    for rank, length in lengths.items():
        if length != total:
            raise UnfitPartition(f"rank {rank} holds {length} elements where its parts are {total}")
    position, present_ranks = 0, sorted(lengths)
    for parameter in parameters:
        size = -(-parameter.numel // ranks)
        for rank in present_ranks:
            start, stop = min(rank * size, parameter.numel), min((rank + 1) * size, parameter.numel)
            if stop > start:
                yield Fragment(parameter, rank, start, stop, position)
        position += size
