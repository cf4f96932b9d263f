"""Read Hugging Face folders with quantised weights (hf_quantized) as the values of the weights.

Pairs are recognised by name, dtype and shape:

- ``X`` of a float8 dtype or int8 [R, C] and its factors: ``X_scale_inv``, one per block (torch/distributed/
  checkpoint/quantized_hf_storage.py), or ``X_scale``, one per tensor, row or block (compressed-tensors,
  ModelOpt, fbgemm_fp8). config.json states the size of a block (`read_quantization`); that of
  ``X_scale_inv`` is 128 x 128 where it does not. Experts in one tensor [E, R, C] have factors of their own.
- ``X.weight`` of a float8 dtype and ``X.scale``, one per block (DeepSeek-V3, inference/convert.py and
  kernel.py, `weight_dequant`). What else is called so is carried as it is stored.
- ``X_blocks`` uint8 [..., G, 16] and ``X_scales`` uint8 [..., G]: MXFP4.

The weight is read as the float32 tensor that the formula gives, under its own name, and the scale is no
longer a tensor (see `ckptcore.core.dequantize`). With ``--keep-quantized`` such a folder is read as plain
safetensors: stored weights and scales. A pair that does not fit its formula is an error, because its stored
values alone are not the weights; so is a weight without a scale, or a scale without its weight, where others
have theirs, and a weight of which the config says that it has one (`lost_scales`).

``quantization_config`` is that of transformers (utils/quantization_config.py), also below ``text_config``;
``compression_config`` was its name in older compressed-tensors. ModelOpt writes hf_quant_config.json beside
a config.json without either.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from ckptcore.core.dequantize import FUNCTIONS
from ckptcore.core.manifest import Manifest, TensorSpec
from ckptcore.core.subset import derive
from ckptcore.encodings.json_text import parse
from ckptcore.encodings.safetensors_header import header_text, read_header
from ckptcore.errors import CkptError, Finding, MalformedCheckpoint, finding
from ckptcore.formats.base import Evidence, Format, Reader, Source
from ckptcore.formats.common.files_beside import read_index
from ckptcore.formats.huggingface.folder import index_of, read_folder, recognised, unindexed
from ckptcore.naming.quantized_names import companions
from ckptcore.utils.foreign_text import InvalidText
from ckptcore.utils.text import short_repr

CONFIG, MODELOPT = "config.json", "hf_quant_config.json"
KEEP = "carry the stored values with --keep-quantized"
_MAX_CONFIG = 16 << 20
_MAX_GLOBS, _MAX_SIZES, _MAX_PARTS = 1000, 32, 50
_MOST = 2**63 - 1  # rows or columns
_IN_WEIGHTS = ("weight_input", "weight_output")  # locations of transforms that are part of the weights
_IGNORED = ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers")
_BLOCK = (128, 128)
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """How weights are quantised, as far as a config states it.

    Attributes:
        method: What made them, as ``quant_method`` spells it; empty where no config says that they are.
        blocks: Rows and columns of the blocks of weights that share a scale.
        strategies: Which weights share a scale: ``tensor``, ``channel``, ``block``; empty where unstated.
        symmetric: Whether no weights have zero points.
        rotated: Whether modules transform their inputs or outputs, for which weights were changed.
        ignored: Names of modules that are not quantised: complete, or a part of one between dots.
        globs: Globs of such names.
    """

    method: str = ""
    blocks: tuple[tuple[int, int], ...] = ()
    strategies: frozenset[str] = frozenset()
    symmetric: bool = True
    rotated: bool = False
    ignored: frozenset[str] = frozenset()
    globs: tuple[str, ...] = ()

    def ignores(self, weight: str) -> bool:
        """Report whether a weight is one of a module that is not quantised."""
        module = weight.removesuffix(".weight")
        names = module.split(".", _MAX_PARTS)  # combinations of parts grow with their square
        parts = (".".join(names[a:b]) for a in range(len(names)) for b in range(a + 1, len(names) + 1))
        return any(p in self.ignored for p in parts) or any(fnmatchcase(module, g) for g in self.globs)


def read_quantization(source: Source) -> QuantizationConfig:
    """Read the config of a folder; of a file alone, or without a config, nothing is stated.

    Raises:
        MalformedCheckpoint: A config cannot be read.
    """
    form = _form(source, CONFIG)
    if next(_stated(form), None) is not None:
        return quantization_of(form)
    part = _form(source, MODELOPT).get("quantization")
    stated = {"quant_method": "modelopt", **part} if isinstance(part, dict) and part else None
    return _parse_checked(stated, MODELOPT)


def quantization_of(form: dict[str, Any]) -> QuantizationConfig:
    """Return what the content of a config.json states; raise `MalformedCheckpoint` if it is none."""
    return _parse_checked(next(_stated(form), None), CONFIG)


def _parse_checked(stated: dict[str, Any] | None, label: str) -> QuantizationConfig:
    if not stated:
        return QuantizationConfig()
    try:
        return _parse(stated, label)
    except (TypeError, AttributeError, ValueError) as error:
        raise MalformedCheckpoint(f"cannot read {label}: {error}", file=label, hint=KEEP) from error


def _form(source: Source, path: str) -> dict[str, Any]:
    size = source.listing.get(path) if source.name is None else None
    if size is None:
        return {}
    if size > _MAX_CONFIG:
        raise MalformedCheckpoint(
            f"{path} must have at most {_MAX_CONFIG} bytes (got {size})", file=path, hint=KEEP
        )
    try:
        form = parse(source.store.read(path, 0, size), path)
    except InvalidText as error:
        raise MalformedCheckpoint(f"cannot read {path}: {error}", file=path, hint=KEEP) from error
    if not isinstance(form, dict):
        raise MalformedCheckpoint(
            f"{path} must be an object (got {short_repr(form, 60)})", file=path, hint=KEEP
        )
    return form


def _stated(form: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what a config.json says about quantisation."""
    for part in (form, form.get("text_config")):
        for name in ("quantization_config", "compression_config"):
            stated = part.get(name) if isinstance(part, dict) else None
            if stated and not isinstance(stated, dict):
                raise MalformedCheckpoint(
                    f"{CONFIG}: {name} must be an object (got {short_repr(stated, 60)})",
                    file=CONFIG,
                    hint=KEEP,
                )
            if stated:
                yield stated


