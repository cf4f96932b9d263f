"""What sequences that attack `retire` are made of, and how one is run."""

from __future__ import annotations

import os
from pathlib import Path

from retiring import World

from ckptcore.planning.request import Settings

NO_DIGESTS = Settings(memory=32 << 20, workers=1, fingerprint=True, digest=False)


def move(a, b):
    Path(b).parent.mkdir(parents=True, exist_ok=True)
    os.rename(a, b)


def rewrite(path, other, *, restore=True):
    """Other last bytes in the same file; restore: with the time that it had."""
    seen = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(-len(other), os.SEEK_END)
        file.write(other)
    if restore:
        os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))


def data_of(folder):
    return next(Path(folder).glob("*.distcp"))


def run_sequence(function, template, shared, tmp_path, monkeypatch):
    """Runs one in a world of its own, and unmounts what it mounted."""
    world = World(template, *shared, tmp_path, function.__name__)
    world.monkeypatch = monkeypatch
    try:
        function(world)
    finally:
        world.unmount()
