"""Choose the map that takes a model's names to another world, by configs and by what fits, and apply it.

The architecture comes from ``--arch``, else from a config of transformers (``--config``, or one beside the
checkpoint), else from names and shapes alone: the maps that account for every tensor. Numbers that shapes do
not give come from configs. Configs that contradict each other are an error.

Maps are declared from a trainer's names to the hub's. The way back is their inverse, in the names of one
generation; many architectures share the hub's names, so a config or ``--arch`` must name one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

from blake3 import blake3

from ckptcore.core.manifest import Manifest
from ckptcore.core.subset import select
from ckptcore.errors import Finding, NameMismatch, UsageError, finding
from ckptcore.naming.maps.adapters import adapter_maps
from ckptcore.naming.maps.agreement import agreed
from ckptcore.naming.maps.conversion import MappedManifest, converted, with_padding, with_zeros
from ckptcore.naming.maps.declaration import ArchMap, built_in_maps
from ckptcore.naming.maps.hub_config import TIE
from ckptcore.naming.maps.hyperparameters import NUMBERS, Config
from ckptcore.naming.maps.matching import Matched, match, require_fit
from ckptcore.naming.maps.sizes import names_in
from ckptcore.naming.maps.tensor_name import Templates
from ckptcore.naming.rename import Dropped, MadeTensor, Mapped
from ckptcore.naming.worlds import GENERATION_NUMBERS, GENERATIONS, HUB, PEFT
from ckptcore.naming.wrapper_prefix import prefix_of_taken
from ckptcore.planning.stored_configs import stored_configs
from ckptcore.utils.text import listed, short_repr

_HEADS = ("lm_head.weight", "embed_out.weight")  # of causal language models on the hub
# World -> the multiple, times tp, to which its trainer pads a vocabulary. Megatron's is the default of
# --make-vocab-size-divisible-by (megatron/training/arguments.py; megatron/training/tokenizer).
VOCABULARY_STEP = {"megatron": 128}
_INVISIBLE = ("rope_theta", "norm_eps", "embedding_scale")  # numbers that no tensor's shape depends on


@dataclass(frozen=True)
class NameMap:
    """How names were mapped, as a plan shows it.

    Attributes:
        arch: Architecture of the map.
        world: World of the source's names.
        to: World of the target's names.
        because: Why this map was chosen.
        numbers: Number -> (value, config and key that give it).
        digest: Digest of the map.
        generation: Generation of the target's names, or "".
        via: The map to the hub's names before this one; None where the source has them, or the target.
        untried: Whether no code of the trainer has loaded what this map makes.
        left_out: (rule, reason) of what the trainer stores and the map does not make.
        padding: Name -> rows of zeros that the trainer's rule adds to a vocabulary.
        rules: The map itself.
        configs: The configs that gave its numbers.
    """

    arch: str
    world: str
    to: str
    because: str
    numbers: Mapping[str, tuple[int | float, str]]
    digest: str
    generation: str = ""
    via: NameMap | None = None
    untried: bool = False
    left_out: tuple[tuple[str, str], ...] = field(default=())
    padding: Mapping[str, int] = field(default_factory=dict)
    rules: ArchMap | None = None
    configs: tuple[Config, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        numbers = {k: {"value": v, "source": s} for k, (v, s) in sorted(self.numbers.items())}
        form: dict[str, Any] = {
            "arch": self.arch,
            "from": self.world,
            "to": self.to,
            "because": self.because,
            "numbers": numbers,
            "digest": self.digest,
        }
        if self.world == HUB:  # a way back
            form |= {
                "generation": self.generation,
                "untried": self.untried,
                "left_out": [list(pair) for pair in self.left_out],
                "padding": dict(self.padding),
            }
        return form | ({"via": self.via.as_dict()} if self.via is not None else {})


@dataclass(frozen=True)
class MappedNames:
    """A model in another world of names. map: how; warnings: assumptions."""

    mapped: Mapped
    map: NameMap
    conversion: MappedManifest
    warnings: tuple[Finding, ...]


@dataclass(frozen=True, kw_only=True)
class NameRequest:
    """The names that are asked for, and what says which architecture has them.

    Attributes:
        to: World of the result.
        source: The full checkpoint, which may have the arguments of its training, and a config beside it.
        arch: Name of an architecture, or ``auto``.
        config: Content of ``--config``, or None.
        url: Value of ``--config``, for messages.
        part: Whether a part of the model was requested, so that tensors may be missing.
        generation: Of the names of ``to``; "" for the newest.
        untried: Whether a map may be used that no code of the trainer has loaded.
        because: Why this architecture, where ``arch`` is none of the user's.
        tp: Tensor parallel ranks, for which a trainer pads the vocabulary; 0 for no padding.
    """

    to: str
    source: Manifest
    arch: str = "auto"
    config: Mapping[str, Any] | None = None
    url: str = ""
    part: bool = False
    generation: str = ""
    untried: bool = False
    because: str = ""
    tp: int = 0


def map_names(mapped: Mapped, world: str, request: NameRequest) -> MappedNames:
    """Map a model part to another world of names.

    Args:
        mapped: The model part under its stored names, without ties.
        world: World of these names.
        request: The names that are asked for.

    Raises:
        NameMismatch: No map fits, or configs contradict each other.
        UsageError: The architecture is unknown, not supported, or ambiguous; weights are quantised; the map
            is untried.
    """
    configs = [
        *([Config(f"--config {request.url}", HUB, request.config)] if request.config is not None else []),
        *stored_configs(request.source, world),
    ]
    to, numbers = request.to, agreed(configs)
    if world == HUB:
        numbers |= _of_generation(to, request.generation)
        _require_plain(mapped.manifest, to)
    sizes = {name: int(value) for name, (value, _) in numbers.items() if isinstance(value, int)}
    calls = _calls(request.arch, configs)
    # The architecture's own maps are few; only if it has none is every map of both worlds tried.
    maps = _maps(world, to, request.generation, calls) or _maps(world, to, request.generation, frozenset())
    if world == HUB:
        _require_one_head(mapped.manifest, to, configs, part=request.part)
        # Before the search: a head that is tied is missing on the hub, and the trainer's map needs it.
        mapped = _with_tied(mapped, maps, configs)
    search = _MapSearch(mapped.manifest, maps, world, to, configs, sizes, request.part)
    # Refused maps take part in the choice, so that their reason is what the user reads.
    matched, chosen_by = search.choose(request.arch)
    if matched.map.refused:
        raise UsageError(
            f"cannot map {world} names of {matched.map.arch}: {matched.map.refused}",
            hint="try --names stored to keep the names as they are",
        )
    _require_agreed(matched.map, configs)
    if world == HUB:
        _require_tried(matched.map, request.untried)
    # A tensor that no rule takes would be lost silently: it is an error.
    require_fit(matched, mapped.manifest.tensors, part=request.part, hint=_part_hint(matched, mapped))
    conversion = with_zeros(converted(mapped.manifest, matched), mapped.manifest, sizes)
    if to in VOCABULARY_STEP:
        conversion = with_padding(conversion, VOCABULARY_STEP[to] * request.tp)
    used = {a for of in matched.assignment.groups for a in of.sizes} | {
        name for of in matched.assignment.groups for name in _axis_names(of.rule.axes)
    }
    # Only numbers that this map has used, or that no shape shows: the others had no influence.
    used_numbers = {
        name: source_text for name, source_text in numbers.items() if name in used or name in _INVISIBLE
    }
    for of in matched.assignment.groups:
        for name in (of.sizes.keys() & NUMBERS) - used_numbers.keys():
            used_numbers[name] = of.sizes[name], "names and shapes"
    name_map = NameMap(
        matched.map.arch,
        world,
        to,
        request.because or chosen_by,
        used_numbers,
        matched.map.digest,
        matched.map.generation,
        None,
        world == HUB and not matched.map.loaded_by,
        matched.map.left_out,
        conversion.padding,
        matched.map,
        tuple(configs),
    )
    warnings = (*_assumed(conversion), *_of_way_back(name_map), *lacking(matched))
    return MappedNames(composed(mapped, conversion), name_map, conversion, warnings)


def _of_generation(to: str, generation: str) -> dict[str, tuple[int | float, str]]:
    """Return the numbers that a generation of a trainer's names says, the newest for ""."""
    generation = generation or next(iter(GENERATIONS.get(to, ("",))))
    chosen = GENERATION_NUMBERS.get((to, generation), {})
    return {name: (value, f"--names {to}:{generation}") for name, value in chosen.items()}


