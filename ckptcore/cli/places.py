"""Find the place of a checkpoint that a command line names as the catalog knows it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ckptcore.errors import CatalogError
from ckptcore.utils import terminal


def named_places(names: Sequence[str], given: Mapping[str, Any]) -> list[str]:
    """Return paths and URLs as they are, and for an alias or the beginning of an id the checkpoint's place.

    A path that exists is never taken for another name, and a name that the catalog does not know stays.

    Args:
        names: What the command line has as SRC.
        given: The command's options; without ``catalog`` the default catalog is asked.
    """
    return [_named(name, given) for name in names]


def _named(name: str, given: Mapping[str, Any]) -> str:
    if given.get("no_catalog") or "://" in name or os.path.lexists(name):
        return name
    place = resolved(name, given.get("catalog"))
    if place is None or place == os.path.abspath(name):
        return name
    terminal.line(f"{name} is {place} in the catalog", err=True)
    return place


def resolved(name: str, catalog: str | None) -> str | None:
    """Return the place of the checkpoint that a catalog has under a name; None if it has none.

    Raises `UsageError` for the beginning of several ids.
    """
    from ckptcore.custody.gate import existing_catalog

    try:
        with existing_catalog(catalog) as opened:
            if opened is None:
                return None
            return opened.place_of(name)
    except CatalogError:  # the error of whoever reads the path is then the one that helps
        return None
