"""Print the answers of commands: as text with rich, or as JSON with a stable schema.

There is one function for each kind of value. Standard output has the answer and nothing else.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ckptcore.cli.tables import new_table, print_table
from ckptcore.errors import CkptError, Finding, finding
from ckptcore.utils import terminal
from ckptcore.utils.text import count, some
from ckptcore.utils.units import show_duration, show_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from ckptcore.checking.check import Report
    from ckptcore.checking.export_proof import ExportProof
    from ckptcore.checking.summary import PieceOwners, Summary
    from ckptcore.comparison.live_comparison import LiveComparison
    from ckptcore.comparison.result import Difference, TensorDifference
    from ckptcore.comparison.statistics import Changes
    from ckptcore.conversion.pipeline import Result
    from ckptcore.conversion.request_costs import RequestCosts
    from ckptcore.core.manifest import Manifest
    from ckptcore.fingerprints.result import Fingerprints
    from ckptcore.fingerprints.statistics import MeasuredTensor, Statistics
    from ckptcore.formats import Format
    from ckptcore.planning.compose import Composed
    from ckptcore.planning.name_maps import NameMap
    from ckptcore.utils.workers import Progress

_MOST, _FEW = 20, 3  # rows of a comparison; tensors whose first difference is printed, too
_WAYS, _PIECES = 6, 16  # ways to cut tensors, and pieces of one, that `inspect` prints
_ROWS = 40  # rows of a table of names before it is cut for a terminal
_TENSORS, _FINDINGS, _FEW_ROWS = 10, 10, 4  # rows that leave the summary of a checkpoint on a terminal
_ALL, _JSON = "--all lists all", "--output json lists all"
_NAMES_TWICE = ("renamed", "mapped")  # tables of pairs whose second column has names, too
_STATUS = {"ok": "green", "unproven": "yellow"}
_VERDICT = {"ok": "green", "failed": "red", "unproven": "yellow", "not-done": "yellow"}
_STYLE = {"error": "red", "warning": "yellow", "info": "dim"}


def manifest(
    value: Manifest,
    include: Sequence[str],
    exclude: Sequence[str] = (),
    *,
    show_all: bool = False,
    as_json: bool,
) -> None:
    """Print the answer of `inspect`. show_all: list every tensor on a terminal, too."""
    from ckptcore.checking.summary import piece_owners, summarize
    from ckptcore.core.subset import describe_derived
    from ckptcore.naming.rename import matches

    summary, placements = summarize(value), piece_owners(value)
    tensors = [
        (i, t)
        for i, t in enumerate(value.tensors)
        if (not include or matches(t.fqn, include)) and not matches(t.fqn, exclude)
    ]
    chunks = (value.chunks.first[1:] - value.chunks.first[:-1]).tolist()
    computed = {i: describe_derived(value, i) for i in value.derived}
    used = sorted({int(f) for f in value.items.file.tolist()})
    if as_json:
        terminal.write_json(
            {
                "format": value.format,
                "evidence": value.origin.get("evidence", []),
                "root": value.root,
                "digest": value.digest,
                "num_tensors": value.num_tensors,
                "bytes": sum(summary.dtypes.values()),
                "dtypes": summary.dtypes,
                "summary": summary.as_dict() | {"placements": [p.as_dict() for p in placements]},
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
    _print_summary(out, value, summary)
    _print_placements(out, placements, summary.ranks)
    _print_pairs(
        out, "cannot be read", [(name, why.describe()) for name, why in value.unread.items()], show_all
    )
    limit = _limit(_TENSORS, show_all)
    rows = [
        (t.fqn, t.dtype, str([*t.shape]), computed[i] if i in computed else str(chunks[i]))
        for i, t in tensors[:limit]
    ]
    print_table(out, ("tensor", "dtype", "shape", "chunks"), rows)
    _print_remainder(out, len(tensors) - limit, "tensors", f"{_ALL}, --include selects")


def _print_summary(out: Console, value: Manifest, summary: Summary | None = None) -> None:
    """Print what a checkpoint is: format, sizes, step and ranks, and a line for each of its parts."""
    from ckptcore.checking.summary import MODEL, OPTIMIZER, UNSURE, summarize

    summary = summary or summarize(value)
    out.print(terminal.text((value.root, "bold"), f": {value.format} ({_evidence(value)})"), soft_wrap=True)
    size = _sizes(summary.dtypes)
    facts = [f"{count(value.num_tensors, 'tensor')}, {show_size(sum(summary.dtypes.values()))} ({size})"]
    facts.append(f"{count(summary.chunks, 'chunk')} in {count(summary.files, 'file')}")
    facts.append(count(summary.objects, "object"))
    facts += [count(len(summary.ranks), "rank")] if summary.ranks else []
    facts += [f"step {summary.step}"] if summary.step is not None else []
    out.print("; ".join(facts))
    for part in summary.parts:
        elements = "parameters" if part.name == MODEL else "elements"
        text = f"{count(part.tensors, 'tensor')}, {part.elements:,} {elements}, {_sizes(part.dtypes)}"
        note = f" ({part.note})" if part.name == UNSURE and part.note else ""
        _print_line(out, part.name, text + note)
    if summary.without_optimizer and not value.unread:
        _print_line(out, OPTIMIZER, "none")


def _sizes(dtypes: Mapping[str, int]) -> str:
    return ", ".join(f"{show_size(nbytes)} {dtype}" for dtype, nbytes in dtypes.items())


def _print_line(out: Console, name: str, text: str) -> None:
    """Print one line of a summary, as all of them are aligned."""
    out.print(terminal.text((f"{name:<13}", "bold"), f" {text}"), soft_wrap=True)


def _print_placements(out: Console, placements: Sequence[PieceOwners], ranks: Sequence[str]) -> None:
    """Print how tensors are cut, and which rank has the pieces."""
    if not any(placement.cuts for placement in placements):
        return
    ways = [
        (
            ", ".join(f"dim {dim} in {pieces}" for dim, pieces in placement.cuts) or "not cut",
            owners_text(placement, ranks),
            str(placement.tensors),
            placement.example,
        )
        for placement in placements[:_WAYS]
    ]
    print_table(out, ("cut", "held by rank", "tensors", "such as"), ways)
    if len(placements) > _WAYS:
        out.print(f"and {count(len(placements) - _WAYS, 'more way')} to cut (--output json)")


def owners_text(placement: PieceOwners, ranks: Sequence[str]) -> str:
    """Return the ranks that hold the pieces of tensors: a row for each piece of all dims but the last one.

    A piece that several ranks hold names all of them.
    """
    from ckptcore.checking.summary import spans

    pieces = ["every rank" if owner.split("+") == [*ranks] else owner for owner in placement.owners]
    columns = placement.cuts[-1][1] if len(placement.cuts) > 1 else 0
    if columns and len(pieces) % columns == 0 and len(pieces) <= _PIECES:
        return " / ".join(
            " ".join(pieces[start : start + columns]) for start in range(0, len(pieces), columns)
        )
    return " | ".join(pieces) if len(pieces) <= _PIECES // 2 else spans(pieces)


def report(value: Report, manifest: Manifest | None = None, *, show_all: bool = False, as_json: bool) -> None:
    """Print the answer of `validate`.

    Args:
        value: The report.
        manifest: What was checked, if it could be read.
        show_all: List every finding on a terminal, too.
        as_json: Print JSON.
    """
    if as_json:
        terminal.write_json(value.as_dict())
        return
    out = terminal.console()
    counts = Counter(f.severity for f in value.findings)
    # "2 infos" is no English; the other severities have a plural.
    kinds = [f"{n} info" if s == "info" else count(n, s) for s, n in counts.items()]
    out.print(
        terminal.text(
            (value.status, _STATUS.get(value.status, "red")),
            f" at level {value.level}: {value.format or 'unknown format'}, {count(value.tensors, 'tensor')}, "
            f"{show_size(value.nbytes)}; {', '.join(kinds) or 'no findings'}",
        )
    )
    if manifest is not None:
        _print_summary(out, manifest)
    _findings(out, value.findings, show_all)


def report_of(error: CkptError, source: str, level: str) -> Report:
    """Return a report for a source whose metadata cannot be read."""
    from ckptcore.checking.check import Report

    findings = tuple(error.values.get("findings", ())) or (
        finding("malformed-metadata", "files", error.message, file=error.values.get("file"), hint=error.hint),
    )
    return Report(level, "", 0, 0, findings)


def plan(
    value: Composed,
    source: Manifest,
    peak: int,
    costs: RequestCosts | None,
    frees: int,
    *,
    show_all: bool = False,
    as_json: bool,
) -> None:
    """Print the answer of `plan`.

    Args:
        value: The plan with everything around it.
        source: The manifest of the source.
        peak: Bytes of memory that a run should take at most.
        costs: Requests to an object store.
        frees: Bytes that `retire --purge` frees on the disk of the destination.
        show_all: List every file and name on a terminal, too.
        as_json: Print JSON.
    """
    if as_json:
        terminal.write_json(_plan_form(value, peak, costs, frees))
        return
    p = value.plan
    out = terminal.console()
    _print_summary(out, source)
    if value.model:
        _print_line(out, "model is", value.model.because)
    _print_naming(out, value.naming)
    _print_line(out, "reads", f"{show_size(p.bytes_in)} in {count(p.requests, 'request')}")
    _print_line(
        out,
        "writes",
        f"{show_size(p.bytes_out)} in {count(len(p.files), 'file')} ({p.target.format}), "
        f"peak memory at most {show_size(peak)}",
    )
    if frees:
        out.print(f"retire --purge frees {show_size(frees)} on this disk, of checkpoints that are set aside")
    if costs:
        out.print(
            f"S3: {count(costs.get, 'GET')} of {show_size(costs.get_bytes)} "
            f"({show_size(costs.over_read)} over-read), {count(costs.list, 'LIST')}, "
            f"{count(costs.put, 'PUT')} of {show_size(costs.put_bytes)}; about ${costs.dollars:.4f}"
        )
    if value.ranks:
        sizes = value.ranks.per_rank
        ranks = f"{count(len(sizes), 'rank')} ({p.target.mesh}): {show_size(min(sizes))} to "
        ranks += f"{show_size(max(sizes))} each"
        out.print(terminal.text(f"{ranks}, the largest {value.ranks.ratio:.3f} of the mean"))
    for s in value.stages:
        other_tensors = f"; {some(s.others)}" if s.others else ""
        out.print(terminal.text(f"  pp={s.stage}: layers {s.ranges or 'none'}{other_tensors}"))
    _print_rows_of(out, value, show_all)
    _findings(out, value.warnings, show_all)


def _print_rows_of(out: Console, value: Composed, show_all: bool) -> None:
    """Print a plan's files and what happens to names: a line for each kind, where its table is long."""
    p = value.plan
    tables: dict[str, list[tuple[str, ...]]] = {
        "file": [(f.path, show_size(f.nbytes), str(f.tensors)) for f in p.files],
        "renamed": list(p.renamed),
        "mapped": [(m.name, f"{m.rule} of {', '.join(m.sources)}") for m in p.made if not m.same],
        "computed": list(p.derived),
        "cast": [(name, f"{stored} to {output}") for name, stored, output in p.cast],
        "tied": [(gone, f"{stays}, equality is checked") for gone, stays in p.ties],
        "dropped": list(p.dropped),
    }
    cut = [name for name, table in tables.items() if len(table) > _limit(_FEW_ROWS, show_all)]
    for name in cut:
        first = tables[name][0]
        such = first[0] if name == "file" else f"{first[0]}: {first[1]}"
        _print_line(out, name, f"{len(tables[name]):,}, such as {such}")
    if cut:
        out.print(f"({_ALL})", style="dim")
    for name, table in tables.items():
        if table and name not in cut:
            heads = ("file", "size", "tensors") if name == "file" else (name, "")
            print_table(out, heads, table, names=(0, 1) if name in _NAMES_TWICE else (0,))


