"""Find layers that lack a tensor which others of their kind have.

This is of its own: formats of two rooms use it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping


def torn_layers(layers: Mapping[int, Collection[str]]) -> Iterator[tuple[int, str]]:
    """Yield (layer, name) of a tensor that a layer lacks: its names are some of those of another layer.

    Layers of two kinds, such as dense ones and those with experts, each have names of their own.

    Args:
        layers: Number -> names of its tensors, behind the number.

    >>> list(torn_layers({0: ["q", "k"], 1: ["q"], 2: ["experts"]}))
    [(1, 'k')]
    """
    kinds = {frozenset(names) for names in layers.values()}
    fuller = {kind: min((k for k in kinds if kind < k), key=sorted, default=kind) for kind in kinds}
    for number, names in sorted(layers.items()):
        lost = fuller[frozenset(names)] - frozenset(names)
        if lost:
            yield number, min(lost)
