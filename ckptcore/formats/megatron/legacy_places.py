"""Find rank files of a legacy checkpoint that are in the folders of other ranks.

What names a file's rank, in this order; each kind of evidence counts where it fits all files:

- ``rank`` of the arguments, the rank in the job. Tools that convert checkpoints write one into all files.
- ranks in a group of the arguments, as forks of Megatron-LM record them.
- seeds of random states.
- embeddings, which the first stage alone has; final norm and output layer, which the last one has.
- numbers of layers of each stage, and which layers have experts, where the arguments give them.

Where files have none of these, ranks of one stage are interchangeable, and so are stages of equal layers
between the first and the last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from ckptcore.errors import Finding, finding
from ckptcore.formats.base import Source
from ckptcore.formats.megatron.legacy_merge import Model, ModelChunk
from ckptcore.formats.megatron.legacy_ranks import RankFile, Ranks, arguments
from ckptcore.formats.megatron.partition_rules import parse_name
from ckptcore.formats.megatron.pipeline import layers_per_chunk
from ckptcore.formats.megatron.seeds import GROUP_TITLES, place_of, seed_reader

GROUP_RANKS = {
    "tensor_model_parallel_rank": "tp",
    "pipeline_model_parallel_rank": "pp",
    "expert_model_parallel_rank": "ep",
}
_FINAL = re.compile(r"^decoder\.final_(?:layer)?norm\.|^output_layer\.weight$")
_Column = Mapping[int, RankFile]  # stage -> file, of one tensor and expert rank


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
    for key, dim in GROUP_RANKS.items():
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
