"""Report the parts of a series that are missing, and the series of which nothing states how many there are.

A part is never taken for the whole. What states the number of parts decides: the name (``N-of-M``, a world
size), the content, ``params.json`` of Meta and Mistral, ``mapping`` in TensorRT-LLM's config.json, or the
shapes of every weight against a Hugging Face config.json. Where nothing does, `unproven-parts` says so.

Composer's rank 0 alone is its complete save, or one slice of a sharded one. Its own record states how many
ranks there were (``state.metadata.world_size``), and the config of a model of the hub
(``state.integrations.huggingface``). Where neither decides, the file is read, and `unproven-whole` says so.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from typing import Any

from ckptcore.core.manifest import Blob
from ckptcore.encodings.json_text import parse
from ckptcore.errors import CkptError, Finding, finding
from ckptcore.formats.base import Source
from ckptcore.formats.common.model_layers import ModelLayers, layers_of, torn_layers
from ckptcore.formats.common.rank_file_names import PartName, absent_parts, part_name, series
from ckptcore.naming.peft import adapter_fit
from ckptcore.store.subfolder import unrecorded
from ckptcore.utils.foreign_text import InvalidText
from ckptcore.utils.text import listed

Shape = tuple[int, ...]
PARAMS = "params.json"  # of Meta and Mistral
_MAX_LISTED = 100  # missing files that are named
_MAX_CONFIG = 1 << 20
_ALONE = "name their folder to read all of them, or read this one with --allow-incomplete"
_FIND = "copy it from where it was written, or read the others with --allow-incomplete"
_UNPROVEN = (
    "add what states it, such as a config.json or an index; export it with --config; or accept what is there "
    "with --allow-incomplete"
)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")
_META_LAYER = re.compile(r"^layers\.(\d{1,6})\.(.+)$", re.DOTALL)
_FLATTENED = re.compile(r"(?:^|\.)flat_param$")  # torch/distributed/fsdp/_flat_param.py
# Of a model's layers: the embedding, whose columns no writer of slices cuts, and what adds to its width.
_RESIDUAL = (
    ("embed_tokens.weight", "self_attn.o_proj.weight", "mlp.down_proj.weight"),
    ("tok_embeddings.weight", "attention.wo.weight", "feed_forward.w2.weight"),
)
# The dim of each that tensor parallelism cuts.
_TENSOR_PARALLEL = {
    "self_attn.q_proj.weight": 0,
    "self_attn.o_proj.weight": 1,
    "mlp.up_proj.weight": 0,
    "mlp.down_proj.weight": 1,
}
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|tok_embeddings|word_embeddings|wte|embed_in)\.weight$")
_ATTENTION_OUT = re.compile(
    r"(?:^|[._])(?:attn|attention)\.(?:output\.)?(?:[oc]_proj|out_proj|linear_proj|proj|dense|wo|w_out)\.weight$"
    r"|(?:^|\.)attn_out\.weight$"
)
_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
_HEAD_SIZES = ("head_dim", "v_head_dim", "d_kv", "attention_head_dim")
_LORA = re.compile(r"\.lora_(?:embedding_)?([AB])(?:\.|$)")
# Composer's state (composer/core/state.py, `State.state_dict`): of the job, and of the models that it wraps.
_METADATA = re.compile(r"(?:^|\.)state\.metadata$")
_INTEGRATIONS = re.compile(r"(?:^|\.)state\.integrations$")


def part_findings(
    source: Source,
    paths: Collection[str],
    shapes: Mapping[str, Shape],
    count: int | None = None,
    files: Mapping[str, str] | None = None,
    blobs: Iterable[Blob] = (),
) -> list[Finding]:
    """Return findings about files that are read, and that their names call parts of several.

    Args:
        source: The folder or file.
        paths: The files that are read, one checkpoint.
        shapes: Shape of every tensor in them.
        count: How many parts there are according to the content.
        files: Tensor -> its file, where each holds tensors in full.
        blobs: The plain values in the files.
    """
    findings: list[Finding] = []
    blobs = tuple(blobs)
    for parts in series(paths).values():
        if len(parts[0].axes) == 1 and source.name is None:
            findings += _of_series(source, parts, shapes, count, blobs)
        else:
            for part in parts:
                findings += _of_one(source, part, shapes, count, blobs)
    # Ranks are not compared here: Meta's reader has the names of all of them.
    is_full = len(paths) == 1 or all(path.endswith(".safetensors") for path in paths)
    if not findings and is_full and all(path.startswith("consolidated") for path in paths):
        findings += lacking_by_params(source, evidence_beside(source, PARAMS), shapes)
    if not findings and count is not None and count > len(paths):
        path = min(paths)
        findings.append(_missing(source, f"{path} is of a save in {count} parts by its own record", path))
    # Files whose tensors are slices are compared by their reader.
    if not findings and (files or len(paths) == 1):
        findings += content_findings(source, paths, shapes)
        if not findings and len(paths) > 1:
            findings += torn_findings(source, files or {}, shapes)
        if not findings:
            findings += layer_findings(source, min(paths), shapes)
    return findings


def content_findings(source: Source, paths: Collection[str], shapes: Mapping[str, Shape]) -> list[Finding]:
    """Return findings about tensors that are halves or slices by their own shapes, in files of any name."""
    return (
        _half_pairs(source, shapes)
        or _unlike_adapted(source, paths, shapes)
        or _slices(source, paths, shapes)
    )


def layer_findings(source: Source, path: str, names: Collection[str]) -> list[Finding]:
    """Return the finding that layers of the model are missing from what a file has, or an index lists.

    Args:
        source: The folder or file.
        path: The file or index, of any name.
        names: Its tensors, in their order.
    """
    # Adapters, torchtune's ``lora_a`` too, have the layers that they adapt.
    if any(".lora_" in name for name in names):
        return []
    layers = ModelLayers(names)
    reason = f"{gap} is not there, and other layers have it" if (gap := layers.gap()) is not None else None
    part = part_name(path)
    # Where the name states a number, what proves it has proven the ends; one part of one proves nothing.
    if (part is None or (part.is_run and part.count == 1)) and layers.are_several:
        config_of = {"config.json": evidence_beside(source, "config.json")}
        configs = {PARAMS: _params_beside(source, names)} | config_of
        for name, config in configs.items():
            if (layer := layers.stated_beyond(config)) is not None:
                message = f"{name} states more layers than {path} has: {layer} is not there"
                return [lack(source, "unproven-parts", "files", message, file=path, hint=_FIND)]
        reason = reason or layers.open_end({key: value for c in configs.values() for key, value in c.items()})
    if reason is None:
        return []
    return [finding("unproven-whole", "files", f"{reason}: {path} may not hold all of the model", file=path)]


def _half_pairs(source: Source, shapes: Mapping[str, Shape]) -> list[Finding]:
    """Return the findings about halves of LoRA pairs that are alone, or whose ranks differ.

    peft (tuners/lora/layer.py): ``lora_A`` is (rank, inputs), and ``lora_B`` (outputs, rank). That of an
    embedding has its dims the same way.
    """
    findings = []
    for name, shape in shapes.items():
        half = _LORA.search(name)
        if half is None or name.endswith(".bias"):  # `lora_bias` is of the second alone
            continue
        pair = f"{name[: half.start(1)]}{'B' if half[1] == 'A' else 'A'}{name[half.end(1) :]}"
        pair_shape = shapes.get(pair)
        if pair_shape is None:
            message = f"{pair} is in no file, and {name} is there"
        elif half[1] == "A" and len(shape) == len(pair_shape) == 2 and shape[0] != pair_shape[1]:
            message = f"{name} {list(shape)} and {pair} {list(pair_shape)} have no rank in common"
        else:
            continue
        findings.append(lack(source, "unproven-parts", "coverage", message, fqn=name, hint=_FIND))
    return findings[:_MAX_LISTED]


def _unlike_adapted(source: Source, paths: Collection[str], shapes: Mapping[str, Shape]) -> list[Finding]:
    """Return the finding that LoRA pairs do not fit what they adapt, or that nothing says what that is.

    One rank's rows of a ``lora_B`` are a pair, too. What tells: adapter_config.json, the base weights, and
    the sizes in a config.json, each where it is there.
    """
    if not any(_LORA.search(name) for name in shapes):
        return []
    expected = _expected(evidence_beside(source, "config.json"))
    inside = expected.inside.items() if expected is not None else ()
    sizes = {name.removesuffix(".weight"): size for name, size in inside}
    fit = adapter_fit(shapes, json_beside(source, "adapter_config.json"), sizes)
    path = min(paths)
    if fit.problems:
        return [lack(source, "unproven-parts", "coverage", listed(fit.problems, 1), file=path, hint=_FIND)]
    if not fit.unknown:
        return []
    message = f"nothing states the rows of {fit.unknown[0]}: a rank's rows of its lora_B would look like all"
    return [finding("unproven-whole", "coverage", message, file=path)]


def _slices(source: Source, paths: Collection[str], shapes: Mapping[str, Shape]) -> list[Finding]:
    """Return the finding that tensors are one rank's slices, whatever their file is called."""
    for name in shapes:
        if _FLATTENED.search(name):
            message = (
                f"{name} holds a rank's parameters in a row, without their names: it may be one of several"
            )
            return [finding("unproven-whole", "files", message, file=min(paths))]
    config = evidence_beside(source, "config.json")
    by_params = ranks_by_params(_params_beside(source, shapes), shapes)
    if by_params is not None and by_params > 1 and len(paths) == 1:
        message = f"{PARAMS} and its columns make {min(paths)} one of {by_params} ranks' parts"
        return [_missing(source, message, min(paths))]
    if (sliced := slicing_ranks(config, shapes)) is not None:
        name, ranks = sliced
        shape = list(shapes[name])
        message = f"{name} {shape} is cut, as its siblings are: {min(paths)} is one of {ranks} ranks' parts"
        return [_missing(source, message, min(paths))]
    if (parallel := tensor_parallel_cut(config, shapes)) is not None:
        name, ranks = parallel
        shape = list(shapes[name])
        message = f"{name} {shape} looks as one of {ranks} tensor-parallel ranks has it, in all layers"
        return [finding("unproven-whole", "files", message, file=min(paths))]
    return []


