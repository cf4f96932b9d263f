"""Name the contents of a checkpoint by content ids, whatever it calls them and however it stores them.

A *holding* is one content with its name: a tensor, a leaf of an object, or a file that its reader does not
interpret. Its *content id* is derived from the content alone: for a tensor from its fingerprint
(`ckptcore.fingerprints.sums`), for a leaf from its path and its value, for a file from its BLAKE3. Equal
tensors of one checkpoint are numbered, so a checkpoint with one zero bias does not hold two. What nothing
can identify (a FIFO, a value that was not built) has no id, and is held by no other checkpoint.

Ids detect accidents, not forgery: fingerprints are sums, and anybody can construct another tensor with one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3

from ckptcore.core import columnar_file
from ckptcore.core.columnar_file import canonical_json
from ckptcore.errors import CkptError
from ckptcore.fingerprints.sums import Fingerprinted
from ckptcore.utils.foreign_text import InvalidText, parsing
from ckptcore.utils.isolation import attempt

ID_BYTES = 16
TENSOR, OBJECT, FILE = "tensor", "object", "file"  # kinds of holdings with an id
Ids = frozenset[bytes]


class Holding(NamedTuple):
    """One content of a checkpoint.

    Attributes:
        kind: TENSOR, OBJECT or FILE; else why nothing can identify it.
        name: Its name in the checkpoint.
        id: Its content id; None if nothing can identify it.
        spec: What equal contents have in common, and is known without reading them: dtype and shape of a
            tensor, the size of a file.
        nbytes: Its size; None if unknown.
    """

    kind: str
    name: str
    id: bytes | None = None
    spec: str = ""
    nbytes: int | None = None


class StoredHoldings(Collection[Holding]):
    """The holdings of a blob: their ids at once, each row when it is asked for.

    A gate compares ids, and needs rows only for what it names: a million take five times as long.

    Attributes:
        ids: Content ids, in order.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        names: Sequence[str],
        ids: Sequence[bytes],
        specs: Sequence[str],
        nbytes: Sequence[int],
    ) -> None:
        """Hold columns of one length, of `Holding`; nbytes: -1 where it is unknown."""
        self.ids = ids
        self._columns = kinds, names, ids, specs, nbytes

    @cached_property
    def id_set(self) -> Ids:
        """Their content ids."""
        return frozenset(self.ids)

    @property
    def specs(self) -> set[tuple[str, str]]:
        """Their kinds, each with the specs of it."""
        kinds, _, _, specs, _ = self._columns
        return set(zip(kinds, specs, strict=True))

    def __len__(self) -> int:
        """Return their number."""
        return len(self.ids)

    def __iter__(self) -> Iterator[Holding]:
        """Yield them in order."""
        for kind, name, id, spec, nbytes in zip(*self._columns, strict=True):
            yield Holding(kind, name, id, spec, None if nbytes < 0 else nbytes)

    def __contains__(self, holding: object) -> bool:
        """Return whether one of them is equal to another."""
        return any(row == holding for row in self)

    def __eq__(self, other: object) -> bool:
        """Return whether the other has equal holdings in equal order."""
        return isinstance(other, Collection) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        """Return the hash of their ids."""
        return hash(tuple(self.ids))


def tensor_spec(dtype: str, shape: Sequence[int]) -> str:
    """Return the spec of a tensor.

    >>> tensor_spec("bfloat16", (4, 2))
    'bfloat16[4,2]'
    """
    return _tensor_spec(dtype, tuple(shape))


