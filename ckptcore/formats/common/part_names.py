"""Recognise by its name a file that is one part of several: the closed table of series and rank names.

A name with ``N-of-M``, of any width, states how many parts there are. A name of a rank, a shard or a part
numbers them from 0 or 1, and something else must state how many there are (`part_proof`). Sources: split
files of torch and huggingface_hub, Meta's ``consolidated.NN.pth`` (llama-models), torchtune before 0.5
(``hf_model_0001_0.pt``), metaseq and fairseq (``reshard-model_part-0.pt``, ``-shard0.pt``), vLLM
(``model-rank-0-part-0.safetensors``), TensorRT-LLM (``rank0.safetensors``), nanotron
(``_pp-rank-0-of-1_tp-rank-0-of-2``), DeepSpeed, Megatron, GPT-NeoX, Composer, and the scripts of many.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from ckptcore.encodings.limits import absent

_SUFFIX = r"\.(?:safetensors|pt|pth|bin|ckpt|pkl)"
_COUNTED = re.compile(r"(?i)(?<!\d)(?P<number>\d+)[-_.]?of[-_.]?(?P<count>\d+)(?!\d)")
_WORLD = re.compile(r"(?i)world_?size_?(?P<world>\d+)")
# Words before a number that say "one of several"; ``ep`` alone is an epoch in many names, and TP53 a gene.
_RANKED = re.compile(
    r"(?i:(?<![A-Za-z])(?:(?:[tpecd]p|[sm]p)[-_.]?)?rank[-_.]*(?P<rank>\d+)(?!\d))"
    r"|(?<![A-Za-z])(?:tp|pp|mp|dp|gpu)[-_]?(?P<axis>\d+)(?=[-_.])"
    r"|(?i:(?<![A-Za-z])(?:part|shard|chunk|slice|worker|node)[-_]?(?P<part>\d+)(?=[-_.]))"
)
_RANK_WORD = re.compile(r"(?:(?i:rank)|tp|pp|mp|ep|dp|cp|gpu)[-_.]*$")


@dataclass(frozen=True, slots=True)
class _Row:
    """Names of one writer.

    Attributes:
        pattern: Of the whole name; each group is a number.
        first: The lowest number.
        sole: Whether the writer also makes a complete save of the first part alone.
        full: Whether each part holds tensors in full.
    """

    pattern: re.Pattern[str]
    first: int
    sole: bool = False
    full: bool = False


_ROWS = (
    # Composer: without sharding, rank 0 alone saves (composer/checkpoint/save.py); "ep" is its epoch.
    _Row(re.compile(r"^(?:ep\d+-ba\d+|latest)-rank(\d+)\.(?:pt|tar|tgz)(?:\.\w+)?$"), 0, sole=True),
    _Row(re.compile(r"^consolidated[._-](\d+)\.(?:pth|pt|bin|safetensors)$"), 0),
    # torchtune before 0.5: the last number is the epoch. Those of the hub have tensors in full.
    _Row(re.compile(rf"^hf_model_(\d+)_\d+{_SUFFIX}$"), 1, full=True),
    _Row(re.compile(rf"^(?:meta|torchtune)_model_(\d+)_\d+{_SUFFIX}$"), 1),
    _Row(re.compile(r"^layer_\d+-model_(\d+)-model_states\.pt$"), 0),
    _Row(re.compile(r"^layer_(\d+)-model_states\.pt$"), 0),
)


@dataclass(frozen=True, slots=True)
class PartNumber:
    """One number in a name.

    Attributes:
        number: The number.
        count: How many parts there are according to the name, or None.
        first: The lowest number, or None where writers start at 0 or at 1.
        span: Position of the digits in the name.
    """

    number: int
    count: int | None
    first: int | None
    span: tuple[int, int]


@dataclass(frozen=True, slots=True)
class PartName:
    """The name of one part of several.

    Attributes:
        path: The name.
        axes: Its numbers.
        sole: Whether the first part may be the complete save.
        full: Whether each part holds tensors in full though nothing counts them.
    """

    path: str
    axes: tuple[PartNumber, ...]
    sole: bool = False
    full: bool = False

    @property
    def series(self) -> str:
        """Return the name without its numbers, which all parts of a save share."""
        text, end = "", 0
        for axis in self.axes:
            text += self.path[end : axis.span[0]] + "\0"
            end = axis.span[1]
        return text + self.path[end:]

    @property
    def count(self) -> int | None:
        """Return how many parts the name says there are, None if it does not."""
        total = 1
        for axis in self.axes:
            if axis.count is None:
                return None
            total *= axis.count
        return total

    @property
    def is_run(self) -> bool:
        """Return whether the parts hold tensors in full, as counted ones do; those of ranks are slices."""
        if self.full:
            return True
        (*leading, last) = self.axes
        slices = _RANK_WORD.search(self.path[: last.span[0]])
        return not leading and last.count is not None and last.first is None and slices is None

    @property
    def is_first(self) -> bool:
        """Return whether each number is the lowest that it can be."""
        return all(axis.number == (axis.first or 0) for axis in self.axes)

    def sibling(self, number: int, axis: int = 0) -> str:
        """Return the name of the part with another number, padded as this one's."""
        start, end = self.axes[axis].span
        digits = self.path[start:end]
        # "00" has a fixed width; after "0" and "9" comes "10".
        width = len(digits) if digits.startswith("0") and len(digits) > 1 else 0
        return self.path[:start] + str(number).zfill(width) + self.path[end:]

    def neighbours(self) -> tuple[str, ...]:
        """Return the names of parts that exist if there are several: first and adjacent numbers."""
        numbers = {
            (position, n)
            for position, axis in enumerate(self.axes)
            for n in (axis.number - 1, axis.number + 1, 0, 1)
            if n >= (axis.first or 0) and n != axis.number
        }
        return tuple(self.sibling(n, position) for position, n in sorted(numbers))