def torn_findings(source: Source, files: Mapping[str, str], shapes: Mapping[str, Shape]) -> list[Finding]:
    """Return the finding that a layer lacks a tensor, unless a config proves all of them.

    Args:
        source: The folder.
        files: Tensor -> its file, of tensors that are in one file each.
        shapes: Shape of every tensor.
    """
    torn = torn_layer(files)
    if torn is None or is_complete_model(evidence_beside(source, "config.json"), shapes):
        return []
    name, file = torn
    message = f"{name} is in no file, and other layers have it: {file} may be of another save"
    return [lack(source, "unproven-parts", "files", message, fqn=None, file=file, hint=_UNPROVEN)]


def torn_layer(files: Mapping[str, str]) -> tuple[str, str] | None:
    """Return a tensor that a layer lacks at the edge of a file, and the file; None where no layer is torn.

    Without an index, a part of another save that has none of the others' names looks right. Its edges are
    elsewhere: between them is a layer that lacks tensors, or no layer at all.

    Args:
        files: Tensor -> its file.

    >>> names = [f"layers.{n}.{k}" for n in range(4) for k in "qkv"]
    >>> torn_layer(dict.fromkeys(names[:6], "a") | dict.fromkeys(names[6:], "b"))
    >>> torn_layer(dict.fromkeys(names[:6], "a") | dict.fromkeys(names[7:], "b"))
    ('layers.2.q', 'b')
    """
    for container, layers in layers_of(files).items():
        alike = Counter(frozenset(layer) for layer in layers.values())
        # Names that one layer alone has are no rule for the others.
        usual, most = alike.most_common(1)[0]
        for number, layer in sorted(layers.items()):
            around = {f for n in range(number - 1, number + 2) for f in layers.get(n, {}).values()}
            if most > 1 and len(around) > 1 and alike[frozenset(layer)] == 1 and layer.keys() < usual:
                last = next(iter(layers.get(number + 1, layer).values()))
                return f"{container}{number}.{min(usual - layer.keys())}", last
            if most > 1 and number + 1 < max(layers) and number + 1 not in layers:
                after = min(n for n in layers if n > number)
                return f"{container}{number + 1}.{min(usual)}", next(iter(layers[after].values()))
    return None