def _calls(arch: str, configs: Sequence[Config]) -> frozenset[str]:
    """Return the names of the architecture that ``--arch`` or a config gives; none where neither does."""
    if arch != "auto":
        return frozenset({arch})
    return frozenset(next((c.architectures for c in configs if c.architectures), ()))


@cache
def _maps(world: str, to: str, generation: str, calls: frozenset[str]) -> tuple[ArchMap, ...]:
    """Return the maps from one world to another: declared ones, or inverses in the names of a generation.

    calls: Of architectures that have these names; none for all.
    """
    if world != HUB:
        declared = tuple(m for m in built_in_maps(calls) if (m.world, m.to) == (world, to))
        return (*declared, *adapter_maps(world)) if to == PEFT else declared
    back = [m for m in built_in_maps(calls) if (m.world, m.to) == (to, HUB)]
    order = [generation] if generation else list(GENERATIONS.get(to, ("",)))
    out = []
    for arch in dict.fromkeys(m.arch for m in back):
        # Of one architecture, the newest generation of names that any of its maps has.
        of_arch = [m for m in back if m.arch == arch]
        first = next((g for g in order if any(g in m.generations or not g for m in of_arch)), None)
        for arch_map in of_arch:
            if arch_map.refused:
                # A refused map has no inverse; it is listed, so that its reason can be given.
                out.append(replace(arch_map, world=HUB, to=to, signs=()))
            elif first is not None and (not first or first in arch_map.generations):
                out.append(arch_map.inverted(first))
    return tuple(out)


