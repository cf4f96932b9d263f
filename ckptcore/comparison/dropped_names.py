"""Tell what a conversion drops apart from what differs: names of one side that the other lacks by a rule.

A reshard leaves out state that belongs to the ranks that saved it. The record of a conversion, its plan or
its JSON answer, lists what was left out and why; without one the same rules are applied to the names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ckptcore.comparison.result import DroppedName
from ckptcore.core.manifest import Manifest
from ckptcore.errors import CkptError, UsageError
from ckptcore.planning.plan import load_head
from ckptcore.planning.rank_local_state import bound_names
from ckptcore.store import open_store
from ckptcore.utils.foreign_text import InvalidText, load_json, parsing

_MAX_RECORD = 1 << 30


@dataclass(frozen=True, slots=True)
class OneSided:
    """A tensor or value that one side lacks.

    Attributes:
        name: The name under which it was compared.
        kind: ``only-in-a`` or ``only-in-b``.
        stored: The stored name of the tensor, or of the object that has the value.
    """

    name: str
    kind: str
    stored: str


def recorded_in(record: str) -> tuple[tuple[str, str], ...]:
    """Return (stored name, rule) of what a conversion left out, by its record.

    Args:
        record: Folder of a saved plan, or a file with the JSON that plan, reshard or consolidate printed.

    Raises:
        UsageError: There is no such record.
    """
    path = Path(record)
    if path.is_dir():
        try:
            with closing(open_store(record)) as store:
                return load_head(store).dropped
        except CkptError as error:
            raise UsageError(f"cannot use {record} as a record: {error.message}") from error
    try:
        if path.stat().st_size > _MAX_RECORD:
            raise UsageError(f"cannot use {record} as a record: it has more than {_MAX_RECORD} bytes")
        with parsing("the record of a conversion"):
            rows = load_json(path.read_bytes())["dropped"]
            pairs = tuple((str(name), str(rule)) for name, rule in rows)
    except (OSError, InvalidText) as error:
        raise UsageError(
            f"cannot use {record} as a record: {error}",
            hint="name the folder of `ckptcore plan --save DIR`, or what `--output json` printed",
        ) from error
    return pairs


def dropped_names(
    missing: Sequence[OneSided], recorded: Mapping[str, str], sources: Mapping[str, Manifest]
) -> dict[str, DroppedName]:
    """Return what a rule drops, by compared name.

    Args:
        missing: What one side lacks.
        recorded: Stored name -> rule, as a conversion recorded it.
        sources: ``only-in-a`` and ``only-in-b`` -> that side.
    """
    ruled = {kind: bound_names(sources[kind]) for kind in {m.kind for m in missing}}
    dropped: dict[str, DroppedName] = {}
    for one_sided in missing:
        rule = recorded.get(one_sided.stored)
        why = ruled[one_sided.kind].get(one_sided.stored) if rule is None else rule
        if why is not None:
            dropped[one_sided.name] = DroppedName(one_sided.name, one_sided.kind, why, rule is not None)
    return dropped
