"""Announced: what is made of a checkpoint that somebody names, and where does it go?

What a root is watched for holds for all below it, whoever names it: a sweep and an announcement then want the
same thing, and one claim keeps them from making it twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.normalize import normal_uri
from ckptcore.catalog.watched_roots import Root
from ckptcore.operations.discover import matches, step_and_run
from ckptcore.operations.export_target import Place, target_of
from ckptcore.planning.request import Request
from ckptcore.store import join_url

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog


def request_of(catalog: Catalog, source: str, step: int | None = None) -> tuple[Root, Request] | None:
    """The watched root that a source lies below, and what its target makes of it; None below no watched root.

    The innermost root counts, by name where several watch one place; paused ones count too. step: what the
    announcement says, for templates that need one where no name tells it. Raises `UsageError` when the
    target cannot be used for it.
    """
    with catalog.reading() as conn:
        every = roots.every(conn)
    for root in sorted(every, key=lambda r: (-len(r.uri), r.name)):
        path = _below(source, root.uri)
        if path is None or not matches(path, root.include):
            continue
        told, run = step_and_run(root.uri, path)
        place = Place(root.uri, run, step if told is None else told, path.rsplit("/", 1)[-1], path)
        # Under the name by which a sweep knows it, also where links lead there under another.
        return root, target_of(root.target).request(join_url(root.uri, path), place)
    return None


def _below(source: str, root: str) -> str | None:
    """The path of a source below a root, or None; links are resolved."""
    here, inside = normal_uri(source), normal_uri(root).rstrip("/") + "/"
    return here[len(inside) :] if here.startswith(inside) and len(here) > len(inside) else None
