"""Hold who is about to replace a place, and what the gate decided about it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from ckptcore.core.columnar_file import canonical_json
from ckptcore.store.file_status import FileStatus

# Keeps writers away from a place for as long as it is entered; raises `Busy` if one is at work there.
AtRest = Callable[[str], AbstractContextManager[None]]
_FOLDER = re.compile(r"\..+\.(?:retiring-[0-9a-f]{8}|obligations)\.ckptcore")


def is_of_custody(name: str) -> bool:
    """Return whether a folder of this name has what is set aside, or a record of obligations."""
    return _FOLDER.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Replacer:
    """Who is about to replace a place.

    Attributes:
        catalog: URL of the catalog that knows obligations; None for the default one, False for none.
        conversion: Its id there, if this process began it.
    """

    catalog: str | bool | None = False
    conversion: str | None = None


NOBODY = Replacer()


@dataclass(frozen=True, slots=True)
class Judged:
    """What was decided about a place.

    Attributes:
        moves: Id of each obligation whose contents the place holds -> the places where they were read.
        looks: Each of these places -> the digest of its files right before (`digest_of_files`).
    """

    moves: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    looks: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        moves = {key: list(places) for key, places in self.moves.items()}
        return {"moves": moves, "looks": dict(self.looks)}

    @classmethod
    def from_dict(cls, form: Mapping[str, Any]) -> Judged:
        """Read the form of `as_dict`."""
        moves = {str(key): tuple(map(str, places)) for key, places in form["moves"].items()}
        return cls(moves, {str(place): str(digest) for place, digest in form["looks"].items()})


def digest_of_files(files: Mapping[str, FileStatus]) -> str:
    """Return a digest that differs when any file of a place was written, moved or touched."""
    return blake3(canonical_json({name: status.as_list() for name, status in files.items()})).hexdigest()
