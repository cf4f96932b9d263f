"""Layouts: the dims of a tensor as products and sums of named axes.

```
(kv_heads (q + k + v) head_dim) h      two dims; the first is groups of heads, in each q, then k, then v
(heads pairs two) h                    rotary pairs beside each other
experts ((gate + up) ffn) h            gate above up, per expert
...                                    all other dims as they are
1                                      a dim of one element
```

Axes beside each other in parentheses are one dim, the last runs fastest; ``+`` puts parts behind each other.
Choosing one part of every sum gives a *block*: the elements that have an index on each of its axes. Two
tensors that hold blocks of the same axes hold the same elements, wherever their layouts put them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product

_TOKEN = re.compile(r"\s*([A-Za-z_][A-Za-z_0-9]*|\.\.\.|[()+1])")
ELLIPSIS = "..."


@dataclass(frozen=True)
class Axis:
    """One axis; ``1`` is a dim of one element that is part of no block."""

    name: str


@dataclass(frozen=True)
class Product:
    """Factors of one dim, the last runs fastest."""

    factors: tuple[Node, ...]


@dataclass(frozen=True)
class Sum:
    """Parts of one dim, behind each other."""

    parts: tuple[Node, ...]


Node = Axis | Product | Sum
UNIT = Axis("1")


@dataclass(frozen=True)
class AxisLayout:
    """The dims of a tensor."""

    dims: tuple[Node, ...]

    @cached_property
    def axes(self) -> frozenset[str]:
        """Every axis that is named; not the ellipsis, and not ``1``."""
        return frozenset(a for d in self.dims for a in _axes(d)) - {ELLIPSIS, "1"}

    @property
    def open(self) -> bool:
        """Whether it has an ellipsis."""
        return Axis(ELLIPSIS) in self.dims

    @cached_property
    def blocks(self) -> tuple[frozenset[str], ...]:
        """The axes of every block, in the order of the tensor's elements."""
        choices = [list(axes_of(d)) for d in self.dims]
        return tuple(frozenset().union(*choice) - {"1"} for choice in product(*choices))

    def closed(self, rank: int) -> AxisLayout | None:
        """Replace the ellipsis, for a tensor of ``rank`` dims; None for too few dims."""
        if not self.open:
            return self if len(self.dims) == rank else None
        count = rank - len(self.dims) + 1
        if count < 0:
            return None
        ellipsis_dim = self.dims.index(Axis(ELLIPSIS))
        return AxisLayout((*self.dims[:ellipsis_dim], *self.tail(count), *self.dims[ellipsis_dim + 1 :]))

    def filled(self, count: int) -> AxisLayout:
        """Replace the ellipsis by ``count`` dims."""
        layout = self.closed(len(self.dims) - 1 + count) if self.open else self
        assert layout is not None  # the count is not negative
        return layout

    @staticmethod
    def tail(count: int) -> tuple[Axis, ...]:
        """Return the axes of an ellipsis of ``count`` dims."""
        return tuple(Axis(f"{ELLIPSIS}{n}") for n in range(count))


def parse_layout(text: str) -> AxisLayout:
    """Parse a layout.

    Raises:
        ValueError: The text is not a layout.

    >>> [sorted(b) for b in parse_layout("(g (q + k) d) h").blocks]
    [['d', 'g', 'h', 'q'], ['d', 'g', 'h', 'k']]
    """
    tokens = list(_tokens(text))
    dims: list[Node] = []
    while tokens:
        dims.append(_factor(tokens, text))
    layout = AxisLayout(tuple(dims))
    if sum(d == Axis(ELLIPSIS) for d in dims) > 1 or any(
        ELLIPSIS in _axes(d) for d in dims if d != Axis(ELLIPSIS)
    ):
        raise ValueError(f"{text!r}: an ellipsis must be a dim, once")
    for choice in product(*(list(_occurring(d)) for d in dims)):
        names = [a for part_axes in choice for a in part_axes if a != "1"]
        if len(names) != len(set(names)):
            raise ValueError(f"{text!r}: an axis is named twice")
    if len(set(layout.blocks)) != len(layout.blocks):
        raise ValueError(f"{text!r}: two parts have the same axes")
    return layout


def size_of(node: Node, sizes: Mapping[str, int]) -> int | None:
    """Return the elements of a dim; None if an axis is unknown."""
    if isinstance(node, Axis):
        return 1 if node == UNIT else sizes.get(node.name)
    total = 0 if isinstance(node, Sum) else 1
    for child in node.parts if isinstance(node, Sum) else node.factors:
        size = size_of(child, sizes)
        if size is None:
            return None
        total = total + size if isinstance(node, Sum) else total * size
    return total