def _print_naming(out: Console, naming: NameMap | None) -> None:
    if naming is None:
        return
    for name_map in (*([naming.via] if naming.via is not None else []), naming):
        to = f"{name_map.to}:{name_map.generation}" if name_map.generation else name_map.to
        untried = ", untried" if name_map.untried else ""
        out.print(
            terminal.text(f"names: {name_map.world} to {to}, {name_map.arch}{untried} ({name_map.because})")
        )
    for name, (number, source) in sorted(naming.numbers.items()):
        out.print(terminal.text(f"  {name} = {number:g} ({source})"))


def _plan_form(value: Composed, peak: int, costs: RequestCosts | None, frees: int) -> dict[str, Any]:
    p = value.plan
    return {
        "source": p.source,
        "format": p.target.format,
        "manifest_digest": p.manifest_digest,
        "plan_digest": p.digest,
        "bytes_in": p.bytes_in,
        "bytes_out": p.bytes_out,
        "requests": p.requests,
        "store_requests": costs.as_dict() if costs else None,
        "peak_memory": peak,
        "purge_frees": frees,
        "files": [
            {"path": f.path, "bytes": f.nbytes, "tensors": f.tensors, "requests": f.requests} for f in p.files
        ],
        "renamed": [list(r) for r in p.renamed],
        "cast": [list(c) for c in p.cast],
        "computed": [list(d) for d in p.derived],
        "dropped": [list(d) for d in p.dropped],
        "ties": [list(t) for t in p.ties],
        "model": value.model.because if value.model else None,
        "warnings": [w.as_dict() for w in value.warnings],
        "ranks": value.ranks.as_dict() if value.ranks else None,
        "stages": [s.as_dict() for s in value.stages],
        "map": _name_map(value),
    }


