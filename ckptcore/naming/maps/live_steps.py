"""Convert names of a live transformers module to names of its files, and back, by transformers' steps.

A *step* renames a part of names by a regex, or joins and cuts tensors. Loading runs the steps from the hub's
names to the module's; saving runs them backwards, joins first. This module does to names what
`core_model_loading.revert_weight_conversion` (saving) and `rename_source_key` (loading) do. Its steps are
data (`from_transformers` writes them), so it needs neither transformers nor tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pydantic import Field, model_validator

from ckptcore.errors import NameMismatch, UsageError
from ckptcore.naming.maps.declaration import Form, RuleForm

ITEM = "{item}"  # in a name: the number of a list that is one tensor in the live module
_PROBES = ("0", "7", "123")  # sample numbers


class Substitution(Form):
    r"""What one direction of a step does to a name.

    Attributes:
        find: Regex with a named group ``g<k>`` for each pattern.
        put: What replaces the text found: the first, or with ``guarded`` that of the pattern's group.
            ``\1`` is the pattern's first group.
        shift: Added to the number that this group is.
        guarded: Nothing is replaced before the first pattern is found (`GroupWeightRename`).
    """

    find: str
    put: tuple[str, ...] = Field(min_length=1)
    shift: int = 0
    guarded: bool = False

    @model_validator(mode="after")
    def _is_regex(self) -> Substitution:
        try:
            self.regex  # noqa: B018 - compiled once, here
        except re.error as error:
            raise ValueError(f"{self.find!r} is no regex: {error}") from error
        return self

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """Compiled."""
        return re.compile(self.find)


class StepForm(Form):
    """A step, both ways.

    Attributes:
        to_hub: Of the module's names; nothing where only loading takes the step.
        to_live: Of the hub's names.
        rule: Of parts of names, for a step that does more than rename: ``from`` in the module, ``to`` on the
            hub. The texts that ``to_hub`` finds are of its terms, in their order.
        numbers: Number that the rule names -> where the config has it, ``vision_config.num_attention_heads``.
        refused: Why this is no rule, for an operation that is none of those known.
        made_of: Classes of transformers' transform or of its operations.
    """

    to_hub: Substitution | None = None
    to_live: Substitution
    rule: RuleForm | None = None
    numbers: dict[str, str] = Field(default_factory=dict)
    refused: str = ""
    made_of: tuple[str, ...] = ("WeightRenaming",)


@dataclass(frozen=True)
class Step:
    """A step of a model: within a submodule, or everywhere.

    Attributes:
        form: The step.
        scope: Of the submodule below the base model; None for the whole model.
        base: The base model's name, with which names may begin.
    """

    form: StepForm
    scope: str | None = None
    base: str = ""

    def within(self, name: str) -> tuple[str, str] | None:
        """Return (prefix of the submodule, name inside it); None for a name outside."""
        if self.scope is None:
            return "", name
        scope = f"{self.scope}." if self.scope else ""
        base = f"{self.base}." if self.base else ""
        for prefix in (base + scope, scope):
            if name.startswith(prefix):
                return prefix, name.removeprefix(prefix)
        return None


@dataclass(frozen=True)
class Route:
    """Tensors of the module, and the tensors of files that they become.

    Attributes:
        live: Names in the module.
        hub: Names in files; ``{item}`` is any number of a list.
        step: The step that joins and cuts; None where tensors are only renamed.
    """

    live: tuple[str, ...]
    hub: tuple[str, ...]
    step: StepForm | None = None


@dataclass
class _Renaming:
    """Renaming steps in their order; those that are guarded remember that they began."""

    steps: Sequence[tuple[Step, Substitution]]
    started_steps: set[int] = field(default_factory=set)

    def applied(self, name: str) -> str:
        for n, (step, sub) in enumerate(self.steps):
            step_match = _first_match(step, sub, name)
            if step_match is None:
                continue
            before, inner_name, match, branch = step_match
            if sub.guarded:
                if branch == 0:
                    self.started_steps.add(n)
                elif n not in self.started_steps:
                    continue
            put = _replacement(sub, match, branch)
            name = before + inner_name.replace(match.group(0), put, 1)
        return name


def saved_names(steps: Sequence[Step], names: Iterable[str], *, refuse: bool = True) -> list[Route]:
    """Return the tensors of files for a module's tensors, as `save_pretrained` writes them.

    Args:
        steps: In the order of loading.
        names: Of the module's tensors.
        refuse: Else tensors whose step is refused are renamed only.

    Raises:
        UsageError: For tensors whose step is refused.
        NameMismatch: Where two tensors would be one part of the same.
    """
    backwards = [(s, s.form.to_hub) for s in reversed(steps) if s.form.to_hub is not None]
    joins = [(s, sub) for s, sub in backwards if s.form.rule is not None or (refuse and s.form.refused)]
    renaming = _Renaming([(s, sub) for s, sub in backwards if s.form.rule is None and not s.form.refused])
    # In transformers' order: a guarded step does nothing before its first pattern was found in some name.
    out: list[Route] = []
    groups: dict[tuple[int, str], dict[int, tuple[str, str]]] = {}
    for name in sorted(names, key=natural_order):
        for n, (step, sub) in enumerate(joins):
            step_match = _first_match(step, sub, name)
            if step_match is None:
                continue
            if step.form.refused:
                raise UsageError(
                    f"cannot map {name} to the hub's names: {step.form.refused}",
                    hint="try --names stored, or save_pretrained in the training program",
                )
            before, inner_name, match, branch = step_match
            key = before + inner_name.replace(match.group(0), sub.put[0], 1)
            branches = groups.setdefault((n, key), {})
            if branch in branches:
                raise NameMismatch(
                    f"{branches[branch][0]} and {name} would be the same part of {key}", broken=[name]
                )
            branches[branch] = name, match.group(0)
            break
        else:
            out.append(Route((name,), (renaming.applied(name),)))
    for (n, key), branches in groups.items():
        step, sub = joins[n]
        assert step.form.rule is not None  # those refused have raised
        before, _, behind = key.partition(sub.put[0])
        hub = tuple(_hub_name(renaming, before + part + behind) for part in sub.put)
        out.append(Route(_part_names(step.form, branches), hub, step.form))
    return out


def live_names(
    steps: Sequence[Step], names: Iterable[str], *, refuse: bool = True
) -> dict[str, tuple[str, ...]]:
    """Return the module's tensors that each tensor of a file becomes, as `from_pretrained` finds them.

    Args:
        steps: In the order of loading.
        names: Of tensors in files.
        refuse: Else tensors whose step is refused are renamed only.

    Raises:
        UsageError: For tensors whose step is refused.
    """
    joins = [s for s in steps if s.form.rule is not None or (refuse and s.form.refused)]
    renaming = _Renaming([(s, s.form.to_live) for s in steps if s.form.rule is None and not s.form.refused])
    out: dict[str, tuple[str, ...]] = {}
    for name in sorted(names, key=natural_order):
        renamed = renaming.applied(name)
        out[name] = (renamed,)
        for step in joins:
            sub = step.form.to_live
            step_match = _first_match(step, sub, renamed)
            if step_match is None:
                continue
            if step.form.refused:
                raise UsageError(
                    f"cannot map {name} to the module's names: {step.form.refused}", hint="try --names stored"
                )
            before, inner_name, match, _ = step_match
            out[name] = tuple(before + inner_name.replace(match.group(0), put, 1) for put in sub.put)
            break
    return out


def natural_order(name: str) -> list[tuple[int, int] | tuple[int, str, int]]:
    """Return transformers' sorting key of a name: numbers by value."""
    out: list[tuple[int, int] | tuple[int, str, int]] = []
    for part in name.split("."):
        if part.isdecimal():
            out.append((0, int(part)))
            continue
        text = part.rstrip("0123456789")
        out.append((1, text, int(part[len(text) :]) if len(text) < len(part) else -1))
    return out