def solved(layout: AxisLayout, shape: tuple[int, ...], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the known sizes of axes, and those that follow from a tensor's shape.

    Args:
        layout: Without an ellipsis.
        shape: Elements, of the same rank.
        sizes: Known ones.

    Raises:
        ValueError: A known size does not fit the shape.

    >>> solved(parse_layout("(g (q + k + v) d) h"), (48, 7), {"g": 2, "q": 4, "k": 1, "v": 1})["d"]
    4
    """
    axis_sizes = dict(sizes)
    while True:
        before = len(axis_sizes)
        for node, size in zip(layout.dims, shape, strict=True):
            _solve(node, size, axis_sizes)
        if len(axis_sizes) == before:
            return axis_sizes


def _solve(node: Node, size: int, axis_sizes: dict[str, int]) -> None:
    """Adds the one unknown axis of a dim."""
    if isinstance(node, Axis):
        expected = axis_sizes.setdefault(node.name, size) if node != UNIT else 1
        if expected != size:
            raise ValueError(f"{_node_text(node)} is {expected}, and the tensor has {size}")
        return
    children = node.parts if isinstance(node, Sum) else node.factors
    sizes = [size_of(n, axis_sizes) for n in children]
    unknown = [n for n, s in zip(children, sizes, strict=True) if s is None]
    rest = 0 if isinstance(node, Sum) else 1
    for child_size in sizes:
        if child_size is not None:
            rest = rest + child_size if isinstance(node, Sum) else rest * child_size
    if not unknown:
        if rest != size:
            raise ValueError(f"{_node_text(node)} is {rest}, and the tensor has {size}")
    elif len(unknown) == 1:
        if isinstance(node, Sum):
            if rest > size:
                raise ValueError(f"{_node_text(node)} is at least {rest}, and the tensor has {size}")
            _solve(unknown[0], size - rest, axis_sizes)
        elif rest and size % rest == 0:
            _solve(unknown[0], size // rest, axis_sizes)
        else:
            raise ValueError(f"{_node_text(node)} is a multiple of {rest}, and the tensor has {size}")


def axes_of(node: Node) -> Iterator[frozenset[str]]:
    """Yield the axes of each block of a dim."""
    for axes in _occurring(node):
        yield frozenset(axes)


def _axes(node: Node) -> Iterator[str]:
    if isinstance(node, Axis):
        yield node.name
        return
    for child in node.parts if isinstance(node, Sum) else node.factors:
        yield from _axes(child)


def _occurring(node: Node) -> Iterator[tuple[str, ...]]:
    """Yield the axes of each block of a dim, as often as they are named."""
    if isinstance(node, Axis):
        yield (node.name,)
    elif isinstance(node, Sum):
        for part in node.parts:
            yield from _occurring(part)
    else:
        for choice in product(*(list(_occurring(f)) for f in node.factors)):
            yield tuple(name for axes in choice for name in axes)


def _node_text(node: Node) -> str:
    if isinstance(node, Axis):
        return node.name
    if isinstance(node, Sum):
        return "(" + " + ".join(_node_text(p) for p in node.parts) + ")"
    return "(" + " ".join(_node_text(f) for f in node.factors) + ")"


def _tokens(text: str) -> Iterator[str]:
    position = 0
    while position < len(text.rstrip()):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueError(f"{text!r} is not a layout (at {text[position:]!r})")
        yield match[1]
        position = match.end()


def _factor(tokens: list[str], text: str) -> Node:
    token = tokens.pop(0)
    if token in (")", "+"):
        raise ValueError(f"{text!r} is not a layout: {token} without what it belongs to")
    if token != "(":
        return Axis(token)
    parts: list[Node] = []
    factors: list[Node] = []
    while True:
        if not tokens:
            raise ValueError(f"{text!r} is not a layout: a parenthesis is not closed")
        if tokens[0] in (")", "+"):
            if not factors:
                raise ValueError(f"{text!r} is not a layout: an empty part")
            parts.append(factors[0] if len(factors) == 1 else Product(tuple(factors)))
            factors = []
            if tokens.pop(0) == ")":
                return parts[0] if len(parts) == 1 else Sum(tuple(parts))
        else:
            factors.append(_factor(tokens, text))