def _name_map(value: Composed) -> dict[str, Any] | None:
    """Return how names were mapped, and the rule that made each tensor."""
    if value.naming is None:
        return None
    tensors = [{"name": m.name, "rule": m.rule, "sources": list(m.sources)} for m in value.plan.made]
    return value.naming.as_dict() | {"tensors": tensors}


def difference(value: Difference, *, as_json: bool) -> None:
    """Print the answer of `diff`."""
    if as_json:
        terminal.write_json(value.as_dict())
        return
    out = terminal.console()
    for label, side in (("A", value.a), ("B", value.b)):
        model = f"; model: {side.model}" if side.model else ""
        gone = f"; {len(side.left_out)} left out" if side.left_out else ""
        bare = f"; {count(side.unverified, 'item')} without a checksum" if side.unverified else ""
        size = f"{count(side.tensors, 'tensor')}, {show_size(side.nbytes)}"
        form = f"; {side.form}" if side.form else ""
        out.print(
            terminal.text(f"{label}: {side.url}: {side.format}, {size}{model}{form}{gone}{bare}"),
            soft_wrap=True,
        )
    if value.by_itself:
        out.print(terminal.text((value.by_itself, "dim")), soft_wrap=True)
    out.print(
        terminal.text(
            (value.verdict, "green" if value.equal else "red"),
            f": {count(value.equal_tensors, 'tensor')} and {count(value.equal_objects, 'value')} equal, "
            f"{count(len(value.tensors), 'tensor')} and {count(len(value.objects), 'value')} different"
            + (f", {len(value.dropped)} left out by a conversion" if value.dropped else ""),
        )
    )
    moved = sorted((t for t in value.tensors if t.has_moved), key=_by_change)
    rows = [(t.name, ", ".join(t.what), *_both(t)) for t in value.tensors if not (t.has_moved or t.is_cast)]
    rows += [(o.name, f"value, {o.what}" if o.what != "values" else "value", o.a, o.b) for o in value.objects]
    _changes(out, value, moved)
    casts = Counter((t.a.dtype, t.b.dtype, t.cast) for t in value.tensors if t.is_cast and t.a and t.b)
    for (a, b, cast), number in casts.items():
        out.print(f"{count(number, 'tensor')}: {a} in A, {b} in B, equal after the cast to {cast}")
    if rows:
        print_table(out, ("name", "differs in", "A", "B"), rows[: _limit(_MOST)])
    _print_remainder(out, len(rows) - _limit(_MOST), "", _JSON)
    _print_pairs(out, "left out", [(d.name, f"{d.what}: {d.why}") for d in value.dropped])
    if value.dropped and not (value.tensors or value.objects or value.equal):
        out.print(
            "only state that a reshard leaves out differs: --ignore-dropped, or --record PATH, accepts it"
        )
    _print_pairs(out, "not compared", list(value.skipped))
    _findings(out, [*value.a.warnings, *value.b.warnings])