def _parse(stated: dict[str, Any], label: str) -> QuantizationConfig:
    blocks, strategies, symmetric = list[tuple[int, int]](), set[str](), True
    if "weight_block_size" in stated:
        size = stated["weight_block_size"]
        strategies.add("tensor" if size is None else "block")
        blocks += [] if size is None else [_block(size, label, "weight_block_size")]
    groups = stated.get("config_groups") or {}
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None  # or a list: a scheme by its name
        if weights is None:
            continue
        symmetric &= weights.get("symmetric") is not False
        kind = weights.get("strategy")
        if kind == "block":
            blocks.append(_block(weights.get("block_structure"), label, "block_structure"))
        # In any other order the columns of a group are scattered, and a "g_idx" beside the weight maps them.
        elif kind == "group" and weights.get("actorder") in (None, False, "weight", "static"):
            blocks.append(_block([1, weights.get("group_size")], label, "group_size"))
            kind = "block"
        if kind is not None:
            strategies.add(str(kind))
    lists = [stated[key] for key in _IGNORED if isinstance(stated.get(key), list)]
    names = [name for ignored in lists for name in ignored if isinstance(name, str)]
    globs = [glob for glob in map(_glob, names) if glob]
    method = str(stated.get("quant_method") or "compressed-tensors")
    sizes = tuple(dict.fromkeys(blocks))
    if len(sizes) > _MAX_SIZES:  # each is tried for every weight
        raise MalformedCheckpoint(
            f"{label} must have at most {_MAX_SIZES} sizes of blocks (got {len(sizes)})",
            file=label,
            hint=KEEP,
        )
    return QuantizationConfig(
        method,
        sizes,
        frozenset(strategies),
        symmetric,
        _rotates(stated.get("transform_config")),
        frozenset(names),
        tuple(globs[:_MAX_GLOBS]),
    )


