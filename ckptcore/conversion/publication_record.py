"""Describe a publication before its first change, so that a rerun can finish it.

``replaces.json`` is written with the plan: the content of the destination when it was checked.
``publishing.json`` is written right before the first change, with the names to write and the names that may
be removed. A rerun finishes a killed publication by these lists; files that appeared at the destination
meanwhile are not in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptcore.core.columnar_file import canonical_json
from ckptcore.custody.judged import Judged
from ckptcore.execution.receipts import Receipt
from ckptcore.store.file_status import FileStatus
from ckptcore.store.listing import Inventory

REPLACES = "replaces.json"
ITSELF = ""  # the name, below the destination, of a destination that is one file
# Steps of a publication, in order. REMOVING, PUTTING: on an object store; MOVING: on this machine.
MOVING, REMOVING, PUTTING, DONE = "moving", "removing", "putting", "done"


@dataclass(frozen=True, slots=True)
class Replaced:
    """What a publication may replace.

    Attributes:
        inventory: All of it; empty for nothing.
        first: Files that make it loadable; they are removed before the files with its tensors.
        judged: What the gate decided about it (`ckptcore.custody.gate`); None if it was not asked.
        home: Name of the folder beside the destination that it is moved into; "" if it is removed.
    """

    inventory: Inventory = field(default_factory=dict)
    first: tuple[str, ...] = ()
    judged: Judged | None = None
    home: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        form: dict[str, Any] = {"inventory": _listed(self.inventory)}
        judged = None if self.judged is None else self.judged.as_dict()
        return form | {"first": list(self.first), "judged": judged, "home": self.home}

    @classmethod
    def from_dict(cls, form: Mapping[str, Any]) -> Replaced:
        """Read the form of `as_dict`."""
        judged = form.get("judged")
        return cls(
            _inventory_of(form["inventory"]),
            tuple(form["first"]),
            None if judged is None else Judged.from_dict(judged),
            str(form.get("home", "")),
        )


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication that was begun.

    Attributes:
        plan: The plan's digest.
        identity: (device, inode, mtime in ns) of what is moved into place; None on an object store.
        step: The current step; "" before the first.
        replaces: What may be replaced.
        puts: Name -> (bytes, BLAKE3 or None) of every file.
        there: The content of the destination after all files were written.
        receipts: Of its files.
    """

    plan: str
    identity: tuple[int, ...] | None
    step: str = ""
    replaces: Replaced = field(default_factory=Replaced)
    puts: Mapping[str, tuple[int, str | None]] = field(default_factory=dict)
    there: Inventory = field(default_factory=dict)
    receipts: tuple[Receipt, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "plan": self.plan,
            "identity": None if self.identity is None else list(self.identity),
            "step": self.step,
            "replaces": self.replaces.as_dict(),
            "puts": {name: list(put) for name, put in self.puts.items()},
            "there": _listed(self.there),
            "receipts": [
                {**r.as_dict(), "sums": None if r.sums is None else r.sums.hex()} for r in self.receipts
            ],
        }

    @classmethod
    def from_dict(cls, form: Mapping[str, Any]) -> Publication:
        """Read the form of `as_dict`."""
        identity = form["identity"]
        return cls(
            str(form["plan"]),
            None if identity is None else tuple(identity),
            str(form["step"]),
            Replaced.from_dict(form["replaces"]),
            {name: (int(nbytes), digest) for name, (nbytes, digest) in form["puts"].items()},
            _inventory_of(form["there"]),
            tuple(map(Receipt.from_dict, form["receipts"])),
        )


def packed_replaced(replaced: Replaced) -> tuple[str, bytes]:
    """Return the name and the bytes of the record of what may be replaced."""
    return REPLACES, canonical_json(replaced.as_dict())


def _listed(inventory: Inventory) -> dict[str, list[Any]]:
    return {name: status.as_list() for name, status in inventory.items()}


def _inventory_of(form: Mapping[str, list[Any]]) -> dict[str, FileStatus]:
    return {name: FileStatus.of_list(status) for name, status in form.items()}
