"""Print the answers of commands: as text with rich, or as JSON with a stable schema.

There is one function for each kind of value. Standard output has the answer and nothing else.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    from ckptcore.comparison.result import Difference, TensorDifference
    from ckptcore.conversion.pipeline import Result
    from ckptcore.conversion.request_costs import RequestCosts
    from ckptcore.core.manifest import Manifest
    from ckptcore.fingerprints.result import Fingerprints
    from ckptcore.formats import Format
    from ckptcore.planning.compose import Composed
    from ckptcore.planning.name_maps import NameMap
    from ckptcore.utils.workers import Progress

_MOST, _FEW = 20, 3  # rows of a comparison; tensors whose first difference is printed, too
_WAYS, _PIECES = 6, 16  # ways to cut tensors, and pieces of one, that `inspect` prints
_ROWS = 40  # rows of a table of names before it is cut for a terminal
_NAMES_TWICE = ("renamed", "mapped")  # tables of pairs whose second column has names, too
_STATUS = {"ok": "green", "unproven": "yellow"}
_VERDICT = {"ok": "green", "failed": "red", "unproven": "yellow", "not-done": "yellow"}
_STYLE = {"error": "red", "warning": "yellow", "info": "dim"}


def manifest(value: Manifest, include: Sequence[str], exclude: Sequence[str] = (), *, as_json: bool) -> None:
    """Print the answer of `inspect`."""
    from ckptcore.checking.summary import summarize
    from ckptcore.core.subset import describe_derived
    from ckptcore.naming.rename import matches

    summary = summarize(value)
    tensors = [
        (i, t)
        for i, t in enumerate(value.tensors)
        if (not include or matches(t.fqn, include)) and not matches(t.fqn, exclude)
    ]
    dtypes: Counter[str] = Counter()
    for part in summary.parts:
        dtypes.update(part.dtypes)
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
                "bytes": dtypes.total(),
                "dtypes": dict(dtypes),
                "summary": summary.as_dict(),
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
    out.print(terminal.text((value.root, "bold"), f": {value.format} ({_evidence(value)})"))
    kinds = ", ".join(f"{show_size(n)} {d}" for d, n in dtypes.most_common())
    tensors_text, chunks_text = count(value.num_tensors, "tensor"), count(stored, "chunk")
    objects_text = count(len(value.blobs) - len(value.unread), "object")
    out.print(
        f"{tensors_text}, {show_size(dtypes.total())} ({kinds}); {chunks_text} in "
        f"{count(len(used), 'file')}; {objects_text}"
    )
    _print_summary(out, summary)
    _print_pairs(out, "cannot be read", [(name, why.describe()) for name, why in value.unread.items()])
    rows = [
        (t.fqn, t.dtype, str([*t.shape]), computed[i] if i in computed else str(chunks[i]))
        for i, t in tensors[: _limit(_ROWS)]
    ]
    print_table(out, ("tensor", "dtype", "shape", "chunks"), rows)
    if len(tensors) > _limit(_ROWS):
        remainder = count(len(tensors) - _ROWS, "more tensor")
        out.print(f"and {remainder} (--output json lists all, --include selects)")


def _print_summary(out: Console, summary: Summary) -> None:
    """Print the parts of a checkpoint, and how its tensors are cut and which rank has the pieces."""
    from ckptcore.checking.summary import MODEL, UNSURE

    for part in summary.parts:
        dtypes = ", ".join(f"{show_size(n)} {d}" for d, n in part.dtypes.items())
        elements = "parameters" if part.name == MODEL else "elements"
        size = f"{count(part.tensors, 'tensor')}, {part.elements:,} {elements}, {dtypes}"
        note = f" ({part.note})" if part.name == UNSURE and part.note else ""
        out.print(terminal.text((f"{part.name:<13}", "bold"), f" {size}{note}"))
    if not any(placement.cuts for placement in summary.placements):
        return
    ways = [
        (
            ", ".join(f"dim {dim} in {pieces}" for dim, pieces in placement.cuts) or "not cut",
            owners_text(placement, summary.ranks),
            str(placement.tensors),
            placement.example,
        )
        for placement in summary.placements[:_WAYS]
    ]
    print_table(out, ("cut", "held by rank", "tensors", "such as"), ways)
    if len(summary.placements) > _WAYS:
        out.print(f"and {count(len(summary.placements) - _WAYS, 'more way')} to cut (--output json)")


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


def report(value: Report, *, as_json: bool) -> None:
    """Print the answer of `validate`."""
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
    _findings(out, value.findings)


def report_of(error: CkptError, source: str, level: str) -> Report:
    """Return a report for a source whose metadata cannot be read."""
    from ckptcore.checking.check import Report

    findings = tuple(error.values.get("findings", ())) or (
        finding("malformed-metadata", "files", error.message, file=error.values.get("file"), hint=error.hint),
    )
    return Report(level, "", 0, 0, findings)


def plan(value: Composed, peak: int, costs: RequestCosts | None, frees: int, *, as_json: bool) -> None:
    """Print the answer of `plan`. frees: bytes that `retire --purge` frees on the disk of the destination."""
    if as_json:
        terminal.write_json(_plan_form(value, peak, costs, frees))
        return
    p = value.plan
    out = terminal.console()
    if value.model:
        out.print(terminal.text(f"model: {value.model.because}"))
    _print_naming(out, value.naming)
    out.print(
        f"reads {show_size(p.bytes_in)} in {count(p.requests, 'request')}, "
        f"writes {show_size(p.bytes_out)} in {count(len(p.files), 'file')} ({p.target.format}), "
        f"peak memory at most {show_size(peak)}"
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
    print_table(
        out,
        ("file", "size", "tensors"),
        [(f.path, show_size(f.nbytes), str(f.tensors)) for f in p.files[: _limit(_ROWS)]],
    )
    if len(p.files) > _limit(_ROWS):
        out.print(f"and {count(len(p.files) - _ROWS, 'more file')} (--output json lists all)")
    _print_pairs(out, "renamed", [(a, b) for a, b in p.renamed])
    _print_pairs(
        out, "mapped", [(m.name, f"{m.rule} of {', '.join(m.sources)}") for m in p.made if not m.same]
    )
    _print_pairs(out, "computed", list(p.derived))
    _print_pairs(out, "cast", [(a, f"{b} to {c}") for a, b, c in p.cast])
    _print_pairs(out, "tied", [(a, f"{b}, equality is checked") for a, b in p.ties])
    _print_pairs(out, "dropped", list(p.dropped))
    _findings(out, value.warnings)


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
    if len(rows) > _limit(_MOST):
        out.print(f"and {len(rows) - _MOST} more (--output json lists all)")
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
    if len(moved) > _limit(_MOST):
        out.print(f"and {len(moved) - _MOST} more (--output json lists all)")
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


def fingerprint(value: Fingerprints, url: str, *, as_json: bool) -> None:
    """Print the answer of `fingerprint`."""
    if as_json:
        terminal.write_json(value.as_dict())
        return
    bare = f"; {count(value.unverified, 'item')} without a checksum" if value.unverified else ""
    out = terminal.console()
    out.print(value.fingerprint, soft_wrap=True)
    of_what = f"{url}: {count(len(value.tensors), 'tensor')}, map {value.map_digest[:16]}{bare}"
    out.print(terminal.text((of_what, "dim")), soft_wrap=True)
    _findings(out, value.warnings)


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
    seconds = ", ".join(f"{k} {show_duration(v)}" for k, v in value.timings.items())
    out.print(f"{seconds}{f'; catalog {value.conversion}' if value.conversion else ''}", style="dim")
    if value.fingerprint is not None:
        out.print(f"fingerprint {value.fingerprint}", style="dim", soft_wrap=True)
    for rule, number in Counter(rule for _, rule in value.dropped).items():
        out.print(terminal.text(f"left out: {number}, {rule}"), soft_wrap=True)
    if value.loadable is not None:
        out.print(terminal.text(f"loadable: {value.loadable}"))
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


def _limit(rows: int) -> int:
    """Return how many rows a table has at most: into a pipe all of them."""
    return sys.maxsize if terminal.is_piped() else rows


def _findings(out: Console, findings: Sequence[Finding]) -> None:
    if not findings:
        return
    table = new_table()
    for column in ("finding", "level", "message"):
        table.add_column(column, overflow="fold")
    for f in findings[: _limit(_ROWS)]:
        message = terminal.text(f.message, lines=True)
        if f.hint:
            message.append("\n").append_text(terminal.text((f"next: {f.hint}", "dim")))
        table.add_row(terminal.text((f.code, _STYLE[f.severity])), f.level, message)
    out.print(table)
    if len(findings) > _limit(_ROWS):
        out.print(f"and {len(findings) - _ROWS} more (--output json lists all)")


def _print_pairs(out: Console, title: str, rows: Sequence[tuple[str, str]]) -> None:
    if not rows:
        return
    print_table(out, (title, ""), rows[: _limit(_ROWS)], names=(0, 1) if title in _NAMES_TWICE else (0,))
    if len(rows) > _limit(_ROWS):
        out.print(f"and {len(rows) - _ROWS} more {title} (--output json lists all)")