def wanted_numbers(steps: Iterable[Step]) -> Mapping[str, str]:
    """Return every number in rules of steps, and its place in a config."""
    return {k: v for s in steps for k, v in s.form.numbers.items()}


def _first_match(step: Step, sub: Substitution, name: str) -> tuple[str, str, re.Match[str], int] | None:
    """Return (prefix of the submodule, name inside it, match, number of the pattern)."""
    inside = step.within(name)
    if inside is None:
        return None
    before, inner_name = inside
    match = sub.regex.search(inner_name)
    if match is None:
        return None
    branch = next(k for k, v in match.groupdict().items() if v is not None)
    return before, inner_name, match, int(branch[1:])


def _replacement(sub: Substitution, match: re.Match[str], branch: int) -> str:
    """Return the replacement of a match."""
    put = sub.put[branch if sub.guarded else 0]
    if "\\1" not in put:
        return put
    text = match.group(sub.regex.groupindex[f"g{branch}"] + 1)
    return put.replace("\\1", str(int(text) + sub.shift) if sub.shift else text)


def _hub_name(renaming: _Renaming, name: str) -> str:
    """Return the hub's name of a part, with ``{item}`` for the number of a list.

    Raises:
        UsageError: Where the number decides how it is called.
    """
    if "*" not in name:
        return renaming.applied(name)
    probed_names = [renaming.applied(name.replace("*", probe)) for probe in _PROBES]
    # The place of the number is where all probes differ. A step may have spelled the same digits itself.
    for probe_match in re.finditer(_PROBES[-1], probed_names[-1]):
        form = probed_names[-1][: probe_match.start()] + ITEM + probed_names[-1][probe_match.end() :]
        if all(form.replace(ITEM, p) == c for p, c in zip(_PROBES, probed_names, strict=True)):
            return form
    raise UsageError(
        f"cannot map {name} to the hub's names: they depend on the layer's number", hint="try --names stored"
    )


def _part_names(form: StepForm, parts: Mapping[int, tuple[str, str]]) -> tuple[str, ...]:
    """Return the names of a joined tensor's parts, absent ones too, in the order of the rule."""
    assert form.rule is not None
    texts = [source.partition(" : ")[0] for source in form.rule.source]
    name, matched_text = next(iter(parts.values()))
    return tuple(
        parts[n][0] if n in parts else name.replace(matched_text, text, 1) for n, text in enumerate(texts)
    )
