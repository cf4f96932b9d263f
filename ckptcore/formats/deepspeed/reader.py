"""Read the manifest of a DeepSpeed checkpoint folder.

Names: ``module.<fqn>`` is the model, ``optimizer.state.<fqn>.<key>`` its optimizer state, and everything
else that a rank saved is an object of its own name. Trained parameters are stored twice, as low-precision
weights and as fp32 masters. With ``weights="master"`` the model has the masters, and the weights as stored
are ``lp/<fqn>`` (DeepSpeed's word for low precision). With ``weights="module"`` the model is as stored, and
masters are ``optimizer.state.<fqn>.fp32``. Where both have one dtype they are copies of each other, and are
compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from math import prod
from typing import Any

from ckptcore.core.manifest import Manifest
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.object_tree import Refused
from ckptcore.encodings.limits import absent
from ckptcore.encodings.pickle.torch_globals import StoredView
from ckptcore.encodings.torchzip.reader import SharedTrees
from ckptcore.errors import Finding, MalformedCheckpoint, NameMismatch, UnsupportedFormat, finding
from ckptcore.formats.base import Source
from ckptcore.formats.common.part_proof import lack
from ckptcore.formats.common.shard_pieces import ShardPlacement, Unmerged, same
from ckptcore.formats.common.trees import kind_of, leaves_below
from ckptcore.formats.deepspeed.assembly import Assembly, FileTensor
from ckptcore.formats.deepspeed.file_names import NAME, CheckpointFiles, files_of
from ckptcore.formats.deepspeed.misplaced_files import (
    TIED,
    LayerFile,
    copied_files,
    misplaced_experts,
    misplaced_first_ranks,
    misplaced_layers,
    misplaced_partitions,
    misplaced_trainer_ranks,
    missing_layers,
    missing_shapes,
    missing_tied_layers,
    unlisted_layers,
)
from ckptcore.formats.deepspeed.optimizer_states import (
    STATE,
    Partitions,
    add_more,
    group_shapes,
    parameter_shapes,
    read_partitions,
)
from ckptcore.formats.deepspeed.rank_files import (
    ModelStates,
    StatesFile,
    config_value,
    read_file,
    read_model_states,
    shared_trees,
)
from ckptcore.formats.deepspeed.tensor_parallel import (
    INFO,
    NeoxRanks,
    TensorParallel,
    lacking,
    neox_ranks,
    part_name,
    with_computed,
)
from ckptcore.formats.deepspeed.universal import add_universal
from ckptcore.formats.deepspeed.unpartitioned import add_unpartitioned, has_masters
from ckptcore.utils.text import listed, short_repr

MODEL = "module."
LOW_PRECISION = "lp/"  # no dot: it is no part that could be the model
Shape = tuple[int, ...]
# Keys that record where values are: the manifest has this in its own form.
LAYOUT_KEYS = frozenset(
    {
        "module",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "shared_params",
        "buffer_names",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "universal_checkpoint_info",
    }
)


@dataclass(frozen=True, slots=True)
class _Part:
    """A state dict of weights: whose file, which tensor-parallel rank, FQN -> value, whether ZeRO-3's."""

    file: StatesFile
    tp: int
    values: Mapping[str, Any]
    partitioned: bool = False


def read(source: Source) -> Manifest:
    """Read the manifest of a folder of one step (the folder that ``latest`` names).

    Raises:
        MalformedCheckpoint: A file is damaged, or the files do not fit each other.
        UnsupportedFormat: Nothing names the parameters, or a form that is not read.
    """
    files = files_of(source.listing)
    shared = shared_trees()
    states = read_model_states(source, files, shared)
    return _Reader(source, files, states, shared).read()


