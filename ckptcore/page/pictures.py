"""Draw shards, lineage and counts as SVG. Colours are classes of the style sheet: nothing is inline."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from markupsafe import Markup, escape

from ckptcore.catalog.types import CheckpointRow, Lineage
from ckptcore.page.display import plain, size
from ckptcore.page.shards import ShardMap

COLOURS = 12  # classes c0 to c11
MOST_NODES = 200
MOST_ROWS = 200  # of a map of changes
SHADES = 6  # of it, classes m0 to m5
_WIDTH = 640
_THINNEST = 3  # of a column of a map of changes
_NODE, _GAP = (190, 50), (66, 18)
_CHART = (340.0, 150.0)
_PLOT = (70.0, 14.0, 255.0, 100.0)  # left, top, width, height
_MOST_DOTS = 60
_DOT = Markup('<circle class="dot" cx="{:.1f}" cy="{:.1f}" r="3"><title>{}</title></circle>')
_SVG = Markup(
    '<svg class="{}" role="{}" viewBox="0 0 {:.0f} {:.0f}" width="{:.0f}" height="{:.0f}"><title>{}</title>'
)
_RECT = Markup(
    '<rect class="{}" x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}"><title>{}</title></rect>'
)
_LINE = Markup(
    '<path class="edge" d="M{:.0f} {:.0f} C{:.0f} {:.0f} {:.0f} {:.0f} {:.0f} {:.0f}">'
    "<title>{}</title></path>"
)


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a histogram. part: its share of the longest bar, up to 1."""

    label: str
    text: str
    part: float


def shards(shard_map: ShardMap) -> Markup:
    """Return the picture of a tensor's boxes: a colour for each rank, holes and overlaps in red."""
    rows, columns = (shard_map.shape[d] if d >= 0 else 1 for d in shard_map.dims)
    if not rows or not columns:
        return Markup("")
    width = float(_WIDTH)
    height = min(max(width * rows / columns, 60.0), 420.0) if shard_map.dims[0] >= 0 else 60.0
    colour = {owner: n % COLOURS for n, owner in enumerate(shard_map.owners)}
    parts = []
    for cell in shard_map.cells:
        x, y = cell.column / columns * width, cell.row / rows * height
        w, h = max(cell.width / columns * width, 1.0), max(cell.height / rows * height, 1.0)
        kind = "hole" if not cell.times else "overlap" if cell.times > 1 else f"c{colour[cell.owner]}"
        label = (
            "missing"
            if not cell.times
            else f"stored {cell.times} times"
            if cell.times > 1
            else plain(cell.owner)
        )
        ends = cell.row + cell.height, cell.column + cell.width
        span = f"{label}: rows {cell.row} to {ends[0]}, columns {cell.column} to {ends[1]}"
        parts.append(_RECT.format(kind, x, y, w, h, span))
        if w > 7 * min(len(label), 16) and h > 16:
            text = Markup('<text x="{:.2f}" y="{:.2f}">{}</text>')
            parts.append(text.format(x + w / 2, y + h / 2 + 4, label[:16]))
    wrong = f"{shard_map.holes} elements missing, {shard_map.overlaps} stored more than once"
    title = f"{len(shard_map.boxes)} boxes of {plain(shard_map.fqn)}, {wrong}"
    return _svg("shards", _WIDTH, height, title, parts)


def chart(name: str, points: Sequence[tuple[int, float | None]]) -> Markup:
    """Return a metric over steps as a line, with its lowest and highest value; "" without two finite values.

    The line is broken where a value is not finite.
    """
    values = np.array([value for _, value in points], np.float64)  # NaN for None
    finite = values[np.isfinite(values)]
    if finite.size < 2:
        return Markup("")
    low, high = float(finite.min()), float(finite.max())
    first, last = points[0][0], points[-1][0]
    # Halves: the difference of the largest numbers is infinite.
    height = (high / 2 - low / 2) or 1.0
    length = (last - first) or 1

    lines: list[list[str]] = [[]]
    dots = []
    for number in _extremes(values):
        step, value = points[number]
        if value is None or not math.isfinite(value):
            lines.append([])
            continue
        x = _PLOT[0] + (step - first) / length * _PLOT[2]
        y = _PLOT[1] + ((high / 2 - value / 2) / height if high > low else 0.5) * _PLOT[3]
        lines[-1].append(f"{x:.1f},{y:.1f}")
        if len(points) <= _MOST_DOTS or not lines[-1][:-1]:
            dots.append(_DOT.format(x, y, f"step {step}: {value:.6g}"))
    parts = [Markup('<polyline class="line" points="{}"/>').format(" ".join(line)) for line in lines if line]
    label = Markup('<text class="{}" x="{:.0f}" y="{:.0f}">{}</text>')
    bottom = _PLOT[1] + _PLOT[3]
    parts += [
        *dots,
        label.format("value", _PLOT[0] - 6, _PLOT[1] + 4, f"{high:.4g}"),
        label.format("value", _PLOT[0] - 6, bottom + 4, f"{low:.4g}"),
        label.format("step", _PLOT[0], bottom + 22, f"step {first}"),
        label.format("step last", _PLOT[0] + _PLOT[2], bottom + 22, last),
    ]
    title = f"{plain(name)} over steps {first} to {last}: from {low:.6g} to {high:.6g}"
    return _svg("chart", _CHART[0], _CHART[1], title, parts)