def _rotates(transforms: Any) -> bool:
    """Report whether transforms of compressed-tensors (`TransformArgs`) act on more than stored weights."""
    groups = transforms.get("config_groups") if transforms else None
    places = [place for group in (groups or {}).values() for place in group.get("apply") or ()]
    return any(place.get("location") not in _IN_WEIGHTS for place in places)


def _glob(name: str) -> str:
    """Return the glob of a name that is one, or "".

    Of regular expressions (``re:``) only those with ``.*`` alone are translated. Others ignore nothing: they
    are a stranger's, and may take practically forever.
    """
    if not name.startswith("re:"):
        return name if "*" in name else ""
    glob = name[3:].removeprefix("^").removesuffix("$").replace(".*", "*").replace("\\.", ".")
    return "" if set(glob) & set("\\[](){}+?|^$") else glob


def _block(stated: object, label: str, name: str) -> tuple[int, int]:
    """Return rows and columns of a block: [128, 128], or "128x128" as older compressed-tensors spells it."""
    size = stated
    if (
        isinstance(size, str)
        and size.count("x") == 1
        and size.replace("x", "").isdecimal()
        and len(size) < 40
    ):
        size = [int(n) for n in size.split("x") if n]
    if (
        not isinstance(size, list)
        or len(size) != 2
        or any(type(n) is not int or not 0 < n <= _MOST for n in size)
    ):
        raise MalformedCheckpoint(
            f"{label}: {name} must be two positive integers (got {short_repr(stated, 60)})",
            file=label,
            hint=KEEP,
        )
    return size[0], size[1]


@dataclass(frozen=True, slots=True)
class _Rule:
    """How the factors of a quantised weight are recognised.

    Attributes:
        scale: Suffix of their name.
        weight: Suffix of the weight's name in its place.
        dtypes: Of the weight; empty where the names alone are evidence.
    """

    scale: str
    weight: str
    dtypes: tuple[str, ...] = ()


# The first rule that fits a name applies.
_INVERSE = _Rule(".weight_scale_inv", ".weight")
_DEEPSEEK = _Rule(".scale", ".weight", _FLOAT8)
_MXFP4 = _Rule("_scales", "_blocks", ("uint8",))  # names ending so mean MXFP4 only with this dtype
_RULES = (
    _INVERSE,
    _Rule("_scale_inv", "", (*_FLOAT8, "int8")),
    _Rule("_scale", "", (*_FLOAT8, "int8")),
    _DEEPSEEK,
    _MXFP4,
)
_IN_BLOCKS = (".weight_scale_inv", "_scale_inv", ".scale")  # one factor per block, unless a config differs
# What a weight has beside its factors where it is not their product: end of the name -> that of the weight.
_FURTHER = {
    "_zero_point": "",
    "_offset": "",
    "_g_idx": "",
    "_scale_2": "",
    "_global_scale": "",
    ".pre_quant_scale": ".weight",
}
_PACKED = ("_scale_2", "_global_scale")  # of 4-bit floats
_PER = {"scaled_rows": " per row", "mxfp4": " per group", "scaled_experts": " per expert"}
# Params of `scaled_experts`: one factor per expert; one per row or column of each.
_OF_EXPERTS = ((1,), (1, 0, 0))
_OF_ROWS = ((1, 1, 0), (1, 0, 1))
_Formula = tuple[str, tuple[int, ...], tuple[int, ...]]  # function, params, shape of the weight
_Headers = dict[str, Mapping[str, Any]]  # of files: tensor -> (dtype, shape, ...)
_Made = tuple[TensorSpec, str, Sequence[str], tuple[int, ...]]


