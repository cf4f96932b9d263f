"""Rule use: which rules of one's own speak for no parameter?

A rule file may be shared by several models, so a rule that finds nothing is told as a warning. A slip in a
glob looks the same, and would leave its parameters to the next rule or to FSDP's default: the names nearest
to the glob are told with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from itertools import chain, islice

from ckptcore.core.manifest import Manifest
from ckptcore.errors import Finding, finding
from ckptcore.naming.optimizer_state import parameters
from ckptcore.naming.rename import matches
from ckptcore.topology.pipeline_stages import number_of
from ckptcore.topology.rules import ShardingRules
from ckptcore.topology.rules_file import ShardingRule, Stages, load
from ckptcore.utils.text import shown, some

_MOST = 20  # findings
_NAMES, _LENGTH, _GLOBS = 300, 100, 3  # names that a glob is held against, characters of one, globs of a rule


def unused_rules(manifest: Manifest, sharding: str, model_prefix: str | None = None) -> tuple[Finding, ...]:
    """A warning for every rule of a sharding file that decides on no parameter of a manifest, and for every
    key of its pipeline stages that no name has.

    sharding: TOML text. model_prefix: where the model is, or None to find it.
    Raises `UsageError` when the text is no sharding file.
    """
    own = load(sharding)
    names = list(parameters(manifest, model_prefix)[0])
    told = chain(_unused_patterns(own.rule, names), _stages(own.stages or Stages(), names))
    return tuple(finding("unused-rule", "cover", message) for message in islice(told, _MOST))


def _unused_patterns(rules: tuple[ShardingRule, ...], names: Sequence[str]) -> Iterator[str]:
    find = ShardingRules(rules, None, (), "--sharding").find
    speak = {id(rule) for name in names if (rule := find(name)) is not None}
    for number, rule in enumerate(rules, 1):
        if id(rule) not in speak:
            hit = next((n for n in names if matches(n, rule.fqn)), None)
            what = f"[[rule]] {number} of --sharding, {some(rule.fqn)}, "
            yield what + (_none(rule.fqn, names) if hit is None else _behind(hit))


def _stages(stages: Stages, names: Sequence[str]) -> Iterator[str]:
    used = {
        "layers": bool(number_of(names, stages.layers)),
        "first": any(matches(n, stages.first) for n in names),
        "last": any(matches(n, stages.last) for n in names),
    }
    for key, is_used in used.items():
        globs = getattr(stages, key)
        if globs and not is_used:
            yield f"[stages] {key} of --sharding, {some(globs)}, {_none(globs, names)}"


def _behind(name: str) -> str:
    return f"decides nothing: what it matches, {shown(name)[1:-1]} for one, an earlier rule has"


def _none(globs: Sequence[str], names: Sequence[str]) -> str:
    kinds: dict[str, str] = {}  # names that differ in numbers alone are one kind
    for name in names:
        kinds.setdefault(re.sub(r"[0-9]+", "0", name[:_LENGTH]), name)
    first = list(kinds)[:_NAMES]
    near = {kinds[k]: None for g in globs[:_GLOBS] for k in get_close_matches(_bare(g), first, 2, 0.4)}
    return f"matches no parameter; {f'near to it: {some(list(near))}' if near else 'no name is near to it'}"


def _bare(glob: str) -> str:
    """A glob's own characters, for likeness to names."""
    return re.sub(r"[*?\[\]]", "", glob.replace("{n}", "0"))[:_LENGTH]
