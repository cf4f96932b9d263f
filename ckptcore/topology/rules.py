"""Find the placement rule of a parameter, the user's first, then that of a built-in family, and its layout.

Families are files of `ckptcore/topology/families/`; names of parameters identify a checkpoint's family. Files
have placement rules, pipeline stages and experts:

```
family = "hf"                        # rules of this built-in family come after the file's own
experts = ["*.experts.{n}."]         # complete experts by name, to the ranks of ep

[mesh]                               # optional; must be the requested mesh
fsdp = 4
tp = 2

[[rule]]                             # the first that matches a parameter's name applies
fqn = ["*.wq.weight", "*.wk.weight"] # globs; * crosses dots
tp = "shard(0)"                      # per axis: shard(DIM), DIM < 0 counts from the end; replicate
fsdp = "shard(0)"                    # the default

[stages]
layers = "layers.{n}."               # how the name of a layer's parameter begins
first = ["tok_embeddings.*"]
last = ["norm.*", "output.*"]
every = ["*freqs_cis"]               # on all stages: rotary tables
stacked = ["*.all_layers.*"]         # layers in one tensor: pp cuts its dim 0
split = [[0, 2], [2, 4]]             # layers of each stage, half-open; default: even
weights = [1, 1]                     # or even with embeddings and head counted as layers
virtual = 2                          # stages per rank; stage s is on rank s % pp
```
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import cache, cached_property
from importlib import resources
from math import prod
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ckptcore.errors import UsageError
from ckptcore.topology.layout import Mesh, Placement, Replicate, Shard, TensorLayout, _StridedShard
from ckptcore.utils.foreign_text import InvalidText, load_toml
from ckptcore.utils.globs import matches
from ckptcore.utils.text import count, short_repr, some

_PLACE = re.compile(r"replicate|shard\(\s*-?[0-9]{1,2}\s*\)")
MAX_BYTES = 1 << 20


def _list(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _place(value: Any) -> Any:
    if not isinstance(value, str) or not _PLACE.fullmatch(value):
        raise ValueError(f"placement must be shard(DIM) or replicate (got {value!r})")
    return None if value == "replicate" else int(value[len("shard(") : -1])


Texts = Annotated[tuple[str, ...], BeforeValidator(_list)]
Place = Annotated[int | None, BeforeValidator(_place)]  # the dim to cut, None for replicate
Weight = Annotated[int, Field(ge=0, le=1024)]
Places = Annotated[tuple[Place, ...], BeforeValidator(_list)]


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ShardingRule(_Form):
    """Placement of the parameters of some names.

    Attributes:
        fqn: Globs.
        pp: Dim that pp cuts; absent: none.
        fsdp: Alternatives: the first, unless another axis cuts that dim and it has fewer elements than there
            are pieces; then the second.
        ep: Dim that ep cuts; absent: ep counts as further ranks of fsdp.
        tp: Dim that tp cuts; absent: none.
    """

    fqn: Texts
    pp: Place = None
    fsdp: Places = (0,)
    ep: Place = None
    tp: Place = None

    def names(self, axis: str) -> bool:
        """Report whether the rule has an entry for an axis."""
        return axis in self.model_fields_set


class Stages(_Form):
    """Which parameters are on which pipeline stage.

    Attributes:
        layers: How a layer's names begin, a glob with ``{n}`` for its number.
        stacked: Globs on tensors whose dim 0 counts layers.
        first: Globs.
        last: Globs.
        every: Globs on parameters of all stages.
        tied: Those of ``first`` that the last stage needs, too, when no name matches ``head``.
        head: Globs.
        split: [first layer, end] of each stage.
        virtual: Stages per rank.
        weights: How many layers the embeddings and the head count as, when layers are split evenly.
    """

    layers: Texts = ()
    stacked: Texts = ()
    first: Texts = ()
    last: Texts = ()
    every: Texts = ()
    tied: Texts = ()
    head: Texts = ()
    split: tuple[tuple[int, int], ...] | None = None
    virtual: int = Field(default=1, ge=1, le=1024)
    weights: tuple[Weight, Weight] = (0, 0)


class ShardingFile(_Form):
    """A complete file; ``evidence`` is globs on names that only models of a built-in family have."""

    family: str | None = None
    evidence: Texts = ()
    experts: Texts = ()
    mesh: dict[str, int] | None = None
    rule: tuple[ShardingRule, ...] = ()
    stages: Stages | None = None


FAMILIES = ("hf", "torchtitan", "olmo", "megatron")
_EVERYWHERE = "buffers"  # rules that come after all others


def load(text: str, name: str = "--sharding") -> ShardingFile:
    """Parse a file's text; raises `UsageError` with the position of an error."""
    if len(text) > MAX_BYTES:
        raise UsageError(f"{name} must have at most {MAX_BYTES} characters (got {len(text)})")
    try:
        return ShardingFile.model_validate(load_toml(text))
    except InvalidText as error:
        raise UsageError(f"cannot read {name} as TOML: {error}") from error
    except ValidationError as error:
        wrong = [f"{_where(row['loc'])}: {row['msg']}" for row in error.errors()[:5]]
        hint = "keys are [mesh], [[rule]], [stages], family and experts"
        raise UsageError(f"{name}: {short_repr('; '.join(wrong), 500)[1:-1]}", hint=hint) from error


