"""Read legacy Megatron-LM checkpoints (`--ckpt-format torch`): one torch file per model-parallel rank.

An iteration's folder has ``mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`` for each tensor, pipeline
and expert-parallel rank (megatron/training/checkpointing.py). The ranks' slices are merged into the
tensors of Megatron-Core's distributed checkpoints. Tensors of several ranks are replicas, compared
while they are moved: norms, routers, and in the last stage the copy of tied embeddings. Unpacked models of
NeMo 1 are read alike.

A file may be in another rank's folder. What names its rank, in this order, where it fits all files:

- ``rank`` of the arguments, the rank in the job. Tools that convert checkpoints write one into all files.
- ranks in a group of the arguments, as forks of Megatron-LM record them.
- seeds of random states.
- embeddings, which the first stage alone has; final norm and output layer, which the last one has.
- numbers of layers of each stage, and which layers have experts, where the arguments give them.

Where files have none of these, ranks of one stage are interchangeable, and so are stages of equal layers
between the first and the last.

A plain optimizer numbers its states by parameter group (megatron/core/optimizer/__init__.py,
_get_param_groups: weight decay or none, expert or not), in the model's parameter order; master copies
are in ``fp32_from_fp16_params``. The distributed optimizer keeps flat buffers in ``distrib_optim.pt``
(distrib_optimizer.py, get_parameter_state_dp_zero). A rank's state dict has the parameters in the same
order, so positions give the names, and every size must fit. What does not add up stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Manifest, View
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.object_tree import Named, Refused, RefusedTensor, encode
from ckptcore.encodings.pickle.torch_globals import StoredView, storages_in
from ckptcore.encodings.torchzip.reader import Objects, refused_in
from ckptcore.errors import Finding, finding
from ckptcore.formats.base import Source
from ckptcore.formats.common.trees import holds_tensor, kind_of
from ckptcore.formats.megatron.flat_buffers import flat_boxes, lay_out, lay_out_buffer
from ckptcore.formats.megatron.legacy_merge import (
    EMBEDDING,
    EXTRA_STATE,
    Merger,
    Model,
    ModelChunk,
    model_of,
    unequal,
)
from ckptcore.formats.megatron.legacy_names import NAME
from ckptcore.formats.megatron.legacy_ranks import RankFile, Ranks, arguments, read_ranks
from ckptcore.formats.megatron.parameter_order import Parameter, Unregistered
from ckptcore.formats.megatron.partition_rules import layers_per_chunk, parse_name, place
from ckptcore.formats.megatron.pickle_globals import read_megatron
from ckptcore.formats.megatron.seeds import GROUP_TITLES, place_of, seed_reader
from ckptcore.formats.torch_save.tree import TorchTree, add_object, note_hidden
from ckptcore.store.subfolder import FileRange
from ckptcore.utils.text import count, short_repr

FLAT = "distrib_optim.pt"
_MODEL = re.compile(r"model\d*")
_FOLDERS = ("mp_rank_", "tp_rank_")
_TENSORS = (StoredView, RefusedTensor)
_RANK_OBJECTS = frozenset({"rng_state", "optimizer"})  # objects that differ by rank
_GROUP_RANKS = {
    "tensor_model_parallel_rank": "tp",
    "pipeline_model_parallel_rank": "pp",
    "expert_model_parallel_rank": "ep",
}
_PER_RANK = frozenset({"rank", "local_rank", *_GROUP_RANKS})  # arguments that differ by rank
_FINAL = re.compile(r"^decoder\.final_(?:layer)?norm\.|^output_layer\.weight$")
_Column = Mapping[int, RankFile]  # stage -> file, of one tensor and expert rank
PREFIX = "optimizer.state"
MASTER = "fp32_from_fp16_params"
_HALF = ("bfloat16", "float16")
_BUFFERS = ("expert_bias", "local_tokens_per_expert", "inv_freq")


def read(source: Source) -> Manifest:
    """Read all ranks into one manifest.

    Raises:
        MalformedCheckpoint: A file is not a rank's, or arguments and tensors contradict each other.
        UnsupportedFormat: The folders do not describe how the model is partitioned.
    """
    ranks = read_ranks(source)
    model = model_of(ranks)
    builder = Builder()
    builder.findings += [*ranks.findings, *misplaced(source, ranks, model), *unequal(model.chunks)]
    merger = Merger(builder, model)
    common: dict[str, tuple[RankFile, Any]] = {}
    for file in ranks.files:
        tree = TorchTree(builder, builder.file(file.path, file.size), file.objects, file.path)
        chunks = [c for c in model.chunks if c.file is file]
        for chunk in chunks:
            merger.add(chunk, tree)
        refused: dict[str, Any] = {}
        for key, value in file.tree.items():
            if _MODEL.fullmatch(key) or key in ranks.beside:
                continue
            if key == "optimizer" and holds_tensor(value, _TENSORS):
                value = _numbered(builder, merger, chunks, tree, value, file)
            if key in _RANK_OBJECTS or holds_tensor(value, _TENSORS):
                tree.add(f"{key}/{file.folder}", value)
            else:
                _add_common(builder, common, key, value, file)
                if refused_in(value):
                    refused[key] = value
        _note_hidden(builder, file.objects, file.path, {**tree.refused, **refused}, merger)
        _add_flat(builder, merger, chunks, source, file)
    for path in source.listing:
        if path.startswith(_FOLDERS) and path not in builder.file_names():
            builder.report("stray-file", "files", f"{path} is not read", file=path)
    origin = {
        "iteration": ranks.files[0].tree.get("iteration"),
        "mesh": {"tp": ranks.tp, "pp": ranks.pp, "ep": ranks.ep, "vpp": len(model.first)},
        "ranks": len(ranks.files),
        "empty_extra_states": merger.dropped,
    }
    return builder.build(NAME, source.store.url, origin)


def _numbered(
    builder: Builder,
    merger: Merger,
    chunks: list[ModelChunk],
    tree: TorchTree,
    optimizer: Any,
    file: RankFile,
) -> Any:
    """Add optimizer states under their parameters; return the rest of the optimizer's tree."""
    try:
        return add_numbered(optimizer, chunks, merger, tree)
    except Unregistered as error:
        builder.report(
            "flat-buffers",
            "coverage",
            f"cannot name the optimizer states of {file.path}, they stay numbered: {error}",
            file=file.path,
        )
        return optimizer


