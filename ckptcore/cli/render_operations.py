"""Print the answers of sweep, scrub, retire, thin and push: a line for each checkpoint, then the totals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ckptcore.utils import terminal
from ckptcore.utils.text import count
from ckptcore.utils.units import show_duration, show_size

if TYPE_CHECKING:
    from ckptcore.catalog.retirements import GivenUp
    from ckptcore.errors import CkptError
    from ckptcore.operations.automation.sweep_items import SweepItem, Swept
    from ckptcore.operations.publication.push import Pushed
    from ckptcore.operations.publication.signing import SignatureCheck, Signed
    from ckptcore.operations.retention.retire import RetireDecision, RetireReport
    from ckptcore.operations.retention.thin import ThinDecision, ThinReport
    from ckptcore.operations.scrub import Looked, Scrubbed

_MOST = 50  # unproven names that are printed for one source
_WARNINGS = 3  # of one checkpoint of a sweep that are printed


def item_line(as_json: bool) -> Callable[[SweepItem], None]:
    """Return a callback that prints each item of a sweep; to standard error where the answer is JSON."""
    last = ""

    def line(item: SweepItem) -> None:
        nonlocal last
        text = _item(item)
        if text != last:  # a checkpoint that cannot be read is so for each of its outputs
            for printed in (text, *_warnings(item)):
                terminal.line(printed, err=as_json)
        last = text

    return line


def swept(value: Swept, *, as_json: bool) -> None:
    """Print the answer of `sweep`; as text, its items are printed already."""
    if as_json:
        terminal.write_json(value.as_dict(), indent=2)
        return
    none = "no checkpoint was found; `ckptcore catalog root add NAME URI` watches a folder"
    terminal.line(("nothing was converted: " if value.dry_run else "") + _counts(value.counts, none))


def waits(seconds: float, error: CkptError) -> None:
    """Print to standard error that a checkpoint is checked again later, and why."""
    terminal.line(f"checking again in {show_duration(seconds)}: {error.message}", err=True)


def already(destination: str, *, as_json: bool) -> None:
    """Print the answer of a conversion that was not needed."""
    if as_json:
        terminal.write_json({"destination": destination, "already": True}, indent=2)
        return
    terminal.line(f"{destination} already holds the result for this checkpoint")


def looked(as_json: bool) -> Callable[[Looked], None]:
    """Return a callback that prints each checkpoint of a scrub."""

    def line(row: Looked) -> None:
        why = f": {row.proven.message}" if row.proven.message else ""
        terminal.line(f"{row.proven.proof:<14} {row.checkpoint.uri}{why}", err=as_json)
        step = next((f.hint for f in row.proven.findings if f.severity == "error" and f.hint), None)
        if step is not None:
            terminal.line(f"  next: {step}", err=as_json)

    return line


def scrubbed(value: Scrubbed, *, as_json: bool) -> None:
    """Print the answer of `scrub`."""
    if as_json:
        terminal.write_json(value.as_dict(), indent=2)
        return
    terminal.line(f"{_counts(value.counts)}; {len(value.looked)} of {value.due} due, of {value.known} known")


def fate(as_json: bool) -> Callable[[RetireDecision], None]:
    """Return a callback that prints what becomes of each source."""

    def line(decision: RetireDecision) -> None:
        terminal.line(f"{decision.fate:<9} {decision.source.uri}: {'; '.join(decision.why)}", err=as_json)
        unproven = [f"{name} ({kind})" for name, kind in decision.unproven]
        if decision.given_up:
            _names("given up", _given_up(decision.given_up), as_json)
        else:
            _names("unproven", unproven, as_json)

    return line


def _given_up(contents: Sequence[GivenUp]) -> list[str]:
    sizes = ((g, "" if g.nbytes is None else f", {show_size(g.nbytes)}") for g in contents)
    return [f"{g.name} ({g.kind}{size})" for g, size in sizes]


def _names(word: str, names: Sequence[str], as_json: bool) -> None:
    """Print what goes, or what is not proven, a name a line."""
    for name in names[:_MOST]:
        terminal.line(f"{'':<9} {word}: {name}", err=as_json)
    if len(names) > _MOST:
        terminal.line(f"{'':<9} {word}: {len(names) - _MOST} more, --output json lists all", err=as_json)


def thin_line(as_json: bool) -> Callable[[ThinDecision], None]:
    """Return a callback that prints what becomes of each step."""

    def line(decision: ThinDecision) -> None:
        sizes = f"{show_size(decision.freed)} of {show_size(decision.before)}" if decision.plan else ""
        reasons = "; ".join(filter(None, (sizes, *decision.why)))
        terminal.line(f"{decision.outcome:<9} {decision.uri}: {reasons}", err=as_json)
        _names("drops", _given_up(decision.given_up), as_json)

    return line


def thinned(value: ThinReport, *, as_json: bool) -> None:
    """Print the answer of `thin`."""
    if as_json:
        terminal.write_json(value.as_dict(), indent=2)
        return
    counted = f"{_counts(value.counts, 'no step was found')}, {show_size(value.freed)}"
    if not value.done:
        terminal.line(f"{counted} would be freed; nothing was changed, --yes thins them")
    elif value.grace:
        later = f"`ckptcore retire --purge` frees it after {show_duration(value.grace.total_seconds())}"
        terminal.line(f"{counted} set aside; {later}")
    else:
        terminal.line(f"{counted} freed")


def pushed_line(as_json: bool) -> Callable[[Pushed], None]:
    """Return a callback that prints what became of each output."""

    def line(item: Pushed) -> None:
        sizes = f"{len(item.sent)} of {count(len(item.files), 'file')}, {show_size(item.sent_bytes)}"
        reason = sizes if item.error is None else f"{item.error.code}: {item.error.message}"
        at_commit = f" at {item.commit[:8]}" if item.commit else ""
        terminal.line(f"{item.outcome:<10} {item.uri} -> {item.url}{at_commit}: {reason}", err=as_json)
        if item.error is not None and item.error.hint:
            terminal.line(f"  next: {item.error.hint}", err=as_json)
        changes = [f"{f.path} ({f.fate})" for f in item.files if f.fate in ("changed", "removed")]
        _names("replaces", changes, as_json)

    return line


def pushed(items: Sequence[Pushed], *, as_json: bool) -> None:
    """Print the answer of `push`."""
    counts = dict(Counter(item.outcome.value for item in items))
    nbytes = sum(item.sent_bytes for item in items)
    if as_json:
        form = {"counts": counts, "sent_bytes": nbytes, "outputs": [item.as_dict() for item in items]}
        terminal.write_json(form, indent=2)
    elif len(items) > 1:
        terminal.line(f"{_counts(counts)}; {show_size(nbytes)} that the branches did not have")


def signed(value: Signed, *, as_json: bool) -> None:
    """Print the answer of `sign`."""
    if as_json:
        terminal.write_json(value.as_dict(), indent=2)
        return
    read = len(value.files) - len(value.recorded)
    recorded = f", {len(value.recorded)} by the digests that the catalog recorded" if value.recorded else ""
    terminal.line(
        f"{value.signature} signs {count(len(value.files), 'file')} of {value.uri} by {value.algorithm}: "
        f"{count(read, 'file')} read{recorded}"
    )


def signature_check(value: SignatureCheck, *, as_json: bool) -> None:
    """Print the answer of `verify-signature`."""
    if as_json:
        terminal.write_json(value.as_dict(), indent=2)
        return
    for row in value.findings:
        terminal.line(f"{row.code}: {row.message}")
    signer = ", ".join(f"{name} {text}" for name, text in value.signer.items() if text)
    verdict = f"is what was signed: {count(value.files, 'file')}, {value.algorithm}; {signer}"
    terminal.line(f"{value.uri} {verdict if value.ok else f'is not what {value.signature} signs'}")


def retired(value: RetireReport, *, as_json: bool) -> None:
    """Print the answer of `retire`."""
    if as_json:
        terminal.write_json(value.as_dict(), indent=2)
        return
    for folder in value.set_aside:
        why = f": {folder.why}" if folder.why else ""
        terminal.line(f"{folder.fate:<9} {folder.uri} in {folder.record}{why}")
    counted = f"{_counts(value.counts)}, {show_size(value.nbytes)} of tensors"
    terminal.line(f"files: {files_line(value)}")
    terminal.line(counted if value.done else f"{counted}; no source was changed, --yes sets them aside")


def files_line(value: RetireReport) -> str:
    """Return the bytes of files before and after, and what was freed, or would be, now and by a purge."""
    freed = f"{show_size(value.freed)} {'freed' if value.done else 'would be freed'}"
    if value.purged:
        freed += f", {show_size(value.purged)} purged"
    later = f"; --purge frees {show_size(value.waiting)} later" if value.waiting else ""
    return f"{show_size(value.before)} before, {freed}, {show_size(value.before - value.freed)} after{later}"


def _item(item: SweepItem) -> str:
    to = f" -> {item.destination}" if item.standing in ("ready", "made") else ""
    why = f": {item.why.removeprefix(f'{item.source} ')}" if item.why else ""
    return f"{item.standing:<9} {item.source}{to}{why}"


def _warnings(item: SweepItem) -> list[str]:
    """Return the lines of a checkpoint's warnings; none of what an earlier sweep converted."""
    raised = [f for f in item.findings if f.severity == "warning" and item.standing != "converted"]
    lines = [f"{'':<9} {f.code}: {f.message}" for f in raised[:_WARNINGS]]
    return lines + ([f"{'':<9} {len(raised) - _WARNINGS} more warnings"] if len(raised) > _WARNINGS else [])


def _counts(counts: Mapping[str, int], none: str = "no checkpoint was found") -> str:
    return ", ".join(f"{n} {name}" for name, n in sorted(counts.items())) or none