def detect(source: Source) -> Evidence | None:
    """Recognise a safetensors file or folder with a quantised weight and its scale."""
    if source.keep_quantized or recognised(source) is None:
        return None
    try:
        headers: _Headers = {}
        # Read when the first pair asks for it, and once: most folders have no pair.
        stated = cache(lambda: read_quantization(source))
        files = _file_of_tensor(source, headers)
        for weight, scale, rule in _pairs(files):
            if rule.dtypes and any(weight + end in files for end in _PACKED):
                continue
            weight_spec, scale_spec = (
                _stored(source, files[name], name, headers) for name in (weight, scale)
            )
            if not rule.dtypes or _is_quantised(rule, weight_spec, scale_spec, stated):
                because = f"found {weight} and its {scale}; dequantised unless --keep-quantized"
                return Evidence("hf_quantized", (because,), ("safetensors",))
    except CkptError:
        return None  # the reader of plain safetensors reports what is wrong
    return None


def read(source: Source) -> Manifest:
    """Read the manifest with quantised weights as float32; raise `MalformedCheckpoint` as `read_folder`."""
    stored = read_folder(source, "hf_quantized")
    config = read_quantization(source)
    specs = {t.fqn: t for t in stored.tensors}
    ends = tuple(_FURTHER)
    extra_parts = [(n, end) for n in specs if n.endswith(ends) for end in _FURTHER if n.endswith(end)]
    further = {name.removesuffix(end) + _FURTHER[end]: name for name, end in extra_parts}
    computed: dict[str, _Made] = {}
    unfit: dict[str, Finding] = {}
    names: set[str] = set()  # of scales, without those of modules
    formulas: dict[tuple[object, ...], _Formula] = {}  # of pairs of one form
    for weight, scale, rule in _pairs(specs):
        weight_spec, scale_spec = specs[weight], specs[scale]
        if rule.dtypes and not _is_pair(rule, weight_spec, scale_spec):
            continue
        if rule is _DEEPSEEK and isinstance(_formula((weight_spec, scale_spec), rule, config), str):
            continue
        names.add(_last(scale))
        form = (rule, weight_spec.dtype, weight_spec.shape, scale_spec.dtype, scale_spec.shape)
        formula = formulas.get(form) or _formula((weight_spec, scale_spec), rule, config)
        if weight in further:
            formula = f"is more than the product with {scale}: {further[weight]} belongs to it"
        if weight in computed or weight in unfit:
            formula = (
                f"has {computed.pop(weight)[2][1] if weight in computed else 'another scale'} and {scale}"
            )
        if isinstance(formula, str):
            unfit[weight] = _unfit(weight_spec, formula)
            continue
        formulas[form] = formula
        fn, params, shape = formula
        computed[weight] = TensorSpec(weight, FUNCTIONS[fn].dtype, shape), fn, (weight, scale), params
    companions_of = companions(t for t in stored.tensors if t.fqn not in computed)
    for weight, extras in companions_of.items():
        if weight not in unfit:
            unfit[weight] = _unfit(specs[weight], f"belongs to {extras[0]}: nothing decodes it here")
    scaled_names = _with_scales(companions_of) | {
        name for _, _, pair, _ in computed.values() for name in pair
    }
    alike = {*_FLOAT8, *(specs[weight].dtype for weight in computed)} - {"uint8"}
    bare = scaleless(stored.tensors, scaled_names, config, alike)
    findings = (*unfit.values(), *bare, *_orphans(stored, names, scaled_names))
    origin = {**stored.origin, "dequantised": len(computed)}
    sizes = sorted({params for _, fn, _, params in computed.values() if fn == "fp8_block"} - {_BLOCK})
    if sizes:
        origin["weight_block_size"] = list(sizes[0])
    return derive(replace(stored, findings=(*stored.findings, *findings), origin=origin), computed)


def lost_scales(source: Source, manifest: Manifest) -> Manifest:
    """Return a manifest of plain safetensors with findings where its config says that weights have scales."""
    if source.keep_quantized or not any(t.dtype in _FLOAT8 for t in manifest.tensors):
        return manifest  # no other file is read for it
    scaled_names = _with_scales(companions(manifest.tensors))
    try:
        findings = [*scaleless(manifest.tensors, scaled_names, read_quantization(source), ())]
    except MalformedCheckpoint as error:  # it may state that they have scales
        codes = [t for t in manifest.tensors if t.dtype in _FLOAT8 and t.fqn not in scaled_names]
        findings = [_unfit(t, f"is {t.dtype}, and may have a scale: {error.message}") for t in codes]
    return replace(manifest, findings=(*manifest.findings, *findings))