def _extremes(values: npt.NDArray[np.float64]) -> list[int]:
    """Return the places of points that differ on a screen: of a few pixels the outermost, and a gap."""
    share = -(-len(values) // int(_PLOT[2] / 2))
    if share <= 2:
        return list(range(len(values)))
    starts = np.arange(0, len(values), share)
    table = np.full((len(starts), share), np.nan)
    table.reshape(-1)[: len(values)] = values
    finite = np.isfinite(table)
    gaps = ~finite
    gaps.reshape(-1)[len(values) :] = False
    lowest = starts + np.where(finite, table, np.inf).argmin(axis=1)
    highest = starts + share - 1 - np.where(finite, table, -np.inf)[:, ::-1].argmax(axis=1)
    has_line = finite.any(axis=1)
    first_gaps = (starts + gaps.argmax(axis=1))[gaps.any(axis=1)]
    ends = [0, len(values) - 1]
    outermost = np.concatenate([lowest[has_line], highest[has_line], first_gaps, ends])
    places: list[int] = np.unique(outermost).tolist()
    return places


def change_map(
    steps: Sequence[int], rows: Mapping[str, Sequence[float | None]], alarmed: Collection[int]
) -> Markup:
    """Return how far each part moved to each step: rows are parts, columns are steps, darker is more.

    Where there are more steps than columns fit, several steps share one, which has their largest change.

    Args:
        steps: The steps, the lowest first.
        rows: Part -> its relative change at each step, None where it is not known.
        alarmed: Steps with an alarm; their columns are marked.
    """
    if len(steps) < 2 or not rows:
        return Markup("")
    left, top, cell = 92.0, 16.0, 16.0
    share = -(-len(steps) // int((_WIDTH - left) / _THINNEST))  # steps of a column
    starts = range(0, len(steps), share)
    width = (_WIDTH - left) / len(starts)
    spans = [steps[start : start + share] for start in starts]
    spelled = [f"{span[0]:d}" if len(span) == 1 else f"{span[0]:d} to {span[-1]:d}" for span in spans]
    across = [f'x="{left + column * width:.2f}"' for column in range(len(starts))]
    drawn = list(rows.items())[:MOST_ROWS]
    is_number = np.array([[value is not None for value in row] for _, row in drawn], np.bool_)
    changes = np.where(is_number, np.array([row for _, row in drawn], np.float64), -np.inf)
    largest = np.maximum.reduceat(changes, list(starts), axis=1)  # NaN where there is one
    shades = _shades(largest, changes[changes > 0])
    is_known = np.logical_or.reduceat(is_number, list(starts), axis=1)
    parts = []
    label = Markup('<text class="{}" x="{:.1f}" y="{:.1f}">{}</text>')
    for number, (name, _) in enumerate(drawn):
        y = top + number * cell
        parts.append(label.format("value", left - 6, y + 12, plain(name)[:14]))
        # There are tens of thousands of cells: the name is escaped once, and the rest of a cell is numbers.
        label_of_row = escape(f"{plain(name)}, step ")
        place = f'y="{y:.2f}" width="{width:.2f}" height="{cell - 1:.2f}"'
        columns = zip(shades[number].tolist(), largest[number].tolist(), across, spelled, strict=True)
        cells = [
            f'<rect class="m{shade}" {x} {place}><title>{label_of_row}{step}: {change:.3g}</title></rect>'
            for shade, change, x, step in itertools.compress(columns, is_known[number].tolist())
        ]
        parts.append(Markup("".join(cells)))
    bottom = top + min(len(rows), MOST_ROWS) * cell
    for column, span in enumerate(spans):
        for step in filter(alarmed.__contains__, span):
            x = left + column * width
            parts.append(_RECT.format("alarm", x, 3, width, 8, f"step {step} has an alarm"))
    parts += [
        label.format("step", left, bottom + 16, f"step {steps[0]}"),
        label.format("step last", _WIDTH, bottom + 16, steps[-1]),
    ]
    title = f"relative change of {len(rows)} parts over steps {steps[0]} to {steps[-1]}"
    return _svg("changes", _WIDTH + 2, bottom + 24, title, parts)


def _shades(changes: npt.NDArray[np.float64], scale: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return the shades of changes, 0 to `SHADES` - 1, by their logarithms among those of a scale."""
    logarithms = np.log(scale[np.isfinite(scale)])
    low, high = logarithms.min(initial=np.inf), logarithms.max(initial=-np.inf)
    shades = np.full(changes.shape, SHADES - 1)
    between = (changes > 0) & np.isfinite(changes)
    if high > low:
        shades[between] = 1 + np.rint((np.log(changes[between]) - low) / (high - low) * (SHADES - 2))
    shades[changes <= 0] = 0
    return shades


def lineage(graph: Lineage, link: Callable[[CheckpointRow], str]) -> Markup:
    """Return the graph of everything a checkpoint was made from and that was made from it."""
    steps = [*graph.ancestors, *graph.descendants]
    nodes = {graph.checkpoint.id: graph.checkpoint}
    edges: dict[tuple[str, str], str] = {}
    for step in steps:
        for end in (step.source, step.derived):
            # Edges to nodes that no longer fit are dropped below.
            if len(nodes) < MOST_NODES:
                nodes.setdefault(end.id, end)
        if step.source.id != step.derived.id:
            edges[step.source.id, step.derived.id] = step.conversion.made_for
    edges = {k: v for k, v in edges.items() if k[0] in nodes and k[1] in nodes}
    layer = _layers(list(nodes), list(edges))
    places: dict[str, tuple[int, int]] = {}
    filled: dict[int, int] = {}
    for name in sorted(nodes, key=lambda n: (layer[n], nodes[n].created_at, n)):
        column = layer[name]
        row = filled[column] = filled.get(column, -1) + 1
        places[name] = (column * (_NODE[0] + _GAP[0] * 2) + 2, row * (_NODE[1] + _GAP[1]) + 2)
    parts = [_edge(places[a], places[b], verb) for (a, b), verb in edges.items()]
    # After all edges: none of them crosses a label out.
    parts += [_verb(places[b], verb) for (_, b), verb in edges.items()]
    parts += [_node(nodes[name], places[name], name == graph.checkpoint.id, link) for name in nodes]
    width = max(x for x, _ in places.values()) + _NODE[0] + 4
    height = max(y for _, y in places.values()) + _NODE[1] + 4
    title = f"lineage: {len(nodes)} checkpoints, {len(edges)} conversions"
    return _svg("lineage", width, height, title, parts, "group")


def bars(rows: Sequence[tuple[str, int, int]]) -> list[Bar]:
    """Return bars by bytes. rows: (label, tensors, bytes)."""
    most = max((nbytes for _, _, nbytes in rows), default=0) or 1
    return [
        Bar(plain(label), f"{number:,} tensors, {size(nbytes)}", nbytes / most)
        for label, number, nbytes in rows
    ]


def bar(part: float, label: str) -> Markup:
    """Return one bar."""
    rect = Markup('<rect class="bar" x="0" y="2" width="{:.2f}" height="12"></rect>').format(
        max(part * 200, 1.0)
    )
    return _svg("histogram", 200, 16, label, [rect])


def _svg(
    kind: str, width: float, height: float, title: str, parts: Sequence[Markup], role: str = "img"
) -> Markup:
    head = _SVG.format(kind, role, width, height, width, height, title)
    return head + Markup("").join(parts) + Markup("</svg>")


def _layers(nodes: Sequence[str], edges: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Return how many conversions each node is behind the furthest source. Loops end."""
    layer = dict.fromkeys(nodes, 0)
    for _ in range(min(len(nodes), 64)):
        moved = False
        for before, after in edges:
            if layer[after] < layer[before] + 1 <= len(nodes):
                layer[after] = layer[before] + 1
                moved = True
        if not moved:
            break
    used = {depth: n for n, depth in enumerate(sorted(set(layer.values())))}
    return {name: used[depth] for name, depth in layer.items()}


def _edge(start: tuple[int, int], end: tuple[int, int], verb: str) -> Markup:
    x1, y1 = start[0] + _NODE[0], start[1] + _NODE[1] / 2
    x2, y2 = end[0], end[1] + _NODE[1] / 2
    middle = (x1 + x2) / 2
    return _LINE.format(x1, y1, middle, y1, middle, y2, x2, y2, plain(verb))


def _verb(end: tuple[int, int], verb: str) -> Markup:
    """Return the label of an edge, at its end: there the edges of one source are apart."""
    text = Markup('<text class="verb" x="{:.0f}" y="{:.0f}">{}</text>')
    return text.format(end[0] - 8, end[1] + _NODE[1] / 2 - 5, plain(verb)[:20])


def _node(
    row: CheckpointRow, place: tuple[int, int], is_current: bool, link: Callable[[CheckpointRow], str]
) -> Markup:
    x, y = place
    title = f"{plain(row.uri)}, {row.state}"
    first = f"{plain(row.format)[:14]}{'' if row.step is None else f', step {row.step}'}"
    second = f"…{plain(row.uri)[-24:]}" if len(row.uri) > 25 else plain(row.uri)
    classes = f"node {row.kind} {row.state}{' here' if is_current else ''}"
    return Markup(
        '<a href="{}"{}><rect class="{}" x="{}" y="{}" width="{}" height="{}" rx="6"><title>{}</title></rect>'
        '<text class="name" x="{}" y="{}">{}</text><text class="place" x="{}" y="{}">{}</text></a>'
    ).format(
        link(row),
        Markup(' aria-current="true"') if is_current else "",
        classes,
        x,
        y,
        _NODE[0],
        _NODE[1],
        title,
        x + 10,
        y + 20,
        first,
        x + 10,
        y + 38,
        second,
    )
