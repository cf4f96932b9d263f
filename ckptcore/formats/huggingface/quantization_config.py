"""Read from config.json how a folder's weights are quantised: the sizes of blocks, and what is left as it is.

``quantization_config`` is that of transformers (utils/quantization_config.py), also below ``text_config``;
``compression_config`` was its name in older compressed-tensors. ModelOpt writes hf_quant_config.json beside
a config.json without either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ckptcore.encodings.json_text import parse
from ckptcore.errors import MalformedCheckpoint
from ckptcore.formats.base import Source
from ckptcore.utils.foreign_text import InvalidText
from ckptcore.utils.text import short_repr

CONFIG, MODELOPT = "config.json", "hf_quant_config.json"
KEEP = "carry the stored values with --keep-quantized"
_MAX_CONFIG = 16 << 20
_MAX_GLOBS, _MAX_SIZES, _MAX_PARTS = 1000, 32, 50
_MOST = 2**63 - 1  # rows or columns
_IN_WEIGHTS = ("weight_input", "weight_output")  # locations of transforms that are part of the weights
_IGNORED = ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers")


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