def _require_plain(manifest: Manifest, to: str) -> None:
    """Require weights that are stored as a trainer loads them."""
    if computed := manifest.dequantized:
        names = listed([manifest.tensors[row].fqn for row in sorted(computed)], 1)
        raise UsageError(
            f"cannot map quantised weights to {to} ({names}): trainers load plain ones",
            hint="export them in a dtype first: ckptcore export SRC PLAIN --dtype bf16",
        )


def _require_tried(rules: ArchMap, untried: bool) -> None:
    """Require a map whose result the trainer's own code has loaded, or the user's word."""
    if not rules.loaded_by and not untried:
        raise UsageError(
            f"the map of {rules.arch} from {HUB} to {rules.to} is untried: no code of {rules.to} has loaded "
            "what it makes",
            hint="add --allow-untried, and compare a step of the trainer before you rely on it",
        )


def _with_tied(mapped: Mapped, maps: Sequence[ArchMap], configs: Sequence[Config]) -> Mapped:
    """Return a model of tied embeddings with its head, where the trainer's loader looks for both."""
    if not _tied_by(configs):
        return mapped
    tensors = mapped.manifest.tensors
    index = {t.fqn: row for row, t in enumerate(tensors)}
    # A tied head is in no file; it is given the rows of the tensor that it is tied to.
    ties = {gone: stays for m in maps for gone, stays in m.ties if gone not in index and stays in index}
    if not ties:
        return mapped
    rows, names = [*range(len(tensors))], [t.fqn for t in tensors]
    stored = {new: old for old, new in mapped.renamed}
    return replace(
        mapped,
        manifest=select(
            mapped.manifest, [*rows, *(index[stays] for stays in ties.values())], [*names, *ties]
        ),
        renamed=(*mapped.renamed, *((stored.get(stays, stays), gone) for gone, stays in ties.items())),
    )


def _tied_by(configs: Sequence[Config], *, ties: bool = True) -> str:
    """Return the name of the config that ties the head, by a field or by its class; "" for none.

    ties: False for the config that says there is a head of its own.
    """
    for config in configs:
        # Fields of the config come before those of its class, which are defaults.
        if config.fields is None:
            continue
        stated = config.fields.get(TIE)
        value = (config.fields.of_class or {}).get(TIE) if stated is None else stated.value
        if value is ties:
            return config.name
    return ""


