"""Check that a model can run on a mesh, by the numbers that its own configs state.

Every box can be cut, so shapes alone refuse little. Trainers refuse more: a rank needs whole heads. What a
trainer refuses is refused here, with the numbers and their source; what it accepts with a condition, or cuts
unevenly, is a warning.

- Megatron-Core (transformer/transformer_config.py, utils.py `divide`): heads and the hidden size of the
  feed-forward network must be multiples of tp. Query groups must be a multiple of tp, or, from 0.16 on, a
  divisor: then ranks replicate a group. Layers must be a multiple of pp, unless options place them. Rows of
  the vocabulary must be a multiple of tp; a job has as many as the tokenizer's, padded to a multiple of
  make_vocab_size_divisible_by x tp (megatron/training/tokenizer, `_vocab_size_with_padding`).
- torchtitan (models/*/model.py, `view(..., -1, head_dim)`): tp must divide heads and key-value heads. Tied
  embeddings have one stage (models/common/decoder.py, `update_from_config`).
- Models of other names: different trainers run them, so these cases are warnings, but for heads that tp does
  not divide: no trainer runs a part of a head. Where nothing states the heads, that is a warning, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from ckptcore.core.manifest import Manifest
from ckptcore.errors import Finding, NameMismatch, UsageError, finding
from ckptcore.naming.maps.hyperparameters import Config, Number
from ckptcore.naming.worlds import HUB, suspected
from ckptcore.planning.stored_configs import stored_configs
from ckptcore.store import open_store, split_url
from ckptcore.topology.layout import Mesh
from ckptcore.utils.foreign_text import InvalidText, load_json

Shape = tuple[int, ...]
_STRICT = frozenset({"megatron", "torchtitan"})  # worlds of one trainer
_FEED_FORWARD = ("ffn_hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
_PLACED = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
)
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_MOST = 4 << 20  # bytes of a config
_ATTENTION = re.compile(r"(?:^|[._])(?:self_)?(?:attn|attention)[._]")
_UNCHECKED = "name the model's config with --config; --config none leaves them unchecked without a warning"


@dataclass(frozen=True, slots=True)
class ModelNumber:
    """A number of the model. source: the config and the key that state it, as a clause."""

    value: Number
    source: str


def require_possible(
    source: Manifest,
    shapes: Mapping[str, Shape],
    mesh: Mesh,
    config: str | None = None,
    *,
    repads: bool = False,
) -> tuple[Finding, ...]:
    """Require that the model can run on the mesh, and return what is uneven or has a condition.

    Args:
        source: The checkpoint, for the configs that it stores.
        shapes: Shapes of the parameters, by their own names.
        mesh: The mesh of the reshard.
        config: A config file or its folder; None for the configs of the source, ``none`` for no config.
        repads: Whether loaders of the output pad the vocabulary for their own tp.

    Raises:
        UsageError: The trainer of these names cannot run the model so; with the numbers.
        NameMismatch: The given config has impossible numbers.
    """
    if config == "none":
        return ()
    world = suspected(shapes) or HUB
    configs = list(stored_configs(source, world)) if config is None else [_read(config, world)]
    numbers, doubts = _numbers(configs, required=config is not None)
    findings = [*doubts]
    sizes = dict(mesh.axes)
    tp = sizes.get("tp", 1)
    if tp > 1 and "heads" not in numbers and any(_ATTENTION.search(name) for name in shapes):
        message = f"nothing states the attention heads: whether tp={tp} divides them is unchecked"
        findings.append(finding("uneven-mesh", "coverage", message, hint=_UNCHECKED))
    if (problem := _of_cut_heads(numbers, tp)) is not None:
        raise UsageError(problem[0], hint=f"{problem[1]}; --config none leaves heads unchecked")
    problems = [*_of_groups(world, numbers, tp), *_of_trainer(world, configs, numbers, sizes)]
    problems += _of_vocabulary(world, configs, shapes, tp, repads)
    for is_refused, message, hint in problems:
        if is_refused and world in _STRICT:
            raise UsageError(message, hint=hint)
        findings.append(finding("uneven-mesh", "coverage", message, hint=hint))
    return tuple(findings)


# Number -> its heads, which a rank has whole.
_CUT_HEADS = {
    "heads": "attention heads",
    "delta_key_heads": "heads of the delta net's keys",
    "delta_value_heads": "heads of the delta net's values",
    "mamba_heads": "heads of Mamba layers",
    "mamba_groups": "groups of Mamba layers",
}
_Problem = tuple[bool, str, str]  # whether trainers refuse it, message, next step


def _of_cut_heads(numbers: Mapping[str, ModelNumber], tp: int) -> tuple[str, str] | None:
    """Return the message and next step where a rank would have a part of a head; None where none has."""
    for name, title in _CUT_HEADS.items():
        heads = numbers.get(name)
        if heads is not None and heads.value % tp:
            message = f"cannot run {heads.value} {title} with tp={tp}: {heads.source}"
            beside = (numbers.get(size) for size in ("kv_heads", *_CUT_HEADS))
            return message, _divisors("tp", heads, *beside)
    return None


def _of_groups(world: str, numbers: Mapping[str, ModelNumber], tp: int) -> Iterator[_Problem]:
    heads, groups = numbers.get("heads"), numbers.get("kv_heads")
    if groups is not None and groups.value % tp:
        message = f"{groups.value} query groups (key-value heads) with tp={tp}: {groups.source}"
        if world == "megatron" and tp % groups.value == 0:
            ranks = int(tp // groups.value)
            hint = "continue with megatron-core 0.16 or later; earlier releases refuse it"
            yield False, f"{message}; {ranks} ranks replicate each group", hint
        else:
            yield True, f"cannot run {message}", _divisors("tp", heads, groups)


def _of_trainer(
    world: str, configs: Sequence[Config], numbers: Mapping[str, ModelNumber], sizes: Mapping[str, int]
) -> Iterator[_Problem]:
    """Yield what a trainer's own code refuses: tied stages, and what only Megatron's arguments say."""
    tp, pp = sizes.get("tp", 1), sizes.get("pp", 1)
    tied = next((c.name for c in configs if c.world == HUB and c.at("tie_word_embeddings") is True), "")
    if world == "torchtitan" and tied and pp > 1:
        message = f"cannot cut tied embeddings into pp={pp} stages: {tied} says tie_word_embeddings = true"
        yield True, message, "use pp=1"
    arguments = next((c for c in configs if c.world == "megatron"), None) if world == "megatron" else None
    if arguments is None:
        return
    for key in _FEED_FORWARD:
        n = arguments.at(key)
        if isinstance(n, int) and n % tp:
            number = ModelNumber(n, f"{arguments.name} says {key} = {n}")
            message = f"cannot cut {n} rows of the feed-forward network with tp={tp}: {number.source}"
            yield True, message, _divisors("tp", number)
    layers = numbers.get("layer")
    if layers is not None and layers.value % pp and not any(arguments.at(key) for key in _PLACED):
        yield (
            False,
            f"{layers.value} layers on pp={pp} stages are uneven: {layers.source}",
            "Megatron-Core needs --pipeline-model-parallel-layout, or the options for first and last stage",
        )


def _of_vocabulary(
    world: str, configs: Sequence[Config], shapes: Mapping[str, Shape], tp: int, repads: bool
) -> Iterator[_Problem]:
    """Yield what rows that pad a vocabulary do not allow, or make the job's number of rows another one."""
    arguments = next((c for c in configs if c.world == "megatron"), None) if world == "megatron" else None
    if arguments is None:
        return
    name_of_rows = {shape[0]: name for name, shape in shapes.items() if name.endswith(_VOCABULARY) and shape}
    tokens, step = arguments.at("vocab_size"), arguments.at("make_vocab_size_divisible_by")
    for rows, name in name_of_rows.items():
        has_numbers = type(tokens) is int and type(step) is int and tokens <= rows
        padded = _padded(tokens, step, tp) if has_numbers else None
        by = f"; {arguments.name} says vocab_size = {tokens}, make_vocab_size_divisible_by = {step}"
        expected = "" if padded is None else f": a job with tp={tp} has {padded} rows{by}"
        if rows % tp and not repads:
            message = f"cannot cut {rows} rows of {name} with tp={tp}{expected}"
            yield True, message, _divisors("tp", ModelNumber(rows, name))
        elif repads and (rows % tp or padded not in (None, rows)):
            hint = "Megatron-Core's loader adds or leaves out rows that pad the vocabulary"
            yield False, f"{rows} rows of {name} are not those of tp={tp}{expected}", hint
        elif padded not in (None, rows):
            hint = f"start the job with --make-vocab-size-divisible-by {rows // tp}"
            yield False, f"{rows} rows of {name} are not those of tp={tp}{expected}", hint


