"""Accept `Format` as plug-in packages of release 0.1 construct it. To be removed in 0.3.

Release 0.1 had 14 fields: ``Format(name, title, recognised_by, Abilities(...), detect, read, arrange,
versions, single_file, nests, shards, place, for_mesh, serializations)``, by position or by keyword. They are
translated into a `Reader` and a `Writer`, with a DeprecationWarning.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptcore.formats.base import Abilities, Format, Layout, Reader, Writer

_ORDER = (
    *("name", "title", "recognised_by", "abilities", "detect", "read", "arrange", "versions"),
    *("single_file", "nests", "shards", "place", "for_mesh", "serializations"),
)
_OLD = frozenset(_ORDER) - {"name", "title", "recognised_by", "detect", "versions"}
_HINT = "give Format a reader=Reader(...) and a writer=Writer(...) of ckptcore.formats"


def accept_old_fields(cls: type[Format] = Format) -> None:
    """Make a class accept the old fields, and return them as attributes."""
    new = cls.__init__

    @functools.wraps(new)
    def init(self: Format, *args: Any, **fields: Any) -> None:
        if _is_old(args, fields):
            warnings.warn(f"the fields of Format have changed: {_HINT}", DeprecationWarning, stacklevel=2)
            args, fields = (), translated(args, fields)
        new(self, *args, **fields)

    def attribute(self: Format, name: str) -> Any:
        if name not in _ATTRIBUTES:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        warnings.warn(f"Format.{name} has moved into its reader or writer", DeprecationWarning, stacklevel=2)
        return _ATTRIBUTES[name](self)

    for name, function in (("__init__", init), ("__getattr__", attribute)):
        setattr(cls, name, function)


def translated(args: tuple[Any, ...], given: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the fields of release 0.1 into those of today.

    Raises:
        TypeError: The fields were not valid in release 0.1 either.
    """
    if len(args) > len(_ORDER):
        raise TypeError(f"Format takes at most {len(_ORDER)} fields (got {len(args)})")
    fields = dict(zip(_ORDER, args, strict=False))
    twice = sorted(fields.keys() & given.keys())
    if twice:
        raise TypeError(f"Format got several values for {', '.join(twice)}")
    fields |= given
    old = {name: fields.pop(name) for name in _ORDER if name in _OLD and name in fields}
    reader = _reader(fields.get("reader"), old)
    writer = _writer(fields.get("writer"), old)
    return {**fields, "reader": reader, "writer": writer}


def _is_old(args: tuple[Any, ...], fields: Mapping[str, Any]) -> bool:
    return (len(args) > 3 and isinstance(args[3], Abilities)) or not _OLD.isdisjoint(fields)


def _reader(reader: Reader | None, old: Mapping[str, Any]) -> Reader | None:
    """Return the reader with the old fields applied; `Abilities.reads` is redundant and is ignored."""
    read = old.get("read", reader.read if reader is not None else None)
    if read is None:
        return None
    made = replace(reader, read=read) if reader is not None else Reader(read)
    given: Abilities | None = old.get("abilities")
    return made if given is None else replace(made, checksums=given.checksums, objects=given.objects)


def _writer(writer: Writer | None, old: Mapping[str, Any]) -> Writer | None:
    arrange = old.get("arrange", writer.whole.arrange if writer is not None else None)
    if arrange is None:
        return None
    before = writer if writer is not None else Writer(Layout(arrange))
    kept = {name: old[name] for name in ("nests", "place") if name in old}
    if "arrange" in old:  # nothing is known of the values that another function keeps
        kept |= {"values": "", "torch_load": False, "flattens": False}
    layout = replace(before.whole, arrange=arrange, **kept)
    for_mesh = layout if before.for_mesh is before.whole else before.for_mesh
    if "shards" in old:
        for_mesh = layout if old["shards"] else None
    other: Format | None = old.get("for_mesh")
    if other is not None:
        for_mesh = other.writer.for_mesh if other.writer is not None else None
    more = {name: old[name] for name in ("single_file", "serializations") if name in old}
    return replace(before, whole=layout, for_mesh=for_mesh, **more)


def _main_layout(form: Format) -> Layout | None:
    return form.writer.whole if form.writer is not None else None


def _mesh_format(form: Format) -> Format | None:
    writer = form.writer
    if writer is None or writer.for_mesh is None or writer.for_mesh is writer.whole:
        return None
    return replace(form, writer=replace(writer, whole=writer.for_mesh, single_file=False))


# The old attributes; `abilities` is still a property.
_ATTRIBUTES: Mapping[str, Any] = {
    "read": lambda f: f.reader.read if f.reader is not None else None,
    "arrange": lambda f: getattr(_main_layout(f), "arrange", None),
    "single_file": lambda f: f.writer is not None and f.writer.single_file,
    "nests": lambda f: getattr(_main_layout(f), "nests", False),
    "shards": lambda f: f.writer is not None and f.writer.for_mesh is not None,
    "place": lambda f: getattr(_main_layout(f), "place", None),
    "for_mesh": _mesh_format,
    "serializations": lambda f: f.writer.serializations if f.writer is not None else ("torch_save",),
}