def _add_flat(
    builder: Builder, merger: Merger, chunks: list[ModelChunk], source: Source, file: RankFile
) -> None:
    """Add the distributed optimizer's file beside a rank's file, if there is one."""
    path = f"{file.folder}/{FLAT}"
    if path not in source.listing:
        return
    size = source.listing[path]
    objects = read_megatron(FileRange(source.store, path, 0, size), path)
    tree = TorchTree(builder, builder.file(path, size), objects, path)
    try:
        add_buffers(objects.tree, chunks, merger, tree)
    except Unregistered as error:
        builder.report("flat-buffers", "coverage", f"cannot split {path} by parameter: {error}", file=path)
        tree.add(f"distrib_optim/{file.folder}", objects.tree)
    _note_hidden(builder, objects, path, tree.refused, merger)


def _add_common(
    builder: Builder, common: dict[str, tuple[RankFile, Any]], key: str, value: Any, file: RankFile
) -> None:
    """Add an object that all ranks have, once; add a finding where they differ."""
    if isinstance(value, Named) and value.kind == "namespace":
        value = Named("namespace", _without_refused(builder, key, value.value, file, key not in common))
    if key not in common:
        common[key] = file, value
        add_object(builder, key, value, file.path)
        return
    first = common[key][1]
    if value != first and _without_rank_parts(value) != _without_rank_parts(first):
        builder.report(
            "rank-object",
            "files",
            f"{key} differs between {file.path} and {common[key][0].path}",
            fqn=key,
            file=file.path,
        )


def _without_refused(
    builder: Builder, key: str, values: Mapping[str, Any], file: RankFile, report: bool
) -> dict[str, Any]:
    lost = {name: refused for name, value in values.items() if (refused := refused_in(value))}
    if lost and report:
        names = ", ".join(f"{key}.{n} ({', '.join(r)})" for n, r in lost.items())
        builder.report(
            "refused-global", "files", f"left out of {file.path}: {names}", fqn=key, file=file.path
        )
    return {name: value for name, value in values.items() if name not in lost}


