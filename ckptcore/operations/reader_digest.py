"""Compute what identifies the readers and checks of this build: the same code gives the same judgement."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from importlib.resources.abc import Traversable

from blake3 import blake3

from ckptcore.formats import registry

# Rooms whose code decides what a checkpoint is, and whether it is complete.
_ROOMS = ("checking", "core", "encodings", "formats")


@cache
def readers_digest() -> str:
    """Return a digest of the readers and checks: their source, and the versions of packages with formats.

    A version number does not serve: builds between two releases have the same one.
    """
    digest = blake3()
    for room in _ROOMS:
        for path, content in _modules(files("ckptcore") / room, room):
            digest.update(f"{path} {len(content)}\n".encode() + content)
    formats = registry()
    for name in sorted(f.name for f in formats.formats):
        digest.update(f"{name} {_version(formats.package(name))}\n".encode())
    return digest.hexdigest()[:16]


def _modules(folder: Traversable, path: str) -> Iterator[tuple[str, bytes]]:
    """Yield the modules of a package, in the order of their paths, with their source."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _modules(entry, f"{path}/{entry.name}")
        elif entry.name.endswith(".py"):
            yield f"{path}/{entry.name}", entry.read_bytes()


def _version(package: str) -> str:
    """Return the version of a package with formats; its name where it is not installed as one."""
    try:
        return version(package)
    except PackageNotFoundError:
        return package
