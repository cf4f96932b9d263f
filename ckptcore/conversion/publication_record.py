"""Publications: what is recorded of one before its first change, so that a rerun needs no fresh look?

``replaces.json`` is written with the plan: what lay at the destination when it was judged.
``publishing.json`` is written right before the first change, with the names that are to be put and those that
may be removed. A run that is killed is gone on with by these lists; what came to the destination meanwhile is
in none of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ckptcore.conversion.staging import PUBLISHING, Staging
from ckptcore.core.columnar_file import canonical_json
from ckptcore.execution.receipts import Receipt
from ckptcore.store import Store
from ckptcore.store.inventory import FILE, LINK, Entry, Inventory

REPLACES = "replaces.json"
# Steps of a publication, in order. REMOVING, PUTTING: of an object store; MOVING: on this machine.
MOVING, REMOVING, PUTTING, DONE = "moving", "removing", "putting", "done"


@dataclass(frozen=True, slots=True)
class Replaced:
    """What a publication may replace. inventory: all of it, empty for nothing. first: what makes it loadable,
    and is removed before the files that hold its tensors."""

    inventory: Inventory = field(default_factory=dict)
    first: tuple[str, ...] = ()

    @property
    def lacks_times(self) -> bool:
        """Whether an older version took it: a rewrite in place could hide from what it noted."""
        return any(e.kind in (FILE, LINK) and e.inode and e.ctime is None for e in self.inventory.values())

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {"inventory": {n: asdict(e) for n, e in self.inventory.items()}, "first": list(self.first)}

    @classmethod
    def from_dict(cls, form: Mapping[str, Any]) -> Replaced:
        """What `as_dict` gave."""
        return cls({n: entry_of(e) for n, e in form["inventory"].items()}, tuple(form["first"]))


@dataclass(frozen=True, slots=True)
class Publication:
    """One that has begun.

    plan: its digest. identity: (device, inode, mtime in ns) of what is moved into place; None on an object
    store. step: how far it came, "" for one that an earlier version began. puts: name -> (bytes, BLAKE3 or
    None) of every file. there: what lay at the destination when all was put. receipts: of its files.
    """

    plan: str
    identity: tuple[int, ...] | None
    step: str = ""
    replaces: Replaced = field(default_factory=Replaced)
    puts: Mapping[str, tuple[int, str | None]] = field(default_factory=dict)
    there: Inventory = field(default_factory=dict)
    receipts: tuple[Receipt, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "plan": self.plan,
            "identity": None if self.identity is None else list(self.identity),
            "step": self.step,
            "replaces": self.replaces.as_dict(),
            "puts": {name: list(told) for name, told in self.puts.items()},
            "there": {n: asdict(e) for n, e in self.there.items()},
            "receipts": [
                {**r.as_dict(), "sums": None if r.sums is None else r.sums.hex()} for r in self.receipts
            ],
        }

    @classmethod
    def from_dict(cls, form: Mapping[str, Any]) -> Publication:
        """What `as_dict` gave; also of the form that earlier versions wrote, which has no step."""
        identity = form["identity"]
        plan, moved = str(form["plan"]), None if identity is None else tuple(identity)
        if "step" not in form:
            return cls(plan, moved)
        return cls(
            plan,
            moved,
            str(form["step"]),
            Replaced.from_dict(form["replaces"]),
            {name: (int(nbytes), digest) for name, (nbytes, digest) in form["puts"].items()},
            {n: entry_of(e) for n, e in form["there"].items()},
            tuple(map(Receipt.from_dict, form["receipts"])),
        )


def note(staging: Staging, publication: Publication) -> None:
    """Records a publication, or how far it came."""
    staging.root.put(PUBLISHING, canonical_json(publication.as_dict()))


def noted(staging: Staging) -> Publication | None:
    """The publication that a run began, or None; also for a record that a crash cut off: nothing was
    changed before it was whole."""
    form = _stored_json(staging.root, PUBLISHING)
    try:
        return None if form is None else Publication.from_dict(form)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def note_replaced(staging: Staging, replaced: Replaced) -> None:
    """Records what was judged to be replaceable."""
    staging.root.put(REPLACES, canonical_json(replaced.as_dict()))


def noted_replaced(staging: Staging) -> Replaced | None:
    """What was judged when the plan was made; None where an earlier version made it, or it was cut off."""
    form = _stored_json(staging.root, REPLACES)
    try:
        return None if form is None else Replaced.from_dict(form)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def entry_of(form: Mapping[str, Any]) -> Entry:
    """The entry of its JSON form; older versions took no ctime."""
    inode, ctime = form["inode"], form.get("ctime")
    return Entry(
        form["kind"],
        int(form["nbytes"]),
        form["stamp"],
        None if inode is None else tuple(inode),
        None if ctime is None else int(ctime),
    )


def _stored_json(store: Store, name: str) -> Any:
    size = store.size(name)
    if size is None:
        return None
    try:
        return json.loads(store.read(name, 0, size))
    except ValueError:
        return None
