"""Find files that are missing, or in the place of others: of another layer, expert, rank, version or stage.

What names a file's place: keys of expert files have the number of their expert (deepspeed/runtime/engine.py,
`_save_moe_checkpoint`), only the first rank lists tied parameters (`_get_shared_params`), and every optimizer
file repeats the configuration and the version. Two files whose tensors have equal checksums are one file
twice, unless ranks may hold equal values.

A pipeline writes ``layer_NN-model_TT-model_states.pt`` for every layer that is a module, and no file for a
function (deepspeed/runtime/pipe/module.py, `save_state_dict`): numbers may have gaps. The names in
``param_shapes`` tell the layers: ``<layer>.<name>``, or ``tied_modules.<key>.<name>`` of a tied one. Without
ZeRO there are no names, but states of the optimizer, each of its parameter's shape.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ckptcore.core.object_tree import Named
from ckptcore.encodings.pickle.torch_globals import StoredView, storages_in
from ckptcore.encodings.torchzip.reader import Storages
from ckptcore.errors import Finding, finding
from ckptcore.formats.base import Source
from ckptcore.formats.common.optimizer_numbers import numbered
from ckptcore.formats.common.rank_file_names import equal_files, mixed
from ckptcore.formats.deepspeed.file_names import CheckpointFiles
from ckptcore.formats.deepspeed.rank_files import ModelStates, StatesFile, config_value
from ckptcore.formats.megatron.seeds import GROUP_TITLES, place_of, seed_reader
from ckptcore.utils.text import short_repr

_EXPERT = re.compile(r"^(?P<layer>.*\bdeepspeed_experts)\.(?P<expert>[0-9]{1,9})\..*$", re.DOTALL)
# Entries of ``ds_config`` that have one value in a job.
_OF_JOB = (
    ("zero_optimization", "stage"),
    ("zero_optimization", "round_robin_gradients"),
    ("train_batch_size",),
    ("bf16", "enabled"),
    ("fp16", "enabled"),
)
Shape = tuple[int, ...]
TIED = re.compile(r"^tied_modules\.[^.]+\.(?P<rest>.+)$", re.DOTALL)
_LAYER = re.compile(r"^[0-9]{1,7}\.")
_OF_PARAMETER = ("exp_avg", "momentum_buffer")  # states that have the shape of their parameter
_MAX_REPORTED = 20


def misplaced_experts(files: Mapping[tuple[int, int, int], tuple[str, Iterable[str]]]) -> Iterator[Finding]:
    """Yield findings for files of experts whose keys are those of another expert or layer.

    Args:
        files: (MoE layer, or -1 for all; global expert; model-parallel rank) -> (path, keys).
    """
    layers: dict[int, dict[str, list[str]]] = {}
    for (layer, expert, _), (path, names) in files.items():
        named_experts = {(m["layer"], int(m["expert"])) for n in names if (m := _EXPERT.match(n))}
        foreign_experts = sorted({number for _, number in named_experts} - {expert})
        if foreign_experts:
            listed = ", ".join(map(str, foreign_experts[:3]))
            yield mixed(f"{path} holds expert {listed}: it is in the place of another file", path)
        elif layer >= 0:  # else the file has the experts of all layers
            for name, _ in named_experts:
                layers.setdefault(layer, {}).setdefault(name, []).append(path)
    owners: dict[str, int] = {}
    for layer, named in layers.items():
        usual = max(named, key=lambda name: len(named[name]))
        for name, paths in named.items():
            if name != usual:
                text = (
                    f"{short_repr(name, 80)}, and other files of MoE layer {layer} of {short_repr(usual, 80)}"
                )
                yield from (mixed(f"{p} holds an expert of {text}", p) for p in paths)
        if usual in owners:
            path = named[usual][0]
            text = f"{path} holds an expert of {short_repr(usual, 80)}, which is MoE layer {owners[usual]}"
            yield mixed(text, path)
        owners.setdefault(usual, layer)


def misplaced_partitions(
    states: ModelStates, partitions: Mapping[tuple[int, int], StatesFile]
) -> Iterator[Finding]:
    """Yield findings for optimizer files of another version or configuration than their model-state file."""
    models = states.firsts()
    for (_, mp), file in partitions.items():
        model = models[mp]
        pairs = [("ds_version", file.tree.get("ds_version"), model.tree.get("ds_version"))]
        if isinstance(file.tree.get("ds_config"), dict):
            pairs += [
                (".".join(keys), config_value(file.tree, *keys), config_value(model.tree, *keys))
                for keys in _OF_JOB
            ]
        for key, in_partition, in_model in pairs:
            if in_partition != in_model and in_partition is not None:
                in_file = f"{file.path} has {key} {short_repr(in_partition, 40)}"
                text = f"{in_file}, {model.path} has {short_repr(in_model, 40)}"
                yield mixed(text, file.path)
    stages = {f.path: _stage(f) for f in partitions.values()}
    first = next(iter(stages), "")
    for path, stage in stages.items():
        if stage != stages[first]:
            text = (
                f"{path} has zero_stage {short_repr(stage, 20)}, {first} has {short_repr(stages[first], 20)}"
            )
            yield mixed(text, path)


def misplaced_first_ranks(files: Mapping[tuple[int, int], StatesFile]) -> Iterator[Finding]:
    """Yield findings for files that list tied parameters where the first rank's file does not."""
    ties = {rank: file for rank, file in files.items() if _has_ties(file)}
    first = files.get((0, 0), files.get((-1, 0)))
    if ties and first is not None and not _has_ties(first):
        (dp, mp), file = next(iter(ties.items()))
        rank = f"model-parallel rank {mp}" if dp < 0 or mp else f"rank {dp}"
        text = f"{file.path} lists tied parameters, which rank 0 does: it is in the place of {rank}'s file"
        yield mixed(text, file.path)


