"""Read and write a step of nanotron: a file for each rank of a tensor, in a folder named after its module.

``model/model/decoder/0/pp_block/attn/o_proj/model_weight_pp-rank-0-of-1_tp-rank-0-of-2.safetensors`` is a
part of ``model.decoder.0.pp_block.attn.o_proj.weight``. config.yaml is written first,
checkpoint_metadata.json last (nanotron/serialize/main.py, `save`).

A file holds one tensor, ``data``. One that ranks share has in its header the shape of the full tensor, and
pairs of slices, of the file's tensor and of the full one (nanotron/parallel/parameters.py, `SlicesPair`). The
name of the file says how many ranks there are. Nothing lists the tensors: model_config.json has the number of
layers.

Written files are those of one rank. Any other number loads them, too: each rank joins the files of a tensor
by the boxes, and takes its own part (nanotron/serialize/weights.py, `load_weights`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice, product
from math import prod
from typing import Any

from ckptcore.core.box import Box
from ckptcore.core.columnar_file import canonical_json
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Item, Manifest, TensorSpec, Unread
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.object_tree import decode
from ckptcore.encodings.json_text import parse
from ckptcore.encodings.safetensors_header import read_header
from ckptcore.errors import Finding, MalformedCheckpoint, UnsupportedFormat, finding
from ckptcore.formats.base import (
    Arrangement,
    Evidence,
    FileLayout,
    Format,
    Layout,
    Literal,
    Reader,
    Source,
    Writer,
    natural,
)
from ckptcore.formats.common.model_layers import torn_layers
from ckptcore.formats.common.part_proof import json_beside, lack
from ckptcore.formats.common.rank_file_names import NANOTRON
from ckptcore.formats.common.rank_file_names import NANOTRON_METADATA as METADATA
from ckptcore.formats.common.rank_file_names import NANOTRON_MODEL as MODEL
from ckptcore.formats.common.shard_pieces import Piece, PlacedTensors, Shape, ShardPlacement, same
from ckptcore.formats.huggingface.safetensors import file_layout, require_dtype
from ckptcore.utils.foreign_text import InvalidText
from ckptcore.utils.text import listed, short_repr

_FIRST = "config.yaml"
_CONFIG = "model_config.json"
_DATA = "data"
_PAIRS, _SHAPE, _VERSION = "local_global_slices_pairs", "unsharded_shape", "version"
_NUMBER = re.compile(r"\s*(?:(?:np|numpy)\.u?int\d+\((\d{1,15})\)|(\d{1,15}))\s*")  # numpy 2 prints its type
_LAYER = re.compile(r"^(.*\bdecoder\.)(\d{1,6})\.pp_block\.(.+)$", re.DOTALL)
# What every version records (nanotron/serialize/metadata.py, CheckpointMetadata).
_RECORDED = {"version": str, "tp": int, "dp": int, "metas": dict}
_STATES = ("optimizer/", "lr_scheduler/", "random/")
_MAX_PAIRS = 256  # of one file; fused tensors have three
_MAX_LISTED = 20
# What each layer of Llama and Qwen has (nanotron/models): a part of a name -> whether a full model is needed
# to say so, which a config describes.
_OF_A_LAYER = {
    "input_layernorm.": False,
    "attn.qkv_proj.": False,
    "attn.o_proj.": False,
    "post_attention_layernorm.": True,
    "mlp.": True,
}
_OF_AN_MLP = frozenset({"mlp.gate_up_proj.", "mlp.down_proj."})  # each needs the other one
CONFIG = "model_config"  # the object that becomes _CONFIG
_WRITTEN = "1.5"
# Modules whose tensors ranks share, whatever their number, and those that each rank has completely
# (nanotron/models/llama.py and qwen.py). The loader looks for the files of the former by their ranks.
_SHARED = re.compile(
    r"model\.(?:token_position_embeddings\.pp_block\.token_embedding|lm_head\.pp_block"
    r"|decoder\.\d{1,6}\.pp_block\.(?:attn\.(?:qkv|o)_proj|mlp\.(?:gate_up|down)_proj))\.(?:weight|bias)"
)
_COMPLETE = re.compile(
    r"model\.(?:final_layer_norm\.pp_block|decoder\.\d{1,6}\.pp_block\.(?:input|post_attention)_layernorm)"
    r"\.weight"
)
_ONE_RANK = "_pp-rank-0-of-1_tp-rank-0-of-1"
_ALL = "None,None,None"  # a slice as nanotron writes it
# What `TrainingMetadata` and `CheckpointMetadata` hold before a training's first step.
_BEFORE_TRAINING = {
    "version": _WRITTEN,
    "tp": 1,
    "dp": 1,
    "cp": 1,
    "custom_metas": None,
    "metas": {
        "consumed_train_samples": 0,
        "consumed_tokens_total": 0,
        "last_train_step": 0,
        "last_stage_idx": None,
        "data_stages": [],
    },
}


def detect(source: Source) -> Evidence | None:
    """Recognise the folder of a step, also of one whose save has not finished."""
    if source.name is not None or not (METADATA in source.listing or _FIRST in source.listing):
        return None
    tensor = next((p for p in source.listing if p.startswith(MODEL) and NANOTRON.match(p)), None)
    if tensor is None:
        return None
    first = METADATA if METADATA in source.listing else _FIRST
    return Evidence("nanotron", (f"found {first} and {tensor}",))


@dataclass(frozen=True, slots=True)
class _File:
    """One file of a tensor: its path, and its ranks and their sizes by the name; None where it has none."""

    path: str
    ranks: tuple[int, int, int] | None  # pipeline, tensor, expert
    sizes: tuple[int, int, int] | None


def read_step(source: Source) -> Manifest:
    """Read the manifest of a step.

    Raises:
        MalformedCheckpoint: A header, or checkpoint_metadata.json, is not valid.
    """
    builder, origin = Builder(), dict[str, Any]()
    recorded = _metadata(source)
    if recorded is None:
        message = f"{METADATA} is missing, which nanotron writes when all ranks have saved"
        builder.findings.append(lack(source, "not-complete", "files", message))
    else:
        step = recorded["metas"].get("last_train_step")
        if type(step) is int:
            origin["step"] = step
    tensors = _files(source)
    sizes = Counter(file.sizes[:2] for files in tensors.values() for file in files if file.sizes is not None)
    mesh = sizes.most_common(1)[0][0] if sizes else (1, 1)
    if sizes:
        origin["mesh"] = {"pp": mesh[0], "tp": mesh[1]}
    if sizes and recorded is not None and recorded["tp"] != mesh[1]:
        message = f"{METADATA} states {recorded['tp']} tensor-parallel ranks, and files have {mesh[1]}"
        builder.report("mixed-saves", "files", message, file=METADATA)
    placed = PlacedTensors(builder)
    for fqn in sorted(tensors, key=natural):
        builder.findings += _contradicting(source, fqn, tensors[fqn], mesh)
        _add_tensor(source, builder, placed, fqn, tensors[fqn], recorded["version"] if recorded else None)
    builder.findings += _lacking(source, tensors)
    states = sorted(p for p in source.listing if p.startswith(_STATES))
    if states:
        message = f"the state of optimizer, scheduler and random numbers is not read: {listed(states, 1)}"
        builder.report("stray-file", "files", message, file=states[0])
    return builder.build("nanotron", source.store.url, origin)


def _metadata(source: Source) -> Mapping[str, Any] | None:
    size = source.listing.get(METADATA)
    if size is None:
        return None
    try:
        recorded = parse(source.store.read(METADATA, 0, size), METADATA)
    except InvalidText as error:
        raise MalformedCheckpoint(f"{METADATA} is not JSON: {error}", file=METADATA) from error
    if not isinstance(recorded, dict):
        raise MalformedCheckpoint(f"{METADATA} must hold an object (got {short_repr(recorded, 40)})")
    odd = [key for key, kind in _RECORDED.items() if type(recorded.get(key)) is not kind]
    if odd:
        value = short_repr(recorded.get(odd[0]), 40)
        message = f"{METADATA} must have a {_RECORDED[odd[0]].__name__} as {odd[0]} (got {value})"
        raise MalformedCheckpoint(message, file=METADATA)
    source.explain(METADATA)
    source.carry(METADATA, METADATA.removesuffix(".json"), recorded)
    return recorded


def _files(source: Source) -> dict[str, list[_File]]:
    """Return FQN -> its files, in the order of the ranks."""
    tensors: dict[str, list[_File]] = {}
    for path in source.listing:
        match = NANOTRON.match(path) if path.startswith(MODEL) else None
        if match is None:
            continue
        folder = match["folder"].removeprefix(MODEL)
        ranks = sizes = None
        if match["tp"] is not None:
            ranks = int(match["pp"]), int(match["tp"]), int(match["exp"] or 0)
            sizes = int(match["pp_size"]), int(match["tp_size"]), int(match["exp_size"] or 1)
        fqn = f"{folder.replace('/', '.')}{match['leaf']}"
        tensors.setdefault(fqn, []).append(_File(path, ranks, sizes))
    return {fqn: sorted(files, key=lambda f: (f.ranks or (), f.path)) for fqn, files in tensors.items()}


def _contradicting(source: Source, fqn: str, files: list[_File], mesh: tuple[int, int]) -> Iterator[Finding]:
    """Yield findings for files of a tensor that are missing, or cannot be of one save."""
    sizes = {file.sizes for file in files}
    stages = {file.ranks[0] for file in files if file.ranks is not None}
    odd = next((file for file in files if file.sizes is not None and file.sizes[:2] != mesh), None)
    if len(sizes) > 1 or len(stages) > 1 or odd is not None:
        named = odd or files[-1]
        message = f"the files of {fqn} are not those of one save: {named.path} has other ranks in its name"
        yield finding("mixed-saves", "files", message, fqn=fqn, file=named.path)
        return
    size = next(iter(sizes))
    if size is None:
        return
    present = {file.ranks[1:] for file in files if file.ranks is not None}
    # The counts are those of a file name, which anybody may write: bounded.
    ranks = product(range(min(size[1], 1 << 12)), range(min(size[2], 1 << 12)))
    for tp, exp in islice((rank for rank in ranks if rank not in present), _MAX_LISTED):
        path = files[0].path
        for axis, rank in (("tp", tp), ("exp", exp)):
            path = re.sub(rf"_{axis}-rank-\d+", f"_{axis}-rank-{rank}", path)
        message = f"{path} is missing: it is one of {size[1] * size[2]} ranks' files"
        yield lack(source, "missing-file", "files", message, file=path)
    beyond = next(
        (f for f in files if f.ranks and any(r >= n for r, n in zip(f.ranks, size, strict=True))), None
    )
    if beyond is not None:
        message = f"a rank in the name of {beyond.path} exceeds its count"
        yield finding("mixed-saves", "files", message, fqn=fqn, file=beyond.path)


def _add_tensor(
    source: Source,
    builder: Builder,
    placed: PlacedTensors,
    fqn: str,
    files: Iterable[_File],
    version: str | None,
) -> None:
    """Add a tensor by the headers of all of its files; each has the version that the step records."""
    for file in files:
        size = source.listing[file.path]
        stored, texts, begin = read_header(source.store, file.path, size, (_PAIRS, _SHAPE, _VERSION))
        if _DATA not in stored:
            raise MalformedCheckpoint(f"{file.path} has no tensor {_DATA!r}", file=file.path)
        if version is not None and texts.get(_VERSION, version) != version:
            stated, of_file = short_repr(version, 40), short_repr(texts[_VERSION], 40)
            message = f"{METADATA} states version {stated}, and {file.path} {of_file}"
            builder.report("mixed-saves", "files", message, fqn=fqn, file=file.path)
        number = builder.file(file.path, size)
        for key, (dtype, shape, start, end) in stored.items():
            placement = same(shape)
            if key == _DATA:
                placement = _placement(shape, texts, file.path, cut=file.ranks is not None)
            # Mamba's parameters have a value beside them (nanotron 0.4, `_no_weight_decay`).
            name = fqn if key == _DATA else f"{fqn}.{key}"
            if dtype not in BY_NAME:
                reason = f"dtype {dtype} is not supported"
                builder.withdraw(name, Unread(reason, dtype, placement.shape, file.path))
            item = builder.item(Item(number, begin + start, end - start))
            placed.add(TensorSpec(name, dtype, placement.shape), placement, item, file.path)


def _placement(shape: Shape, texts: Mapping[str, Any], path: str, *, cut: bool) -> ShardPlacement:
    """Return where a file's tensor is in the full one, by its boxes."""
    if (_PAIRS in texts) != cut or (_SHAPE in texts) != cut:
        state = "no boxes of a full tensor, and a rank" if cut else "boxes of a full tensor, and no rank"
        raise MalformedCheckpoint(f"{path} has {state} in its name", file=path)
    if not cut:
        return same(shape)
    full = _shape(texts[_SHAPE], path)
    pairs = texts[_PAIRS].split(";") if isinstance(texts[_PAIRS], str) else []
    if not 0 < len(pairs) <= _MAX_PAIRS or len(full) != len(shape):
        raise _no_boxes(path, texts[_PAIRS])
    pieces = []
    for pair in pairs:
        local, hash_sign, of_full = pair.partition("#")
        if not hash_sign:
            raise _no_boxes(path, texts[_PAIRS])
        local_box, full_box = _box(local, shape, path), _box(of_full, full, path)
        if local_box.shape != full_box.shape:
            message = f"{path} has a box of {list(local_box.shape)} in the place of {list(full_box.shape)}"
            raise MalformedCheckpoint(message, file=path)
        pieces.append(Piece(local_box, full_box.offset))
    boxes = [piece.local for piece in pieces]
    apart = all(box_a.intersect(box_b) is None for n, box_a in enumerate(boxes) for box_b in boxes[:n])
    if not apart or sum(prod(box.shape) for box in boxes) != prod(shape):
        raise MalformedCheckpoint(f"the boxes of {path} do not tile its tensor of {list(shape)}", file=path)
    return ShardPlacement(full, tuple(pieces), shape)


