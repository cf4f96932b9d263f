"""Judge the steps of a run by the statistics of their tensors, and record what speaks against them.

A step is compared with the two measured steps before it. Where both have fingerprints the comparison is
exact. By statistics alone, a tensor is the same if the largest value and the number of zeros are, and norm
and mean up to `_CLOSE`. Each alarm has its rule in `RULES`, and nothing else decides.

* ``step-repeated``: the weights are those of another step. Nothing says which of both is right.
* ``frozen-changed``: a weight that both steps know as frozen, or that the run's fact ``frozen`` names, is
  neither what it was at the last step nor at the one before (which it is, if that was the odd one).
* ``trainable-unchanged``: a float32 or float64 weight with optimizer state is what it was, while most others
  moved. Small updates of 16-bit weights vanish in rounding, so these are not judged.
* ``expert-died``: of an expert all weights are zero, or what they were while another one of its layer moved,
  or all first moments are zero while those of another one are not. Experts that are stacked in one tensor
  have no statistics of their own.
* ``not-finite``: a weight or a moment holds NaN or Inf.
* ``norm-jumped``: a weight's norm is ten times, or a tenth of, what it was at both steps before, which differ
  by less than two times from each other (what began at zero grows by more at first).
"""

from __future__ import annotations

import difflib
import itertools
import logging
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckptcore.comparison.result import layer_of, part_of
from ckptcore.comparison.statistics import Changes
from ckptcore.core.columnar_file import Heads
from ckptcore.core.manifest import Manifest
from ckptcore.errors import CatalogError, Finding, UsageError, finding
from ckptcore.fingerprints.statistics import MeasuredTensor
from ckptcore.fingerprints.step_columns import NOTHING, StepColumns, TensorPoint, pack_points, unpack_columns
from ckptcore.naming.moments import state_of
from ckptcore.naming.optimizer_state import FROZEN, STATE, TRAINED, roles_of
from ckptcore.naming.rename import matches
from ckptcore.utils.foreign_text import InvalidText

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog
    from ckptcore.catalog.history import Alarm, MeasuredStep
    from ckptcore.catalog.types import StatisticsRow

_log = logging.getLogger("ckptcore")
BEFORE = 2  # steps that a step is compared with
_BLOCK = 1 << 20  # numbers of a table that are in memory at once
_CLOSE = 1e-6  # relative: more than other boxes of a tensor change its sums, which are partly of float32
_JUMP, _SETTLED = 10.0, 2.0
_EXPERT = re.compile(r"(.*?experts?[._/])(\d{1,9})([._/].*)")
_FIRST_MOMENTS = frozenset({"exp_avg", "momentum_buffer", "m"})
_UNROUNDED = frozenset({"float32", "float64"})
_MOST = 100  # alarms of one code that are recorded of a step


@dataclass(frozen=True)
class JudgedStep:
    """A step while it is judged.

    Attributes:
        step: The step.
        points: FQN -> its tensors.
        prints: FQN -> fingerprint, where it is known.
    """

    step: int | None
    points: Mapping[str, TensorPoint]
    prints: Mapping[str, str] = field(default_factory=dict)

    def has_same(self, fqn: str, step: JudgedStep) -> bool:
        """Report whether another step has the same values of a tensor, which both have."""
        mine, theirs = self.prints.get(fqn), step.prints.get(fqn)
        # Fingerprints are exact where both have one; measured steps of old versions have statistics alone.
        if mine is not None and theirs is not None:
            return mine == theirs
        return _is_close(self.points[fqn], step.points[fqn])


@dataclass(frozen=True)
class Series:
    """A step, and what it is judged by.

    Attributes:
        this: The step.
        before: The measured steps before it, nearest first.
        equals: Other steps whose weights are the same.
        frozen_globs: What the run's facts name as frozen.
    """

    this: JudgedStep
    before: Sequence[JudgedStep] = ()
    equals: Sequence[int] = ()
    frozen_globs: Sequence[str] = ()

    def is_frozen(self, fqn: str) -> bool:
        """Report whether a tensor is known to be frozen at this step and at the last one."""
        # A run's own statement counts, even where the stored roles differ: an
        # optimizer may have states of a frozen weight.
        if self.frozen_globs and matches(fqn, self.frozen_globs):
            return True
        return all(judged.points[fqn].role == FROZEN for judged in (self.this, *self.before[:1]))

    def shared(self) -> Iterator[TensorPoint]:
        """Yield the tensors that the last step has in the same size."""
        if self.before:
            last = self.before[0].points
            for fqn, point in self.this.points.items():
                if fqn in last and last[fqn].numel == point.numel:
                    yield point


