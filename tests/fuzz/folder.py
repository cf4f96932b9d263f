"""Hold a checkpoint folder in memory, with the interface that readers use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ckptcore.errors import SourceUnreadable


class Folder:
    """Files by relative path. Reads are exact, like a store's."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = dict(files)
        self.url = "memory://fuzz"
        self.local: Path | None = None

    def list(self) -> dict[str, int]:
        return {p: len(b) for p, b in sorted(self.files.items())}

    def size(self, path: str) -> int | None:
        data = self.files.get(path)
        return None if data is None else len(data)

    def stamp(self, path: str) -> str | None:
        return "" if path in self.files else None

    def ctime(self, path: str) -> int | None:
        return None

    def read(self, path: str, start: int, length: int) -> bytes:
        data = self.files.get(path)
        if data is None or start < 0 or length < 0 or start + length > len(data):
            raise SourceUnreadable(f"{path} has no bytes [{start}, {start + length})", file=path)
        return data[start : start + length]

    def read_into(self, path: str, start: int, into: memoryview) -> None:
        into[:] = self.read(path, start, len(into))

    def close(self) -> None:
        pass


def load(root: Path, limit: int = 400_000) -> dict[str, bytes] | None:
    """Return the content of a folder or of one file, or None above ``limit`` bytes."""
    paths = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file())
    if sum(p.stat().st_size for p in paths) > limit:
        return None
    return {p.name if root.is_file() else str(p.relative_to(root)): p.read_bytes() for p in paths}