def _of_series(
    source: Source,
    parts: tuple[PartName, ...],
    shapes: Mapping[str, Shape],
    count: int | None,
    blobs: tuple[Blob, ...],
) -> list[Finding]:
    """Return findings about all parts of a folder's series with one number."""
    stated = _stated(source, parts[0], shapes, count)
    missing, total = absent_parts(parts, _MAX_LISTED, stated)
    if missing:
        suffix = f", as are {total - 1} more" if total > 1 else ""
        why = f"it is one of {stated} parts" if stated is not None else "other parts of its series are there"
        message = f"{missing[0]} is missing{suffix}: {why}"
        return [
            _missing(source, message if n == 0 else f"{path} is missing", path)
            for n, path in enumerate(missing)
        ]
    beyond = [p.path for p in parts if stated is not None and p.axes[0].number > stated]
    if beyond:
        message = f"the number of {beyond[0]} exceeds its count"
        return [finding("mixed-saves", "files", message, file=beyond[0])]
    return [] if stated is not None else unproven_findings(source, parts, shapes, blobs)


def _of_one(
    source: Source, part: PartName, shapes: Mapping[str, Shape], count: int | None, blobs: tuple[Blob, ...]
) -> list[Finding]:
    """Return findings about a file that is read without the others of its series."""
    stated = _stated(source, part, shapes, count)
    if stated == 1:
        return []
    beside = next((path for path in part.neighbours() if _size(source, path) is not None), None)
    if stated is not None or beside is not None:
        why = f"is one of {stated} parts" if stated is not None else f"is one part, and {beside} is another"
        return [_missing(source, f"{part.path} {why}", part.path, _ALONE if beside else _FIND)]
    if not part.is_first:
        message = f"{part.path} is one of several parts by its name, and the first is not beside it"
        return [_missing(source, message, part.path)]
    return unproven_findings(source, (part,), shapes, blobs)


