"""Put a folder back as it was when it was prepared, at its own place: catalogs hold full paths."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path


class Prepared:
    """A folder, and a copy of it for each state that was prepared in it. Catalogs in it are closed before."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._copies = place.with_name(f"{place.name}.states")

    def restore(self, state: str, prepare: Callable[[Path], None]) -> Path:
        """Put the folder back to a state, which is prepared in an empty folder when it is first asked for."""
        copy = self._copies / state
        if not copy.exists():
            self.empty()
            prepare(self.place)
            shutil.copytree(self.place, copy, symlinks=True)
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(copy, self.place, symlinks=True)
        return self.place

    def empty(self) -> Path:
        """Remove all that is in the folder."""
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir(parents=True)
        return self.place
