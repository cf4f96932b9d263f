"""Find the placement rule of a parameter: the user's rules first, then those of a built-in family.

Families are files of `ckptcore/topology/families/`; names of parameters identify a checkpoint's family.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import cache, cached_property
from importlib import resources

from ckptcore.errors import UsageError
from ckptcore.topology.rules_file import ShardingFile, ShardingRule, Stages, load
from ckptcore.utils.globs import matches
from ckptcore.utils.text import count, some

FAMILIES = ("hf", "torchtitan", "olmo", "megatron")
_EVERYWHERE = "buffers"  # rules that come after all others


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
        rule_by_name: dict[str, ShardingRule | None] = {}

        def find(fqn: str) -> ShardingRule | None:
            name = re.sub(r"[0-9]+", "0", fqn) if plain else fqn
            if name not in rule_by_name:
                rule_by_name[name] = next((r for p, r in rows if p.match(name)), None)
            return rule_by_name[name]

        return find


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