def _shape(text: Any, path: str) -> Shape:
    """Parse the text of a tuple of numbers, as Python prints it: ``(np.int64(32), 8)``."""
    inner = text[1:-1] if isinstance(text, str) and text[:1] == "(" and text[-1:] == ")" else ")"
    numbers = [_NUMBER.fullmatch(part) for part in inner.removesuffix(",").split(",")] if inner else []
    if len(numbers) > 64 or not all(numbers):
        raise MalformedCheckpoint(f"{path} has {short_repr(text, 60)} as {_SHAPE}", file=path)
    return tuple(int(number[1] or number[2]) for number in numbers if number is not None)


def _box(text: str, shape: Shape, path: str) -> Box:
    """Parse slices ``start,stop,step|...``, where None is all of a dim."""
    offset, extent = [], []
    slices = text.split("|") if shape or text else []
    if len(slices) != len(shape):
        raise _no_boxes(path, text)
    for part, length in zip(slices, shape, strict=True):
        bounds = part.split(",")
        if len(bounds) != 3 or any(b != "None" and not re.fullmatch(r"\d{1,15}", b) for b in bounds):
            raise _no_boxes(path, text)
        start = 0 if bounds[0] == "None" else int(bounds[0])
        stop = length if bounds[1] == "None" else int(bounds[1])
        if not 0 <= start <= stop <= length or bounds[2] not in ("None", "1"):
            raise _no_boxes(path, text)
        offset.append(start)
        extent.append(stop - start)
    return Box(tuple(offset), tuple(extent))