def _changes(out: Console, value: Difference, moved: Sequence[TensorDifference]) -> None:
    """Print what changed by part, by layer and by tensor, most first."""
    if not moved:
        return
    heads = ("changed", "equal", "|B-A|/|A|", "max |B-A|")
    parts = [
        (p.name, str(p.changed), str(p.equal), _number(p.change), _number(p.max_abs)) for p in value.parts
    ]
    if len(parts) > 1:
        print_table(out, ("part", *heads), parts)
    layers = [f"{p.name.removeprefix('layer ')} ({_number(p.change)})" for p in value.layers if p.changed]
    if layers[1:]:
        remainder = f", and {len(layers) - 8} more" if layers[8:] else ""
        out.print(
            terminal.text(f"layers, most changed first: {', '.join(layers[:8])}{remainder}"), soft_wrap=True
        )
    if value.frozen:
        out.print(terminal.text(f"equal beside them: {some(value.frozen)}"), soft_wrap=True)
    print_table(
        out,
        ("tensor", "|B-A|/|A|", "max |B-A|", "mean |B-A|", "cosine", "differ"),
        [(tensor.name, *_measured(tensor)) for tensor in moved[: _limit(_MOST)]],
    )
    _print_remainder(out, len(moved) - _limit(_MOST), "", _JSON)
    for tensor in moved if len(moved) <= _FEW else ():
        if (first := tensor.first) is not None:
            bits = f"{first.a!r} (0x{first.a_bits}) and {first.b!r} (0x{first.b_bits})"
            out.print(
                terminal.text(f"{tensor.name} differs first at {list(first.index)}: {bits}"), soft_wrap=True
            )


