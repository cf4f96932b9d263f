"""Compare every tensor of an export with its namesake in a reference folder that is known to be right.

Logits cannot do that: a few inputs use a few rows of an embedding, and some of the experts. The reference is
read once, beside the export, and its elements are cast to the export's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing

from ckptcore.checking.export_proof import REFERENCE, Check, Problem, failed, named, not_done, passed
from ckptcore.comparison.export_sides import OpenExport
from ckptcore.comparison.export_values import SOURCE, Beside, finish, read_beside
from ckptcore.comparison.opened import Opened
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Manifest
from ckptcore.errors import NameMismatch, UsageError
from ckptcore.planning.config_folder import check_names
from ckptcore.planning.request import Settings
from ckptcore.reading.rereading import rereading
from ckptcore.utils.text import count
from ckptcore.utils.workers import Progress


@rereading
def check_reference(
    export: OpenExport, reference: Manifest, tolerance: float, settings: Settings, progress: Progress | None
) -> Check:
    """Compare the tensors of an export with those of a reference.

    Args:
        export: The export.
        reference: The folder that is known to be right.
        tolerance: Of logits. With one, tensors may differ: they are named, and logits decide.
        settings: Memory and threads.
        progress: Called with the number of bytes read.
    """
    mine, theirs = Opened(export.url, export.values), Opened(f"reference ({reference.root})", reference)
    with closing(mine.store), closing(theirs.store):
        problems, pairs = _pairs(export, mine, theirs)
        seen = read_beside(pairs, settings, progress)
        ends = [end for end in (finish(theirs, SOURCE), finish(mine, "export")) if end is not None]
    damage = [(side, why) for s in seen for side, why in s.damage] + ends
    if unread := [why for side, why in damage if side == SOURCE]:
        return not_done(REFERENCE, f"the reference cannot be read: {unread[0]}")
    problems += [Problem("", why) for _, why in damage]
    differing = [
        Problem(
            s.name,
            f"{s.differing:,} of {s.specs[1].numel:,} elements differ from the reference{_cast(s.specs)}",
        )
        for s in seen
        if s.differing
    ]
    values = {"compared": len(seen), "differing": [p.name for p in differing]}
    if problems or (differing and not tolerance):
        return failed(REFERENCE, [*problems, *differing], **values)
    if differing:
        text = f"{count(len(differing), 'tensor')} of {len(seen)} differ, which a tolerance of logits allows"
        return passed(REFERENCE, f"{text}: {named(differing)}", **values)
    cast = [s for s in seen if s.specs[0].dtype != s.specs[1].dtype]
    after = f", {len(cast)} after a cast of the reference's" if cast else ""
    return passed(REFERENCE, f"{count(len(seen), 'tensor')} equal bit for bit{after}", **values)


def _cast(specs: Sequence[object]) -> str:
    one, two = (getattr(spec, "dtype", "") for spec in specs)
    return "" if one == two else f", after the cast from {one}"


def _pairs(export: OpenExport, mine: Opened, theirs: Opened) -> tuple[list[Problem], list[Beside]]:
    """Return (names and shapes that differ, tensors to read side by side)."""
    there, right = mine.manifest.index, theirs.manifest.index
    problems, pairs = [], []
    only = {*there} ^ {*right}
    ties = dict(_ties(export, theirs.manifest)) if only else {}
    for name in [*there, *(n for n in right if n not in there)]:
        side = "is not in the reference" if name in there else "is only in the reference"
        twin = name if name not in only else ties.get(name, "")
        row, other = (of.get(name, of.get(twin)) for of in (there, right))
        if row is None or other is None:
            problems.append(Problem(name, side))
            continue
        got, wanted = mine.manifest.tensors[row], theirs.manifest.tensors[other]
        if got.shape != wanted.shape:
            problems.append(
                Problem(name, f"has the shape {list(got.shape)}, the reference {list(wanted.shape)}")
            )
        elif got.dtype != wanted.dtype and not (
            BY_NAME[got.dtype].is_float and BY_NAME[wanted.dtype].is_float
        ):
            problems.append(Problem(name, f"is {got.dtype}, the reference has {wanted.dtype}"))
        else:
            pairs.append(Beside(name, (theirs, mine), (other, row), wanted=False))
    return problems, pairs


def _ties(export: OpenExport, reference: Manifest) -> Iterator[tuple[str, str]]:
    """Yield (name, the one that shares its values) by the export's config, both ways."""
    shapes: Mapping[str, tuple[int, ...]] = {t.fqn: t.shape for t in reference.tensors} | export.shapes()
    if export.config is None:
        return
    try:
        expected = check_names(export.config, shapes)
    except (NameMismatch, UsageError):  # the check of names reports it
        return
    for gone, kept in expected.ties:
        yield gone, kept
        yield kept, gone
