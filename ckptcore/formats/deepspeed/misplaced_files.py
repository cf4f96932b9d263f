"""Find files that are in the place of others: of another expert, rank, version, stage or batch size.

What names a file's place: keys of expert files have the number of their expert (deepspeed/runtime/engine.py,
`_save_moe_checkpoint`), only the first rank lists tied parameters (`_get_shared_params`), and every optimizer
file repeats the configuration and the version. Two files whose tensors have equal checksums are one file
twice, unless ranks may hold equal values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckptcore.core.object_tree import Named
from ckptcore.encodings.pickle.torch_globals import storages_in
from ckptcore.encodings.torchzip.reader import Storages
from ckptcore.errors import Finding
from ckptcore.formats.base import Source
from ckptcore.formats.common.equal_files import equal_files, mixed
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