def unproven_findings(
    source: Source, parts: tuple[PartName, ...], shapes: Mapping[str, Shape], blobs: Iterable[Blob] = ()
) -> list[Finding]:
    """Return the finding that a missing last part would not be seen, unless a config proves the shapes.

    Args:
        source: The folder or file.
        parts: All files of one kind that are read, at least one.
        shapes: Shape of every tensor in them.
        blobs: The plain values in them.
    """
    ranks, config = recorded(blobs)
    if is_complete_model(evidence_beside(source, "config.json"), shapes) or ranks == len(parts):
        return []
    if len(parts) == 1 and (parts[0].sole or ranks is not None):
        return _of_sole(source, parts[0], shapes, ranks, config)
    if ranks is not None and len(parts) < ranks:
        message = f"{ranks} ranks took part, and {len(parts)} files of them are there"
        return [_missing(source, message, parts[0].path)]
    names = parts[0].path if len(parts) == 1 else f"{parts[0].path} and {len(parts) - 1} more"
    message = f"nothing states how many parts {names} belong to: a missing last one would not be seen"
    if source.recover:
        return [finding("missing-part", "files", message, file=parts[0].path)]
    return [finding("unproven-parts", "files", message, file=parts[0].path, hint=_UNPROVEN)]


def _of_sole(
    source: Source, part: PartName, shapes: Mapping[str, Shape], ranks: int | None, config: Mapping[str, Any]
) -> list[Finding]:
    """Return the finding about a file that may be the complete save, or the first part of one."""
    if is_complete_model(config, shapes):
        return []
    if (name := lacking_tensor(config, shapes)) is not None:
        of = ranks or "several"
        message = f"{name} is not there, or cut, by the model's config: {part.path} is one part of {of}"
        return [_missing(source, message, part.path)]
    took = f", and {ranks} ranks took part" if ranks is not None else ""
    message = f"nothing states whether {part.path} is the complete save or one part of it{took}"
    return [finding("unproven-whole", "files", message, file=part.path)]