def _measured(tensor: TensorDifference) -> tuple[str, ...]:
    share = tensor.differing / tensor.a.numel if tensor.a is not None and tensor.a.numel else 0.0
    of = f"{100 * share:.3g} %"
    measures = tensor.measures
    if measures is None:
        return ("-",) * 4 + (of,)
    numbers = (measures.change, measures.max_abs, measures.mean_abs, measures.cosine)
    not_finite = f", {measures.not_finite:,} not finite" if measures.not_finite else ""
    return (*map(_number, numbers), of + not_finite)


def _number(number: float | None) -> str:
    return "-" if number is None else f"{number:.3g}"


def _by_change(tensor: TensorDifference) -> tuple[bool, float]:
    """Return the place of a tensor in a list of changes: an optimizer's state moves more than the model."""
    return tensor.is_optimizer, -tensor.measures.change if tensor.measures is not None else 0.0


def _both(tensor: TensorDifference) -> tuple[str, str]:
    a, b = ("" if s is None else f"{s.dtype} {list(s.shape)}" for s in (tensor.a, tensor.b))
    return a, b


def fingerprint(value: Fingerprints, url: str, live: LiveComparison | None, *, as_json: bool) -> None:
    """Print the answer of `fingerprint`. live: the comparison with the job's fingerprint, if it sent one."""
    if as_json:
        verdict = None if live is None or live.verdict is None else asdict(live.verdict)
        findings = [] if live is None else [f.as_dict() for f in live.findings]
        terminal.write_json(value.as_dict() | {"live": verdict, "findings": findings})
        return
    bare = f"; {count(value.unverified, 'item')} without a checksum" if value.unverified else ""
    out = terminal.console()
    out.print(value.fingerprint, soft_wrap=True)
    of_what = f"{url}: {count(len(value.tensors), 'tensor')}, map {value.map_digest[:16]}{bare}"
    out.print(terminal.text((of_what, "dim")), soft_wrap=True)
    if live is not None and live.verdict is not None and not live.different:
        out.print(live.verdict.text)
    _findings(out, (*value.warnings, *(live.findings if live is not None else ())))


