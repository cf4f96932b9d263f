"""Name the tensors of a source whose elements an export loses, or drops against its rule."""

from __future__ import annotations

from collections import Counter

from ckptcore.checking.export_proof import Problem
from ckptcore.comparison.element_use import element_use
from ckptcore.core.manifest import Manifest
from ckptcore.errors import DamagedCheckpoint
from ckptcore.naming.rename import Mapped
from ckptcore.planning.zero_tensors import not_zero


def element_problems(source: Manifest, known: Mapped) -> list[Problem]:
    """Account for every stored element of a source.

    Args:
        source: The checkpoint.
        known: What an export makes of it.

    Returns:
        A problem for each tensor of which elements are lost, more or fewer are dropped than its rule says, or
        elements are in the export twice.
    """
    gone = {d.fqn for d in known.dropped if d.part is None}
    parts = Counter[str]()
    for dropped in known.dropped:
        if dropped.part is not None and dropped.fqn not in gone:
            parts[dropped.fqn] += dropped.part
    use = element_use(source, known.manifest, {t.fqn for t in source.tensors if t.fqn not in gone})
    found = [
        Problem(name, f"{count:,} of its elements are in no tensor of the export, and no rule says why")
        for name, count in use.unused.items()
        if name not in parts
    ]
    for name, count in parts.items():
        lost = use.once.get(name, 0)
        if lost != count:
            what = f"{lost:,} of its elements are in no tensor of the export, and its rule drops {count:,}"
            found.append(Problem(name, what))
    return found + [
        Problem(name, f"{count:,} of its elements are in another tensor of the export, too")
        for name, count in use.repeated.items()
    ]


def zero_problems(source: Manifest, known: Mapped) -> tuple[list[Problem], str]:
    """Read the tensors that a rule drops where they are all zero.

    Returns:
        A problem for each that is not, and why the source cannot be read, or "".
    """
    try:
        return [
            Problem(d.fqn, f"{count:,} of its {numel:,} elements are not zero, and {d.only_zero}")
            for d, count, numel in not_zero(source, known.dropped)
        ], ""
    except DamagedCheckpoint as error:
        return [], error.message