def _require_one_head(manifest: Manifest, to: str, configs: Sequence[Config], *, part: bool) -> None:
    """Require a head of its own, or tied embeddings: with both nothing says which one counts.

    part: Whether tensors may be missing.
    """
    tied = _tied_by(configs)
    head = next((t.fqn for t in manifest.tensors if t.fqn in _HEADS), "")
    if not head and not part and (untied := _tied_by(configs, ties=False)):
        raise NameMismatch(
            f"cannot map to {to}: {untied} says tie_word_embeddings = false, and there is no {_HEADS[0]}",
            hint="try the config of the model that this is, or complete the folder",
        )
    if tied and head:
        raise NameMismatch(
            f"cannot map to {to}: {tied} says tie_word_embeddings = true, and there is {head}",
            hint=f"try --exclude {head}, or a config of the model whose head this is",
        )


def _axis_names(axes: Mapping[str, str]) -> Iterator[str]:
    for expression in axes.values():
        yield from names_in(expression)


@dataclass(frozen=True)
class _MapSearch:
    """The search for the one map that takes a manifest's names to another world.

    part: whether tensors may be missing.
    """

    manifest: Manifest
    maps: Sequence[ArchMap]
    world: str
    to: str
    configs: Sequence[Config]
    sizes: Mapping[str, int]
    part: bool

    @cached_property
    def templates(self) -> Templates:
        """The kinds of names in the manifest."""
        return Templates.of(t.fqn for t in self.manifest.tensors)

    def _match(self, rules: ArchMap) -> Matched:
        return match(rules, self.manifest.tensors, self.sizes, self.templates)

    def choose(self, arch: str) -> tuple[Matched, str]:
        """Return the only map that fits, and why."""
        if arch != "auto":
            chosen = [m for m in self.maps if arch == m.arch or arch in (*m.model_types, *m.architectures)]
            if not chosen:
                raise UsageError(
                    f"no map takes {self.world} names of architecture {arch!r} to {self.to}",
                    hint=f"one of: {_archs(self.maps)}",
                )
            because = f"--arch {arch}"
        else:
            named = next((c for c in self.configs if c.architectures), None)
            if named is None and self.world == HUB:
                raise UsageError(
                    f"cannot map to {self.to}: nothing says which architecture this is, and many share "
                    "their names",
                    hint="try --config FOLDER with the model's config.json, or --arch",
                )
            if named is None:
                return self._fitting()
            calls = named.architectures
            chosen = [m for m in self.maps if {m.arch, *m.model_types, *m.architectures} & set(calls)]
            because = f"{named.name} says {calls[0]}"
            if not chosen:
                raise NameMismatch(
                    f"no map takes {self.world} names of {calls[0]} to {self.to} ({because})",
                    hint="try --names stored to keep the names as they are; there are maps for "
                    f"{_archs(self.maps)}",
                )
        supported = [m for m in chosen if not m.refused]
        # Where configs contradict every map, one is chosen all the same: `_require_agreed` reports it.
        # A config may say that this map is for another variant; the others are compared.
        able = [m for m in supported if not _contradicted(m, self.configs)] or supported
        matches = [self._match(m) for m in able]
        if not matches:
            return _nothing(chosen[0]), because
        # Several maps fit, and their results differ: nothing but the trainer's config can decide.
        if len({_outcome(m) for m in matches if m.fits}) > 1:
            raise UsageError(
                f"cannot find the layout of {matches[0].map.arch}: several fit its names and shapes",
                hint="try with the config that the trainer wrote beside the checkpoint",
            )
        # If none fits, the nearest is reported, with what does not fit.
        return min(matches, key=_distance), because

    def _fitting(self) -> tuple[Matched, str]:
        """Return the only map that accounts for every tensor, by names, shapes and configs of modules."""
        # Maps that share all names with another are only taken by name.
        supported = [m for m in self.maps if not m.refused and not m.by_name]
        able = [m for m in supported if not _contradicted(m, self.configs)] or supported
        if not able:
            raise NameMismatch(
                f"no map takes {self.world} names to {self.to}",
                hint="try --names stored to keep the names as they are",
            )
        matches = [self._match(m) for m in able if _covers(m, self.templates)]
        fitting = [m for m in matches if m.fits]
        if not fitting and self.part:
            able_in_part = [m for m in matches if m.fits_in_part]
            least = min(map(_distance, able_in_part), default=0)
            fitting = [m for m in able_in_part if _distance(m) == least]
        if not fitting:
            # No map has all names: one that is refused by a sign in them explains more than a distance.
            for refused in (m for m in self.maps if m.refused and not matches):
                if any(sign.search(t.fqn) for sign in refused.signs for t in self.manifest.tensors):
                    return _nothing(refused), "its names"
            # One that a config contradicts may fit by names: then the contradiction is the error.
            excluded = (m for m in supported if m not in able and _covers(m, self.templates))
            contradicted = (self._match(m) for m in excluded)
            refused_by_config = next((m for m in contradicted if m.fits), None)
            if refused_by_config is not None:  # the caller reports the contradiction
                return refused_by_config, "names and shapes"
            all_matches = matches or [self._match(m) for m in able]
            return min(all_matches, key=_distance), "the closest by names"
        first = fitting[0]
        # Maps with one result are one answer, whatever their architectures are called.
        kinds = {_outcome(m) for m in fitting}
        if len(kinds) > 1:
            names = [m.map.arch for m in fitting]
            raise UsageError(
                f"cannot choose the architecture: names and shapes fit {', '.join(names)}, whose tensors "
                "differ",
                hint=f"try --arch {names[0]}, or --config with the model's config.json",
                candidates=names,
            )
        other_archs = [m.map.arch for m in fitting[1:]]
        same = f" (as for {', '.join(other_archs)})" if other_archs else ""
        return first, f"names and shapes fit {first.map.arch}{same}"