class _Reader:
    def __init__(
        self, source: Source, files: CheckpointFiles, states: ModelStates, shared: SharedTrees
    ) -> None:
        self._source, self._files, self._states, self._trees = source, files, states, shared
        self._builder = Builder()
        self._assembly = Assembly(self._builder)
        # Of each model-parallel rank the first file: what it records of parameters is
        # the same for all its data-parallel ranks.
        self._ranks = states.firsts()
        self._trained = {
            mp: {name: shape for group in parameter_shapes(f) for name, shape in group.items()}
            for mp, f in self._ranks.items()
        }
        self._frozen = {mp: _frozen_shapes(f) for mp, f in self._ranks.items()}
        self._shared = {k: v for f in states.files.values() for k, v in _texts(f, "shared_params").items()}
        self._buffers = {n for f in self._ranks.values() for n in _names(f, "buffer_names")}
        self._opened: list[StatesFile] = [*states.files.values()]
        self._copies: list[tuple[str, FileTensor]] = []
        self._layer_names: set[str] = set()
        self._partitions: dict[tuple[int, int], StatesFile] = {}
        self._layers: dict[tuple[int, int], LayerFile] = {}
        self._expert_keys: dict[tuple[int, int, int], tuple[str, list[str]]] = {}
        self._placeholders: dict[str, str] = {}
        # Filled once the shapes of all ranks are known.
        self._neox: NeoxRanks | None = None
        # A folder that was converted in place keeps the buffers, which are the save itself.
        self._universal = bool(files.universal) and not files.optim
        # Before 0.3.9 nothing named the parameters of the buffers.
        self._named = self._universal or all(
            f.tree.get("param_shapes") is not None for f in self._ranks.values()
        )

    def read(self) -> Manifest:
        builder, states = self._builder, self._states
        builder.findings += [*states.findings, *self._missing_experts()]
        parts = list(self._parts())
        names = (name for part in parts for name in part.values)
        for name, message in lacking(self._source, states.sample.tree, names):
            # With recovery, parts are expected to be missing; otherwise a tensor with a hole is damage.
            builder.findings.append(lack(self._source, "hole", "coverage", message, fqn=MODEL + name))
        builder.findings += misplaced_experts(self._expert_keys)
        # A universal folder may leave out layer files, because its weights are in `zero/`.
        if not self._files.universal or self._files.layers:
            builder.findings += missing_layers(states, self._files, self._trained)
            builder.findings += missing_tied_layers(self._trained, self._layers)
            if not self._files.experts:
                builder.findings += missing_shapes(states, self._layers)
        placements = self._placements(parts)
        files = self._files
        partitioned = self._named and bool(files.optim or files.universal)
        masters = partitioned or any(map(has_masters, self._ranks.values()))
        zero3 = any(dp >= 0 for dp, _ in states.files)
        # Without ZeRO nothing records which parameter a master is of, and weights are the default.
        computed = self._neox.computed if self._neox is not None else {}
        means = sorted(name for name, operation in computed.items() if operation == "mean")
        if means:
            message = f"the copies of {MODEL}{listed(means, 1)} differ between ranks: their mean is taken"
            builder.report("averaged-copies", "coverage", message, fqn=MODEL + means[0])
        # The rules for copies that differ between ranks are of the weights as stored, not of their masters.
        preferred = "master" if partitioned and not computed else "module"
        chosen = preferred if self._source.weights == "auto" else self._source.weights
        if self._source.weights == "master" and not masters:
            raise UnsupportedFormat(
                "the checkpoint has no master weights that anything names", hint="leave out --weights master"
            )
        use_masters = chosen == "master" and masters
        if zero3 and self._source.weights == "module":
            raise UnsupportedFormat(
                "ZeRO-3 stores master weights alone: there are no others to choose",
                hint="leave out --weights module",
            )
        self._experts = {n for p in parts for n in p.values} if files.experts else set[str]()
        # Masters first: a stored weight of another dtype or cut then goes below `LOW_PRECISION`.
        self._add_masters(placements, use_masters)
        every_tie = self._ties(parts, placements)
        ties = every_tie if use_masters else {}
        self._alias(ties)
        for part in parts:
            self._add_weights(part, placements, use_masters)
        self._add_frozen(placements)
        self._alias({a: o for a, o in ties.items() if a in self._placeholders})  # owners that are frozen
        for name, stored in self._copies:
            if not self._assembly.same_bytes(name, stored):
                message = f"{name} of {stored.file.path} is not that of rank 0, which is taken"
                builder.report("rank-object", "files", message, fqn=name, file=stored.file.path)
        self._require_values()
        builder.findings += self._misplaced(placements, every_tie.keys())
        for file in states.files.values():
            self._add_objects(file)
        self._assembly.add_unused(self._opened)
        self._note_stray()
        self._require_names()
        manifest = builder.build(NAME, self._source.store.url, self._origin(use_masters, masters))
        return with_computed(manifest, computed, states.world.tp, MODEL)

    # --- which weights there are ---

    def _parts(self) -> Iterator[_Part]:
        world = self._states.world
        for (dp, mp), file in self._states.files.items():
            module = file.tree.get("module")
            # Files above 0 hold placeholders for partitioned weights, but buffers in full.
            if isinstance(module, dict) and dp > 0:
                self._compare_buffers(file, module)
            elif isinstance(module, dict):
                yield _Part(file, mp % world.tp, _flat(module, file.path), dp >= 0)
            elif module is not None and not isinstance(module, dict):
                raise MalformedCheckpoint(
                    f"module of {file.path} must be a dict (got {kind_of(module)})", file=file.path
                )
        for (layer, tp), path in self._files.layers.items():
            if self._has_rank(tp < world.tp, path):
                file = self._open(path)
                values = {f"{layer}.{name}": value for name, value in _flat(file.tree, path).items()}
                self._layer_names |= values.keys()
                shapes = {n: v.shape for n, v in values.items() if isinstance(v, StoredView)}
                self._layers[layer, tp] = LayerFile(file, shapes, values.keys())
                yield _Part(file, tp, values)
        for (layer, expert, mp), path in self._files.experts.items():
            if self._has_rank(mp < world.mp, path):
                file = self._open(path)
                values = _flat(file.tree, path)
                self._expert_keys[layer, expert, mp] = path, list(values)
                yield _Part(file, mp % world.tp, values)

    def _has_rank(self, in_job: bool, path: str) -> bool:
        # A file of a rank beyond the job's size is left over from another save with more ranks.
        if not in_job:
            world = self._states.world
            message = f"{path} is of no rank of {world.tp} tensor-parallel x {world.pp} pipeline ranks"
            self._builder.report("mixed-saves", "files", message, file=path)
        return in_job

    def _compare_buffers(self, file: StatesFile, module: Mapping[str, Any]) -> None:
        """Compare buffers of ranks: with ZeRO-3 each has its own, and DeepSpeed's tools take rank 0's."""
        self._copies += [
            (f"{MODEL}{name}", FileTensor(file, value))
            for name, value in _flat(module, file.path).items()
            # A placeholder has no element, and nothing to compare.
            if isinstance(value, StoredView) and 0 not in value.shape
        ]

    def _missing_experts(self) -> Iterator[Finding]:
        """Yield findings for experts without a file: ``num_experts`` states how many each layer has."""
        experts_by_layer: dict[int, set[int]] = {}
        for layer, expert, _ in self._files.experts:
            experts_by_layer.setdefault(layer, set()).add(expert)
        stored = self._states.sample.tree.get("num_experts")
        # Before MoE layers were counted nothing says how many experts
        # there are: the highest number found decides.
        counts = stored if isinstance(stored, list) else []
        # Before MoE layers had numbers (-1), one file had the experts of all of them.
        if len(counts) > len(experts_by_layer) and -1 not in experts_by_layer:
            lost = ", ".join(map(str, absent(experts_by_layer, len(counts), 5)))
            absent_layers = len(counts) - len(experts_by_layer)
            message = f"the files of experts of {absent_layers} MoE layers are missing (layer {lost})"
            yield finding("missing-rank", "files", message)
        for place, layer in enumerate(sorted(experts_by_layer)):
            stored_count = counts[place] if place < len(counts) else None
            count = stored_count if type(stored_count) is int else 1 + max(experts_by_layer[layer])
            for expert in absent(experts_by_layer[layer], count, 20):
                prefix = f"layer_{layer}_" if layer >= 0 else ""
                path = f"{prefix}expert_{expert}_mp_rank_00_model_states.pt"
                message = f"{path} is missing: layer {layer} has {count} experts"
                yield finding("missing-rank", "files", message, file=path)

    def _open(self, path: str) -> StatesFile:
        file = read_file(self._source, path, self._trees)
        self._opened.append(file)
        return file

    def _placements(self, parts: list[_Part]) -> dict[str, dict[int, ShardPlacement]]:
        """Return FQN -> tensor-parallel rank -> placement of its shard; record what cannot be joined."""
        shapes: dict[str, dict[int, Shape]] = {}
        tp = self._states.world.tp
        for mp in self._ranks:
            for name, shape in {**self._frozen[mp], **self._trained[mp]}.items():
                shapes.setdefault(name, {}).setdefault(mp % tp, shape)
        for part in parts:
            for name, value in part.values.items():
                if isinstance(value, StoredView) and _is_placeholder(part, value):
                    # A placeholder's shape says nothing about the
                    # parameter; `param_shapes` or the fragments do.
                    self._placeholders.setdefault(name, part.file.path)
                elif isinstance(value, StoredView):
                    shapes.setdefault(name, {}).setdefault(part.tp, value.shape)
        tree = self._states.sample.tree
        # Checkpoints with `universal_checkpoint_info` say how each tensor is
        # cut; in others the trainer's rules decide.
        if INFO not in tree:
            first = {name: next(iter(shards.values())) for name, shards in shapes.items()}
            self._neox = neox_ranks(self._source, tree, first, tp, _sums(parts))
        rules = self._neox or TensorParallel(tree, list(shapes), tp)
        placements: dict[str, dict[int, ShardPlacement]] = {}
        for name, shard_shapes in shapes.items():
            try:
                if name in self._buffers and len(set(shard_shapes.values())) == 1:
                    # Buffers of equal shapes on all ranks are copies; only
                    # rules for parameters would join them.
                    placements[name] = {rank: same(shape) for rank, shape in shard_shapes.items()}
                else:
                    placements[name] = rules.place(name, shard_shapes)
            except Unmerged as error:
                # One tensor that cannot be joined leaves the others readable.
                self._assembly.unread(MODEL + name, f"its shards cannot be joined: {error}", "")
                message = f"cannot join the tensor-parallel shards of {name}: {error}"
                self._builder.report("unmerged-tensor", "files", message, fqn=MODEL + name)
        return placements

    # --- adding ---

    def _add_masters(self, placements: Mapping[str, dict[int, ShardPlacement]], use_masters: bool) -> None:
        """Add master weights and optimizer state, by the form in which the ranks saved them."""
        tp = self._states.world.tp
        target = {name: MODEL + name for name in self._master_names()} if use_masters else {}
        if self._universal:
            # Only trained parameters have masters; the others of a universal folder are its weights.
            trained = {n for shapes in self._trained.values() for n in shapes}
            shapes = self._merged_shapes(placements)
            add_universal(self._source, self._files, self._assembly, shapes, trained, target)
            return
        partitions = read_partitions(self._source, self._files, self._states, self._trees)
        self._partitions = partitions
        self._opened += partitions.values()
        self._builder.findings += misplaced_partitions(self._states, partitions)
        cuts: dict[str, list[int]] = {}
        partitions_of_ranks: list[Partitions] = []
        for mp, model in self._ranks.items():
            of_rank = {dp: file for (dp, m), file in partitions.items() if m == mp}
            if of_rank and not self._named:
                # Without names only the buffers themselves can be kept.
                self._add_unnamed(of_rank)
            elif of_rank:
                own_placements = {n: placements.get(n, {}).get(mp % tp) for n in self._trained[mp]}
                world = self._states.world
                partitions_of_ranks.append(
                    Partitions(self._assembly, world, of_rank, model, own_placements, target, cuts)
                )
            elif isinstance(model.tree.get("optimizer"), dict):
                weights, several = self._trainable(model), self._states.world.mp > 1
                of_rank_placed = {n: placements.get(n, {}).get(mp % tp) for n in weights}
                add_unpartitioned(
                    self._assembly, self._source, model, weights, of_rank_placed, use_masters, several=several
                )
        # A parameter that several pipeline stages hold, a tied embedding, is cut by each stage's partitions:
        # all are cut alike, so that copies can be compared box by box.
        often = Counter(name for shapes in self._trained.values() for name in shapes)
        shared = {name for name, n in often.items() if n > 1}
        starts = {row for rank in partitions_of_ranks for row in rank.starts(shared)} if shared else set()
        for name, start in sorted(starts):
            cuts.setdefault(name, []).append(start)
        for rank_partitions in partitions_of_ranks:
            rank_partitions.add()
        # Experts' optimizer states in files of their own are kept as each rank has them.
        for path in self._files.expert_optim.values():
            file = self._open(path)
            for key, value in file.tree.items():
                self._assembly.tree(file).add(f"optimizer/{path.removesuffix('.pt')}.{key}", value)

    def _add_unnamed(self, files: Mapping[int, StatesFile]) -> None:
        """Keep buffers of which nothing names the parameters as the ranks have them."""
        for file in files.values():
            message = f"nothing names the parameters in the buffers of {file.path}: param_shapes is missing"
            self._builder.report("unnamed-states", "files", message, file=file.path)
            for key, value in file.tree.items():
                if key == "optimizer_state_dict":
                    self._assembly.value("optimizer", value, file, per_file=True)
            add_more(self._assembly, file)

    def _alias(self, ties: Mapping[str, str]) -> None:
        for alias in ties:
            owner, steps = ties[alias], 0
            # A tie of a tie; a crafted file may tie names in a circle.
            while owner in ties and steps < 64:
                owner, steps = ties[owner], steps + 1
            self._assembly.alias_all(alias, owner, (MODEL, f"{STATE}."))

    def _master_names(self) -> set[str]:
        """Return every name that a master may get: of parameters, and of experts by their global number."""
        names = {n for shapes in self._trained.values() for n in shapes}
        return names | self._experts

    def _merged_shapes(self, placements: Mapping[str, dict[int, ShardPlacement]]) -> dict[str, Shape]:
        """Return FQN -> shape of the logical parameter."""
        return {name: next(iter(shards.values())).shape for name, shards in placements.items() if shards}

    def _trainable(self, model: StatesFile) -> dict[str, StoredView]:
        module = model.tree.get("module")
        values = module if isinstance(module, dict) else {}
        return {
            name: value
            for name, value in values.items()
            if isinstance(value, StoredView) and name not in self._buffers
        }

    def _ties(
        self, parts: list[_Part], placements: Mapping[str, dict[int, ShardPlacement]]
    ) -> dict[str, str]:
        """Return alias -> owner: as rank 0 records it, or names of one view where nothing does (stage 0).

        A layer of a pipeline that is tied has its file under its number, and its parameters are
        ``tied_modules.<key>.<name>`` (deepspeed/runtime/pipe/module.py, `TiedLayerSpec`).
        """
        shapes = self._merged_shapes(placements)
        stored = {n: v.shape for p in parts if p.partitioned is False for n, v in _tensors(p)}
        tp = self._states.world.tp
        ties = {
            # With several tensor-parallel ranks a stored shape is that of a shard, and is not compared with
            # the merged one.
            a: o
            for a, o in self._shared.items()
            if tp > 1 or a not in stored or o not in shapes or stored[a] == shapes[o]
        }
        listed = self._master_names()
        tied: dict[str, list[str]] = {}
        for name in listed:
            if match := TIED.match(name):
                tied.setdefault(match["rest"], []).append(name)
        for name in self._layer_names - listed - self._buffers:
            owners = tied.get(name.partition(".")[2], [])
            # Several tied modules with a parameter of this name: which of them it is cannot be known.
            if len(owners) == 1 and shapes.get(name) == shapes.get(owners[0]):
                ties.setdefault(name, owners[0])
        for part in parts:
            owner_of_view: dict[Any, str] = {}
            for name, value in part.values.items():
                if isinstance(value, StoredView) and 0 not in value.shape:
                    owner = owner_of_view.setdefault(
                        (value.key, value.offset, value.dtype, value.shape, value.strides), name
                    )
                    if owner != name:
                        ties.setdefault(name, owner)
        return ties

    def _add_weights(
        self, part: _Part, placements: Mapping[str, dict[int, ShardPlacement]], use_masters: bool
    ) -> None:
        for name, value in part.values.items():
            if not isinstance(value, StoredView):
                if isinstance(value, Refused):
                    self._assembly.odd(f"{MODEL}{name}", value, part.file.path)
                else:
                    self._assembly.object(f"{MODEL}{name}", value, part.file.path)
                continue
            placement = placements.get(name, {}).get(part.tp)
            if placement is None or _is_placeholder(part, value):
                # Its bytes belong to the checkpoint, though no tensor has
                # them: `check` must not call them unused.
                self._assembly.place(FileTensor(part.file, value), name)  # not joined, or empty
                continue
            has_master = use_masters and self._assembly.has(MODEL + name)
            # A weight of another dtype than its master's, as in mixed precision, is a tensor of its own.
            low = has_master and not self._assembly.fits(MODEL + name, value.dtype, placement)
            target = f"{LOW_PRECISION if low else MODEL}{name}"
            if self._neox is not None and name in self._neox.computed:
                target = part_name(target, part.tp)
            self._assembly.tensor(target, FileTensor(part.file, value), placement)

    def _add_frozen(self, placements: Mapping[str, dict[int, ShardPlacement]]) -> None:
        """Add frozen parameters: complete beside the weights (ZeRO-2), or cut over the ranks (ZeRO-3)."""
        world = self._states.world
        for (dp, mp), file in self._states.files.items():
            fragments = file.tree.get("frozen_param_fragments")
            for name, value in (fragments if isinstance(fragments, dict) else {}).items():
                shape, target = self._frozen[mp].get(name), MODEL + str(name)
                placement = placements.get(name, {}).get(mp % world.tp)
                if not isinstance(value, StoredView):
                    self._assembly.odd(target, value, file.path)
                elif shape is None:
                    self._assembly.unread(target, "frozen_param_shapes has no shape of it", file.path)
                    self._assembly.place(FileTensor(file, value), target)
                elif placement is None:
                    self._assembly.place(FileTensor(file, value), target)
                elif dp < 0:
                    self._assembly.tensor(target, FileTensor(file, value), placement)
                else:
                    # ZeRO-3 cuts a frozen parameter into parts of one size, and pads the last ones.
                    size = -(-prod(shape) // world.dp)
                    if value.shape != (size,):
                        message = f"{file.path} has {list(value.shape)} elements of {name}, a rank has {size}"
                        self._builder.report("item-mismatch", "files", message, fqn=target, file=file.path)
                        self._assembly.unread(target, "a rank's part of it has another size", file.path)
                        self._assembly.place(FileTensor(file, value), target)
                        continue
                    # The last ranks' parts may reach beyond the parameter, or
                    # begin there: padding is no element of it.
                    start, stop = (min(n * size, prod(shape)) for n in (dp, dp + 1))
                    buffer = self._assembly.place(FileTensor(file, value), target)
                    self._assembly.run(target, buffer, 0, shape, start, stop, placement)

    def _require_values(self) -> None:
        """Note weights of which only a placeholder is stored."""
        for name, path in self._placeholders.items():
            if not self._assembly.has(MODEL + name):
                self._assembly.unread(
                    MODEL + name, "only a placeholder is stored: no file has its values", path
                )

    def _add_objects(self, file: StatesFile) -> None:
        # With one file its keys need no file name; with several, each rank may have other values.
        several = len(self._states.files) > 1
        for key, value in file.tree.items():
            if key in LAYOUT_KEYS or value is None:
                continue
            self._assembly.value(str(key), value, file, per_file=several)

    def _misplaced(
        self, placements: Mapping[str, dict[int, ShardPlacement]], aliases: Set[str]
    ) -> Iterator[Finding]:
        """Yield findings for rank files that are in the place of others; equal replicas are none."""
        tp, models = self._states.world.tp, self._states.files
        # Without a cut all tensor ranks may be equal, since all have the same shards: only
        # within one rank are equal files misplaced.
        cut = any(len(set(shards.values())) > 1 for shards in placements.values())
        listed = self._master_names()
        yield from misplaced_layers(self._layers, listed)
        if self._named:
            recorded_names = listed | {name for shapes in self._frozen.values() for name in shapes}
            yield from unlisted_layers(self._states, self._layers, recorded_names, self._buffers, aliases)
        # Both files of a tied layer hold the same: their names are those of `tied_modules`.
        layers = {key: layer.file for key, layer in self._layers.items() if layer.names & listed}
        complete = {mp: file for (dp, mp), file in models.items() if dp < 0}
        tensor_ranks = {mp % tp for mp in (*(mp for _, mp in self._partitions), *complete)}
        tensor_ranks |= {rank for _, rank in layers}
        for rank in (None,) if cut or tp == 1 else sorted(tensor_ranks):
            for files in (
                [f for (_, mp), f in self._partitions.items() if rank in (None, mp % tp)],
                [f for mp, f in complete.items() if rank in (None, mp % tp)],
                [f for (_, r), f in layers.items() if rank in (None, r)],
            ):
                yield from copied_files(self._source, files)
        of_zero3 = [file for (dp, _), file in models.items() if dp >= 0]
        yield from copied_files(self._source, of_zero3, "frozen_param_fragments")
        yield from misplaced_first_ranks(models)
        yield from misplaced_trainer_ranks(self._source, self._states)

    def _note_stray(self) -> None:
        """Report files of states that are no part of this checkpoint."""
        read = set(self._builder.file_names())
        for path in self._source.listing:
            # Other files in the folder, a tokenizer or a log, are nobody's mistake.
            ours = path.endswith((".pt",)) and "_states" in path.rsplit("/", 1)[-1]
            if ours and path not in read:
                self._builder.report(
                    "stray-file", "files", f"{path} is not part of this checkpoint", file=path
                )
        if self._files.universal and not self._universal:
            path = next(iter(next(iter(self._files.universal.values())).values()))
            message = (
                "zero/ of a universal checkpoint is left out: the partitions that it was made of are read"
            )
            self._builder.report("stray-file", "files", message, file=path)

    def _require_names(self) -> None:
        """Refuse two values of one name: client state may use any."""
        names: set[str] = set()
        for name in [t.fqn for t in self._builder.tensors] + [
            b.key for b in self._builder.blobs if b.unread is None
        ]:
            if name in names:
                raise NameMismatch(f"two values of the checkpoint have the name {short_repr(name, 80)}")
            names.add(name)

    def _origin(self, use_masters: bool, masters: bool) -> dict[str, Any]:
        world, tree = self._states.world, self._states.sample.tree
        kind = "fp32 master weights" if use_masters else "weights as stored"
        return {
            "step": _number(tree.get("global_steps")),
            "deepspeed": short_repr(tree.get("ds_version"), 40),
            "zero_stage": _number(config_value(tree, "zero_optimization", "stage")),
            "mesh": {"dp": world.dp, "tp": world.tp, "pp": world.pp},
            "weights": "master" if use_masters else "module",
            "masters": masters,
            "model": {"prefix": MODEL, "because": f"DeepSpeed keeps the model under module ({kind})"},
        }


def _is_placeholder(part: _Part, value: StoredView) -> bool:
    """Return whether a weight is what ZeRO-3 leaves in place of one that is partitioned."""
    return value.shape == (0,) and part.partitioned


def _frozen_shapes(file: StatesFile) -> dict[str, Shape]:
    value = file.tree.get("frozen_param_shapes")
    if value is None:
        return {}
    (shapes,) = group_shapes([value], file.path)
    return shapes


def _texts(file: StatesFile, key: str) -> dict[str, str]:
    pairs = file.tree.get(key)
    items = pairs.items() if isinstance(pairs, dict) else ()
    return {k: v for k, v in items if type(k) is str and type(v) is str}


def _names(file: StatesFile, key: str) -> list[str]:
    names = file.tree.get(key)
    return [n for n in names if type(n) is str] if isinstance(names, (list, tuple, set)) else []


def _number(value: Any) -> int | None:
    return value if type(value) is int else None


def _sums(parts: Iterable[_Part]) -> dict[str, list[int | None]]:
    """Return name -> CRC-32 of its storage in each file that has it."""
    sums: dict[str, list[int | None]] = {}
    for part in parts:
        for name, value in _tensors(part):
            stored = part.file.objects.storages.get(value.key)
            sums.setdefault(name, []).append(None if stored is None else stored[2])
    return sums


def _tensors(part: _Part) -> Iterable[tuple[str, StoredView]]:
    return ((n, v) for n, v in part.values.items() if isinstance(v, StoredView))


def _flat(values: Mapping[Any, Any], path: str) -> dict[str, Any]:
    """Return a state dict by dotted names; Megatron-DeepSpeed nests them."""
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        for name, _, leaf in leaves_below(value, str(key), StoredView):
            if name in leaves:
                raise NameMismatch(f"{path}: two values have the name {short_repr(name, 80)}")
            leaves[name] = leaf
    return leaves