def _without_rank_parts(value: Any) -> Any:
    """Return a value without its per-rank parts, in a comparable form."""
    if isinstance(value, Named) and value.kind == "namespace":
        value = {k: v for k, v in value.value.items() if k not in _PER_RANK}
    try:
        return encode(value)
    except TypeError:
        return repr(value)


def _note_hidden(
    builder: Builder, objects: Objects, path: str, refused: Mapping[str, Any], merger: Merger
) -> None:
    """Add findings for tensors inside refused classes, one for each value that may hold them."""
    used = storages_in(objects.tree, refused=True)
    hidden = sum(n for k, (_, n, _) in objects.storages.items() if k not in used)
    if not hidden:
        return
    note_hidden(
        builder, {n: (isinstance(v, Refused), refused_in(v), path) for n, v in refused.items()}, hidden
    )
    if not refused and path not in merger.lost:
        classes = ", ".join(objects.refused) or "an unknown class"
        message = f"cannot read {count(hidden, 'byte')} of tensors in {path}: they are inside {classes}"
        builder.report("refused-tensors", "coverage", message, file=path)


def misplaced(source: Source, ranks: Ranks, model: Model) -> list[Finding]:
    """Return findings for files in another rank's folder, by the first kind of evidence that shows any.

    Args:
        source: The iteration's folder, from which seeds are read where the arguments have no rank.
        ranks: The ranks' files.
        model: What they hold.
    """
    if len(ranks.files) < 2:
        return []
    numbers = _numbers(ranks.files)
    kinds: tuple[Callable[[], Iterator[Finding]], ...] = (
        lambda: _by_number(ranks, numbers),
        lambda: _by_group(ranks),
        lambda: _by_seed(source, ranks) if not numbers else iter(()),
        lambda: _by_ends(ranks, model),
        lambda: _by_layers(ranks, model),
        lambda: _by_kinds(ranks, model),
    )
    # Lambdas, because seeds cost requests: later kinds are tried only where the earlier ones say nothing.
    return next((findings for kind in kinds if (findings := [*kind()])), [])


def _numbers(files: Sequence[RankFile]) -> list[int]:
    """Return the rank in the job of each file, or nothing where they do not tell the files apart."""
    recorded = [arguments(f.tree, f.path).get("rank") for f in files]
    numbers = [r for r in recorded if type(r) is int and r >= 0]
    return numbers if len(set(numbers)) == len(files) else []


def _by_number(ranks: Ranks, numbers: Sequence[int]) -> Iterator[Finding]:
    """Yield findings for files whose rank in the job is of other parallel groups.

    Tensor ranks count fastest in a job's ranks, pipeline ranks slowest (megatron/core/parallel_state.py,
    RankGenerator: every order begins with tp, and has ep before pp).
    """
    tp = ranks.tp
    rows = [*zip(ranks.files, numbers, strict=False)]
    wrong = [(f, rank) for f, rank in rows if rank % tp != f.tp]
    for file, rank in wrong:
        yield _mismatch(file, f"is from rank {rank}, which is tensor rank {rank % tp}, not {file.tp}")
    # Where experts are split over fewer tensor ranks, the job's layout decides which pairs of them wrote.
    every_pair = ranks.etp == tp
    places = {f.path: (f.pp, f.ep, f.tp) if every_pair else (f.pp,) for f in ranks.files}
    order = sorted(rows, key=lambda row: places[row[0].path])
    for (first, low), (second, high) in pairwise(order if not wrong else ()):
        if low > high and places[first.path] != places[second.path]:
            message = f"{first.path} is from rank {low}, {second.path} from rank {high}: they are swapped"
            yield finding("item-mismatch", "files", message, file=second.path)


def _by_group(ranks: Ranks) -> Iterator[Finding]:
    for key, dim in _GROUP_RANKS.items():
        recorded = [(f, arguments(f.tree, f.path).get(key)) for f in ranks.files]
        if {rank for _, rank in recorded if type(rank) is int} != set(range(getattr(ranks, dim))):
            continue
        for file, rank in recorded:
            if type(rank) is int and rank != getattr(file, dim):
                yield _mismatch(file, f"is of {GROUP_TITLES[dim]} {rank} by its arguments ({key})")


