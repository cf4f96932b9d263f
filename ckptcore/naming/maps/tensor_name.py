"""Names of tensors with indices in them: ``decoder.layers.{layer}.mlp.linear_fc1.weight``.

```
{layer}            a number: an index on the axis ``layer``
{layer + first}    the same, counted from another number: arithmetic (`sizes`) follows the axis
{kind:weight|bias} one of some texts, the same in every name of a rule
{path:*}           any text of at least one character, the same in every name of a rule
```

Thousands of names are a few *templates*: what is left of them when numbers are taken out. Names are matched
by template, and their numbers are columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from ckptcore.core.manifest import Ints
from ckptcore.naming.maps.sizes import names_in, value_of

SLOT = "\0"  # where a number is in a template
# As `%d` writes it, so without leading zeros, and short enough for int64.
NUMBER = re.compile(r"(?<![0-9])(?:0|[1-9][0-9]{0,8})(?![0-9])")
_FIELD = re.compile(r"\{([^{}]*)\}")
_AXIS = re.compile(r"\s*([A-Za-z_][A-Za-z_0-9]*)\s*(?:([+-].*))?")
_TEXT = re.compile(r"([A-Za-z_][A-Za-z_0-9]*):(.+)")


@dataclass(frozen=True)
class Index:
    """A number of a name that is an index on an axis. shift: expression that is added to it, or ""."""

    axis: str
    shift: str = ""

    def shifted(self, numbers: Mapping[str, int]) -> int:
        """Return the shift; raise `UnknownNumber`, `ValueError`."""
        return int(value_of("0" + self.shift, numbers)) if self.shift else 0


@dataclass(frozen=True)
class Wild:
    """A part of a name that may be any text."""

    label: str


Part = str | Index | Wild


@dataclass(frozen=True)
class Templates:
    """Names by template.

    Attributes:
        rows: Template -> int64 [n], positions of its names.
        numbers: Template -> int64 [n, k], their numbers.
    """

    rows: Mapping[str, Ints]
    numbers: Mapping[str, Ints]

    @classmethod
    def of(cls, names: Iterable[str]) -> Templates:
        """Return the templates of names."""
        rows: dict[str, list[int]] = {}
        numbers: dict[str, list[list[str]]] = {}
        for row, name in enumerate(names):
            if SLOT in name:  # no pattern has it: no rule is for such a name
                continue
            template = NUMBER.sub(SLOT, name)
            rows.setdefault(template, []).append(row)
            numbers.setdefault(template, []).append(NUMBER.findall(name))
        return cls(
            {t: np.array(r, np.int64) for t, r in rows.items()},
            {t: np.array(v, np.int64).reshape(len(v), -1) for t, v in numbers.items()},
        )


@dataclass(frozen=True)
class NameMatch:
    """Names that fit a pattern.

    Attributes:
        rows: int64 [n], positions.
        index: Axis -> int64 [n], the number in the name; what the pattern adds is still in it.
        wild: Label -> the text as a template.
        inside: Label -> int64 [n, m], the numbers in that text.
    """

    rows: Ints
    index: Mapping[str, Ints]
    wild: Mapping[str, str]
    inside: Mapping[str, Ints]


@dataclass(frozen=True)
class TensorName:
    """A pattern without choices: texts, indices and wild parts."""

    parts: tuple[Part, ...]

    @cached_property
    def indices(self) -> tuple[Index, ...]:
        """Its indices, in order."""
        return tuple(p for p in self.parts if isinstance(p, Index))

    @cached_property
    def wild(self) -> tuple[str, ...]:
        """The labels of its wild parts, in order."""
        return tuple(p.label for p in self.parts if isinstance(p, Wild))

    def __str__(self) -> str:
        return "".join(
            p
            if isinstance(p, str)
            else "{" + (f"{p.axis}{p.shift}" if isinstance(p, Index) else f"{p.label}:*") + "}"
            for p in self.parts
        )

    def fits(self, template: str) -> bool:
        """Return whether names of a template may fit, for any numbers."""
        return self._regex.fullmatch(template) is not None

    def match(self, templates: Templates) -> list[NameMatch]:
        """Return the names that fit, template by template."""
        if not self.wild:
            name_match = self._of(self.template, templates, {})
            return [name_match] if name_match is not None else []
        out = []
        for template in templates.rows:
            texts = self._regex.fullmatch(template)
            name_match = self._of(template, templates, texts.groupdict()) if texts is not None else None
            if name_match is not None:
                out.append(name_match)
        return out

    def spell(
        self, index: Mapping[str, Ints], wild: Mapping[str, str], inside: Mapping[str, Ints], count: int
    ) -> list[str]:
        """Return the names of ``count`` rows of numbers."""
        form: list[str] = []
        columns: list[list[int]] = []
        for part in self.parts:
            if isinstance(part, str):
                form.append(part.replace("%", "%%"))
            elif isinstance(part, Index):
                form.append("%d")
                columns.append(index[part.axis].tolist())
            else:
                form.append(wild[part.label].replace("%", "%%").replace(SLOT, "%d"))
                columns += [c.tolist() for c in inside[part.label].T]
        text = "".join(form)
        if not columns:
            return [text % ()] * count
        return [text % values for values in zip(*columns, strict=True)]

    @cached_property
    def template(self) -> str:
        """The template of its names, where it has no wild parts."""
        return "".join(NUMBER.sub(SLOT, p) if isinstance(p, str) else SLOT for p in self.parts)

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        labels: set[str] = set()
        form = []
        for part in self.parts:
            if isinstance(part, str):
                form.append(re.escape(NUMBER.sub(SLOT, part)))
            elif isinstance(part, Index):
                form.append(re.escape(SLOT))
            else:
                form.append(f"(?P={part.label})" if part.label in labels else f"(?P<{part.label}>.+)")
                labels.add(part.label)
        return re.compile("".join(form), re.DOTALL)

    def _of(self, template: str, templates: Templates, texts: Mapping[str, str]) -> NameMatch | None:
        """Return the numbers of a template that fit, or None."""
        rows = templates.rows.get(template)
        if rows is None:
            return None
        numbers = templates.numbers[template]
        keep = np.ones(len(rows), np.bool_)
        column = 0
        index: dict[str, Ints] = {}
        inside: dict[str, Ints] = {}
        for part in self.parts:
            if isinstance(part, str):
                for digits in NUMBER.findall(part):
                    keep &= numbers[:, column] == int(digits)
                    column += 1
            elif isinstance(part, Index):
                if part.axis in index:
                    keep &= numbers[:, column] == index[part.axis]
                index[part.axis] = numbers[:, column]
                column += 1
            else:
                count = texts[part.label].count(SLOT)
                digits_of_text = numbers[:, column : column + count]
                if part.label in inside:
                    keep &= (digits_of_text == inside[part.label]).all(axis=1)
                inside[part.label] = digits_of_text
                column += count
        if not keep.any():
            return None
        chosen = np.flatnonzero(keep)
        return NameMatch(
            rows[chosen],
            {a: v[chosen] for a, v in index.items()},
            dict(texts),
            {t: v[chosen] for t, v in inside.items()},
        )


def parse_name(text: str) -> list[tuple[TensorName, dict[str, str]]]:
    """Parse a pattern of names: one for every choice of texts, with the chosen texts.

    Raises:
        ValueError: For a field that is none.

    >>> [(str(n), c) for n, c in parse_name("layers.{i}.q.{p:weight|bias}")]
    [('layers.{i}.q.weight', {'p': 'weight'}), ('layers.{i}.q.bias', {'p': 'bias'})]
    """
    parts: list[Part | tuple[str, Sequence[str]]] = []
    end = 0
    for field in _FIELD.finditer(text):
        parts.append(text[end : field.start()])
        parts.append(_field(field[1], text))
        end = field.end()
    parts.append(text[end:])
    if any(isinstance(p, str) and ("{" in p or "}" in p) for p in parts):
        raise ValueError(f"{text!r}: a brace is not closed")
    choices = {p[0]: p[1] for p in parts if isinstance(p, tuple)}
    out = []
    for picked in product(*choices.values()):
        chosen = dict(zip(choices, picked, strict=True))
        joined: list[Part] = []
        for p in parts:
            part = chosen[p[0]] if isinstance(p, tuple) else p
            if isinstance(part, str) and joined and isinstance(joined[-1], str):
                joined[-1] += part
            elif part != "":
                joined.append(part)
        out.append((TensorName(tuple(joined)), chosen))
    return out


def _field(text: str, of: str) -> Part | tuple[str, Sequence[str]]:
    labelled = _TEXT.fullmatch(text)
    if labelled is not None:
        label, form = labelled.groups()
        return Wild(label) if form == "*" else (label, form.split("|"))
    match = _AXIS.fullmatch(text)
    if match is None:
        raise ValueError(f"{of!r}: {{{text}}} is neither an index nor a choice")
    shift = (match[2] or "").replace(" ", "")
    if shift:
        names_in("0" + shift)
    return Index(match[1], shift)
