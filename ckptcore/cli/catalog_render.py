"""Print catalog answers as text, in at most 100 columns.

Long URIs and names lose their beginning, which they share; JSON has them in full.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ckptcore.catalog.aliases import AliasRow
from ckptcore.catalog.audit import AuditRow
from ckptcore.catalog.holds import HoldRow
from ckptcore.catalog.obligations import ListedObligation
from ckptcore.catalog.queues import InboxEvent, Message
from ckptcore.catalog.row_values import row_findings
from ckptcore.catalog.sql_query import Answer
from ckptcore.catalog.training import COUNTS, LIVE, TEXTS, Training
from ckptcore.catalog.training_rows import Ranked
from ckptcore.catalog.types import (
    CheckpointDetail,
    CheckpointRow,
    ConversionDetail,
    ConversionRow,
    Lineage,
    LineageStep,
    Origin,
    State,
)
from ckptcore.catalog.watched_roots import RootRow
from ckptcore.cli.tables import print_table, wrap_name
from ckptcore.errors import Finding
from ckptcore.redaction import beginning, redacted
from ckptcore.utils import terminal
from ckptcore.utils.text import count
from ckptcore.utils.units import show_duration, show_size

if TYPE_CHECKING:
    from ckptcore.catalog.history import MeasuredStep
    from ckptcore.comparison.step_history import RunHistory
    from ckptcore.fingerprints.step_columns import TensorPoint

WIDTH = 100
_ID = 8  # digits of an id, enough to tell the checkpoints of one catalog apart
_METRICS = 12  # that `show` lists
_FILES = 20  # files and findings that `show` lists

_LINES = ("message", "tensor", "where")  # columns whose cells may have several lines

Column = tuple[str, Callable[[Any], str]]


def render(value: Any, console: Console | None = None) -> None:
    """Print a value of `ckptcore.catalog.types`, or a tuple of them, to the console (standard output)."""
    if console is None:
        console = terminal.console()
        if not terminal.is_piped():
            console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    for part in _blocks(value):
        console.print(part)


def size(nbytes: int | None) -> str:
    """Return a number of bytes in binary units, or a dash where it is unknown.

    >>> size(2_147_483_648)
    '2.0 GiB'
    """
    return "-" if nbytes is None else show_size(nbytes)


def tail(text: str, width: int) -> str:
    """Return the end of a text that is too long, from a slash or dot on where there is one.

    >>> tail("/data/runs/llama/step-1000", 14), tail("model.layers.0.mlp.weight", 16)
    ('…/step-1000', '….0.mlp.weight')
    """
    text = redacted(text)  # before the cut: afterwards, a password could no longer be recognised
    if len(text) <= width:
        return text
    start = len(text) - width + 1
    end = text[start:]
    cut = 0 if text[start - 1] in "./" else next((n for n, c in enumerate(end) if c in "./"), 0)
    return "…" + (end[cut:] if cut <= width // 2 else end)


def _cell(text: str, width: int) -> str:
    """Return a text for a column of a terminal, cut as `tail` does; into a pipe the whole of it."""
    return redacted(text) if terminal.is_piped() else tail(text, width)


def _blocks(value: Any) -> Iterable[RenderableType]:
    if isinstance(value, CheckpointDetail):
        return _checkpoint(value)
    if isinstance(value, ConversionDetail):
        return _conversion(value)
    if isinstance(value, Lineage):
        return _lineage(value)
    if isinstance(value, Answer):
        return _answer(value)
    if isinstance(value, RootRow):
        return _root(value)
    if not value:
        return ["nothing found"]
    if isinstance(value[0], Origin):
        return [_origin(origin) for origin in value]
    if type(value[0]) in NAMED:
        rows = _table(value, NAMED[type(value[0])])
    else:
        rows = _checkpoints(value) if isinstance(value[0], CheckpointRow) else _conversions(value)
    return [rows, *_findings_table(tuple(row_findings(value)))]


NAMED: dict[type, tuple[Column, ...]] = {
    AliasRow: (
        ("name", lambda r: r.name),
        ("checkpoint", lambda r: r.checkpoint[:_ID]),
        ("version", lambda r: str(r.version)),
        ("set", lambda r: _when(r.updated_at)),
        ("uri", lambda r: _cell(r.uri, 30)),
    ),
    AuditRow: (
        ("at", lambda r: _when(r.at)),
        ("who", lambda r: _cell(r.actor, 20)),
        ("change", lambda r: r.action),
        ("checkpoint", lambda r: r.subject[:_ID]),
        ("before", lambda r: str(r.detail.get("before") or "-")[:_ID]),
        ("forced although", lambda r: _cell(str(r.detail.get("forced") or "-"), 40)),
    ),
    ListedObligation: (
        ("obligation", lambda r: r.id[:_ID]),
        ("since", lambda r: _when(r.created_at)),
        ("contents", lambda r: str(len(r.contents))),
        ("lost", lambda r: str(r.lost)),
        ("deleted", lambda r: _cell(r.source, 30)),
        ("counts on", lambda r: _cell(r.place, 30)),
    ),
    HoldRow: (
        ("hold", lambda r: r.id[:_ID]),
        ("checkpoint", lambda r: r.checkpoint[:_ID]),
        ("until", lambda r: _when(r.until)),
        ("owner", lambda r: _cell(r.owner or "-", 10)),
        ("reason", lambda r: _cell(r.reason, 20)),
        ("uri", lambda r: _cell(r.uri, 40)),
    ),
    InboxEvent: (
        ("id", lambda r: r.id[:_ID]),
        ("state", lambda r: r.state),
        ("tries", lambda r: str(r.tries)),
        ("received", lambda r: _when(r.received_at)),
        ("source", lambda r: _cell(r.source, 10)),
        ("uri", lambda r: _cell(r.uri or "-", 20)),
        ("message", lambda r: beginning(r.error_message or "-", 200)),
    ),
    Message: (
        ("id", lambda r: r.id[:_ID]),
        ("state", lambda r: r.state),
        ("tries", lambda r: str(r.tries)),
        ("created", lambda r: _when(r.created_at)),
        ("endpoint", lambda r: _cell(r.endpoint, 10)),
        ("type", lambda r: _cell(r.type, 20)),
        ("message", lambda r: beginning(r.error_message or "-", 200)),
    ),
    Ranked: (
        ("value", lambda r: f"{r.value:.6g}"),
        ("measured at", lambda r: "-" if r.step is None else str(r.step)),
        ("checkpoint", lambda r: r.checkpoint.id[:_ID]),
        ("kind", lambda r: r.checkpoint.kind),
        ("run", lambda r: _cell(r.checkpoint.run or "-", 20)),
        ("uri", lambda r: _cell(r.checkpoint.uri, 30)),
    ),
    RootRow: (
        ("name", lambda r: _cell(r.name, 16)),
        ("active", lambda r: "yes" if r.enabled else "no"),
        ("include", lambda r: _cell(" ".join(r.include) or "*", 16)),
        ("swept", lambda r: _when(r.swept_at)),
        ("uri", lambda r: _cell(r.uri, 40)),
    ),
}


def _answer(answer: Answer) -> Iterable[RenderableType]:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in answer.columns:
        table.add_column(terminal.text(name), overflow="fold")
    for row in answer.rows:
        table.add_row(*(terminal.text("-" if value is None else str(value)) for value in row))
    yield table if answer.rows else "nothing found"
    if answer.more:
        yield Text(f"and more; raise --limit to see more than {count(len(answer.rows), 'row')}")


def _checkpoints(rows: Iterable[CheckpointRow]) -> Table:
    return _table(
        rows,
        (
            ("id", lambda r: r.id[:_ID]),
            ("kind", lambda r: r.kind),
            ("format", lambda r: _cell(r.format, 12)),
            ("step", lambda r: "-" if r.step is None else str(r.step)),
            ("tensors", lambda r: str(r.num_tensors)),
            ("size", lambda r: size(r.nbytes)),
            ("state", lambda r: r.condition),
            ("uri", lambda r: _cell(r.uri, 30)),
        ),
        right=("step", "tensors", "size"),
    )


def _root(row: RootRow) -> Iterable[RenderableType]:
    targets = [", ".join(f"{k}={v}" for k, v in target.items()) for target in (row.target, *row.also)]
    yield _facts(
        {
            "root": row.name,
            "uri": row.uri,
            "active": "yes" if row.enabled else "no",
            "include": " ".join(row.include) or "*",
            **{f"output {n}" if n else "output": text for n, text in enumerate(targets)},
            "retention": ", ".join(f"{k}={v}" for k, v in row.retention.items()) or "as retire asks",
            "added": _when(row.created_at),
            "last sweep": f"{_when(row.swept_at)} {row.swept_note or ''}" if row.swept_at else "never",
        }
    )
    yield from _findings_table(tuple(row_findings(row)))


def _conversions(rows: Iterable[ConversionRow]) -> Table:
    return _table(
        rows,
        (
            ("id", lambda r: r.id[:_ID]),
            ("verb", lambda r: r.verb),
            ("state", lambda r: r.state),
            ("started", lambda r: _when(r.started_at)),
            ("took", _took),
            ("written", lambda r: size(r.bytes_out)),
            ("error", lambda r: _cell(r.error_code or _verified(r), 18)),
            ("destination", lambda r: _cell(r.destination_uri, 20)),
        ),
        right=("took", "written"),
    )


def _checkpoint(detail: CheckpointDetail) -> Iterable[RenderableType]:
    row = detail.checkpoint
    proven = f"{row.verified_level}, {_when(row.verified_at)}" if row.verified_at else "-"
    yield _facts(
        {
            "checkpoint": row.id,
            "uri": row.uri,
            "kind": row.kind,
            "format": row.format,
            "state": row.condition + (f" since {_when(row.replaced_at)}" if row.replaced_at else ""),
            row.proof: proven,
            "run": row.run or "-",
            "step": "-" if row.step is None else str(row.step),
            "tensors": f"{row.num_tensors} ({', '.join(row.dtypes) or 'none'}), {size(row.nbytes)}",
            "manifest": row.manifest_digest,
            "content": row.content_digest or "-",
            "fingerprint": row.fingerprint or "-",
            "loadable": detail.loadable or "-",
            "origin": ", ".join(f"{k}={v}" for k, v in row.origin.items()) or "-",
            "added": _when(row.created_at),
            "tags": ", ".join(f"{k}={v}" for k, v in detail.tags.items()) or "-",
            **_training(detail.training),
        }
    )
    if detail.written_by:
        yield Group("", Text("written by"), _conversions(detail.written_by))
    if detail.used_by:
        yield Group("", Text("used by"), _conversions(detail.used_by))
    yield from _findings_table(detail.findings)
    if detail.files:
        left = count(len(detail.files) - _FILES, "more file")
        yield Group(
            "",
            _table(
                detail.files[:_FILES],
                (
                    ("file", lambda f: _cell(f.path, 44)),
                    ("size", lambda f: size(f.nbytes)),
                    ("role", lambda f: f.role),
                    ("blake3", lambda f: (f.digest or "-")[:32]),
                ),
                right=("size",),
            ),
        )
        if len(detail.files) > _FILES:
            yield Text(f"and {left}")
    if detail.tensors:
        yield Group(
            "",
            _table(
                detail.tensors,
                (
                    ("tensor", lambda t: wrap_name(terminal.clean(t.fqn), 54)),
                    ("dtype", lambda t: t.dtype),
                    ("shape", lambda t: "x".join(map(str, t.shape)) or "scalar"),
                    ("size", lambda t: size(t.nbytes)),
                ),
                right=("size",),
            ),
        )


def _training(training: Training | None) -> dict[str, str]:
    """Return what is known about the training, without its config, which JSON has."""
    if training is None:
        return {}
    facts = training.facts
    fact_by_name = {name: getattr(facts, name) for name in (*TEXTS, "epoch", *COUNTS)}
    live = {name: value for name in LIVE if (value := getattr(facts, name)) is not None}
    metrics = ", ".join(
        f"{name}={m.text}" + (f" (step {m.step})" if m.step is not None else "")
        for name, m in list(facts.metrics.items())[:_METRICS]
    )
    return {
        **({"job": training.live_text} if live else {}),
        **{name.replace("_", " "): value for name, value in live.items()},
        "training": ", ".join(f"{k}={v}" for k, v in fact_by_name.items() if v is not None) or "-",
        "metrics": metrics
        + (f" and {len(facts.metrics) - _METRICS} more" if len(facts.metrics) > _METRICS else ""),
    }


def _conversion(detail: ConversionDetail) -> Iterable[RenderableType]:
    row = detail.conversion
    yield _facts(
        {
            "conversion": row.id,
            "verb": row.made_for,
            "state": row.state,
            "error": f"{row.error_code}: {row.error_message}" if row.error_code else "-",
            "source": row.source_uri,
            "destination": row.destination_uri,
            "started": _when(row.started_at),
            "took": _took(row),
            "bytes": f"{size(row.bytes_in)} in, {size(row.bytes_out)} out",
            "peak memory": size(row.peak_memory),
            "timings": ", ".join(f"{k} {show_duration(v)}" for k, v in row.timings.items()) or "-",
            "plan": row.plan_digest or "-",
            "fingerprint": row.fingerprint or "-",
            "map": row.map_digest or "-",
            **_verdict(row),
            "flow run": row.flow_run_id or "-",
            "version": row.tool_version,
        }
    )
    checkpoints = detail.sources + detail.derived
    if checkpoints:
        yield Group("", _checkpoints(checkpoints))
    yield from _findings_table(detail.findings)


def _verdict(row: ConversionRow) -> dict[str, str]:
    """Return the verdict of `verify-export`, where it was run."""
    if row.export_verdict is None:
        return {}
    checks = "".join(f"\n{n}: {c['verdict']}, {c['summary']}" for n, c in row.export_checks.items())
    return {"export": f"{row.export_verdict}, {_when(row.export_verified_at)}{checks}"}


def _lineage(lines: Lineage) -> Iterable[RenderableType]:
    for step in reversed(lines.ancestors):
        yield _step_text(step, step.source)
    yield terminal.text(("* " + _short(lines.checkpoint), "bold"))
    for step in lines.descendants:
        yield _step_text(step, step.derived)


def _step_text(step: LineageStep, checkpoint: CheckpointRow) -> Text:
    up = checkpoint is step.source
    conversion_text = f"{'->' if up else '<-'} {step.conversion.made_for} {_when(step.conversion.ended_at)}"
    return terminal.text(
        f"{'  ' * (step.depth - 1)}{'^' if up else 'v'} {_short(checkpoint)}  {conversion_text}"
    )


def _short(row: CheckpointRow) -> str:
    state = "" if row.state == State.PRESENT else f" ({row.state})"
    return f"{row.id[:_ID]}  {row.format}  {_cell(row.uri, 36)}{state}"


def _origin(origin: Origin) -> RenderableType:
    facts = {}
    if origin.file is not None:
        facts["file"] = f"{origin.file.path}, {size(origin.file.nbytes)}"
        facts["blake3"] = origin.file.digest or "-"
    row = origin.checkpoint
    facts["checkpoint"] = f"{row.id} ({row.kind}, {row.format}, {row.state})"
    facts["uri"] = row.uri
    if row.fingerprint is not None:
        facts["fingerprint"] = row.fingerprint
    if origin.conversion is None:
        facts["written by"] = "no recorded conversion"
    else:
        conversion = origin.conversion
        facts["written by"] = f"{conversion.made_for} {conversion.id}, {_when(conversion.ended_at)}"
    if origin.sources:
        facts["made from"] = "\n".join(f"{s.uri} ({s.format}, {s.id})" for s in origin.sources)
    return Group(_facts(facts), "")


def _findings_table(findings: tuple[Finding, ...]) -> Iterable[RenderableType]:
    if findings:
        counts = Counter(f.severity for f in findings)
        totals = ", ".join(f"{n} {s}" if s == "info" else count(n, s) for s, n in counts.items())
        yield Group(
            "",
            Text(f"findings: {totals}"),
            _table(
                findings[:_FILES],
                (
                    ("code", lambda f: f.code),
                    ("level", lambda f: f.level),
                    ("where", lambda f: wrap_name(terminal.clean(f.fqn or f.file or "-"), 28)),
                    ("message", lambda f: f.message),
                ),
            ),
        )
        if len(findings) > _FILES:
            yield Text(f"and {len(findings) - _FILES} more")


def _facts(facts: dict[str, str]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for name, text in facts.items():
        grid.add_row(name, terminal.text(text, lines=True))
    return grid


def _table(rows: Iterable[Any], columns: tuple[Column, ...], right: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name, _ in columns:
        table.add_column(
            name,
            no_wrap=name != "message",
            overflow="fold" if name == "message" else "ellipsis",
            justify="right" if name in right else "left",
        )
    for row in rows:
        table.add_row(*(terminal.text(cell(row), lines=name in _LINES) for name, cell in columns))
    return table


def _when(time: datetime | None) -> str:
    return "-" if time is None else time.astimezone().strftime("%Y-%m-%d %H:%M")


def _verified(row: ConversionRow) -> str:
    """Return the verdict on an export that failed verification."""
    return f"export {row.export_verdict}" if row.export_verdict == "failed" else "-"


def _took(row: ConversionRow) -> str:
    if row.ended_at is None:
        return "-"
    return show_duration((row.ended_at - row.started_at).total_seconds())


def render_history(history: RunHistory, tensor: Sequence[tuple[MeasuredStep, TensorPoint]] | None) -> None:
    """Print the measured steps of a run with their alarms, or one tensor at each of them."""
    out = terminal.console()
    if tensor is None:
        print_table(out, _STEP_HEADS, [_step_cells(step) for step in history.steps], names=())
        for alarm in history.alarms:
            out.print(terminal.text(f"step {alarm.step}: {alarm.code}: {alarm.message}"), soft_wrap=True)
        for part in _findings_table(tuple(row_findings(history.steps))):
            out.print(part)
        return
    cells = []
    for step, point in tensor:
        counts = (point.nan, point.inf, point.zeros, point.change, point.cosine)
        cells.append((str(step.step), *map(_figure, (point.norm, point.mean, point.absmax, *counts))))
    print_table(out, _TENSOR_HEADS, cells, names=())


_STEP_HEADS = ("step", "norm", "change", "max", "NaN", "Inf", "zeros", "alarms")
_TENSOR_HEADS = ("step", "norm", "mean", "max", "NaN", "Inf", "zeros", "change", "cosine")


def _step_cells(step: MeasuredStep) -> tuple[str, ...]:
    own = step.statistics
    alarms = ", ".join(f"{code} ({n})" if n > 1 else code for code, n in sorted(step.alarms.items()))
    numbers = map(_figure, (own.norm, own.change, own.absmax, own.nan, own.inf, own.zeros))
    return (str(step.step), *numbers, alarms or "-")


def _figure(number: float | None) -> str:
    return "-" if number is None or math.isnan(number) else f"{number:.4g}"
