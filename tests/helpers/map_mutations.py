"""Wrong maps and wrong folders, of which every shape is right: one thing turned round that a family has.

Those of maps change what the TOML of a family says, and those of folders the tensors of an export. Which
there are follows from the declarations and from the names: a new family has its own without a line here.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from importlib import resources
from typing import Any

import pytest
import torch
from families import FAMILIES
from trainer_names import State

from ckptcore.naming.maps import declaration, live_families
from ckptcore.naming.maps.declaration import ArchMap, FamilyForm, GroupForm, built_in_maps
from ckptcore.planning import live_maps, name_maps

Change = Callable[[str], str]


def _swapped(one: str, other: str) -> Change:
    pair = {one: other, other: one}
    return lambda text: re.sub(rf"\b(?:{one}|{other})\b", lambda m: pair[m[0]], text)


# What is done to every layout on the trainer's side.
LAYOUTS: Mapping[str, Change] = {
    "gate and up swapped": _swapped("gate", "up"),
    "q and k swapped": lambda text: _swapped("q_rows", "k_rows")(_swapped("q", "k")(text)),
    "k and v swapped": lambda text: _swapped("k_rows", "v_rows")(_swapped("k", "v")(text)),
    "groups of heads in another order": lambda text: re.sub(
        r"\bkv_heads (\([^()]*\)|q|k|v)(?= )", r"\1 kv_heads", text
    ),
    "rotary pairs not permuted": lambda text: text.replace("pairs two", "two pairs"),
}
# What is done to every name on the hub's side.
NAMES: Mapping[str, Change] = {
    "experts shifted by one": lambda text: text.replace("{experts}", "{experts + 1}"),
    "norms of q and k swapped": _swapped("q_norm", "k_norm"),
}
# Maps that change names alone: no layout can be wrong, and a rule that is dropped is refused.
RENAMES = frozenset({("gpt_neox", "gpt_neox")})
FUSED = "gate and up swapped, of a module"
DROPPED = "a rule dropped"


def _forms(path: str, kind: str) -> dict[str, Any]:
    """A file of maps, as tomllib reads it, with the change made."""
    form = tomllib.loads((resources.files(declaration.__package__) / path).read_text("utf-8"))
    groups = form["map"] if "map" in form else form.values()
    for rule in (r for g in groups for r in g.get("rule", ())):
        if kind in LAYOUTS:
            rule["from"] = _each(rule["from"], _behind(LAYOUTS[kind]))
            if "or" in rule:
                rule["or"] = _each(rule["or"], _behind(LAYOUTS[kind]))
        elif "to" in rule:
            rule["to"] = _each(rule["to"], NAMES[kind])
    return form


def _behind(change: Change) -> Change:
    """The change, of the layout alone."""

    def changed(term: str) -> str:
        name, colon, layout = term.partition(" : ")
        return f"{name}{colon}{change(layout)}"

    return changed


def _each(terms: Any, change: Change) -> Any:
    return change(terms) if isinstance(terms, str) else [_each(t, change) for t in terms]


@cache  # by families that use them
def _shared_groups(kind: str, name: str) -> dict[str, GroupForm]:
    """A shared file's groups of rules, with the change made."""
    return {k: GroupForm.model_validate(v) for k, v in _forms(f"shared/{name}.toml", kind).items()}


@cache
def _changed_family(kind: str, arch: str) -> FamilyForm:
    """A family's declaration, with the change made."""
    return FamilyForm.model_validate(_forms(f"families/{arch}.toml", kind))