def _where(path: tuple[int | str, ...]) -> str:
    """Format the position of an error in the file.

    >>> _where(("rule", 0, "tp", 0))
    'rule 1, tp 1'
    """
    return (
        "".join(f" {w + 1}" if isinstance(w, int) else f", {w}" for w in path).removeprefix(", ")
        or "the file"
    )


@dataclass(frozen=True)
class ShardingRules:
    """The rules for one model.

    Attributes:
        rules: In the order in which they are tried.
        stages: Pipeline stages, or None if no file has them.
        experts: How names of single experts begin.
        origin: Where the rules are from, for messages.
    """

    rules: tuple[ShardingRule, ...]
    stages: Stages | None
    experts: tuple[str, ...]
    origin: str

    def find(self, fqn: str) -> ShardingRule | None:
        """Return the first rule that matches a parameter's name."""
        return self._match(fqn)

    @cached_property
    def _match(self) -> Callable[[str], ShardingRule | None]:
        rows = [(re.compile("|".join(translate(g) for g in r.fqn)), r) for r in self.rules]
        # Layers and experts differ in numbers, which a glob without digits cannot distinguish.
        plain = not any(re.search(r"[0-9\[?]", g) for r in self.rules for g in r.fqn)

        @cache
        def first(name: str) -> ShardingRule | None:
            return next((r for p, r in rows if p.match(name)), None)

        return lambda fqn: first(re.sub(r"[0-9]+", "0", fqn) if plain else fqn)


def rules_for(names: Sequence[str], user_file: ShardingFile | None, needed: bool) -> ShardingRules:
    """Return the rules for a model of these parameters.

    Args:
        names: Names of the parameters.
        user_file: The user's file.
        needed: Whether the mesh needs more than the default rules, which are FSDP's.

    Raises:
        UsageError: The family is unknown. Or rules are needed, the user gave none, and the names fit no
            family or several.
    """
    family = user_file.family if user_file is not None else _family_by_names(names, needed)
    if family is not None and family not in FAMILIES:
        raise UsageError(f"unknown family {family!r}", hint=f"one of: {', '.join(FAMILIES)}")
    files = [f for f in (user_file, family and builtin(family), builtin(_EVERYWHERE)) if f]
    stages = next((f.stages for f in files if f.stages is not None), None)
    experts = next((f.experts for f in files if f.experts), ())
    origin = " and ".join(
        ([] if user_file is None else ["--sharding"])
        + ([] if family is None else [f"the rules for {family} names"])
    )
    return ShardingRules(
        tuple(r for f in files for r in f.rule), stages, experts, origin or "the built-in rules"
    )


@cache
def builtin(name: str) -> ShardingFile:
    """Load a built-in file of rules from `ckptcore/topology/families/`."""
    text = (resources.files("ckptcore.topology") / "families" / f"{name}.toml").read_text()
    return load(text, f"{name}.toml")


def _family_by_names(names: Sequence[str], needed: bool) -> str | None:
    kinds = {re.sub(r"[0-9]+", "0", n) for n in names}
    families = [f for f in FAMILIES if any(matches(n, builtin(f).evidence) for n in kinds)]
    if len(families) == 1 or not needed:
        return families[0] if len(families) == 1 else None
    fit = (
        f"fit several families: {', '.join(families)}" if families else f"fit none of: {', '.join(FAMILIES)}"
    )
    raise UsageError(
        f"cannot choose rules for this mesh: the names of {count(len(names), 'parameter')} {fit} "
        f"(got {some(names)})",
        hint='give rules: --sharding FILE with [[rule]] tables, or with family = "NAME" alone',
    )