def _no_boxes(path: str, text: Any) -> MalformedCheckpoint:
    return MalformedCheckpoint(f"{path} has no boxes in {_PAIRS} (got {short_repr(text, 80)})", file=path)


def _lacking(source: Source, names: Mapping[str, list[_File]]) -> Iterator[Finding]:
    """Yield findings for tensors that are in no file: of layers, and before and behind them."""
    config = json_beside(source, _CONFIG)
    count = config.get("num_hidden_layers")
    layers: dict[int, set[str]] = {}
    start = "decoder."
    for name in names:
        if match := _LAYER.match(name):
            start = match[1]
            layers.setdefault(int(match[2]), set()).add(match[3])
    stated = count if type(count) is int and 0 < count <= 1 << 16 else None
    needed = stated if stated is not None else max(layers, default=0) + 1
    if stated is not None:
        why = f"{_CONFIG} has {needed} layers"
    else:
        why = f"{start}{needed - 1} is there" if layers else "every such model has it"
    for number in islice((n for n in range(needed) if n not in layers), _MAX_LISTED):
        yield lack(source, "missing-file", "files", f"{start}{number} is in no file, and {why}")
    if layers and max(layers) >= needed:
        message = f"{start}{max(layers)} is there, and {why}: files are of another save"
        yield finding("mixed-saves", "files", message)
    lost = {(number, f"{start}{number}.pp_block.{rest}") for number, rest in torn_layers(layers)}
    for number, layer_names in layers.items():
        if not any(rest.startswith("attn.") and "_proj." in rest for rest in layer_names):
            continue  # another model's layer
        for part, of_model in _OF_A_LAYER.items():
            if (stated is not None or not of_model) and not any(
                rest.startswith(part) for rest in layer_names
            ):
                lost.add((number, f"{start}{number}.pp_block.{part}weight"))
        mlp = {part for part in _OF_AN_MLP if any(rest.startswith(part) for rest in layer_names)}
        if mlp:
            lost |= {(number, f"{start}{number}.pp_block.{part}weight") for part in _OF_AN_MLP - mlp}
    ends = ["token_embedding.", "final_layer_norm."]
    if config.get("tie_word_embeddings") is False:
        ends.append("lm_head.")
    lost |= {(-1, f"{end}weight") for end in ends if not any(end in name for name in names)}
    for _, name in islice(sorted(lost), _MAX_LISTED):
        yield lack(source, "missing-file", "files", f"{name} is in no file, and every such model has it")
    if stated is None:
        message = (
            f"nothing states how many layers there are: {_CONFIG} is missing, or has no num_hidden_layers"
        )
        yield finding("unproven-whole", "files", message, hint=f"add {_CONFIG}")