def misplaced_trainer_ranks(source: Source, states: ModelStates) -> Iterator[Finding]:
    """Yield findings for model-state files of other model-parallel ranks, by a trainer's state inside.

    Megatron-DeepSpeed saves its arguments and random states beside the model. In a job's ranks tensor ranks
    count fastest, then data-parallel ranks, then stages (deepspeed/runtime/pipe/topology.py).
    """
    dp, tp = states.world.dp, states.world.tp
    files = states.firsts()
    args = {mp: _arguments(file) for mp, file in files.items()}
    ranks: dict[int, Any] = {mp: args[mp].get("rank") for mp in files}
    places = {mp // tp * dp * tp + mp % tp: mp for mp in files}
    mismatches: list[tuple[int, str]] = []
    if len(files) > 1 and _same_values(ranks, places):
        for mp, rank in ranks.items():
            if places[rank] != mp:
                mismatches.append((mp, f"is from rank {rank}, which is model-parallel rank {places[rank]}"))
    elif len(files) > 1:
        seeded = {
            mp: place_of(f.tree, args[mp].get("seed"), seed_reader(source, f.path, f.objects.storages))
            for mp, f in files.items()
        }
        for dim, ranks_of_dim in (
            ("tp", {mp: mp % tp for mp in files}),
            ("pp", {mp: mp // tp for mp in files}),
        ):
            seed_ranks = {mp: getattr(place, dim) for mp, place in seeded.items()}
            if _same_values(seed_ranks, ranks_of_dim.values()):
                wrong = [mp for mp in files if seed_ranks[mp] != ranks_of_dim[mp]]
                mismatches += [
                    (mp, f"has the random states of {GROUP_TITLES[dim]} {seed_ranks[mp]}") for mp in wrong
                ]
    for mp, text in mismatches:
        yield mixed(f"{files[mp].path} {text}: it is in the place of another file", files[mp].path)


def copied_files(source: Source, files: Iterable[StatesFile], key: str | None = None) -> Iterator[Finding]:
    """Yield findings for files of different ranks or layers that hold the same values.

    Args:
        source: The folder.
        files: Of which no two may be equal.
        key: The part of each file's dict that is compared, or None for all of it.
    """

    def compared(file: StatesFile) -> Storages:
        stored = file.objects.storages
        if key is None:
            return stored
        inside = storages_in(file.tree.get(key))
        return {k: row for k, row in stored.items() if k in inside}

    return equal_files(source, ((file.path, compared(file)) for file in files))


def _arguments(file: StatesFile) -> Mapping[str, Any]:
    args = file.tree.get("args")
    if isinstance(args, Named) and args.kind == "namespace":
        args = args.value
    return args if isinstance(args, Mapping) else {}


def _same_values(ranks: Mapping[int, Any], expected: Iterable[int]) -> bool:
    values = list(ranks.values())
    return all(type(v) is int for v in values) and set(values) == set(expected)


def _stage(file: StatesFile) -> Any:
    state = file.tree.get("optimizer_state_dict")
    return state.get("zero_stage") if isinstance(state, dict) else None


def _has_ties(file: StatesFile) -> bool:
    shared = file.tree.get("shared_params")
    return isinstance(shared, dict) and bool(shared)


@dataclass(frozen=True, slots=True)
class LayerFile:
    """A file of a pipeline layer.

    Attributes:
        file: The file.
        shapes: Name in the model -> shape, of tensors.
        names: Every name in the model.
    """

    file: StatesFile
    shapes: Mapping[str, Shape]
    names: Set[str]


Layers = Mapping[tuple[int, int], LayerFile]  # (layer, tensor-parallel rank) -> file


def missing_layers(
    states: ModelStates, files: CheckpointFiles, trained: Mapping[int, Mapping[str, Shape]]
) -> Iterator[Finding]:
    """Yield findings for missing files of layers: parameters are listed, or other ranks have the layer.

    Args:
        states: The model-state files.
        files: All files, which are no universal folder's.
        trained: Model-parallel rank -> FQN -> shape, of the parameters that it lists.
    """
    # Only a pipeline leaves its weights out of these files.
    if not files.layers and any("module" not in f.tree or f.tree["module"] is not None for f in _of(states)):
        return
    tp = states.world.tp
    layers = {int(n.partition(".")[0]) for s in trained.values() for n in s if _LAYER.match(n)}
    layers |= {layer for layer, _ in files.layers}
    layer_ranks = ((layer, rank) for layer in sorted(layers) for rank in range(tp))
    for layer, rank in islice((w for w in layer_ranks if w not in files.layers), _MAX_REPORTED):
        suffix = f"-model_{rank:02d}" if tp > 1 else ""
        path = f"layer_{layer:02d}{suffix}-model_states.pt"
        message = f"{path} is missing: its parameters are listed, or other ranks have the layer"
        yield finding("missing-rank", "files", message, file=path)


def missing_tied_layers(trained: Mapping[int, Mapping[str, Shape]], layers: Layers) -> Iterator[Finding]:
    """Yield findings for tied parameters that no layer's file holds.

    Not every layer that is tied has a file: one with a ``forward_fn`` is a function.
    """
    names = {name: m["rest"] for shapes in trained.values() for name in shapes if (m := TIED.match(name))}
    have = {name.partition(".")[2] for layer_file in layers.values() for name in layer_file.names}
    for name in [n for n, rest in names.items() if rest not in have][: _MAX_REPORTED if layers else 0]:
        message = f"a layer_*-model_states.pt is missing: none holds {short_repr(name, 80)}, which is listed"
        yield finding("missing-rank", "files", message, fqn=name)


def missing_shapes(states: ModelStates, layers: Layers) -> Iterator[Finding]:
    """Yield findings where optimizers have states of more parameters of a shape than layers have.

    A stage may have states of a tied parameter without a file of the layer, so that a lower count is a
    warning. Shapes of one dim are left out: wrappers for float16 flatten their groups.
    """
    tp, first_files = states.world.tp, states.firsts()
    for rank in sorted({mp % tp for mp in first_files}) if layers else ():  # not all that a field claims
        stored = Counter(
            s for (_, t), layer_file in layers.items() if t == rank for s in layer_file.shapes.values()
        )
        needed: Counter[Shape] = Counter()
        for mp, file in first_files.items():
            if mp % tp == rank:
                needed.update(s for s in _state_shapes(file) if len(s) > 1)
        for shape in islice(needed - stored, _MAX_REPORTED):
            message = (
                f"optimizers have states of {needed[shape]} parameters {list(shape)}, the files of layers "
                f"hold {stored[shape]}: a layer_*-model_states.pt is missing"
            )
            if not stored[shape]:
                yield finding("missing-rank", "files", message)
            else:
                yield finding("missing-part", "files", f"{message}, or a parameter is tied")


def misplaced_layers(layers: Layers, listed: Iterable[str]) -> Iterator[Finding]:
    """Yield findings for files of pipeline layers without parameters that are listed for the layer.

    Args:
        layers: The files.
        listed: Names that ``param_shapes`` has.
    """
    names_by_layer: dict[str, set[str]] = {}
    for name in listed:
        names_by_layer.setdefault(name.partition(".")[0], set()).add(name)
    for (layer, _), layer_file in layers.items():
        lost = min(names_by_layer.get(str(layer), set()) - layer_file.names, default=None)
        if lost is not None:
            path = layer_file.file.path
            yield mixed(f"{path} has no {short_repr(lost, 80)}: it is in the place of another file", path)


def unlisted_layers(
    states: ModelStates, layers: Layers, listed: Set[str], buffers: Set[str], aliases: Set[str]
) -> Iterator[Finding]:
    """Yield findings for files of layers of which no name is listed: surplus ones, or of frozen parameters.

    Pipelines of today do not list frozen parameters (deepspeed/runtime/engine.py, `_save_checkpoint`, does so
    for ZeRO-2 and 3). Where they are listed, such a file is of another save.

    Args:
        states: The model-state files.
        layers: The files of layers.
        listed: Names of parameters that the model-state files list.
        buffers: Names of buffers that they list.
        aliases: Names of tied parameters.
    """
    if len(states.firsts()) < states.world.mp:
        return
    frozen = any(isinstance(f.tree.get("frozen_param_shapes"), dict) for f in _of(states))
    surplus = [
        layer_file
        for layer_file in layers.values()
        if layer_file.names - buffers
        and not layer_file.names & listed
        and not layer_file.names <= buffers | aliases
    ]
    for layer_file in surplus[:_MAX_REPORTED]:
        path, name = layer_file.file.path, f"module.{min(layer_file.names - buffers)}"
        message = f"{path} holds {short_repr(name, 80)}, and no *_model_states.pt lists a parameter of it"
        if frozen:
            yield mixed(f"{message}: it is of another save", path)
            continue
        yield finding(
            "unlisted-tensor",
            "files",
            f"{message}: all of them are frozen, or the file is of another save",
            fqn=name,
            file=path,
            hint="move the file away if it is of another save",
        )


def _of(states: ModelStates) -> Iterable[StatesFile]:
    return states.files.values()


def _state_shapes(file: StatesFile) -> Iterator[Shape]:
    """Return the shapes of parameters by the states of an optimizer without ZeRO."""
    state = file.tree.get("optimizer")
    optimizer = numbered(state.get("optimizer_state_dict", state)) if isinstance(state, dict) else None
    for values in optimizer.state.values() if optimizer else ():
        moments = (values.get(key) for key in _OF_PARAMETER) if isinstance(values, dict) else ()
        shape = next((v.shape for v in moments if isinstance(v, StoredView)), None)
        if shape is not None:
            yield shape
