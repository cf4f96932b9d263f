"""Record what a reader took from its files: which bytes are structure, and which belong to nothing.

Encodings report structure while they read (`ckptcore.store.subfolder.FileRange`); items are in the manifest.
`ckptcore.core.unused_bytes` makes the account.

Encodings also report values that a format's reader does not ask for, such as other keys of a file's
metadata. `ckptcore.formats.common.carried_values` makes objects of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptcore.core.metadata_budget import meter
from ckptcore.utils.ordering import Ints

_SPAN, _CHAR = 32, 4  # bytes of memory for each range, and for a character of a text


@dataclass(frozen=True, slots=True)
class UnusedBytes:
    """Bytes of a file that belong to no tensor, object or structure.

    Attributes:
        file: Path below the checkpoint's root.
        start: First byte.
        end: The byte behind the last.
        description: What they are, where an encoding knows; else "".
        padding: Whether they are structure if all of them are zero; only reading them shows it.
    """

    file: str
    start: int
    end: int
    description: str = ""
    padding: bool = False


class ByteLedger:
    """What a reader took from its files; filled while it reads, and then not changed.

    Attributes:
        read: The files of which it read bytes.
        structure: File -> int64 [n, 2], ranges that are structure, in any order.
        unused: Ranges that belong to nothing, although they are inside of an item.
        carried: (file, name of an object, its values by key).
        odd: (file, name of the object, key) of carried values of another type than the reader knows.
    """

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.structure: dict[str, list[Ints]] = {}
        self.unused: list[UnusedBytes] = []
        self.carried: list[tuple[str, str, Mapping[str, Any]]] = []
        self.odd: list[tuple[str, str, str]] = []

    def add_read(self, path: str) -> None:
        """Record that the reader has read bytes of a file."""
        self.read.add(path)

    def explain(self, path: str, spans: Ints) -> None:
        """Record ranges that are structure, int64 [n, 2]."""
        # A file decides how many ranges it has: they count against the budget of metadata.
        meter().keep(_SPAN * len(spans), path)
        self.structure.setdefault(path, []).append(spans)

    def add_unused(self, path: str, start: int, end: int, description: str, padding: bool = False) -> None:
        """Record bytes that belong to nothing, and what they are."""
        # A file decides how many of these it has, too.
        meter().keep(_SPAN + _CHAR * (len(path) + len(description)), path)
        self.unused.append(UnusedBytes(path, start, end, description, padding))

    def carry(self, path: str, group: str, values: Mapping[str, Any], odd: Collection[str] = ()) -> None:
        """Record values that become an object."""
        self.carried.append((path, group, values))
        self.odd += [(path, group, key) for key in odd]

    def below(self, prefix: str) -> ByteLedger:
        """Return the account of the files below a folder, with paths relative to it."""
        inner = ByteLedger()
        # Folders of several checkpoints have one account while they are read; each checkpoint takes its part.
        cut = len(prefix)
        inner.read = {path[cut:] for path in self.read if path.startswith(prefix)}
        inner.structure = {p[cut:]: spans for p, spans in self.structure.items() if p.startswith(prefix)}
        inner.unused = [
            replace(span, file=span.file[cut:]) for span in self.unused if span.file.startswith(prefix)
        ]
        inner.odd = [(p[cut:], name, key) for p, name, key in self.odd if p.startswith(prefix)]
        inner.carried = [(p[cut:], name, v) for p, name, v in self.carried if p.startswith(prefix)]
        return inner