def arrange_step(request: Arrangement) -> Iterator[FileLayout]:
    """Lay out the files of a step.

    Raises:
        UnsupportedDtype: safetensors has no such dtype.
        UnsupportedFormat: Nothing says what the config is, or how ranks share a tensor.
    """
    if CONFIG not in request.objects:
        raise UnsupportedFormat(
            "cannot write a step of nanotron without the config of its model",
            hint="add --names nanotron, and --config with the model's config.json",
        )
    for number, spec in enumerate(request.tensors):
        yield _tensor_file(number, spec)
    yield _json_file(_CONFIG, decode(request.objects[CONFIG]))
    yield _json_file(METADATA, _BEFORE_TRAINING, commit=True)


def _tensor_file(number: int, spec: TensorSpec) -> FileLayout:
    shared = _SHARED.fullmatch(spec.fqn) is not None
    if not shared and not _COMPLETE.fullmatch(spec.fqn):
        raise UnsupportedFormat(
            f"cannot write {spec.fqn}: nothing says how ranks of nanotron share it",
            hint=f"leave it out with --exclude {spec.fqn}",
        )
    require_dtype(spec)
    texts = None
    if shared:
        box = "|".join([f"0,{spec.shape[0]},None", *[_ALL] * (len(spec.shape) - 1)])
        texts = {
            _VERSION: _WRITTEN,
            _PAIRS: f"{'|'.join([_ALL] * len(spec.shape))}#{box}",
            _SHAPE: str(tuple(spec.shape)),
        }
    module, _, leaf = spec.fqn.rpartition(".")
    path = f"{MODEL}{module.replace('.', '/')}/model_{leaf}{_ONE_RANK * shared}.safetensors"
    layout = file_layout(path, [0], [TensorSpec(_DATA, spec.dtype, spec.shape)], texts)
    return replace(layout, tensors=(number,))


def _json_file(path: str, content: Any, *, commit: bool = False) -> FileLayout:
    data = canonical_json(content)
    return FileLayout(path, len(data), (), (), (Literal(0, data),), commit=commit)


_START = Layout(arrange_step)
FORMAT = Format(
    name="nanotron",
    title="nanotron checkpoint (versions 1.2 to 1.5)",
    recognised_by="`checkpoint_metadata.json`, and `model/**/model_*.safetensors`",
    detect=detect,
    suffixes=frozenset({"safetensors"}),
    reader=Reader(read_step, objects=True),
    writer=Writer(_START, world="nanotron", starts={"nanotron": _START}),
)
