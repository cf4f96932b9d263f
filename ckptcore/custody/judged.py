"""Hold who is about to replace a place, and what the gate decided about it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
    """

    moves: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"moves": {key: list(places) for key, places in self.moves.items()}}

    @classmethod
    def from_dict(cls, form: Mapping[str, Any]) -> Judged:
        """Read the form of `as_dict`."""
        return cls({str(key): tuple(map(str, places)) for key, places in form["moves"].items()})