def _file_of_tensor(source: Source, headers: _Headers) -> dict[str, str]:
    """Return tensor -> file, from the index or from the files' headers."""
    index = index_of(source)
    if index is not None:
        return dict(read_index(source, index).files)
    paths = unindexed(source)
    # Most models have no scale, which their headers show unparsed. JSON can spell a letter by number.
    texts = (header_text(source.store, path, source.listing[path]) for path in paths)
    if not any(b"scale" in text or b"\\u" in text for text in texts):
        return {}
    for path in paths:
        headers[path] = read_header(source.store, path, source.listing[path], None)[0]
    return {name: path for path, names in headers.items() for name in names}


def _pairs(names: Iterable[str]) -> list[tuple[str, str, _Rule]]:
    """Return (weight, scale, rule) of every pair, found by name; those whose names are evidence first."""
    all_names = set(names)
    pairs = []
    for name in sorted(n for n in all_names if "scale" in n):  # as every rule has it
        for rule in _RULES:
            weight = name.removesuffix(rule.scale) + rule.weight
            if name.endswith(rule.scale) and weight in all_names:
                pairs.append((weight, name, rule))
                break
    return sorted(pairs, key=lambda pair: bool(pair[2].dtypes))


def _stored(source: Source, path: str, name: str, headers: _Headers) -> TensorSpec | None:
    """Return dtype and shape of a tensor, None where its file is missing; a file's header is read once."""
    if path not in headers:
        size = source.listing.get(path)
        headers[path] = {} if size is None else read_header(source.store, path, size, None)[0]
    row = headers[path].get(name)
    return None if row is None else TensorSpec(name, str(row[0]), tuple(row[1]))


def _is_pair(rule: _Rule, weight: TensorSpec, scale: TensorSpec) -> bool:
    """Report whether these are a weight and factors by their dtypes.

    Codes are no factors of codes: all tensors of a model were cast, or are integers.
    """
    return weight.dtype in rule.dtypes and (rule is _MXFP4 or scale.dtype not in rule.dtypes)


def _is_quantised(
    rule: _Rule, weight: TensorSpec | None, scale: TensorSpec | None, stated: Callable[[], QuantizationConfig]
) -> bool:
    """Report whether a pair shows that a folder is quantised; a tensor is None where its file is missing.

    Integers may be any model's: they are a weight where name and formula fit, or where a config says so.
    """
    if weight is None or scale is None:
        return weight is not None and weight.dtype in rule.dtypes and weight.dtype != "int8"
    if not _is_pair(rule, weight, scale):
        return False
    if rule is not _DEEPSEEK and (weight.dtype != "int8" or stated().method):
        return True
    formula = _formula((weight, scale), rule, stated())
    return weight.fqn.endswith(".weight") and not isinstance(formula, str)


def _formula(
    inputs: tuple[TensorSpec, TensorSpec], rule: _Rule, config: QuantizationConfig
) -> _Formula | str:
    """Return the formula of a pair, or why none fits."""
    weight, scale = inputs
    if config.rotated:
        return "belongs to modules that rotate their inputs by its config (transform_config)"
    if weight.dtype == "int8" and not config.symmetric:
        return f"has zero points by its config, and no {weight.fqn}_zero_point"
    forms = [*_forms(rule, scale, config)]
    shapes = [(fn, params, FUNCTIONS[fn].shape(inputs, params)) for fn, params in forms]
    fits = [(fn, params, shape) for fn, params, shape in shapes if shape is not None]
    # Blocks of several sizes may give the same number of scales.
    sizes = {tuple(map(min, params, weight.shape[-2:])) for fn, params, _ in fits if fn == "fp8_block"}
    if fits and (len(sizes) < 2 or fits[0][0] != "fp8_block"):
        return fits[0]
    per = ", ".join(dict.fromkeys(f"{fn} with one scale{_per(fn, params)}" for fn, params in forms))
    does = f"{'fits' if fits else 'does not fit'} {per or 'what is decoded here'}"
    of = f"{scale.fqn} {scale.dtype} {list(scale.shape)}"
    return f"is {weight.dtype} {list(weight.shape)}, and {of} {does}"


