"""Keep the registry of formats: which `Format` reads or writes a format and version, and the defaults.

Its keys are (action, format, version). Formats of this project come first. Other packages add more through
the entry-point group ``ckptcore.formats``; each entry is a `Format`:

    [project.entry-points."ckptcore.formats"]
    mine = "my_package.mine:FORMAT"
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Literal

from ckptcore.errors import UsageError
from ckptcore.formats.base import Format
from ckptcore.utils.near_names import did_you_mean

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "ckptcore.formats"
OWN = "ckptcore"
Action = Literal["read", "write"]
Key = tuple[Action, str, str]
_log = logging.getLogger("ckptcore")


@dataclass(frozen=True)
class Registry:
    """All formats.

    Attributes:
        rows: (Action, name, version) -> the format, and the package that provides it, as registered.
        broken: (package, reason) of unusable entry points, which are not registered.
    """

    rows: Mapping[Key, tuple[Format, str]]
    broken: tuple[tuple[str, str], ...] = ()

    @cached_property
    def formats(self) -> tuple[Format, ...]:
        """Return every format once, in the order of registration."""
        return tuple(dict.fromkeys(form for form, _ in self.rows.values()))

    def find(self, action: Action, name: str, version: str | None = None) -> Format:
        """Return the format that performs an action.

        Args:
            action: "read" or "write".
            name: Name of the format.
            version: Version of the format; None for its default (the newest).

        Raises:
            UsageError: There is no such format; the error lists the known ones.
        """
        versions = {v: form for (a, n, v), (form, _) in self.rows.items() if (a, n) == (action, name)}
        for known_version, form in versions.items():
            if version in (None, known_version):
                return form
        if versions:
            raise UsageError(
                f"cannot {action} version {version} of format {name!r}", hint=f"known: {', '.join(versions)}"
            )
        names = dict.fromkeys(n for a, n, _ in self.rows if a == action)
        listed = any(n == name for _, n, _ in self.rows)
        message = f"cannot {action} format {name!r}" if listed else f"unknown format {name!r}"
        raise UsageError(message, hint=did_you_mean(name, names, f"one of: {', '.join(names)}"))

    def package(self, name: str) -> str:
        """Return the package that provides a format."""
        return next(package for (_, n, _), (_, package) in self.rows.items() if n == name)


def register(project_formats: Sequence[Format], *, plugins: bool = True) -> Registry:
    """Return the registry of this project's formats and those of installed packages.

    An entry point is skipped and logged if it fails, is no `Format`, or has the name of a registered format.

    Args:
        project_formats: Formats of this project.
        plugins: Whether to load the entry points of installed packages.
    """
    rows: dict[Key, tuple[Format, str]] = {}
    for format in project_formats:
        rows |= dict.fromkeys(_keys(format), (format, OWN))
    broken: list[tuple[str, str]] = []
    for point in entry_points(group=GROUP) if plugins else ():
        package = point.dist.name if point.dist is not None else point.value
        try:
            format = point.load()
        except Exception as error:  # any defect of another package; it is logged and listed
            broken.append((package, f"{point.value} fails: {type(error).__name__}: {error}"))
            continue
        if not isinstance(format, Format):
            broken.append((package, f"{point.value} is {type(format).__name__}, not a Format"))
            continue
        keys = list(_keys(format))
        taken = next((rows[key][1] for key in keys if key in rows), None)
        if taken is not None:
            broken.append((package, f"format {format.name!r} is already provided by {taken}"))
            continue
        rows |= dict.fromkeys(keys, (format, package))
    for package, reason in broken:
        _log.warning("formats of package %s are not used: %s", package, reason)
    return Registry(rows, tuple(broken))


def entry_points(group: str) -> Iterable[EntryPoint]:
    """Return the entry points of installed packages in a group.

    `importlib.metadata` finds them, if there are any: to import it and to ask every package takes longer than
    to read the metadata of a small checkpoint.
    """
    if not _is_named(group.encode()):
        return ()
    from importlib import metadata

    return metadata.entry_points(group=group)


def _is_named(group: bytes) -> bool:
    """Report whether the entry points of a package may be of a group: False only where none of them is."""
    if any(hasattr(finder, "find_distributions") and finder is not PathFinder for finder in sys.meta_path):
        return True  # packages that are elsewhere than in folders
    for folder in sys.path:
        try:
            with os.scandir(folder or ".") as entries:
                packages = [e.path for e in entries if e.name.lower().endswith((".dist-info", "egg-info"))]
        except NotADirectoryError:  # a zip
            return True
        except OSError:  # as `importlib.metadata` does with folders that it cannot list
            continue
        for package in packages:
            try:
                with open(f"{package}/entry_points.txt", "rb", buffering=0) as file:
                    if group in file.read():
                        return True
            except OSError:  # it has none
                continue
    return False


def _keys(format: Format) -> Iterator[Key]:
    actions: list[tuple[Action, object]] = [("read", format.reader), ("write", format.writer)]
    for action, able in actions:
        yield from ((action, format.name, version) for version in format.versions if able is not None)