def _by_seed(source: Source, ranks: Ranks) -> Iterator[Finding]:
    seeded = [
        place_of(
            f.tree, arguments(f.tree, f.path).get("seed"), seed_reader(source, f.path, f.objects.storages)
        )
        for f in ranks.files
    ]
    for dim, label in GROUP_TITLES.items():
        seeded_ranks = [getattr(s, dim) for s in seeded]
        if None in seeded_ranks or set(seeded_ranks) != {getattr(f, dim) for f in ranks.files}:
            continue
        for file, n in zip(ranks.files, seeded_ranks, strict=True):
            if n != getattr(file, dim):
                yield _mismatch(file, f"has the random states of {label} {n}")


def _by_ends(ranks: Ranks, model: Model) -> Iterator[Finding]:
    first_chunks = {id(c.file): c for c in model.chunks if c.number == 0}
    last_chunks = {id(c.file): c for c in model.chunks if c.number == len(model.first) - 1}
    for column in _columns(ranks):
        for end, contents, chunks, has in (
            (0, "embeddings, which the first stage has", first_chunks, _has_embeddings),
            (
                ranks.pp - 1,
                "the final norm or output layer, which the last stage has",
                last_chunks,
                _has_final,
            ),
        ):
            if end not in column or has(chunks.get(id(column[end]))):
                continue
            for stage, file in column.items():
                if stage != end and has(chunks.get(id(file))):
                    yield _mismatch(file, f"has {contents}, and {column[end].path} lacks")


def _by_layers(ranks: Ranks, model: Model) -> Iterator[Finding]:
    counts = layers_per_chunk(ranks.args, ranks.pp, len(model.first))
    if counts is None:
        return
    expected_counts = [*zip(*counts, strict=True)]
    for column in _columns(ranks):
        stored_counts = [tuple(_layers(model, column[p])) for p in sorted(column)]
        if len(stored_counts) != len(expected_counts) or sorted(stored_counts) != sorted(expected_counts):
            continue
        for (stage, file), have, want in zip(
            sorted(column.items()), stored_counts, expected_counts, strict=True
        ):
            if have != want:
                yield _mismatch(file, f"has {list(have)} layers, and stage {stage} has {list(want)}")


def _by_kinds(ranks: Ranks, model: Model) -> Iterator[Finding]:
    pattern = _expert_layers(ranks.args, model.world.layers)
    if pattern is None:
        return
    for column in _columns(ranks):
        rows = [
            (c.file, model.first[c.number][c.file.pp] + layer, kind)
            for c in model.chunks
            if column.get(c.file.pp) is c.file
            for layer, kind in _kinds(c).items()
        ]
        if any(n >= len(pattern) for _, n, _ in rows) or sum(k for *_, k in rows) != sum(pattern):
            continue
        wrong: dict[str, tuple[RankFile, int, bool]] = {}
        for file, n, kind in rows:
            if kind != pattern[n]:
                wrong.setdefault(file.path, (file, n, kind))
        for file, n, kind in wrong.values():
            yield _mismatch(file, f"has {'' if kind else 'no '}experts in layer {n}, against moe_layer_freq")


def _mismatch(file: RankFile, text: str) -> Finding:
    hint = "copy the file again from the rank that wrote it, and keep the name of its folder"
    message = f"{file.path} {text}: it is in the place of another rank's file"
    return finding("item-mismatch", "files", message, file=file.path, hint=hint)


# --- stages ---------------------------------------------------------------------------------------


def _columns(ranks: Ranks) -> list[_Column]:
    """Return the stages of each tensor and expert rank."""
    columns: dict[tuple[int, int], dict[int, RankFile]] = {}
    for file in ranks.files:
        columns.setdefault((file.tp, file.ep), {})[file.pp] = file
    return [c for c in columns.values() if len(c) > 1]