def _covers(rules: ArchMap, templates: Templates) -> bool:
    """Return whether a rule takes every kind of name: a quick test before shapes are compared."""
    names = [term.name for rule in rules.rules for side in rule.spellings for term in side]
    wild = [name for name in names if name.wild]
    left = templates.rows.keys() - _plain_templates(rules)
    # A name with a wild part fits by pattern; all others must be templates of the map.
    return all(any(name.fits(t) for name in wild) for t in left)


def _plain_templates(rules: ArchMap) -> set[str]:
    """Return the templates of the names that rules take, without those with a wild part."""
    names = (term.name for rule in rules.rules for side in rule.spellings for term in side)
    return {name.template for name in names if not name.wild}


def _part_hint(matched: Matched, mapped: Mapped) -> str:
    """Return the option that names the model part, where the map would take what is below a prefix."""
    left = [mapped.manifest.tensors[t].fqn for t in matched.left]
    templates = _plain_templates(matched.map) if left else set[str]()

    def taken(names: Sequence[str]) -> int:
        rows = Templates.of(names).rows
        return sum(len(rows[template]) for template in rows.keys() & templates)

    prefix = prefix_of_taken(left, taken)
    if not prefix:
        return ""
    first = next(name for name in left if name.startswith(prefix))
    stored = {new: old for old, new in mapped.renamed}.get(first, first)
    option = stored.removesuffix(first.removeprefix(prefix))
    return f"add --model-prefix {option}: the names below it are those of the map"


def _contradicted(rules: ArchMap, configs: Sequence[Config]) -> str:
    """Return what a config of either world has that the map does not support, or ""."""
    required = {rules.world: rules.requires, rules.to: rules.target_requires}
    for config in configs:
        for place, values in required.get(config.world, {}).items():
            value = config.at(place)
            # A value that must be absent: false, 0, an empty list and a missing field all mean absent.
            if not values and (any(value) if isinstance(value, (list, tuple)) else value):
                return f"{config.name} says {place} = {short_repr(value)}, the map is for one without it"
            # Numbers and texts only: a list in its place says nothing about this variant.
            if values and isinstance(value, (str, int, float)) and value not in values:
                allowed = " or ".join(json.dumps(v) for v in values)
                return f"{config.name} says {place} = {json.dumps(value)}, the map is for {allowed}"
    return ""


