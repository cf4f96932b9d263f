"""Warn about sharding rules that match no parameter.

Several models may share a rule file, so an unused rule is a warning. A typo in a glob looks the same, and
would leave its parameters to the next rule or to FSDP's default. The warning lists the names nearest to the
glob.
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
from ckptcore.utils.text import short_repr, some

_MOST = 20  # findings
_NAMES, _LENGTH, _GLOBS = 300, 100, 3  # names compared with a glob, characters of each, globs of a rule


def unused_rules(manifest: Manifest, sharding: str, model_prefix: str | None = None) -> tuple[Finding, ...]:
    """Return a warning for every unused rule and stage key of a sharding file.

    Args:
        manifest: The checkpoint's tensors.
        sharding: TOML text.
        model_prefix: Prefix of the model part, or None to find it.

    Raises:
        UsageError: The text is not a sharding file.
    """
    rule_file = load(sharding)
    names = list(parameters(manifest, model_prefix)[0])
    unused = chain(_unused_patterns(rule_file.rule, names), _stages(rule_file.stages or Stages(), names))
    return tuple(finding("unused-rule", "coverage", message) for message in islice(unused, _MOST))


def _unused_patterns(rules: tuple[ShardingRule, ...], names: Sequence[str]) -> Iterator[str]:
    find = ShardingRules(rules, None, (), "--sharding").find
    used = {id(rule) for name in names if (rule := find(name)) is not None}
    for number, rule in enumerate(rules, 1):
        if id(rule) not in used:
            hit = next((n for n in names if matches(n, rule.fqn)), None)
            label = f"[[rule]] {number} of --sharding, {some(rule.fqn)}, "
            yield label + (_none(rule.fqn, names) if hit is None else _behind(hit))


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
    return f"has no effect: an earlier rule matches its parameters, such as {short_repr(name)[1:-1]}"


def _none(globs: Sequence[str], names: Sequence[str]) -> str:
    kinds: dict[str, str] = {}  # names that differ only in numbers are one kind
    for name in names:
        kinds.setdefault(re.sub(r"[0-9]+", "0", name[:_LENGTH]), name)
    first = list(kinds)[:_NAMES]
    near = {kinds[k]: None for g in globs[:_GLOBS] for k in get_close_matches(_bare(g), first, 2, 0.4)}
    return f"matches no parameter; {f'similar names: {some(list(near))}' if near else 'no name is similar'}"


def _bare(glob: str) -> str:
    """Return a glob's literal characters, to compare it with names."""
    return re.sub(r"[*?\[\]]", "", glob.replace("{n}", "0"))[:_LENGTH]