def statistics(
    tensors: Sequence[MeasuredTensor], url: str, alarms: Sequence[Finding], *, show_all: bool, as_json: bool
) -> None:
    """Print the answer of `stats` of one checkpoint: outliers first, or with ``show_all`` all."""
    if as_json:
        rows = [tensor.as_dict() for tensor in tensors]
        terminal.write_json({"tensors": rows, "alarms": [alarm.as_dict() for alarm in alarms]})
        return
    out = terminal.console()
    listed = sorted(tensors, key=_outlying)
    top = listed if show_all else listed[: _limit(_MOST)]
    out.print(terminal.text(f"{url}: {count(len(tensors), 'tensor')}, outliers first"), soft_wrap=True)
    cells = [(tensor.fqn, tensor.dtype, *_own_numbers(tensor.statistics)) for tensor in top]
    print_table(out, ("tensor", "dtype", *_OWN_HEADS), cells)
    _print_remainder(out, len(listed) - len(top), "tensors", _ALL)
    _findings(out, alarms)


def changes(
    value: Changes, urls: Sequence[str], alarms: Sequence[Finding], *, show_all: bool, as_json: bool
) -> None:
    """Print the answer of `stats` of two checkpoints: what moved most, or with ``show_all`` all tensors."""
    if as_json:
        terminal.write_json(value.as_dict() | {"alarms": [alarm.as_dict() for alarm in alarms]})
        return
    out = terminal.console()
    listed = sorted(value.tensors, key=lambda change: (-change.relative, change.fqn))
    top = listed if show_all else listed[: _limit(_MOST)]
    out.print(terminal.text(f"{urls[0]} to {urls[1]}: what moved most first"), soft_wrap=True)
    cells = [
        (change.fqn, _number(change.relative), _number(change.cosine), *_own_numbers(change.after))
        for change in top
    ]
    print_table(out, ("tensor", "|B-A|/|A|", "cosine", *_OWN_HEADS), cells)
    _print_remainder(out, len(listed) - len(top), "tensors", _ALL)
    lists = {
        "only in A": value.only_before,
        "only in B": value.only_after,
        "without numbers to compare": value.unmeasured,
    }
    for title, names in lists.items():
        if names:
            out.print(terminal.text(f"{title}: {some(names)}"), soft_wrap=True)
    _findings(out, alarms)


_OWN_HEADS = ("norm", "mean", "max", "NaN", "Inf", "zeros")


def _own_numbers(own: Statistics) -> tuple[str, ...]:
    share = own.zeros / own.numel if own.numel else 0.0
    numbers = map(_number, (own.norm, own.mean, own.absmax))
    return (*numbers, f"{own.nan:,}", f"{own.inf:,}", f"{100 * share:.3g} %")


def _outlying(tensor: MeasuredTensor) -> tuple[Any, ...]:
    """Return the place of a tensor: not finite ones, then zeros, then by peak over root mean square."""
    own = tensor.statistics
    peak = own.absmax / own.rms if own.rms and math.isfinite(own.rms) else 0.0
    return -(own.nan + own.inf), bool(own.norm), -peak, tensor.fqn


