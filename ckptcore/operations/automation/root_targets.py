"""Settle what a watched root makes when it is added or changed, instead of at each sweep.

A root is swept by a worker that has another working folder: paths are made absolute. Sizes are written as on
the command line. A config or tokenizer that cannot be read is refused here, where it can be corrected.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ckptcore.catalog.watched_roots import RootRow
from ckptcore.operations.export_target import ExportTarget, require_apart_targets, target_of, targets_of
from ckptcore.planning.model_files import require_named_files
from ckptcore.store import local_path
from ckptcore.utils.units import parse_size

_FILES = ("config", "tokenizer")
_NONE = "none"  # the value of an option that asks for no file


def settled(form: Mapping[str, Any], *, reads: bool = True) -> ExportTarget:
    """Return a target with absolute paths and sizes in bytes.

    Args:
        form: The JSON form of a target, as `target_of` reads it.
        reads: Whether the files that it names are read; another machine may be the one that has them.

    Raises:
        UsageError: A field, a value or the template is invalid, or a named file cannot be read.
    """
    values = dict(form)
    for name in (*_FILES, "destination"):
        value = values.get(name)
        if isinstance(value, str) and value and value != _NONE and not value.startswith("{"):
            path = local_path(value)
            values[name] = value if path is None else os.path.abspath(path)
    size = values.get("max_file_size")
    if isinstance(size, str):
        values["max_file_size"] = parse_size(size)
    target = target_of(values)
    if reads:
        require_readable(target)
    return target


def settled_all(forms: Sequence[Mapping[str, Any]], *, reads: bool = True) -> list[ExportTarget]:
    """Return the targets of one root; raise `UsageError` as `settled`, or if two would write to one place."""
    targets = [settled(form, reads=reads) for form in forms]
    require_apart_targets(targets)
    return targets


def require_readable(target: ExportTarget) -> None:
    """Raise `UsageError` if the config or the tokenizer that a target names cannot be read."""
    require_named_files(*(target.options.get(name) for name in _FILES))


def check(root: RootRow) -> None:
    """Raise `UsageError` if a root's targets cannot be used, or the files that they name cannot be read."""
    for target in targets_of(root):
        require_readable(target)