def recorded(blobs: Iterable[Blob]) -> tuple[int | None, Mapping[str, Any]]:
    """Return how many ranks took part, and the config of the model of the hub, by Composer's own record."""
    ranks: int | None = None
    config: Any = {}
    for blob in blobs:
        if type(blob.tree) is not dict:
            continue
        if _METADATA.search(blob.key) and type(blob.tree.get("world_size")) is int:
            ranks = blob.tree["world_size"]
        elif _INTEGRATIONS.search(blob.key):
            config = blob.tree
            for key in ("huggingface", "model", "config", "content"):
                config = config.get(key) if isinstance(config, dict) else None
    return ranks, config if isinstance(config, dict) else {}


def _missing(source: Source, message: str, path: str, hint: str = _FIND) -> Finding:
    return lack(source, "missing-file", "files", message, file=path, hint=hint)


def lack(source: Source, code: str, level: str, message: str, **where: str | None) -> Finding:
    """Return the finding that a part is missing: no error where the user accepts what is there."""
    return finding("missing-part" if source.recover else code, level, message, **where)


def _stated(source: Source, part: PartName, shapes: Mapping[str, Shape], count: int | None) -> int | None:
    """Return how many parts there are, or None if nothing states it."""
    if part.count is not None:
        return part.count
    if count is not None:
        return count
    if part.path.startswith("consolidated."):
        return ranks_by_params(json_beside(source, PARAMS), shapes)
    mapping = evidence_beside(source, "config.json").get("mapping")
    if isinstance(mapping, dict):  # TensorRT-LLM: cp ranks share a file
        sizes = [mapping.get(key, 1) for key in ("tp_size", "pp_size")]
        if all(type(n) is int and n > 0 for n in sizes):
            return int(sizes[0]) * int(sizes[1])
    return None


def ranks_by_params(params: Mapping[str, Any], shapes: Mapping[str, Shape]) -> int | None:
    """Return the ranks that Meta's model was cut for, by params.json and the columns of its output weights.

    llama-models/models/checkpoint.py counts the files; the columns of ``wo``, and the rows of ``wq``, are
    those of a rank's heads. None where a layer or the last norm is not there, or where they disagree.
    """
    width, heads, layers = (params.get(key) for key in ("dim", "n_heads", "n_layers"))
    head = params.get("head_dim", 0)
    if any(type(n) is not int or n < 1 for n in (width, heads, layers)) or type(head) is not int:
        return None
    assert isinstance(width, int)
    assert isinstance(heads, int)
    assert isinstance(layers, int)
    rows = heads * head if head > 0 else width
    # Bounded, because the number of layers is a foreign file's.
    cuts = {_rank_heads(shapes, f"layers.{n}.attention") for n in range(min(layers, 1 << 16))}
    if len(cuts) != 1 or not (cut := cuts.pop()) or rows % cut:
        return None
    return rows // cut if shapes.get("norm.weight") == (width,) else None