def export_proof(value: ExportProof, *, as_json: bool) -> None:
    """Print the answer of `verify-export`."""
    if as_json:
        terminal.write_json(value.as_dict())
        return
    out = terminal.console()
    by = f" (named by {value.found_by})" if value.found_by else ""
    against = f" against {value.source}{by}" if value.source is not None else ""
    out.print(
        terminal.text((value.verdict, _VERDICT[value.verdict]), f": {value.export}{against}"), soft_wrap=True
    )
    table = new_table()
    for column in ("check", "verdict", "result"):
        table.add_column(column, overflow="fold")
    for check in value.checks:
        verdict = terminal.text((check.verdict, _VERDICT[check.verdict]))
        table.add_row(terminal.text(check.name), verdict, terminal.text(check.summary))
    out.print(table)
    problems = [(str(p.name) or check.name, p.what) for check in value.failures for p in check.problems]
    _print_pairs(out, "failed", problems)
    if value.conversion is not None:
        out.print(f"catalog {value.conversion}", style="dim")


def result(value: Result, *, as_json: bool) -> None:
    """Print the answer of a conversion."""
    if as_json:
        terminal.write_json(value.as_dict())
        return
    out = terminal.console()
    verified = sum(r.verified for r in value.files)
    unproven = sum(r.unverified for r in value.files)
    proof = f"{count(verified, 'stored checksum')} verified"
    proof += f", {count(unproven, 'record')} without one" if unproven else ""
    out.print(
        terminal.text(
            (value.destination, "green"),
            f": {value.format}, {count(len(value.tensors), 'tensor')}, "
            f"{show_size(value.nbytes)} in {count(len(value.files), 'file')}; {proof}",
        )
    )
    if value.loadable is not None:
        reason = next((f" ({f.message})" for f in value.warnings if f.code == "not-loadable"), "")
        style = "red" if value.loadable == "no" else ""
        out.print(terminal.text((f"loadable: {value.loadable}", style), reason), soft_wrap=True)
    seconds = ", ".join(f"{k} {show_duration(v)}" for k, v in value.timings.items())
    out.print(f"{seconds}{f'; catalog {value.conversion}' if value.conversion else ''}", style="dim")
    if value.fingerprint is not None:
        out.print(f"fingerprint {value.fingerprint}", style="dim", soft_wrap=True)
    for rule, number in Counter(rule for _, rule in value.dropped).items():
        out.print(terminal.text(f"left out: {number}, {rule}"), soft_wrap=True)
    _findings(out, value.warnings)


def formats(*, as_json: bool) -> None:
    """Print the supported formats, with those of installed packages."""
    from ckptcore.formats import KNOWN, registry

    format_registry = registry()
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
                "package": format_registry.package(f.name),
            }
            for f in format_registry.formats
        ]
        refused = [{"name": k.name, "title": k.title, "hint": k.hint} for k in KNOWN]
        broken = [{"package": p, "reason": r} for p, r in format_registry.broken]
        terminal.write_json({"formats": rows, "refused": refused, "broken": broken})
        return
    out = terminal.console()
    lines = []
    for f in format_registry.formats:
        package = format_registry.package(f.name)
        lines.append((f.name if package == "ckptcore" else f"{f.name} ({package})", _abilities(f)))
    print_table(out, ("format", "what it is"), lines)
    print_table(
        out, ("recognised, not read", "title", "next step"), [(k.name, k.title, k.hint) for k in KNOWN]
    )
    for package, reason in format_registry.broken:
        out.print(terminal.text(("not used", "red"), f": formats of {package}: {reason}"))


def _evidence(value: Manifest) -> str:
    """Return why a format was recognised, with plural forms that fit.

    The stored text, which is part of the manifest's digest, has ``file(s)``.
    """
    evidence = "; ".join(value.origin.get("evidence", []))
    return re.sub(r"\b(\d+)( [^;]*?)\(s\)", lambda m: f"{m[1]}{m[2]}{'' if m[1] == '1' else 's'}", evidence)