def _per(fn: str, params: tuple[int, ...]) -> str:
    return f" per block of {params[0]} x {params[1]}" if fn == "fp8_block" else _PER.get(fn, "")


def _forms(
    rule: _Rule, scale: TensorSpec, config: QuantizationConfig
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (function, params) that a pair may have, by its names and its config."""
    if rule is _MXFP4:
        yield "mxfp4", ()
        return
    inverse = rule.scale in _IN_BLOCKS
    strategies = {"block"} if rule is _DEEPSEEK else config.strategies
    strategies = strategies or ({"block"} if inverse else {"tensor", "channel"})
    rank = (len(scale.shape),)
    if "tensor" in strategies:
        yield "scaled", rank
        yield from (("scaled_experts", dims) for dims in _OF_EXPERTS)
    if "channel" in strategies:
        yield "scaled_rows", rank
        yield from (("scaled_experts", dims) for dims in _OF_ROWS)
    if "block" in strategies:
        for block in config.blocks or ([_BLOCK] if inverse else []):
            yield "fp8_block", block


def _unfit(weight: TensorSpec, why: str) -> Finding:
    return finding("unfit-quantization", "coverage", f"{weight.fqn} {why}", fqn=weight.fqn)


def scaleless(
    tensors: Iterable[TensorSpec],
    scaled_names: Iterable[str],
    config: QuantizationConfig,
    alike: Collection[str],
) -> Iterator[Finding]:
    """Yield findings for weights that no tensor is a scale of.

    A lost scale leaves no other trace: the weight alone is complete, and wrong by its factors.

    Args:
        tensors: All tensors.
        scaled_names: Names of quantised weights that have scales, and of their scales.
        config: What the folder's config states.
        alike: Dtypes of weights here that have scales.
    """
    stated = {*_FLOAT8} if config.method else set[str]()
    if config.method == "compressed-tensors":
        stated.add("int8")
    scaled = {*scaled_names}
    for tensor in tensors:
        rank = len(tensor.shape)
        by_config = tensor.dtype in stated and rank > 1
        by_others = tensor.dtype in alike and rank == 2 and tensor.fqn.endswith(".weight")
        if (by_config or by_others) and tensor.fqn not in scaled and not config.ignores(tensor.fqn):
            by = "unlike others" if by_others else f"although its config states {config.method}"
            yield _unfit(tensor, f"is {tensor.dtype} {list(tensor.shape)}, and {by} it has no scale")


def _with_scales(weights: Mapping[str, Iterable[str]]) -> set[str]:
    return {*weights, *(name for names in weights.values() for name in names)}


def _orphans(manifest: Manifest, names: set[str], used: set[str]) -> Iterator[Finding]:
    """Yield findings for scales, called like those of the pairs here, whose weight is not in the folder."""
    if any(f.code == "missing-file" for f in manifest.findings):
        return  # it may be there
    reported = {f.fqn for f in manifest.findings}
    specs = {t.fqn: t for t in manifest.tensors}
    for name in sorted(n for n in specs.keys() - used if _last(n) in names):
        rule = next(r for r in _RULES if name.endswith(r.scale))
        if rule is _DEEPSEEK and len(specs[name].shape) != 2:
            continue  # a parameter of this name
        weight = name.removesuffix(rule.scale) + rule.weight
        if weight not in specs and weight not in reported:
            message = f"{name} scales {weight}, which is not in the folder"
            yield finding("unfit-quantization", "coverage", message, fqn=name)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


FORMAT = Format(
    name="hf_quantized",
    title="Hugging Face folder with quantised weights (float8, int8, MXFP4), read as float32",
    recognised_by="`X.weight` with `X.weight_scale_inv`, `X.weight_scale` or `X.scale`, or `X_blocks` with "
    "`X_scales`, in safetensors",
    detect=detect,
    suffixes=frozenset({"safetensors", "json"}),
    reader=Reader(read, objects=True),
)