@lru_cache(maxsize=1 << 16)
def _tensor_spec(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def file_spec(nbytes: int) -> str:
    """Return the spec of a file."""
    return f"{nbytes} bytes"


def tensor_holdings(tensors: Iterable[Fingerprinted], nbytes: Mapping[str, int]) -> list[Holding]:
    """Return the holdings of fingerprinted tensors. nbytes: FQN -> size."""
    return [
        Holding(TENSOR, fqn, tensor_id(fingerprint), tensor_spec(dtype, shape), nbytes.get(fqn))
        for fqn, dtype, shape, fingerprint in tensors
    ]


def tensor_id(fingerprint: str) -> bytes:
    """Return the content id of a tensor. fingerprint: in hex."""
    return bytes.fromhex(fingerprint)[:ID_BYTES]


def leaf_holding(name: str, path: str, values: Any) -> Holding:
    """Return the holding of one leaf of an object. name: the object's. values: its JSON forms."""
    return Holding(OBJECT, name, _digest("object", canonical_json([path, values])))


def file_holding(name: str, nbytes: int, digest: str) -> Holding:
    """Return the holding of a file. digest: its BLAKE3, in hex."""
    return Holding(FILE, name, _digest("file", bytes.fromhex(digest)), file_spec(nbytes), nbytes)


def numbered(holdings: Iterable[Holding]) -> tuple[Holding, ...]:
    """Return holdings whose tensors have different ids: each further equal tensor gets an id of its own."""
    holdings = tuple(holdings)
    ids = [row.id for row in holdings if row.id is not None and row.kind == TENSOR]
    if len(set(ids)) == len(ids):  # as a rule, and of a million tensors in a fifth of the time
        return holdings
    counts: dict[bytes, int] = {}
    rows = []
    for row in holdings:
        if row.id is not None and row.kind == TENSOR:
            count = counts[row.id] = counts.get(row.id, 0) + 1
            if count > 1:
                row = row._replace(id=nth(row.id, count))
        rows.append(row)
    return tuple(rows)


def ids_of_tensors(tensors: Iterable[Fingerprinted]) -> Ids:
    """Return the content ids of all tensors of a checkpoint, numbered."""
    digits = 2 * ID_BYTES
    # All at once: of a million tensors, one id after the other takes five times as long.
    return numbered_ids(bytes.fromhex("".join([row[3][:digits] for row in tensors])))


def numbered_ids(blob: bytes) -> Ids:
    """Return packed ids of all tensors of a checkpoint, numbered as `numbered` does."""
    rows = _cut(blob)
    ids = frozenset(rows)
    if len(ids) == len(rows):
        return ids
    repeats = ((id, count) for id, count in Counter(rows).items() if count > 1)
    return ids.union(nth(id, n) for id, count in repeats for n in range(2, count + 1))


def nth(id: bytes, count: int) -> bytes:
    """Return the id of the n-th tensor with an equal content in one checkpoint."""
    return id if count == 1 else _digest("repeat", id + count.to_bytes(8, "little"))


def ids_of(holdings: Iterable[Holding]) -> Ids:
    """Return the content ids of holdings."""
    if isinstance(holdings, StoredHoldings):
        return holdings.id_set
    return frozenset(holding.id for holding in holdings if holding.id is not None)


def in_one(parts: Iterable[Ids]) -> Ids:
    """Return the ids of all parts; where all are in one of them, this one, and no copy of a million ids."""
    filled = [part for part in parts if part]
    return filled[0] if len(filled) == 1 else frozenset[bytes]().union(*filled)


def common(ids: Ids, other_ids: Ids) -> Ids:
    """Return the ids that are in both; where ``other_ids`` has all, these, and no copy."""
    return ids if ids <= other_ids else ids & other_ids


def pack_ids(ids: Collection[bytes]) -> bytes:
    """Return content ids in one blob, sorted."""
    return b"".join(sorted(ids))


def unpack_ids(blob: bytes) -> Ids:
    """Return the content ids of `pack_ids`."""
    return frozenset(_cut(blob))


def _cut(blob: bytes) -> list[bytes]:
    ids: list[bytes] = np.frombuffer(blob, f"V{ID_BYTES}").tolist()
    return ids


def pack(holdings: Collection[Holding]) -> bytes:
    """Return holdings with ids in one compressed blob."""
    # Each spec once: a million tensors of a model have a few dozens.
    specs = {spec: n for n, spec in enumerate(dict.fromkeys(holding.spec for holding in holdings))}
    head = {
        "version": 1,
        "kinds": [holding.kind for holding in holdings],
        "names": [holding.name for holding in holdings],
        "specs": list(specs),
    }
    ids = np.frombuffer(b"".join(holding.id or b"" for holding in holdings), np.uint8)
    spec = np.array([specs[holding.spec] for holding in holdings], np.int64)
    nbytes = np.array([-1 if holding.nbytes is None else holding.nbytes for holding in holdings], np.int64)
    return columnar_file.dump(head, {"ids": ids, "spec": spec, "nbytes": nbytes})


def unpack(blob: bytes) -> StoredHoldings:
    """Return the holdings of `pack`; raise `InvalidText` for another blob."""
    loaded = attempt(columnar_file.load, blob)
    if isinstance(loaded, CkptError):
        raise InvalidText(f"these are no holdings: {loaded.message}")
    head, arrays = loaded
    with parsing("a blob of holdings"):
        specs = [str(spec) for spec in head["specs"]]
        columns = (
            list(map(str, head["kinds"])),
            list(map(str, head["names"])),
            _cut(arrays["ids"].tobytes()),
            list(map(specs.__getitem__, arrays["spec"].tolist())),
            arrays["nbytes"].tolist(),
        )
        if head["version"] != 1 or len({len(column) for column in columns}) != 1:
            raise InvalidText("these are holdings of another version, or truncated")
    return StoredHoldings(*columns)


def pack_specs(holdings: Iterable[Holding]) -> bytes:
    """Return a short digest of each spec of some holdings, to rule out equal contents without unpacking."""
    if isinstance(holdings, StoredHoldings):
        specs = holdings.specs
    else:
        specs = {(holding.kind, holding.spec) for holding in holdings}
    return b"".join(sorted({spec_digest(kind, spec) for kind, spec in specs}))


@lru_cache(maxsize=1 << 16)
def spec_digest(kind: str, spec: str) -> bytes:
    """Return the digest of a spec in `pack_specs`, 8 bytes."""
    return _digest("spec", canonical_json([kind, spec]))[:8]


def unpack_specs(blob: bytes) -> Ids:
    """Return the digests of `pack_specs`."""
    return frozenset(blob[start : start + 8] for start in range(0, len(blob), 8))


def _digest(kind: str, data: bytes) -> bytes:
    return blake3(data, derive_key_context=f"ckptcore holding 1 {kind}").digest(ID_BYTES)
