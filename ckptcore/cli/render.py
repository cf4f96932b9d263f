"""Faces: how does a value look to a person, and how to a program?

One function a kind of value; text with rich, JSON with a stable schema. Standard output carries
the answer alone.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ckptcore.errors import CkptError, Finding, finding
from ckptcore.utils import terminal
from ckptcore.utils.units import show_size

if TYPE_CHECKING:
    from rich.console import Console

    from ckptcore.checking.check import Report
    from ckptcore.checking.export_proof import ExportProof
    from ckptcore.comparison.fingerprint import Fingerprints
    from ckptcore.comparison.result import Difference, TensorDifference
    from ckptcore.conversion.pipeline import Result
    from ckptcore.core.manifest import Manifest
    from ckptcore.planning.compose import Composed
    from ckptcore.utils.workers import Progress

_LIMIT = 40  # rows of a table of names before it is cut for a terminal
_STATUS = {"ok": "green", "unproven": "yellow"}
_VERDICT = {"ok": "green", "failed": "red", "unproven": "yellow", "not-done": "yellow"}
_STYLE = {"error": "red", "warning": "yellow", "info": "dim"}


def manifest(value: Manifest, include: Sequence[str], exclude: Sequence[str] = (), *, as_json: bool) -> None:
    """The answer of `inspect`."""
    from ckptcore.core.subset import describe_derived
    from ckptcore.naming.rename import matches

    tensors = [
        (i, t)
        for i, t in enumerate(value.tensors)
        if (not include or matches(t.fqn, include)) and not matches(t.fqn, exclude)
    ]
    dtypes: Counter[str] = Counter()
    for t in value.tensors:
        dtypes[t.dtype] += t.nbytes
    chunks = (value.chunks.first[1:] - value.chunks.first[:-1]).tolist()
    computed = {i: describe_derived(value, i) for i in value.derived}
    stored = len(value.chunks) + (len(value.inputs.chunks) if value.inputs is not None else 0)
    used = sorted({int(f) for f in value.items.file.tolist()})
    if as_json:
        terminal.write_json(
            {
                "format": value.format,
                "evidence": value.origin.get("evidence", []),
                "root": value.root,
                "digest": value.digest,
                "num_tensors": value.num_tensors,
                "bytes": value.nbytes,
                "dtypes": dict(dtypes),
                "files": [{"path": value.files[f].path, "size": value.files[f].size} for f in used],
                "tensors": [
                    {"fqn": t.fqn, "dtype": t.dtype, "shape": list(t.shape), "chunks": chunks[i]}
                    | ({"computed": computed[i]} if i in computed else {})
                    for i, t in tensors
                ],
                "objects": [{"key": b.key, "refused": list(b.refused)} for b in value.blobs if not b.unread],
                "unreadable": [{"fqn": name} | why.as_dict() for name, why in value.unread.items()],
                "origin": {k: v for k, v in value.origin.items() if k not in ("paths", "evidence")},
            }
        )
        return
    out = terminal.console()
    out.print(
        terminal.text(
            (value.root, "bold"), f": {value.format} ({'; '.join(value.origin.get('evidence', []))})"
        )
    )
    kinds = ", ".join(f"{show_size(n)} {d}" for d, n in dtypes.most_common())
    out.print(
        f"{value.num_tensors} tensors, {show_size(value.nbytes)} ({kinds}); {stored} chunks in "
        f"{len(used)} files; {len(value.blobs) - len(value.unread)} objects"
    )
    _print_pairs(out, "cannot be read", [(name, why.describe()) for name, why in value.unread.items()])
    table = _table("tensor", "dtype", "shape", "chunks")
    for i, t in tensors[:_LIMIT]:
        _add_row(table, t.fqn, t.dtype, str(list(t.shape)), computed.get(i, str(chunks[i])))
    out.print(table)
    if len(tensors) > _LIMIT:
        out.print(f"and {len(tensors) - _LIMIT} more tensors (--output json has all, --include picks)")


def report(value: Report, *, as_json: bool) -> None:
    """The answer of `validate`."""
    if as_json:
        terminal.write_json(value.as_dict())
        return
    out = terminal.console()
    counts = Counter(f.severity for f in value.findings)
    found = ", ".join(f"{n} {s}{'s' if n > 1 else ''}" for s, n in counts.items()) or "nothing found"
    out.print(
        terminal.text(
            (value.status, _STATUS.get(value.status, "red")),
            f" at level {value.level}: {value.format or 'unknown format'}, {value.tensors} tensors, "
            f"{show_size(value.nbytes)}; {found}",
        )
    )
    _findings(out, value.findings)


def report_of(error: CkptError, source: str, level: str) -> Report:
    """A report for a source whose metadata could not even be read."""
    from ckptcore.checking.check import Report

    findings = tuple(error.values.get("findings", ())) or (
        finding("malformed-metadata", "files", error.message, file=error.values.get("file"), hint=error.hint),
    )
    return Report(level, "", 0, 0, findings)


def plan(value: Composed, peak: int, *, as_json: bool) -> None:
    """The answer of `plan`."""
    p = value.plan
    if as_json:
        terminal.write_json(
            {
                "source": p.source,
                "format": p.target.format,
                "manifest_digest": p.manifest_digest,
                "plan_digest": p.digest,
                "bytes_in": p.bytes_in,
                "bytes_out": p.bytes_out,
                "requests": p.requests,
                "peak_memory": peak,
                "files": [
                    {"path": f.path, "bytes": f.nbytes, "tensors": f.tensors, "requests": f.requests}
                    for f in p.files
                ],
                "renamed": [list(r) for r in p.renamed],
                "cast": [list(c) for c in p.cast],
                "computed": [list(d) for d in p.derived],
                "dropped": [list(d) for d in p.dropped],
                "ties": [list(t) for t in p.ties],
                "model": value.model.because if value.model else None,
                "warnings": [w.as_dict() for w in value.warnings],
                "ranks": value.ranks.as_dict() if value.ranks else None,
                "map": _name_map(value),
            }
        )
        return
    out = terminal.console()
    if value.model:
        out.print(terminal.text(f"model: {value.model.because}"))
    if value.naming:
        n = value.naming
        out.print(terminal.text(f"names: {n.world} to {n.to}, {n.arch} ({n.because})"))
        for name, (number, source) in sorted(n.numbers.items()):
            out.print(terminal.text(f"  {name} = {number:g} ({source})"))
    out.print(
        f"reads {show_size(p.bytes_in)} in {p.requests} requests, writes {show_size(p.bytes_out)} in "
        f"{len(p.files)} files ({p.target.format}), peak memory about {show_size(peak)}"
    )
    if value.ranks:
        low, high = min(value.ranks.per_rank), max(value.ranks.per_rank)
        held = f"hold {show_size(low)} to {show_size(high)} each"
        ranks = f"{len(value.ranks.per_rank)} ranks ({p.target.mesh}) {held}"
        out.print(terminal.text(f"{ranks}, the fullest {value.ranks.ratio:.3f} of the mean"))
    table = _table("file", "bytes", "tensors")
    for f in p.files[:_LIMIT]:
        _add_row(table, f.path, f"{f.nbytes:,}", str(f.tensors))
    out.print(table)
    _print_pairs(out, "renamed", [(a, b) for a, b in p.renamed])
    _print_pairs(out, "made", [(m.name, f"{m.rule} of {', '.join(m.sources)}") for m in p.made if not m.same])
    _print_pairs(out, "computed", list(p.derived))
    _print_pairs(out, "cast", [(a, f"{b} to {c}") for a, b, c in p.cast])
    _print_pairs(out, "tied", [(a, f"{b}, equality is checked") for a, b in p.ties])
    _print_pairs(out, "dropped", list(p.dropped))
    _findings(out, value.warnings)


def _name_map(value: Composed) -> dict[str, Any] | None:
    """How names were mapped, and the rule that made each tensor."""
    if value.naming is None:
        return None
    made = [{"name": m.name, "rule": m.rule, "sources": list(m.sources)} for m in value.plan.made]
    return value.naming.as_dict() | {"tensors": made}


def difference(value: Difference, *, as_json: bool) -> None:
    """The answer of `diff`."""
    if as_json:
        terminal.write_json(value.as_dict())
        return
    out = terminal.console()
    for label, side in (("A", value.a), ("B", value.b)):
        model = f"; model: {side.model}" if side.model else ""
        gone = f"; {len(side.left_out)} left out" if side.left_out else ""
        bare = f"; {side.unverified} items without a checksum" if side.unverified else ""
        size = f"{side.tensors} tensors, {show_size(side.nbytes)}"
        out.print(
            terminal.text(f"{label}: {side.url}: {side.format}, {size}{model}{gone}{bare}"), soft_wrap=True
        )
    out.print(
        terminal.text(
            ("equal", "green") if value.equal else ("different", "red"),
            f": {value.equal_tensors} tensors and {value.equal_objects} values are the same, "
            f"{len(value.tensors)} tensors and {len(value.objects)} values are not",
        )
    )
    table = _table("name", "differs in", "A", "B")
    rows = [(t.name, _what(t), *_both(t)) for t in value.tensors]
    rows += [(o.name, f"value, {o.what}" if o.what != "values" else "value", o.a, o.b) for o in value.objects]
    for row in rows[:_LIMIT]:
        _add_row(table, *row)
    if rows:
        out.print(table)
    if len(rows) > _LIMIT:
        out.print(f"and {len(rows) - _LIMIT} more (--output json has all)")
    _print_pairs(out, "not compared", list(value.skipped))
    _findings(out, [*value.a.warnings, *value.b.warnings])


def _what(found: TensorDifference) -> str:
    if found.first is None or found.a is None:
        return ", ".join(found.what)
    return f"{found.differing:,} of {found.a.numel:,} elements, first at {list(found.first.index)}"


def _both(found: TensorDifference) -> tuple[str, str]:
    if found.first is not None:
        first = found.first
        return f"{first.a!r} (0x{first.a_bits})", f"{first.b!r} (0x{first.b_bits})"
    a, b = ("" if s is None else f"{s.dtype} {list(s.shape)}" for s in (found.a, found.b))
    return a, b


def fingerprint(value: Fingerprints, url: str, *, as_json: bool) -> None:
    """The answer of `fingerprint`."""
    if as_json:
        terminal.write_json(value.as_dict())
        return
    bare = f"; {value.unverified} items without a checksum" if value.unverified else ""
    out = terminal.console()
    out.print(value.fingerprint, soft_wrap=True)
    of_what = f"{url}: {len(value.tensors)} tensors, map {value.map_digest[:16]}{bare}"
    out.print(terminal.text((of_what, "dim")), soft_wrap=True)


def export_proof(value: ExportProof, *, as_json: bool) -> None:
    """The answer of `verify-export`."""
    if as_json:
        terminal.write_json(value.as_dict())
        return
    out = terminal.console()
    by = f" (named by {value.found_by})" if value.found_by else ""
    against = f" against {value.source}{by}" if value.source is not None else ""
    out.print(
        terminal.text((value.verdict, _VERDICT[value.verdict]), f": {value.export}{against}"), soft_wrap=True
    )
    table = _table("check", "verdict", "what")
    for check in value.checks:
        verdict = terminal.text((check.verdict, _VERDICT[check.verdict]))
        table.add_row(terminal.text(check.name), verdict, terminal.text(check.summary))
    out.print(table)
    problems = [(str(p.name) or check.name, p.what) for check in value.failures for p in check.problems]
    _print_pairs(out, "failed", problems)
    if value.conversion is not None:
        out.print(f"catalog {value.conversion}", style="dim")


def result(value: Result, *, as_json: bool) -> None:
    """The answer of a conversion."""
    if as_json:
        terminal.write_json(value.as_dict())
        return
    out = terminal.console()
    verified = sum(r.verified for r in value.files)
    unproven = sum(r.unverified for r in value.files)
    proof = f"{verified} stored checksums verified" + (f", {unproven} pieces without one" if unproven else "")
    out.print(
        terminal.text(
            (value.destination, "green"),
            f": {value.format}, {len(value.tensors)} tensors, "
            f"{show_size(value.nbytes)} in {len(value.files)} files; {proof}",
        )
    )
    seconds = ", ".join(f"{k} {v:.2f} s" for k, v in value.timings.items())
    out.print(f"{seconds}{f'; catalog {value.conversion}' if value.conversion else ''}", style="dim")
    if value.fingerprint is not None:
        out.print(f"fingerprint {value.fingerprint}", style="dim", soft_wrap=True)
    for rule, count in Counter(rule for _, rule in value.dropped).items():
        out.print(terminal.text(f"left out: {count}, {rule}"), soft_wrap=True)
    if value.loadable is not None:
        out.print(terminal.text(f"loadable: {value.loadable}"))
    _findings(out, value.warnings)


def formats(*, as_json: bool) -> None:
    """The support matrix, with the formats of installed packages."""
    from ckptcore.formats import KNOWN, registry

    found = registry()
    if as_json:
        rows = [
            {
                "name": f.name,
                "title": f.title,
                "recognised_by": f.recognised_by,
                "versions": list(f.versions),
                "reads": f.abilities.reads,
                "writes": f.abilities.writes,
                "checksums": f.abilities.checksums,
                "objects": f.abilities.objects,
                "package": found.package(f.name),
            }
            for f in found.formats
        ]
        refused = [{"name": k.name, "title": k.title, "hint": k.hint} for k in KNOWN]
        broken = [{"package": p, "reason": r} for p, r in found.broken]
        terminal.write_json({"formats": rows, "refused": refused, "broken": broken})
        return
    out = terminal.console()
    table = _table("format", "what", "read", "write", "checksums", "recognised by")
    for f in found.formats:
        a, package = f.abilities, found.package(f.name)
        name = f.name if package == "ckptcore" else f"{f.name} ({package})"
        seen_by = f.recognised_by.replace("`", "")
        _add_row(table, name, f.title, _yes(a.reads), _yes(a.writes), a.checksums, seen_by)
    out.print(table)
    table = _table("recognised, not read", "what", "next step")
    for k in KNOWN:
        _add_row(table, k.name, k.title, k.hint)
    out.print(table)
    for package, reason in found.broken:
        out.print(terminal.text(("not used", "red"), f": formats of {package}: {reason}"))


def error(value: CkptError, *, as_json: bool) -> None:
    """An error: JSON on standard output, or words on standard error."""
    if as_json:
        form = value.as_dict()
        form["findings"] = [f.as_dict() for f in value.values.get("findings", ())]
        terminal.write_json({"error": form})
        return
    out = terminal.console(err=True)
    # What a message has in more lines than one is indented: none can pass for a line of our own.
    message = terminal.text(f": {value.message}".replace("\n", "\n    "), lines=True)
    out.print(terminal.text((value.code, "red")) + message, soft_wrap=True)
    if value.hint:
        out.print(terminal.text(f"  next: {value.hint}"), soft_wrap=True)


@contextmanager
def progress() -> Iterator[Progress]:
    """A progress callback: a bar with bytes, rate and time left on a terminal, else a line a stage."""
    if not sys.stderr.isatty():
        seen: set[str] = set()

        def line(stage: str, done: int, total: int) -> None:
            if stage not in seen:
                seen.add(stage)
                terminal.line(f"{stage}: {show_size(total)}", err=True)

        yield line
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    with Progress(
        TextColumn("{task.description:9}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=terminal.console(err=True),
        transient=False,
    ) as bar:
        tasks: dict[str, Any] = {}

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=max(total, 1))
            bar.update(tasks[stage], completed=done)

        yield advance


def _findings(out: Console, found: Sequence[Finding]) -> None:
    if not found:
        return
    table = _table("finding", "level", "what")
    for f in found[:_LIMIT]:
        what = terminal.text(f.message, lines=True)
        if f.hint:
            what.append("\n").append_text(terminal.text((f"next: {f.hint}", "dim")))
        table.add_row(terminal.text((f.code, _STYLE[f.severity])), f.level, what)
    out.print(table)
    if len(found) > _LIMIT:
        out.print(f"and {len(found) - _LIMIT} more (--output json has all)")


def _print_pairs(out: Console, title: str, rows: Sequence[tuple[str, str]]) -> None:
    if not rows:
        return
    table = _table(title, "")
    for a, b in rows[:_LIMIT]:
        _add_row(table, a, b)
    out.print(table)
    if len(rows) > _LIMIT:
        out.print(f"and {len(rows) - _LIMIT} more {title} (--output json has all)")


def _table(*columns: str) -> Any:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _add_row(table: Any, *cells: str) -> None:
    """Adds a row in which no cell makes lines of its own."""
    table.add_row(*map(terminal.text, cells))


def _yes(value: bool) -> str:
    return "yes" if value else "-"