def lacking_by_params(source: Source, params: Mapping[str, Any], names: Iterable[str]) -> Iterator[Finding]:
    """Yield findings for layers that are not there by params.json, or that lack a tensor of others.

    Args:
        source: The folder or file.
        params: Content of params.json; {} without one.
        names: Tensors of all files, in the names of Meta and Mistral; nothing is expected of others.
    """
    layers: dict[int, set[str]] = {}
    for name in names:
        if match := _META_LAYER.match(name):
            layers.setdefault(int(match[1]), set()).add(match[2])
    stated = params.get("n_layers")
    count = stated if type(stated) is int and layers else 0
    for number in islice((n for n in range(count) if n not in layers), _MAX_LISTED):
        message = f"layers.{number} is in no file, and {PARAMS} has {count} layers"
        yield lack(source, "missing-file", "files", message)
    for number, rest in islice(torn_layers(layers), _MAX_LISTED):
        name = f"layers.{number}.{rest}"
        yield lack(source, "hole", "coverage", f"{name} is in no file, and other layers have it", fqn=name)


def _rank_heads(shapes: Mapping[str, Shape], attention: str) -> int:
    """Return the elements of a rank's heads in a layer; 0 where nothing says it, or two tensors disagree."""
    out, queries = shapes.get(f"{attention}.wo.weight"), shapes.get(f"{attention}.wq.weight")
    sizes = {shape[dim] for shape, dim in ((out, -1), (queries, 0)) if shape}
    return sizes.pop() if len(sizes) == 1 else 0


@dataclass(frozen=True, slots=True)
class _Expected:
    """Shapes by a config: outside of the layers, and of what tensor parallelism cuts in each of them."""

    layers: int
    outside: Mapping[str, Shape]
    inside: Mapping[str, Shape]

    @property
    def width(self) -> Shape:
        return self.outside["norm.weight"]