def judge(series: Series) -> list[Finding]:
    """Return the alarms about a step."""
    return [alarm for rule in RULES for alarm in _first(rule(series))]


def _first(alarms: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the first alarms of a rule; the last one says how many more there are."""
    # A step that broke altogether has an alarm for each tensor: the
    # number is enough, and the rows are bounded.
    listed = list(alarms)
    yield from listed[:_MOST]
    if len(listed) > _MOST:
        code = listed[0].code
        yield _alarm(code, f"{len(listed) - _MOST} more tensors have this alarm ({code})")


def _alarm(code: str, message: str, fqn: str | None = None) -> Finding:
    return finding(code, "history", message, fqn=fqn)


def _repeated(series: Series) -> Iterator[Finding]:
    if series.equals:
        steps = ", ".join(map(str, series.equals))
        yield _alarm("step-repeated", f"its weights are those of step {steps}")


def _not_finite(series: Series) -> Iterator[Finding]:
    points = series.this.points.values()
    # Roles are only known where the optimizer was stored; without any, every weight counts.
    knows_roles = any(point.role == TRAINED for point in points)
    for point in points:
        counted = point.role in (TRAINED, FROZEN) if knows_roles else point.role != STATE
        if (point.nan or point.inf) and (counted or state_of(point.fqn) is not None):
            text = f"{point.fqn}: {point.nan} NaN and {point.inf} Inf of {point.numel} elements"
            yield _alarm("not-finite", text, point.fqn)


def _frozen_changed(series: Series) -> Iterator[Finding]:
    for point in series.shared():
        if point.role == STATE or not series.is_frozen(point.fqn):
            continue
        # Both steps before, since the last one may be the odd one:
        # then this step is back at the frozen values.
        earlier = [judged for judged in series.before if point.fqn in judged.points]
        if not any(series.this.has_same(point.fqn, judged) for judged in earlier):
            text = f"{point.fqn} is frozen, and is not what it was at step {series.before[0].step}"
            yield _alarm("frozen-changed", text, point.fqn)


def _trainable_unchanged(series: Series) -> Iterator[Finding]:
    trained = [
        point
        for point in series.shared()
        if point.role == TRAINED and series.before[0].points[point.fqn].role == TRAINED
        if not matches(point.fqn, series.frozen_globs)
    ]
    same = [point for point in trained if series.this.has_same(point.fqn, series.before[0])]
    if 2 * len(same) > len(trained):
        return  # nothing was trained between the two: a learning rate of zero, or a step that is repeated
    for point in same:
        if point.dtype in _UNROUNDED and _EXPERT.fullmatch(point.fqn) is None:
            text = f"{point.fqn} has optimizer state, and is what it was at step {series.before[0].step}"
            yield _alarm("trainable-unchanged", text, point.fqn)


def _dead_experts(series: Series) -> Iterator[Finding]:
    """Yield an alarm for each expert that is zero, or that stopped while others of its layer learn."""
    weights: dict[str, dict[str, list[TensorPoint]]] = defaultdict(lambda: defaultdict(list))
    # Alarms of an expert compare it with the others of its layer, so both tables are by layer first.
    first_moments: dict[str, dict[str, list[TensorPoint]]] = defaultdict(lambda: defaultdict(list))
    for point in series.this.points.values():
        state = state_of(point.fqn) if point.role == STATE else None
        is_first_moment = state is not None and state.key in _FIRST_MOMENTS
        match = _EXPERT.fullmatch(state.parameter if is_first_moment and state is not None else point.fqn)
        if match is not None and (is_first_moment or point.role != STATE):
            (first_moments if is_first_moment else weights)[match[1]][match[2]].append(point)
    shared = {point.fqn for point in series.shared()}
    for layer, experts in weights.items():
        changed = {
            number: any(
                point.fqn in shared and not series.this.has_same(point.fqn, series.before[0])
                for point in points
            )
            for number, points in experts.items()
        }
        learning = {
            number: any(point.norm or point.nan for point in points)
            for number, points in first_moments.get(layer, {}).items()
        }
        for number, points in sorted(experts.items(), key=lambda item: int(item[0])):
            # A new layer has nothing to be compared with.
            comparable = all(point.fqn in shared for point in points)
            if not any(point.norm or point.nan or point.inf for point in points):
                reason = "all its weights are zero"
            elif comparable and not changed[number] and any(changed.values()):
                # If none of the layer changed, the layer was not trained: a matter for another rule.
                reason = f"its weights are those of step {series.before[0].step}, and others moved"
            elif not learning.get(number, True) and any(learning.values()):
                reason = "its first moments are zero, and those of others are not"
            else:
                continue
            yield _alarm("expert-died", f"{layer}{number}: {reason}", f"{layer}{number}")


def _norm_jumped(series: Series) -> Iterator[Finding]:
    # Two steps are needed to know that a norm is settled.
    if len(series.before) < BEFORE:
        return
    last, second = (judged.points for judged in series.before[:BEFORE])
    for point in series.shared():
        # The norm of a single element is its value, which may well pass zero.
        if point.role == STATE or point.numel < 2 or point.fqn not in second:
            continue
        norms = last[point.fqn].norm, second[point.fqn].norm
        # A norm that still doubles from step to step tells nothing by a jump.
        if min(norms) <= 0 or max(norms) > _SETTLED * min(norms):
            continue
        if point.norm >= _JUMP * max(norms) or point.norm <= min(norms) / _JUMP:
            text = f"{point.fqn}: its norm is {point.norm:.3g}, and was {norms[0]:.3g}"
            yield _alarm("norm-jumped", f"{text} at step {series.before[0].step}", point.fqn)


RULES: tuple[Callable[[Series], Iterator[Finding]], ...] = (
    _repeated,
    _not_finite,
    _frozen_changed,
    _trainable_unchanged,
    _dead_experts,
    _norm_jumped,
)


def statistics_row(
    manifest: Manifest,
    measured: Iterable[MeasuredTensor],
    changes: Changes | None = None,
    against: str | None = None,
) -> StatisticsRow | None:
    """Return what the catalog records of measured tensors; None if there are none.

    Args:
        manifest: The checkpoint, whose names tell the roles of the tensors.
        measured: Its tensors, by their stored names.
        changes: What changed since another step.
        against: Public id of that step.
    """
    from ckptcore.catalog.types import StatisticsRow

    roles = roles_of(manifest)
    changed = {change.fqn: change for change in changes.tensors} if changes is not None else {}
    points = []
    for fqn, dtype, _, statistics in measured:
        change = changed.get(fqn)
        # NaN for a change that was not measured: the columns have no other absent value.
        numbers = (math.nan, math.nan)
        if change is not None:
            numbers = change.relative, math.nan if change.cosine is None else change.cosine
        counts = statistics.nan, statistics.inf, statistics.zeros
        points.append(
            TensorPoint(
                fqn,
                dtype,
                roles[fqn],
                statistics.numel,
                statistics.norm,
                statistics.mean,
                statistics.absmax,
                *counts,
                *numbers,
            )
        )
    if not points:
        return None
    weights = [point for point in points if point.role != STATE]
    compared = [changed[point.fqn] for point in weights if point.fqn in changed]
    length = math.hypot(*(change.before.norm for change in compared))
    # Of all weights together, as the norm of one long vector: a tensor
    # that was not compared adds to neither side.
    relative = math.hypot(*(change.norm for change in compared)) / length if length else None
    return StatisticsRow(
        pack_points(points),
        len(points),
        _finite(math.hypot(*(point.norm for point in weights))),
        _finite(max((point.absmax for point in weights), default=0.0)),
        sum(point.nan for point in points),
        sum(point.inf for point in points),
        sum(point.zeros for point in weights),
        None if relative is None else _finite(relative),
        against,
    )


def settle(catalog: Catalog, ref: str) -> list[Finding]:
    """Judge a measured step, and those that are judged by it; record their alarms.

    Args:
        catalog: The catalog.
        ref: The step: its id or place.

    Returns:
        The alarms about the step; none if it was not measured.

    Raises:
        CatalogError: The catalog's statistics of the step are damaged. Those of another step that are damaged
            count as not measured, with a warning.
    """
    from ckptcore.catalog import history
    from ckptcore.catalog.database import clock

    # One transaction: a step that is measured meanwhile is judged after this one, with its statistics.
    with catalog.writing() as conn:
        step = history.at(conn, ref)
        if step is None:
            return []
        # A row is unpacked once, though it is a neighbour of several steps.
        loaded: dict[str, JudgedStep | None] = {}

        def judged(rows: Sequence[MeasuredStep]) -> list[JudgedStep]:
            for row in rows:
                if row.checkpoint not in loaded:
                    columns = _tensors(row)
                    loaded[row.checkpoint] = columns and JudgedStep(
                        row.step,
                        {point.fqn: point for point in columns.points()},
                        history.prints(conn, row.checkpoint),
                    )
            return [unpacked for row in rows if (unpacked := loaded[row.checkpoint]) is not None]

        if not judged([step]):
            raise CatalogError(
                f"the catalog's statistics of {step.uri} are damaged",
                hint=f"`ckptcore stats {step.uri}` measures it again",
            )
        globs = history.frozen_globs(conn, step.run) if step.run is not None else ()
        behind = history.beside(conn, step, BEFORE)[1]
        twins = history.like(conn, step)
        alarms: list[Finding] = []
        # Steps behind are judged again, because this one is now what they are
        # compared with; twins, because they repeat it.
        for measured in (step, *behind, *twins):
            before = judged(history.beside(conn, measured, BEFORE)[0])
            for this in judged([measured]):
                similar = judged(history.like(conn, measured))
                equals = {o.step for o in similar if o.step is not None and _have_same_weights(this, o)}
                raised = judge(Series(this, before, sorted(equals), globs))
                history.settle_alarms(conn, clock(conn), measured.checkpoint, raised)
                if measured is step:
                    alarms = raised
    return alarms


def _tensors(step: MeasuredStep, heads: Heads | None = None) -> StepColumns | None:
    """Return the tensors of a step; None, with a warning, if the catalog's statistics are damaged."""
    try:
        return unpack_columns(step.statistics.columns, step.statistics.tensors, heads)
    except InvalidText as error:
        text = "the catalog's statistics of %s are damaged (%s); `ckptcore stats` measures it again"
        _log.warning(text, step.uri, error)
        return None


def _have_same_weights(first: JudgedStep, second: JudgedStep) -> bool:
    """Report whether two steps have the same weights, but for those that are frozen."""
    # Frozen weights are equal in all steps of a run, and so they prove no repetition.
    names = {fqn for fqn, point in first.points.items() if point.role not in (STATE, FROZEN)}
    theirs = {fqn for fqn, point in second.points.items() if point.role not in (STATE, FROZEN)}
    return bool(names) and names == theirs and all(first.has_same(fqn, second) for fqn in names)


def _is_close(first: TensorPoint, second: TensorPoint) -> bool:
    # Counts first: they are exact, and differ in most pairs of steps.
    if (first.numel, first.nan, first.inf, first.zeros) != (
        second.numel,
        second.nan,
        second.inf,
        second.zeros,
    ):
        return False
    if first.absmax != second.absmax:
        return False
    scale = max(first.rms, second.rms)
    return (
        math.isclose(first.norm, second.norm, rel_tol=_CLOSE)
        and abs(first.mean - second.mean) <= _CLOSE * scale
    )


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


@dataclass(frozen=True)
class RunHistory:
    """The measured steps of a run.

    Attributes:
        run: Its name.
        steps: The steps, the lowest first.
        alarms: Open alarms, by step.
        tensors: Of each step.
        damaged: Numbers of the steps whose tensors the catalog cannot read any more.
    """

    run: str
    steps: Sequence[MeasuredStep]
    alarms: Sequence[Alarm]
    tensors: Sequence[StepColumns] = ()
    damaged: Sequence[int | None] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form, without tensors."""
        steps = []
        for step in self.steps:
            form = asdict(step)
            del form["statistics"]["columns"]
            steps.append(form.pop("statistics") | form)
        return {"run": self.run, "steps": steps, "alarms": [asdict(alarm) for alarm in self.alarms]}

    def tensor(self, fqn: str) -> list[tuple[MeasuredStep, TensorPoint]]:
        """Return a tensor at each step that has it; raise `UsageError` if none does."""
        # Names are searched per step, since tensors may appear or vanish within a run.
        pairs = list(zip(self.steps, self.tensors, strict=True))
        rows = [
            (step, columns.point(columns.names.index(fqn))) for step, columns in pairs if fqn in columns.names
        ]
        if not rows:
            names = sorted({name for columns in self.tensors for name in columns.names})
            close = difflib.get_close_matches(fqn, names, 1)
            raise UsageError(
                f"no measured step of {self.run} has a tensor {fqn!r}",
                hint=f"perhaps {close[0]}" if close else "`ckptcore inspect SRC` lists the names",
            )
        return rows

    @cached_property
    def _table(self) -> _Table:
        return _Table(self.tensors)

    def layers(self) -> dict[str, list[tuple[int, float | None]]]:
        """Return layer, or part outside of the layers -> (step, norm of its weights) at each step."""
        series: dict[str, list[tuple[int, float | None]]] = {name: [] for name in self._table.layers}
        for start in self._table.blocks():
            block = self._table.block(start)
            lengths, present = self._table.lengths(block.norm, block.weight)
            steps = [step.step or 0 for step in self.steps[start : start + len(lengths)]]
            columns = _by_layer(lengths, np.isfinite(lengths))
            for points, column, has in zip(series.values(), columns, present.T.tolist(), strict=True):
                points.extend(itertools.compress(zip(steps, column, strict=True), has))
        return series

    def moves(self) -> dict[str, list[float | None]]:
        """Return layer or part -> how far its weights moved to each step from the one before.

        Where it was measured, the norm of the change relative to that of the weights; else the relative
        change of the norm, which is at most as large. None where the step before has no such tensor.
        """
        table = self._table
        moved: dict[str, list[float | None]] = {name: [] for name in table.layers}
        # The step before a block's first is the last of the block before; nothing precedes the run's first.
        last = _Block.of(1, table.columns)
        for start in table.blocks():
            block = table.block(start)
            before = np.concatenate([last.norm, block.norm[:-1]])
            shared = block.weight & np.concatenate([last.stored, block.stored[:-1]])
            with np.errstate(invalid="ignore", over="ignore"):
                by_norm = block.norm - before
                differences = np.where(np.isfinite(block.change), block.change * before, by_norm)
            lengths, distances = (table.lengths(values, shared)[0] for values in (before, differences))
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                relative = distances / lengths
            for changes, column in zip(moved.values(), _by_layer(relative, lengths != 0), strict=True):
                changes.extend(column)
            last = block.last()
        return moved


@dataclass(frozen=True)
class _Block:
    """Numbers of consecutive steps: a row a step, a column a tensor.

    Attributes:
        norm: Norms.
        change: How far each tensor moved, relative to its norm; NaN where it was not measured.
        stored: Whether the step has the tensor.
        weight: Whether it is one of the model there.
    """

    norm: npt.NDArray[np.float64]
    change: npt.NDArray[np.float64]
    stored: npt.NDArray[np.bool_]
    weight: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, steps: int, columns: int) -> _Block:
        """Return the numbers of steps without tensors."""
        size = (steps, columns)
        return cls(np.zeros(size), np.full(size, np.nan), np.zeros(size, np.bool_), np.zeros(size, np.bool_))

    def last(self) -> _Block:
        """Return the last step."""
        return _Block(self.norm[-1:], self.change[-1:], self.stored[-1:], self.weight[-1:])


class _Table:
    """The weights of many steps, in columns by layer: names are read once, and steps are summed together."""

    def __init__(self, steps: Sequence[StepColumns]) -> None:
        self._steps = steps
        layer = {name: layer_name(name) for name in _weights(steps)}
        ordered = sorted(layer, key=lambda name: _natural(layer[name]))
        self._column = {name: column for column, name in enumerate(ordered)}
        starts: dict[str, int] = {}
        for column, name in enumerate(ordered):
            starts.setdefault(layer[name], column)
        self.layers, self.columns = list(starts), len(ordered)
        self._starts = np.array(list(starts.values()), np.int64)
        self._latest: tuple[int, _Block] | None = None

    def blocks(self) -> range:
        """Return the numbers of the steps that a block begins with."""
        # Steps are taken in blocks of a bounded table, however many tensors a step has.
        return range(0, len(self._steps) if self.columns else 0, max(_BLOCK // max(self.columns, 1), 1))

    def block(self, start: int) -> _Block:
        """Return the steps of one block."""
        # Most runs are one block, which norms and changes are both computed from.
        if self._latest is None or self._latest[0] != start:
            self._latest = start, self._build_block(start)
        return self._latest[1]

    def _build_block(self, start: int) -> _Block:
        steps = self._steps[start : start + self.blocks().step]
        block = _Block.of(len(steps), self.columns)
        names, columns = list[str](), np.zeros(0, np.int64)
        for row, step_columns in enumerate(steps):
            if step_columns.names != names:  # most steps have the tensors of the one before
                names = step_columns.names
                columns = np.array([self._column.get(n, -1) for n in names], np.int64)
            rows = np.flatnonzero(columns >= 0)
            places = columns[rows]
            block.norm[row, places] = step_columns.numbers["norm"][rows]
            block.change[row, places] = step_columns.numbers["change"][rows]
            block.stored[row, places] = True
            block.weight[row, places] = ~step_columns.of_role(STATE)[rows]
        return block

    def lengths(
        self, norms: npt.NDArray[np.float64], chosen: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        """Return of each step the Euclidean norms of the layers' chosen norms, and which layers have any."""
        # Columns are ordered by layer, so a layer is a range and the sum is one reduction.
        starts, sizes = self._starts, np.diff(self._starts, append=self.columns)
        norms = np.where(chosen, norms, 0.0)
        # Squares of the largest norms are infinite, and of small ones 0.
        scales = np.maximum.reduceat(np.where(np.isfinite(norms), np.abs(norms), 0.0), starts, axis=1)
        scales[scales == 0] = 1.0
        squares = np.add.reduceat((norms / np.repeat(scales, sizes, axis=1)) ** 2, starts, axis=1)
        with np.errstate(over="ignore"):
            lengths = np.sqrt(squares) * scales
        return lengths, np.logical_or.reduceat(chosen, starts, axis=1)


def _by_layer(table: npt.NDArray[np.float64], is_known: npt.NDArray[np.bool_]) -> list[list[float | None]]:
    """Return the columns of a table of numbers, None for those that are not known."""
    numbers = table.T.astype(object)
    numbers[~is_known.T] = None
    columns: list[list[float | None]] = numbers.tolist()
    return columns


def _weights(steps: Iterable[StepColumns]) -> Iterable[str]:
    """Return the names that belong to a weight at some step."""
    weights = dict[str, None]()
    names, last_states = list[str](), np.zeros(0, np.bool_)
    for step_columns in steps:
        states = step_columns.of_role(STATE)
        if step_columns.names != names or not np.array_equal(states, last_states):
            weights |= dict.fromkeys(itertools.compress(step_columns.names, ~states))
        names, last_states = step_columns.names, states
    return weights


def layer_name(fqn: str) -> str:
    """Return what a weight is summed up with: ``layer 3``, or its part of the model outside of the layers.

    >>> layer_name("model.layers.3.mlp.up_proj.weight"), layer_name("model.embed_tokens.weight")
    ('layer 3', 'embedding')
    """
    layer = layer_of(fqn)
    return part_of(fqn) if layer is None else f"layer {layer}"


def read_history(
    catalog: Catalog, run: str, *, tensors: bool = False, limit: int | None = None, before: int | None = None
) -> RunHistory:
    """Return the measured steps of a run; raise `UsageError` if there are none.

    Args:
        catalog: The catalog.
        run: The name of the run.
        tensors: With the tensors of each step.
        limit: The most steps, the highest ones; None for as many as the catalog gives.
        before: Those below this step.
    """
    from ckptcore.catalog import history

    most = history.MOST_STEPS if limit is None else limit
    # Alarms and steps from one snapshot: an alarm of a step that is not listed would have no row.
    with catalog.reading() as conn:
        steps = history.steps(conn, run, columns=tensors, limit=most, before=before)
        alarms = history.alarms_of(conn, run)
    if not steps:
        raise UsageError(
            f"no step of the run {run!r} was measured",
            hint="`ckptcore stats SRC` measures a step, and so does --stats of a conversion",
        )
    # Nearly all steps of a run have the same names, whose JSON is a third of the work of unpacking.
    heads = Heads()
    columns = [_tensors(step, heads) for step in steps] if tensors else []
    # Damaged ones are listed too, so that a gap in a chart can be explained.
    damaged = [step.step for step, unpacked in zip(steps, columns, strict=False) if unpacked is None]
    return RunHistory(run, steps, alarms, [unpacked or NOTHING for unpacked in columns], damaged)


def _natural(name: str) -> tuple[bool, int, str]:
    head, _, number = name.rpartition(" ")
    return (bool(head), int(number), name) if number.isdigit() else (False, 0, name)