def _require_agreed(rules: ArchMap, configs: Sequence[Config]) -> None:
    contradiction = _contradicted(rules, configs)
    if contradiction:
        raise NameMismatch(
            f"the map of {rules.arch} ({rules.world} to {rules.to}) is not for this: {contradiction}",
            hint="try another --arch, or --names stored to keep the names as they are",
        )


def _outcome(matched: Matched) -> frozenset[Any]:
    """Return a value that is equal for maps with equal results."""
    return frozenset(
        (of.term, of.rule.to, of.rule.add, tuple(sorted(of.sizes.items())), tuple(of.rows.tolist()))
        for of in matched.assignment.groups
    )


def _distance(matched: Matched) -> int:
    """Count what does not fit."""
    return sum(map(len, (matched.left, matched.twice, matched.unused, matched.absent, matched.problems)))


def _nothing(refused: ArchMap) -> Matched:
    return match(refused, (), {})


def _archs(maps: Sequence[ArchMap]) -> str:
    return ", ".join(sorted({m.arch for m in maps if not m.refused})) or "none"


def composed(mapped: Mapped, conversion: MappedManifest) -> Mapped:
    """Combine renaming by the user's rules, or a map before this one, and the map after it."""
    before = {new: old for old, new in mapped.renamed}
    earlier = {m.name: m for m in mapped.made}

    def stored(name: str) -> tuple[str, ...]:
        # Of a tensor that an earlier map made, its sources are what is stored.
        return earlier[name].sources if name in earlier else (before.get(name, name),)

    # A tensor that an earlier map split or joined is no renamed tensor, even if this map only renames it.
    moved = {new: old for new, old in conversion.moved.items() if old not in earlier or earlier[old].same}
    renamed = [(*stored(old), new) for new, old in moved.items()]
    gone = [
        Dropped(before.get(name, name), rule, only_zero=conversion.only_zero.get(name, ""))
        for name, rule in conversion.dropped
    ]
    gone += [Dropped(before.get(name, name), rule, part=count) for name, rule, count in conversion.parts]
    origins = tuple(
        MadeTensor(
            new,
            rule,
            tuple(dict.fromkeys(o for s in conversion.sources[new] for o in stored(s))),
            new in moved,
        )
        for new, rule in conversion.rules.items()
    )
    origins += tuple(MadeTensor(new, rule, stored(beside), False) for new, rule, beside in conversion.zeros)
    origins = tuple(
        m._replace(rule=f"{m.rule}, and {conversion.padding[m.name]} rows of zeros")
        if m.name in conversion.padding
        else m
        for m in origins
    )
    return replace(
        mapped,
        manifest=conversion.manifest,
        renamed=tuple((old, new) for old, new in renamed if old != new),
        dropped=(*mapped.dropped, *gone),
        made=origins,
        # The digest of two maps is of both, in their order.
        map=blake3(f"{mapped.map} {conversion.map.digest}".encode()).hexdigest()
        if mapped.map
        else conversion.map.digest,
    )


def _assumed(conversion: MappedManifest) -> Iterator[Finding]:
    for axis, size in conversion.guessed:
        message = f"the size of {axis} in the map of {conversion.map.arch} is unknown: {size} was assumed"
        yield finding("assumed-size", "coverage", message)


def _of_way_back(name_map: NameMap) -> Iterator[Finding]:
    if name_map.world == HUB:
        message = (
            f"{name_map.to} finds no optimizer state in the output, no step and no data loader: a run begins"
        )
        yield finding("no-optimizer", "coverage", message)
    if name_map.untried:
        message = f"no code of {name_map.to} has loaded what the map of {name_map.arch} makes"
        yield finding("untried-map", "coverage", message)


def lacking(matched: Matched) -> Iterator[Finding]:
    """Yield a finding for the tensors that a part of a model lacks."""
    gone = [f"nothing for the rule {rule}" for rule in matched.unused] + list(matched.absent)
    if gone:
        rest = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
        message = f"a part of {matched.map.arch}, which transformers will not open: {gone[0]}{rest}"
        yield finding("not-loadable", "files", message)
