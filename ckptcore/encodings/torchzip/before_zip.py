"""Locate the parts of a file of `torch.save` before 1.6, which is no zip.

Five pickles: a magic number, the version of the protocol, what torch notes of the host, the tree, whose
persistent ids name storages, and the keys of the storages. Behind them each storage in that order: the number
of its elements, 8 bytes, and the elements, both little-endian on every host (torch/serialization.py,
`_legacy_save`; torch/csrc/serialization.cpp). There are no checksums. Writers until torch 0.4 name parts of
storages, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptcore.core.manifest import Ints
from ckptcore.encodings.pickle.unpickler import loads
from ckptcore.encodings.torchzip.archive import Reader
from ckptcore.errors import MalformedCheckpoint, UnsupportedFormat
from ckptcore.utils.text import short_repr

# torch/serialization.py MAGIC_NUMBER, as pickle protocols from 2 write it, and those before.
_MAGIC_NUMBER, _PROTOCOL_VERSION = 0x1950A86A20F9469CFC6C, 1001
_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"
_MAGIC_TEXT = b"L119547037146038801333356L"
BEFORE_ZIP = 32  # bytes in which the number is
TEXT_REASON = "begins with the magic number of torch.save as pickle protocol 0 or 1 writes it"
TEXT_HINT = "load it with torch and save it again"
_HOSTS = tuple(
    {"protocol_version": 1001, "little_endian": little, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    for little in (True, False)
)
_COUNT = 8  # bytes before the elements of a storage


def is_before_zip(first: bytes) -> bool:
    """Report whether a file that starts with these `BEFORE_ZIP` bytes is of torch.save before 1.6.

    It begins with a pickled number; callers could choose the protocol of the pickle.
    """
    return _MAGIC in first[:BEFORE_ZIP] or is_text_before_zip(first)


def is_text_before_zip(first: bytes) -> bool:
    """Report whether such a file has pickles of protocol 0 or 1, which are not read."""
    return first.startswith(_MAGIC_TEXT)


@dataclass(frozen=True, slots=True)
class Pickles:
    """The pickles of a file.

    Attributes:
        tree: Bytes of the pickle of the tree.
        keys: Keys of the storages, in the order of the file.
        end: The place behind the pickles: the first storage.
        odd_host: First byte and end of what torch notes of the host, where that is of no known host.
    """

    tree: bytes
    keys: tuple[str, ...]
    end: int
    odd_host: tuple[int, int] | None


def read_pickles(read: Reader, length: int, label: str) -> Pickles:
    """Return the pickles of a file.

    Raises:
        UnsupportedFormat: They are of protocol 0 or 1.
        MalformedCheckpoint: One is cut, or says something else than torch writes there.
    """
    if is_text_before_zip(read(0, min(length, BEFORE_ZIP))):
        raise UnsupportedFormat(f"{label} {TEXT_REASON}", hint=TEXT_HINT, file=label)
    # A late import: only files before torch 1.6 need it.
    from ckptcore.encodings.pickle.extent import pickle_end

    spans = [(0, pickle_end(read, 0, length, label))]
    for _ in range(4):
        start = spans[-1][1]
        spans.append((start, pickle_end(read, start, length, label)))
    magic, version, host, tree, keys = (read(start, end - start) for start, end in spans)
    for pickled, value in ((magic, _MAGIC_NUMBER), (version, _PROTOCOL_VERSION)):
        if (stated := loads(pickled, {}, label=label)) != value:
            raise MalformedCheckpoint(f"{label} must begin with {value} (got {short_repr(stated)})")
    storage_keys = loads(keys, {}, label=f"{label}: the keys of the storages")
    if type(storage_keys) is not list or not all(type(key) is str for key in storage_keys):
        raise MalformedCheckpoint(f"{label} must list its storages (got {short_repr(storage_keys)})")
    if len(set(storage_keys)) < len(storage_keys):
        raise MalformedCheckpoint(f"{label} lists a storage twice")
    stated = loads(host, {}, label=f"{label}: what torch notes of the host")
    return Pickles(tree, tuple(storage_keys), spans[-1][1], None if _is_host(stated) else spans[2])


def _is_host(value: Any) -> bool:
    return any(value == host and type(value["little_endian"]) is bool for host in _HOSTS)


class StorageSizes:
    """The storages that a tree's persistent ids name.

    Attributes:
        by_key: Key -> (elements, bytes), as the first id of the storage states it: the file has that number.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self.by_key: dict[str, tuple[int, int]] = {}

    def add(self, key: str, numel: int, nbytes: int) -> None:
        """Note a storage; raises `ValueError` where an earlier id says that it has another length."""
        if self.by_key.setdefault(key, (numel, nbytes))[1] != nbytes:
            raise ValueError(f"storage {key!r} has {self.by_key[key][1]} bytes, and {nbytes}")

    def locate(
        self, read: Reader, length: int, pickles: Pickles
    ) -> tuple[dict[str, tuple[int, int]], Ints, int]:
        """Return key -> (first byte, bytes), the ranges of the numbers before them, and where the last ends.

        Raises:
            MalformedCheckpoint: A storage is missing, is cut off or has another number of elements, or the
                file has one that the tree does not name.
        """
        label, keys = self._label, pickles.keys
        unmatched = min(self.by_key.keys() ^ set(keys), default=None)
        if unmatched is not None:
            where = "the list of storages" if unmatched in self.by_key else "its tree"
            raise MalformedCheckpoint(f"{label}: storage {unmatched!r} is not in {where}", file=label)
        places: dict[str, tuple[int, int]] = {}
        position = pickles.end
        counts = np.empty((len(keys), 2), np.int64)
        for number, key in enumerate(keys):
            numel, nbytes = self.by_key[key]
            end = position + _COUNT + nbytes
            if end > length:
                raise MalformedCheckpoint(
                    f"{label} ends at byte {length}, inside of storage {key!r}", file=label
                )
            stored = int.from_bytes(read(position, _COUNT), "little")
            if stored != numel:
                raise MalformedCheckpoint(
                    f"{label}: storage {key!r} must have {numel} elements (got {stored})", file=label
                )
            counts[number] = position, position + _COUNT
            places[key] = position + _COUNT, nbytes
            position = end
        return places, counts, position