@cache
def mutant(family: str, world: str, kind: str) -> ArchMap | None:
    """The family's map with a change; None where it changes nothing, or says something impossible."""
    right = _map(family, world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(declaration, "_groups", partial(_shared_groups, kind))
        try:
            form = _changed_family(kind, right.arch)
            made = declaration._map(form, next(m for m in form.map if m.world == world))
        except ValueError:
            return None
    return made if made.rules != right.rules else None


def _map(family: str, world: str) -> ArchMap:
    return next(m for m in built_in_maps() if (m.arch, m.world, m.refused) == (family, world, ""))


def without(family: str, world: str, rule: str) -> ArchMap:
    """The family's map with a rule dropped."""
    right = _map(family, world)
    return replace(right, rules=tuple(r for r in right.rules if r.name != rule))


def map_mutants() -> Iterator[tuple[str, str, str]]:
    """(family, world, kind) of every change that a family's map can have."""
    for family, (_, _, worlds) in FAMILIES.items():
        for world in worlds:
            yield from (
                (family, world, k) for k in (*LAYOUTS, *NAMES) if mutant(family, world, k) is not None
            )


@contextmanager
def mapped_by(wrong: ArchMap) -> Iterator[None]:
    """Exports use the wrong map."""
    right = built_in_maps()
    maps = tuple(
        wrong if (m.arch, m.world, m.to) == (wrong.arch, wrong.world, wrong.to) else m for m in right
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(name_maps, "built_in_maps", lambda calls: maps)
        patch.setattr(name_maps, "_maps", name_maps._maps.__wrapped__)  # without what it remembers
        yield


@contextmanager
def live_mapped_by(change: Callable[[ArchMap], ArchMap]) -> Iterator[None]:
    """Exports of live modules use the changed rules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_maps, "live_map", lambda *given: change(live_families.live_map(*given)))
        yield


def turned(rules: ArchMap) -> ArchMap:
    """Gate and up of fused experts as each other."""
    wrong = tuple(
        replace(r, to=(replace(r.to[0], name=r.to[1].name), replace(r.to[1], name=r.to[0].name)))
        if len(r.to) == 2
        else r
        for r in rules.rules
    )
    return replace(rules, rules=wrong)


# Damage to a folder's tensors; each gives their names, and none where there is no such part.
def _swap(state: State, one: str, other: str, layer: str) -> set[str]:
    """Two tensors as each other, both of the last layer that has them."""
    pairs = [(n, re.sub(one, other, n)) for n in state if layer in n and re.search(one, n)]
    pairs = [(a, b) for a, b in pairs if b in state]
    for a, b in pairs[-1:]:
        state[a], state[b] = state[b], state[a]
    return {n for pair in pairs[-1:] for n in pair}


def _gate_and_up(config: Mapping[str, Any], state: State) -> set[str]:
    for one, other in ((r"\bgate_proj\b", "up_proj"), (r"\bw1\b", "w3")):
        if found := _swap(state, one, other, "."):
            return found
    name = next((n for n in state if re.search(r"gate_up_proj$|gate_up_proj\.weight$|input_linear", n)), "")
    if not name:
        return set()
    both = state[name]
    if config["model_type"] == "gpt_oss":  # neighbours
        state[name] = both.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        state[name] = both.roll(both.shape[-2] // 2, -2)
    return {name}


def _q_and_k(config: Mapping[str, Any], state: State) -> set[str]:
    return _swap(state, r"\bq_proj\b", "k_proj", ".")


def _group_order(config: Mapping[str, Any], state: State) -> set[str]:
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    name = next((n for n in state if n.endswith("self_attn.q_proj.weight")), "")
    if not name or not heads or not groups or not 1 < groups < heads:
        return set()
    rows = state[name]
    state[name] = rows.unflatten(0, (groups, heads // groups, -1)).transpose(0, 1).flatten(0, 2)
    return {name}


def _rotary(config: Mapping[str, Any], state: State) -> set[str]:
    name = next((n for n in state if n.endswith("self_attn.q_proj.weight")), "")
    if not name:
        return set()
    state[name] = (
        state[name].unflatten(0, (config["num_attention_heads"], 2, -1)).transpose(1, 2).flatten(0, 2)
    )
    return {name}


def _experts(config: Mapping[str, Any], state: State) -> set[str]:
    found = [m for n in state if (m := re.fullmatch(r"(.*experts\.)(\d+)(\..*)", n))]
    if found:
        head, tail = found[-1][1], found[-1][3]
        names = sorted(m[0] for m in found if (m[1], m[3]) == (head, tail))
        tensors = [state[n] for n in names]
        state.update(zip(names, tensors[1:] + tensors[:1], strict=True))
        return set(names)
    name = next((n for n, t in state.items() if "experts" in n and t.dim() == 3), "")
    if name:
        state[name] = state[name].roll(1, 0)
    return {name} - {""}


def _lost(config: Mapping[str, Any], state: State) -> set[str]:
    name = sorted(state)[len(state) // 2]
    del state[name]
    return {name}


DAMAGES: Mapping[str, Callable[[Mapping[str, Any], State], set[str]]] = {
    "gate and up swapped": _gate_and_up,
    "q and k swapped": _q_and_k,
    "groups of heads in another order": _group_order,
    "rotary pairs not permuted": _rotary,
    "experts shifted by one": _experts,
    "a tensor lost": _lost,
}


def contiguous(state: State) -> dict[str, torch.Tensor]:
    """As safetensors takes them."""
    return {n: t.contiguous() for n, t in state.items()}