def _has_embeddings(chunk: ModelChunk | None) -> bool:
    # A stage with layers for the prediction of several tokens has a copy.
    names = [n for n in (chunk.state if chunk else ()) if n.startswith(("embedding.", "mtp."))]
    return bool(names) and all(n.startswith("embedding.") for n in names)


def _has_final(chunk: ModelChunk | None) -> bool:
    return any(_FINAL.match(n) for n in (chunk.state if chunk else ()))


def _layers(model: Model, file: RankFile) -> Iterator[int]:
    for chunk in model.chunks:
        if chunk.file is file:
            yield len(_kinds(chunk))


def _kinds(chunk: ModelChunk) -> dict[int, bool]:
    """Return whether each of a chunk's layers has experts, by the layer's number in the chunk."""
    has_experts: dict[int, bool] = {}
    for name in chunk.state:
        local = parse_name(name)
        if local.block in ("decoder", "encoder"):
            has_experts[local.layer] = has_experts.get(local.layer, False) or local.rest.startswith(
                "mlp.experts."
            )
    return has_experts


def _expert_layers(args: Mapping[str, Any], layers: int) -> list[bool] | None:
    """Return which layers have experts by ``moe_layer_freq``: a list, or a number for every n-th layer."""
    frequency = args.get("moe_layer_freq")
    if type(frequency) is int and frequency > 1:
        return [n % frequency == 0 for n in range(layers)]
    if isinstance(frequency, list) and len(frequency) == layers and all(n in (0, 1) for n in frequency):
        return [bool(n) for n in frequency]
    return None


def parameters_of(chunk: ModelChunk, model: Model) -> list[Parameter]:
    """Return a state dict's parameters, in order.

    Raises:
        Unregistered: The shape of a parameter is unknown, or no rule places it.
    """
    out = []
    for name, value in chunk.state.items():
        if not isinstance(value, (StoredView, Refused)) or name.endswith((EXTRA_STATE, *_BUFFERS)):
            continue
        shape = value.shape if isinstance(value, (StoredView, RefusedTensor)) else None
        if shape is None or not isinstance(value, (StoredView, RefusedTensor)):
            raise Unregistered(f"the shape of {name} is not known")
        untied_name = EMBEDDING if model.tied and name == "output_layer.weight" else name
        placement = place(untied_name, shape, model.rank(chunk), model.world)
        if placement is None:
            raise Unregistered(f"no rule for how {name} is split")
        out.append(Parameter(name, shape, value.dtype, placement, ".mlp.experts." in name))
    return out


def add_numbered(optimizer: Any, chunks: Sequence[ModelChunk], merger: Merger, tree: TorchTree) -> Any:
    """Add the states of a plain optimizer under their parameters; return the rest of its tree.

    Args:
        optimizer: The value of ``optimizer`` in a rank's file.
        chunks: The rank's model chunks.
        merger: Gets the states.
        tree: The rank's file.

    Raises:
        Unregistered: Groups and parameters do not fit. Nothing has been added then.
    """
    if isinstance(optimizer, dict) and optimizer and all(type(k) is int for k in optimizer):
        optimizer = [optimizer[k] for k in sorted(optimizer)]
    several = isinstance(optimizer, list)
    apart = any(_of_experts(g) for g in _all_groups(optimizer if several else [optimizer]))
    parameters = [p for c in chunks for p in parameters_of(c, merger.model)]
    named_states: list[tuple[str, Parameter, StoredView | Refused]] = []
    rest = []
    for part in optimizer if several else [optimizer]:
        inner = part.get("optimizer", part) if isinstance(part, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("param_groups"), list):
            raise Unregistered("an optimizer without parameter groups")
        groups = list(_groups(inner["param_groups"], parameters, apart))
        states = dict(inner.get("state", {}))
        for members in groups:
            for number, parameter in members:
                state = states.get(number)
                if isinstance(state, dict):
                    taken = {k: v for k, v in state.items() if _fits(v, parameter)}
                    named_states += [(kind, parameter, v) for kind, v in taken.items()]
                    states[number] = {k: v for k, v in state.items() if k not in taken}
        remaining = {**inner, "state": {k: v for k, v in states.items() if v}} if "state" in inner else inner
        left = {**part, "optimizer": remaining} if inner is not part else remaining
        if MASTER in part:
            named_states += _masters(part[MASTER], groups)
            left.pop(MASTER)
        rest.append(left)
    for kind, parameter, value in named_states:
        if isinstance(value, Refused):
            merger.lose(f"{PREFIX}.{kind}.{parameter.placement.fqn}", value, chunks[0].file.path)
        else:
            merger.put(parameter.placement, value, tree, f"{PREFIX}.{kind}.")
    return rest if several else rest[0]


