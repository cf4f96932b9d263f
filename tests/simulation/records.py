"""Read the records that custody keeps, without ckptcore: of what is set aside, and of obligations."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from custody_model import HOME, Contents, Tree, is_hidden, logical, read_parts, read_place
from custody_model import places as places_in

OBLIGATION = re.compile(r"\.(?P<name>[^/]+)\.obligations\.ckptcore/(?P<id>[^/.][^/]*)\.json")


@dataclass(frozen=True)
class Beside:
    """A record of an obligation.

    Attributes:
        place: What it is beside.
        source: URL of the deleted source; "" if it is torn.
    """

    place: str
    source: str


def obligations(tree: Tree) -> list[Beside]:
    """Return the records of obligations."""
    found = []
    for path, data in tree.items():
        above, _, _ = path.rpartition("/")
        folder = above.rpartition("/")[0]
        matched = OBLIGATION.fullmatch(path[len(folder) + bool(folder) :])
        if matched:
            place = f"{folder}/{matched['name']}" if folder else matched["name"]
            found.append(Beside(place, str((_parsed(data) or {}).get("source", ""))))
    return found


def vouched(tree: Tree, *, rotten: bool) -> set[str]:
    """Return the content ids that a record is beside, and what sources hold at their places.

    rotten: as of `ids_in_sight`.
    """
    there = _read_in(tree, rotten=rotten)
    places = {one.place for one in obligations(tree) if one.source}
    places |= {place for place in there if place.startswith("runs/") and not is_hidden(place)}
    return {each for place in places for each in there.get(place, {}).values()}


def ids_in_sight(tree: Tree, *, rotten: bool) -> set[str]:
    """Return the content ids that are held by more than what conversions have set aside.

    rotten: what is torn is read item by item, as the product reads it.
    """
    asides = tuple(
        f"{home}/" for home, record in homes(tree).items() if record and record.get("why") == "replaced"
    )
    read = _read_in(tree, rotten=rotten).items()
    return {id for place, contents in read for id in contents.values() if not place.startswith(asides)}


def _read_in(tree: Tree, *, rotten: bool) -> dict[str, Contents]:
    """Return what can be read at each place. rotten: also item by item."""
    files, there = places_in(tree), all_in(tree).items()
    return {
        place: read_parts(files[place]) if contents is None and rotten else contents or {}
        for place, contents in there
    }


def is_kept(place: str, contents: Contents, there: Mapping[str, Contents | None]) -> bool:
    """Return whether a source is at its place, set aside, or restored to another name, as it was."""
    return any(logical(p) in (place, f"{place}-back") and each == contents for p, each in there.items())


def all_in(tree: Tree) -> dict[str, Contents | None]:
    """Return what is at each place; None for one that is torn."""
    return {place: read_place(files) for place, files in places_in(tree).items()}


def homes(tree: Tree) -> dict[str, dict[str, Any] | None]:
    """Return the folders in which something is set aside, with their records; None for none or a torn one."""
    found: dict[str, dict[str, Any] | None] = {}
    for path in tree:
        for matched in HOME.finditer(path):
            home = path[: matched.end()]
            if path.startswith(f"{home}/{matched['name']}"):
                found[home] = _parsed(tree.get(f"{home}/record.json"))
    return found


def beside(place: str, there: Mapping[str, Contents | None]) -> Iterator[Contents]:
    """Yield what is at a place, and what was moved away from it and is hidden beside it."""
    above, _, name = place.rpartition("/")
    for path, contents in there.items():
        hidden = is_hidden(path) and (path.startswith(f"{above}/.{name}.") or logical(path) == place)
        if contents is not None and (path == place or hidden):
            yield contents


def _parsed(data: bytes | None) -> dict[str, Any] | None:
    try:
        form = json.loads(data or b"")
    except ValueError:
        return None
    return form if isinstance(form, dict) else None