def _expected(config: Mapping[str, Any]) -> _Expected | None:
    """Return the shapes that Llama and its relatives have by a config; None where it lacks a size."""
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config
    sizes = [config.get(k) for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")]
    heads = config.get("num_attention_heads")
    if any(type(n) is not int or n < 1 for n in (*sizes, heads)):
        return None
    vocabulary, width, inner, layers = (int(n) for n in sizes if n is not None)
    head = config.get("head_dim") or width // int(heads or 1)
    rows = int(heads or 1) * head if type(head) is int else 0
    outside = {
        "embed_tokens.weight": (vocabulary, width),
        "norm.weight": (width,),
        **({} if config.get("tie_word_embeddings") else {"lm_head.weight": (vocabulary, width)}),
    }
    groups = config.get("num_key_value_heads") or heads
    narrow = int(groups) * head if type(groups) is int and type(head) is int else 0
    inside = {
        "self_attn.q_proj.weight": (rows, width),
        "self_attn.k_proj.weight": (narrow, width),
        "self_attn.v_proj.weight": (narrow, width),
        "self_attn.o_proj.weight": (width, rows),
        "mlp.down_proj.weight": (width, inner),
        "mlp.up_proj.weight": (inner, width),
    }
    return _Expected(layers, outside, inside)


def is_complete_model(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> bool:
    """Return whether tensors are a complete model by a Hugging Face config, none of them cut.

    It is proven for the names that Llama and its relatives share: each layer has the same tensors, those that
    tensor parallelism cuts have their full shapes, and what is before and behind the layers is there.
    """
    expected = _expected(config)
    if expected is None:
        return False
    inside: dict[int, dict[str, Shape]] = {}
    outside: dict[str, Shape] = {}
    for name, shape in shapes.items():
        match = _LAYER.search(name)
        if match:
            inside.setdefault(int(match[1]), {})[match[2]] = shape
        else:
            outside[name] = shape
    # One more than there are is enough to differ: the config's number may be huge.
    if inside.keys() != set(range(min(expected.layers, len(inside) + 1))):
        return False
    if any(layer != inside[0] for layer in inside.values()):
        return False
    if any(inside[0].get(name) != shape for name, shape in expected.inside.items()):
        return False
    up = expected.inside["mlp.up_proj.weight"]  # a gate, which not every model has, is multiplied with it
    if inside[0].get("mlp.gate_proj.weight", up) != up:
        return False
    ends = expected.outside.items()
    return all(any(n.endswith(end) and s == shape for n, s in outside.items()) for end, shape in ends)


def slicing_ranks(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> tuple[str, int] | None:
    """Return a tensor that is one rank's slice, and how many ranks there are; None where nothing shows it.

    Slices of rows (FSDP2, DTensor) leave less than the embedding's columns in what is added to them. Those of
    tensor parallelism show against a config alone: rows of ``q_proj`` and ``up_proj``, and columns of
    ``o_proj`` and ``down_proj``, are cut by one number. Packed weights are cut in columns only.

    >>> shapes = {"embed_tokens.weight": (40, 16), "layers.0.self_attn.o_proj.weight": (4, 16)}
    >>> slicing_ranks({}, {**shapes, "layers.0.mlp.down_proj.weight": (4, 24)})
    ('layers.0.self_attn.o_proj.weight', 4)
    """
    models: dict[str, dict[str, set[Shape]]] = {}
    names: dict[tuple[str, str], str] = {}
    for name, shape in shapes.items():
        match = _LAYER.search(name)
        if match and len(shape) == 2:
            model = name[: match.start(1) - len("layers.")]
            models.setdefault(model, {}).setdefault(match[2], set()).add(shape)
            names.setdefault((model, match[2]), name)
    expected = _expected(config)
    for model, inside in models.items():
        for embedding, attention, mlp in _RESIDUAL:
            width = shapes.get(f"{model}{embedding}", ())[1:]
            added = inside.get(attention, set()) | inside.get(mlp, set())
            rows = {shape[:1] for shape in added}
            if len(width) != 1 or len(rows) != 1 or attention not in inside:
                continue
            ((width_left,),) = rows
            if expected is not None and expected.width == (width_left,):
                continue  # an embedding that is wider than the model
            if 0 < width_left < width[0] and width[0] % width_left == 0:
                return names[model, attention], width[0] // width_left
        if expected is not None and shapes.get(f"{model}embed_tokens.weight", ())[1:] == expected.width:
            cuts = {
                _cut(shape, expected.inside[name], dim)
                for name, dim in _TENSOR_PARALLEL.items()
                for shape in inside.get(name, {(0, 0)})
            }
            if len(cuts) == 1 and (ranks := cuts.pop()) > 1:
                return names[model, "self_attn.o_proj.weight"], ranks
    return None


def tensor_parallel_cut(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> tuple[str, int] | None:
    """Return a tensor that tensor parallelism seems to have cut, and into how many; None without one.

    What attention adds to the model has the model's width on one side, and most models have as many elements
    of heads on the other. Some have fewer, which a config states: heads, and the size of each. Packed weights
    have fewer columns, and not all matrices of a layer have the width. Where ranks share the embedding
    (transformers' plans), rows of the output weights are fewer.

    >>> shapes = {"embed_tokens.weight": (40, 16), "layers.0.self_attn.o_proj.weight": (16, 8)}
    >>> tensor_parallel_cut({}, shapes)
    ('layers.0.self_attn.o_proj.weight', 2)
    >>> tensor_parallel_cut({"num_attention_heads": 2, "head_dim": 4}, shapes)
    """
    embeddings = {shape for name, shape in shapes.items() if len(shape) == 2 and _EMBEDDING.search(name)}
    widths = {width for _, width in embeddings}
    stated = _head_elements(config)
    for container, layers in layers_of(shapes).items():
        first, *further_layers = layers.values()
        for name, shape in first.items():
            if len(shape) != 2 or not _ATTENTION_OUT.search(name) or max(shape) not in widths:
                continue
            cut, width = min(shape), max(shape)
            is_cut = 0 < cut < width and width % cut == 0 and cut not in stated
            matrices = [matrix for matrix in first.values() if len(matrix) == 2]
            are_alike = all(layer.get(name, shape) == shape for layer in further_layers)
            if is_cut and are_alike and all(width in matrix for matrix in matrices):
                return f"{container}{min(layers)}.{name}", width // cut
    for name, shape in shapes.items():
        if name.endswith("lm_head.weight") and len(embeddings) == 1:
            ((rows, width),) = embeddings
            if shape[1:] == (width,) and 0 < shape[0] < rows and rows % shape[0] == 0:
                return name, rows // shape[0]
    return None


def _head_elements(config: Mapping[str, Any]) -> set[int]:
    """Return the elements of all heads by a config, and by those of the models inside it."""
    forms = [config, *(form for form in config.values() if isinstance(form, dict))]
    return {
        form[heads] * form[size]
        for form in forms
        for heads in _HEADS
        for size in _HEAD_SIZES
        if type(form.get(heads)) is int and type(form.get(size)) is int
    }


def _cut(shape: Shape, full: Shape, dim: int) -> int:
    """Return how often a shape is in a full one that is cut along a dim; 0 if it is not."""
    size, length = shape[dim], full[dim]
    return length // size if size and length % size == 0 and shape[1 - dim] == full[1 - dim] else 0


def lacking_tensor(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> str | None:
    """Return a weight that is smaller than a Hugging Face config states, or not there; None if there is none.

    A flattened slice has fewer elements, one of a dim has fewer rows or columns, and a pipeline stage has
    fewer layers.
    """
    expected = _expected(config)
    if expected is None:
        return None
    full = {**expected.outside, **expected.inside}
    sample = next(iter(expected.inside))
    layers: dict[int, str] = {}
    for name, shape in shapes.items():
        of = next((shape for end, shape in full.items() if name.endswith(f".{end}")), None)
        if of is not None and prod(shape) < prod(of):
            return name
        match = _LAYER.search(name)
        if match and match[2] == sample:
            layers[int(match[1])] = name
    absent = next((n for n in range(expected.layers) if n not in layers), None)
    return f"layers.{absent}.{sample}" if layers and absent is not None else None


def _size(source: Source, path: str) -> int | None:
    size = source.listing.get(path)
    return source.store.size(path) if size is None and source.name is not None else size


def evidence_beside(source: Source, path: str) -> Mapping[str, Any]:
    """Return the JSON object of a file that is asked for evidence only; {} as `json_beside`.

    The reader takes nothing from it: it stays a file beside the checkpoint, to be carried or accounted for.
    """
    return json_beside(replace(source, store=unrecorded(source.store)), path)


def _params_beside(source: Source, names: Iterable[str]) -> Mapping[str, Any]:
    """Return params.json as `evidence_beside` does; {} where the names are not Meta's.

    Meta, Mistral and torchtune have no module around the layers. For others it is a request in vain.
    """
    is_meta = any(name.startswith("layers.") for name in names)
    return evidence_beside(source, PARAMS) if is_meta else {}


def json_beside(source: Source, path: str, most: int = _MAX_CONFIG) -> Mapping[str, Any]:
    """Return the JSON object of a file beside the parts; {} if there is none, or it proves nothing."""
    try:
        # Without the right to list, a store denies whoever asks for an object that is not there.
        size = _size(source, path)
        if size is None or not 0 < size <= most:
            return {}
        form = parse(source.store.read(path, 0, size), path)
    except (CkptError, InvalidText):
        return {}
    return form if isinstance(form, dict) else {}