def _padded(tokens: int, step: int, tp: int) -> int | None:
    """Return the rows of a vocabulary in a job; None where the numbers are impossible.

    >>> _padded(50257, 128, 1), _padded(50257, 128, 8)
    (50304, 51200)
    """
    if tokens < 1 or step < 1:
        return None
    return -(-tokens // (step * tp)) * step * tp


def _divisors(axis: str, *numbers: ModelNumber | None) -> str:
    """Return the sizes of an axis that divide all numbers, as a next step."""
    counts = [int(n.value) for n in numbers if n is not None]
    fits = [k for k in range(1, min([*counts, 1 << 10]) + 1) if all(n % k == 0 for n in counts)]
    return f"use {axis}={', '.join(map(str, fits[:12]))}; or --config with the numbers of the model"


def _numbers(
    configs: Sequence[Config], *, required: bool
) -> tuple[dict[str, ModelNumber], tuple[Finding, ...]]:
    """Return number -> value and source; the first config with a number counts."""
    numbers: dict[str, ModelNumber] = {}
    doubts = []
    for config in configs:
        try:
            stated = config.numbers
        except NameMismatch as error:
            if required:
                raise
            doubts.append(
                finding("uneven-mesh", "coverage", f"heads and layers are unchecked: {error.message}")
            )
            continue
        for number, (value, key) in stated.items():
            if isinstance(value, int):
                numbers.setdefault(number, ModelNumber(value, f"{config.name} says {key} = {value}"))
    return numbers, tuple(doubts)


def _read(place: str, world: str) -> Config:
    """Return the config of a file, or of a folder with ``config.json``."""
    parent, name = split_url(place)
    is_file = name.endswith(".json")
    folder, path = (parent, name) if is_file else (place, "config.json")
    with closing(open_store(folder)) as store:
        size = store.size(path)
        data = store.read(path, 0, size) if size is not None and size <= _MOST else None
    try:
        content = None if data is None else load_json(data)
    except InvalidText as error:
        raise UsageError(f"cannot read --config {place} as JSON: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(
            f"--config {place} must be a config file, or a folder with config.json",
            hint="try --config none, which leaves heads unchecked",
        )
    return Config(f"--config {place}", HUB if isinstance(content.get("model_type"), str) else world, content)