def add_buffers(state: Any, chunks: Sequence[ModelChunk], merger: Merger, tree: TorchTree) -> None:
    """Add the flat buffers of ``distrib_optim.pt`` under their parameters.

    Args:
        state: The value of the file.
        chunks: The rank's model chunks.
        merger: Gets the states.
        tree: The file.

    Raises:
        Unregistered: Sizes do not add up. Nothing has been added then.
    """
    parts = state if isinstance(state, list) else [state]
    if len(parts) > 2:
        raise Unregistered(f"{len(parts)} distributed optimizers")
    rows: list[tuple[str, Parameter, StoredView, int]] = []
    for n, part in enumerate(parts):
        if part is None:  # another rank of this group keeps it
            continue
        expert = None if len(parts) == 1 else n == 1  # the experts' own optimizer is the second
        buffers = list(_buffers(chunks, merger.model, expert))
        for number, dtypes, tensors in _stored_buffers(part):
            if number >= len(buffers) or buffers[number][0] != dtypes[0]:
                raise Unregistered(f"buffer {number} of {' '.join(dtypes)}")
            parameters = buffers[number][1]
            own_bucket = [
                merger.model.tied and merger.model.world.pp > 1 and p.placement.fqn == EMBEDDING
                for p in parameters
            ]
            for kind, stored in tensors.items():
                rows += _ranges(kind, stored, parameters, own_bucket, merger.model.bucket_size)
    for kind, parameter, value, start in rows:
        _put_range(kind, parameter, value, start, merger, tree)


# --- numbers --------------------------------------------------------------------------------------


def _all_groups(optimizers: Sequence[Any]) -> Iterator[Any]:
    for optimizer in optimizers:
        inner = optimizer.get("optimizer", optimizer) if isinstance(optimizer, dict) else None
        groups = inner.get("param_groups") if isinstance(inner, dict) else None
        yield from groups if isinstance(groups, list) else ()


def _of_experts(group: Any) -> bool:
    return isinstance(group, dict) and bool(group.get("is_expert_parallel", group.get("is_expert", False)))


def _groups(
    groups: Sequence[Any], parameters: Sequence[Parameter], apart: bool
) -> Iterator[list[tuple[int, Parameter]]]:
    """Yield (number, parameter) pairs of each group; the group's fields select its parameters.

    Experts are ``apart`` in groups of their own when they are spread over ranks. Raise `Unregistered` where
    groups and parameters do not fit.
    """
    keyed: dict[tuple[bool, bool], list[Parameter]] = {}
    for p in parameters:
        no_decay = p.name.endswith(".bias") or len(p.shape) == 1
        keyed.setdefault((no_decay, p.expert and apart), []).append(p)
    for group in groups:
        numbers = group.get("params") if isinstance(group, dict) else None
        if not isinstance(numbers, list):
            raise Unregistered("a parameter group without numbers")
        if not numbers:
            yield []
            continue
        if group.get("lr_mult", 1.0) != 1.0 or group.get("is_decoupled_lr") or "wd_mult" not in group:
            raise Unregistered("parameter groups have different learning rates")
        members = keyed.pop((group["wd_mult"] == 0.0, _of_experts(group)), [])
        if len(members) != len(numbers):
            raise Unregistered(f"a group has {len(numbers)} numbers for {len(members)} parameters")
        yield list(zip(numbers, members, strict=True))


def _fits(value: Any, parameter: Parameter) -> bool:
    if isinstance(value, Refused):  # unreadable, but it belongs to that parameter
        return True
    if not isinstance(value, StoredView) or value.shape == ():
        return False
    if value.shape != parameter.shape:
        raise Unregistered(f"a state of {list(value.shape)} for {parameter.name} {list(parameter.shape)}")
    return True