def _abilities(of: Format) -> str:
    """Return a format's title, what ckptcore does with it, and how it is recognised."""
    able = of.abilities
    verbs = " and ".join(
        verb for verb, is_able in (("read", able.reads), ("written", able.writes)) if is_able
    )
    checksums = "no checksums" if able.checksums == "none" else able.checksums
    return f"{of.title}: {verbs}; {checksums}. Recognised by {of.recognised_by.replace('`', '')}."


def error(value: CkptError, *, as_json: bool) -> None:
    """Print an error: as JSON to standard output, or as text to standard error."""
    if as_json:
        form = value.as_dict()
        form["findings"] = [f.as_dict() for f in value.values.get("findings", ())]
        terminal.write_json({"error": form})
        return
    out = terminal.console(err=True)
    # Further lines of a message are indented: none can pass for a line of ckptcore's own.
    message = terminal.text(f": {value.message}".replace("\n", "\n    "), lines=True)
    out.print(terminal.text((value.code, "red")) + message, soft_wrap=True)
    if value.hint:
        out.print(terminal.text(f"  next: {value.hint}"), soft_wrap=True)


@contextmanager
def progress() -> Iterator[Progress]:
    """Yield a progress callback: a bar with rate and time left on a terminal, else a line per stage."""
    if not sys.stderr.isatty():
        stages: set[str] = set()

        def line(stage: str, nbytes: int, total: int) -> None:
            if stage not in stages:
                stages.add(stage)
                terminal.line(f"{stage}: {show_size(total)}", err=True)

        yield line
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )

    class Rate(ProgressColumn):
        """Bytes per second, in the units of all other sizes: rich's own column has decimal ones."""

        def render(self, task: Task) -> Text:
            rate = task.finished_speed or task.speed
            rendered = "?" if rate is None else f"{show_size(rate)}/s"
            return terminal.text((rendered, "progress.data.speed"))

    with Progress(
        TextColumn("{task.description:9}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        Rate(),
        TimeRemainingColumn(),
        console=terminal.console(err=True),
        transient=False,
    ) as bar:
        tasks: dict[str, Any] = {}

        def advance(stage: str, nbytes: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=max(total, 1))
            bar.update(tasks[stage], completed=nbytes)

        yield advance


def _limit(rows: int, show_all: bool = False) -> int:
    """Return how many rows a table has at most: into a pipe, and on demand, all of them."""
    return sys.maxsize if show_all or terminal.is_piped() else rows


def _print_remainder(out: Console, number: int, what: str, demand: str) -> None:
    """Print how many rows of a table are left out, and how to see them."""
    if number > 0:
        out.print(f"and {number:,} more {what}".rstrip() + f" ({demand})")


def _findings(out: Console, findings: Sequence[Finding], show_all: bool | None = None) -> None:
    """Print findings. show_all: whether all are asked for; None where the command has no ``--all``."""
    if not findings:
        return
    table = new_table()
    for column in ("finding", "level", "message"):
        table.add_column(column, overflow="fold")
    limit = _limit(_ROWS if show_all is None else _FINDINGS, bool(show_all))
    for f in findings[:limit]:
        message = terminal.text(f.message, lines=True)
        if f.hint:
            message.append("\n").append_text(terminal.text((f"next: {f.hint}", "dim")))
        table.add_row(terminal.text((f.code, _STYLE[f.severity])), f.level, message)
    out.print(table)
    _print_remainder(out, len(findings) - limit, "", _JSON if show_all is None else _ALL)


def _print_pairs(
    out: Console, title: str, rows: Sequence[tuple[str, str]], show_all: bool | None = None
) -> None:
    """Print a table of names, each with a text. show_all: see `_findings`."""
    if not rows:
        return
    limit = _limit(_ROWS, bool(show_all))
    print_table(out, (title, ""), rows[:limit], names=(0, 1) if title in _NAMES_TWICE else (0,))
    _print_remainder(out, len(rows) - limit, title, _JSON if show_all is None else _ALL)