Coordinates = tuple[tuple[str, tuple[int, ...]], ...]


# Axes cut in the order in which trainers apply them: pp, ep and tp first, then `fully_shard` cuts the rest.
# Where axes to the right of fsdp have already cut its dim, its placement is a strided one (torch:
# distributed/fsdp/_fully_shard/_fsdp_param.py, `_init_sharding_spec_tp`).
def place(
    fqn: str,
    shape: tuple[int, ...],
    mesh: Mesh,
    rule: ShardingRule | None,
    coordinates: Coordinates = (),
    stacked: bool = False,
) -> TensorLayout:
    """Return the layout of a parameter, as of FSDP2 over TP.

    Args:
        fqn: Its name, for messages.
        shape: Global shape, elements.
        mesh: The mesh.
        rule: Its rule; None for FSDP's default.
        coordinates: Coordinates of the ranks that have it at all; axes named there do not cut it.
        stacked: Whether dim 0 counts layers, which pp cuts.

    Raises:
        UsageError: The rule does not fit the shape, or FSDP2 cannot shard it.
    """
    if not shape:  # fully_shard does not shard scalars
        return TensorLayout(coordinates=coordinates)
    sizes = dict(mesh.axes)
    fixed = {axis for axis, _ in coordinates}
    cut: dict[str, int | None] = {}  # axis -> dim or None, without fsdp
    for axis in ("pp", "ep", "tp"):
        if axis in sizes and axis not in fixed and rule is not None and rule.names(axis):
            cut[axis] = _dim(fqn, shape, axis, getattr(rule, axis))
    if stacked and "pp" in sizes:
        cut["pp"] = 0
    pieces = [prod(sizes[a] for a, d in cut.items() if d == dim) for dim in range(len(shape))]
    # Without a rule of its own, ep is flattened with fsdp: both cut what the others leave.
    data = "+".join(a for a in ("fsdp", "ep") if a in sizes and a not in cut and a not in fixed)
    placements: dict[str, Placement] = {}
    for axis in ("pp", "dp_replicate", data, "ep", "tp"):
        if axis == "dp_replicate" and axis in sizes and data:  # HSDP; plain DDP has no mesh
            placements[axis] = Replicate()
        elif axis and axis == data:
            parts = prod(sizes[a] for a in data.split("+"))
            by = _fsdp_dim(fqn, shape, (0,) if rule is None else rule.fsdp, parts, pieces)
            right = prod(sizes[a] for a, d in cut.items() if d == by and a != "pp")
            strided = by is not None and right > 1
            placements[axis] = (
                Replicate() if by is None else _StridedShard(by, split_factor=right) if strided else Shard(by)
            )
        elif axis in cut:
            to = cut[axis]
            placements[axis] = Replicate() if to is None else Shard(to)
    return TensorLayout(tuple(placements), tuple(placements.values()), coordinates)


def _fsdp_dim(
    fqn: str, shape: tuple[int, ...], choices: Sequence[int | None], parts: int, pieces: Sequence[int]
) -> int | None:
    """Return the first dim long enough for another cut, else the last choice."""
    dims = [_dim(fqn, shape, "fsdp", c) for c in choices]
    fits = (d for d in dims if d is None or pieces[d] == 1 or shape[d] >= pieces[d] * parts)
    dim = next(fits, dims[-1])
    if dim and parts > 1 and shape[dim] % (pieces[dim] * parts):
        raise UsageError(
            f"cannot shard {short_repr(fqn)} {list(shape)}: FSDP cuts dim {dim} only evenly, "
            f"and {shape[dim]} is not a multiple of {pieces[dim] * parts}",
            hint="let fsdp cut dim 0, or use sizes that divide it",
        )
    return dim


def _dim(fqn: str, shape: tuple[int, ...], axis: str, dim: int | None) -> int | None:
    if dim is None:
        return None
    if not -len(shape) <= dim < len(shape):
        raise UsageError(
            f"cannot shard {short_repr(fqn)} {list(shape)}: it has no dim {dim} for {axis}",
            hint="put a rule for it before, with another dim or replicate",
        )
    return dim % len(shape)