def _masters(
    masters: Any, groups: Sequence[Sequence[tuple[int, Parameter]]]
) -> Iterator[tuple[str, Parameter, StoredView | Refused]]:
    """Yield master copies: a list per group, of its parameters in half precision."""
    if not isinstance(masters, list) or len(masters) != len(groups):
        raise Unregistered("master copies and states have different groups")
    for values, members in zip(masters, groups, strict=True):
        half = [p for _, p in members if p.dtype in _HALF]
        if not isinstance(values, list) or len(values) != len(half):
            raise Unregistered("master copies and states have different parameters")
        for value, parameter in zip(values, half, strict=True):
            if not _fits(value, parameter):
                raise Unregistered(f"the master copy of {parameter.name} is not a tensor")
            yield "fp32_param", parameter, value


# --- flat buffers ---------------------------------------------------------------------------------


def _buffers(
    chunks: Sequence[ModelChunk], model: Model, expert: bool | None
) -> Iterator[tuple[str, list[Parameter]]]:
    """Yield (dtype, parameters) of each buffer: one per model chunk and dtype, in order of first use."""
    for chunk in chunks:
        by_dtype: dict[str, list[Parameter]] = {}
        for p in parameters_of(chunk, model):
            if expert is None or p.expert == expert:
                by_dtype.setdefault(p.dtype, []).append(p)
        yield from by_dtype.items()


def _stored_buffers(part: Any) -> Iterator[tuple[int, tuple[str, ...], Mapping[str, Any]]]:
    """Yield (number, dtypes, kind -> tensor or its buckets) of every buffer in a part."""
    if not isinstance(part, dict):
        raise Unregistered(f"distributed optimizer state is a {kind_of(part)}, not a dict")
    for number, by_dtype in part.items():
        if type(number) is not int:
            continue  # buckets_coalesced
        if not isinstance(by_dtype, dict):
            raise Unregistered(f"buffer {number} is a {kind_of(by_dtype)}, not a dict")
        for dtypes, kinds in by_dtype.items():
            names = (
                tuple(d.value for d in dtypes if isinstance(d, Named)) if isinstance(dtypes, tuple) else ()
            )
            if len(names) != 2 or not isinstance(kinds, dict):
                raise Unregistered(f"buffer {number} has unknown dtypes {short_repr(dtypes, 60)}")
            if any(isinstance(v, Refused) for v in kinds.values()):
                raise Unregistered(f"a tensor of buffer {number} cannot be read")
            yield number, names, {k: v for k, v in kinds.items() if isinstance(v, (StoredView, list))}


def _ranges(
    kind: str, stored: Any, parameters: Sequence[Parameter], own_bucket: Sequence[bool], bucket: int | None
) -> Iterator[tuple[str, Parameter, StoredView, int]]:
    """Yield (kind, parameter, flat tensor, first element in it)."""
    if isinstance(stored, StoredView):
        _require_flat([stored])
        for s in lay_out_buffer(parameters, stored.shape[0], own_bucket, bucket):
            yield kind, s.parameter, stored, s.start
        return
    _require_flat(stored)  # before buckets were coalesced: one padded tensor each
    for s in lay_out(parameters, [v.shape[0] for v in stored], padded=True, own_bucket=own_bucket):
        yield kind, s.parameter, stored[s.bucket], s.start


def _require_flat(tensors: Sequence[Any]) -> None:
    if any(not isinstance(v, StoredView) or len(v.shape) != 1 or v.strides != (1,) for v in tensors):
        raise Unregistered("a buffer is not a flat tensor")


def _put_range(
    kind: str, parameter: Parameter, value: StoredView, start: int, merger: Merger, tree: TorchTree
) -> None:
    fqn = f"{PREFIX}.{kind}.{parameter.placement.fqn}"
    item, view = tree.place(value, fqn)
    itemsize = BY_NAME[value.dtype].itemsize
    for offset, shape, begin, steps in flat_boxes(parameter.placement, 0, prod(parameter.shape)):
        box_view = View(view.start + (start + begin) * itemsize, steps, view.flags)
        merger.chunk(fqn, value.dtype, parameter.placement.shape, offset, shape, item, box_view)