@lru_cache(maxsize=1 << 14)  # folders of many saves have the same names, and several formats ask
def part_name(path: str) -> PartName | None:
    """Return the numbers of a part's name; None for a name that does not say that there are more.

    >>> [a.count for a in part_name("model-00001-of-000163.safetensors").axes]
    [163]
    >>> part_name("consolidated.00.pth").sibling(1), part_name("hf_model_0001_0.pt").sibling(2)
    ('consolidated.01.pth', 'hf_model_0002_0.pt')
    >>> [part_name(n) for n in ("model-7b.pt", "epoch-3.pt", "step-1000.pt", "pytorch_model_1.bin", "v2.pt")]
    [None, None, None, None, None]
    """
    if "/" in path:
        return None
    for row in _ROWS:
        match = row.pattern.match(path)
        if match:
            return PartName(
                path, (PartNumber(int(match[1]), None, row.first, match.span(1)),), row.sole, row.full
            )
    counted = tuple(
        PartNumber(int(m["number"]), int(m["count"]), None, m.span("number")) for m in _COUNTED.finditer(path)
    )
    spans = {axis.span for axis in counted}
    world = _WORLD.search(path)
    # With one number, a world size in the name is its count.
    ranks = [(m.span(m.lastgroup), int(m[m.lastgroup])) for m in _RANKED.finditer(path) if m.lastgroup]
    ranks = [(span, number) for span, number in ranks if span not in spans]
    count = int(world["world"]) if world and len(ranks) == 1 else None
    named = tuple(PartNumber(number, count, 0, span) for span, number in ranks)
    axes = tuple(sorted((*counted, *named), key=lambda axis: axis.span))
    return PartName(path, axes) if axes else None


def series(paths: Iterable[str]) -> dict[str, tuple[PartName, ...]]:
    """Return the parts among some files, by what their names share; ``N-of-M`` also by M."""
    parts: dict[str, list[PartName]] = {}
    for path in paths:
        part = part_name(path)
        if part is not None:
            parts.setdefault(part.series, []).append(part)
    return {name: tuple(members) for name, members in parts.items()}


def is_run(paths: Iterable[str]) -> bool:
    """Return whether files are parts of one counted series, each once, with tensors in full.

    >>> is_run(["model-1-of-3.bin", "model-3-of-3.bin"]), is_run(["rank0-of-2.bin", "rank1-of-2.bin"])
    (True, False)
    """
    parts = [part_name(path) for path in paths]
    runs = [part for part in parts if part is not None and part.is_run]
    numbers = {part.axes[0].number for part in runs}
    return len({part.series for part in runs}) == 1 and len(numbers) == len(parts)


def absent_parts(parts: Iterable[PartName], limit: int, count: int | None = None) -> tuple[list[str], int]:
    """Return the missing parts of a series with one number: the names of the first ones, and how many.

    Writers of ``N-of-M`` start at 1, few at 0: a part 0 decides. Without a count, only gaps are missing.

    Args:
        parts: Those that exist, at least one.
        limit: Most names to return; the cost depends on it, not on the count.
        count: How many there are, where the names do not state it.

    >>> absent_parts([part_name("m-2-of-3.bin")], 9)
    (['m-1-of-3.bin', 'm-3-of-3.bin'], 2)
    >>> absent_parts([part_name("m-1-of-1000000000.bin")], 1)
    (['m-2-of-1000000000.bin'], 999999999)
    """
    parts = list(parts)
    numbers = {part.axes[0].number for part in parts}
    first_part = parts[0]
    axis = first_part.axes[0]
    first = axis.first if axis.first is not None else int(0 not in numbers)
    count = axis.count if axis.count is not None else count
    stop = count if count is not None else max(numbers) - first + 1
    inside = {n - first for n in numbers if first <= n < first + stop}
    return [first_part.sibling(n + first) for n in absent(inside, stop, limit)], stop - len(inside)
