"""Spell several folders as one source: ``merged://[ROOT,ROOT]``, and ``merged://[ROOT,ROOT]/FOLDER`` in them.

Of its own because the stores and the catalog share the spelling, and neither imports the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import unquote

from ckptcore.errors import UsageError
from ckptcore.utils.average_url import escaped, file_of_average, is_average, split_average
from ckptcore.utils.step_names import stage_of

_SCHEME = "merged://"
_SPELLED = re.compile(r"merged://\[([^\[\]]+)\]((?:/.*)?)", re.DOTALL)


def is_merged(url: str) -> bool:
    """Report whether a URL names several places as one source: of one checkpoint, or of an average."""
    return url.startswith(_SCHEME) or is_average(url)


def merged_url(roots: str | Iterable[str]) -> str:
    """Return one URL for the folders of a source: sorted, each once. One folder keeps its own URL.

    Folders of pipeline stages (``pp0``, ``pp1``) have files of equal names. They are read in the folders that
    have them.

    >>> merged_url(["/node1/step-3", "/node0/step-3/"]), merged_url("/node0/step-3"), merged_url(["s3://b/a"])
    ('merged://[/node0/step-3,/node1/step-3]', '/node0/step-3', 's3://b/a')

    >>> merged_url(["/step-3/pp0", "/step-3/pp1"]), merged_url(["/node0/step-3/pp0", "/node1/step-3/pp1/"])
    ('/step-3', 'merged://[/node0/step-3,/node1/step-3]')

    Raises:
        UsageError: No folder is given, or one of them has no name.
    """
    if isinstance(roots, str):
        # A URL of a folder in them stays as it is: a list of folders cannot name that.
        named, inner = split_merged(roots)
        if inner or not named:
            return roots
        roots = named
    folders = _folders(roots)
    if _are_stages(folders):
        folders = {
            above or slash or "." for above, slash, _ in (folder.rpartition("/") for folder in folders)
        }
    if len(folders) == 1:
        return folders.pop()
    if average := next(filter(is_average, folders), None):
        raise UsageError(f"cannot read {average} as a folder of a checkpoint: it is an average")
    return f"{_SCHEME}[{','.join(sorted(map(escaped, folders)))}]"


def named_stages(roots: str | Iterable[str]) -> tuple[str, ...]:
    """Return the folders of pipeline stages that `merged_url` replaces by the folders that have them.

    >>> named_stages(["/step-3/pp1", "/step-3/pp0"]), named_stages(["/a", "/b"]), named_stages("/a/pp0")
    (('/step-3/pp0', '/step-3/pp1'), (), ())
    """
    folders = _folders(split_merged(roots)[0] or (roots,) if isinstance(roots, str) else roots)
    return tuple(sorted(folders)) if _are_stages(folders) else ()


def _folders(roots: Iterable[str]) -> set[str]:
    folders: set[str] = set()
    for root in roots:
        for folder in (() if is_average(root) else roots_of(root)) or (root,):
            folders.add(folder if folder.endswith("://") else folder.rstrip("/") or folder)
    if not folders or "" in folders:
        raise UsageError("a source is needed")
    return folders


def _are_stages(folders: set[str]) -> bool:
    return len(folders) > 1 and all(stage_of(folder.rpartition("/")[2]) is not None for folder in folders)


def split_merged(url: str) -> tuple[tuple[str, ...], str]:
    """Return the folders of a merged source, and the path of the folder in them that a URL names.

    >>> split_merged("merged://[/node0,s3://runs/step%2C3]/optim")
    (('/node0', 's3://runs/step,3'), 'optim')
    >>> split_merged("/node0")
    ((), '')

    Raises:
        UsageError: The URL begins like one, and is none.
    """
    if not url.startswith(_SCHEME):
        return (), ""
    match = _SPELLED.fullmatch(url)
    roots = tuple(map(unquote, match[1].split(","))) if match is not None else ()
    if match is None or "" in roots:
        raise UsageError(
            f"cannot read {url}: not a list of folders",
            hint="write merged://[FOLDER,FOLDER], with %25, %2C, %5B and %5D for %,[] in names",
        )
    return roots, match[2].strip("/")


def roots_of(url: str) -> tuple[str, ...]:
    """Return the places that the URL of a merged source names, one in each of its folders; else none.

    Of an average they are those of all its inputs.

    >>> roots_of("merged://[/node0,s3://runs]/optim"), roots_of("/node0")
    (('/node0/optim', 's3://runs/optim'), ())
    >>> roots_of("average://[1.0*/run/a,2.0*/run/b]")
    ('/run/a', '/run/b')
    """
    if is_average(url):
        if place := file_of_average(url):
            return roots_of(place) or (place,)
        return tuple(place for root in split_average(url)[0] for place in roots_of(root) or (root,))
    roots, inner = split_merged(url)
    return tuple(f"{root.rstrip('/')}/{inner}" for root in roots) if inner else roots
