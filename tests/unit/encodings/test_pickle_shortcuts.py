"""Sizes and records read at once: the same values and memo numbers as single opcodes give."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from ckptcore.encodings.pickle import records, unpickler
from ckptcore.encodings.pickle.records import Call, Memo, Record, Shortcuts
from ckptcore.encodings.pickle.unpickler import loads
from ckptcore.errors import MalformedCheckpoint
from ckptcore.formats.dcp.metadata import TABLE

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint import metadata as meta  # noqa: E402
from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: E402

DTYPES = (torch.bfloat16, torch.float32, torch.int64)
SHAPES: tuple[tuple[int, ...], ...] = ((), (7,), (300, 4), (70_000, 2, 3), (1, 2, 3, 4, 5), (0,), (300, 4))


def metadata_of(tensors: int, chunks: int) -> meta.Metadata:
    """Metadata whose tensors have equal and different shapes, dtypes and properties, in turn."""
    listed: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    for n in range(tensors):
        size = torch.Size(SHAPES[n // 3 % len(SHAPES)])
        own = n % 5 == 0
        properties = meta.TensorProperties(DTYPES[n // 2 % 3], requires_grad=own, pin_memory=n % 7 == 0)
        offset = torch.Size([0] * len(size))
        listed[f"w.{n}"] = meta.TensorStorageMetadata(
            properties, size, [meta.ChunkStorageMetadata(offset, size) for _ in range(chunks)]
        )
        stored[meta.MetadataIndex(f"w.{n}", offset, n)] = _StorageInfo(f"w.{n}", n << 16, 2000 + n)
    listed["note"] = meta.BytesStorageMetadata()
    # One text as two values of a record: the second refers to the first, inside the record.
    both = "__0_0.distcp"
    stored[meta.MetadataIndex("note", torch.Size([]), 3)] = _StorageInfo(both, 1, 2, both)  # type: ignore[arg-type]
    return meta.Metadata(listed, {f"w.{n}": ("w", n) for n in range(tensors)}, stored)


def form(value: Any, seen: dict[int, int]) -> Any:
    """A comparable form of a value: an object that is met again is the number of its first meeting."""
    if isinstance(value, Record | dict | list):
        if id(value) in seen:
            return "again", seen[id(value)]
        seen[id(value)] = len(seen)
    match value:
        case Record():
            return value.kind, form(value.args, seen), form(value.state, seen)
        case dict():
            return [(form(k, seen), form(v, seen)) for k, v in value.items()]
        case list() | tuple():
            return type(value).__name__, [form(v, seen) for v in value]
        case Call():
            return value.name
    return repr(value)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, list[Any]]]:
    """Return the form of a pickle's value, and its memo; ``single`` for single opcodes."""

    def run(data: bytes, *, single: bool) -> tuple[Any, list[Any]]:
        memos: list[Memo] = []
        with monkeypatch.context() as patch:
            patch.setattr(unpickler, "Memo", lambda: memos.append(Memo()) or memos[-1])
            patch.setattr(unpickler.RecordRuns, "follow", lambda *args: args[3])
            if single:
                patch.setattr(Shortcuts, "size", lambda *_: (None, 0))
                patch.setattr(Shortcuts, "record", lambda *_: (None, 0))
                patch.setattr(Shortcuts, "opening", lambda *_: None)
            found = loads(data, TABLE, label="it")
        return form(found, {}), memos[0].rows

    return run


def same_memo(quick: list[Any], single: list[Any]) -> None:
    """Every number has the same value, or is a temporary's."""
    assert len(quick) == len(single)
    kept = [(a, b) for a, b in zip(quick, single, strict=True) if a is not records._SKIPPED]
    assert len(kept) > len(quick) // 3
    assert form([a for a, _ in kept], {}) == form([b for _, b in kept], {})


@pytest.mark.parametrize(("tensors", "chunks"), [(1, 1), (60, 1), (200, 3), (60, 0)])
def test_values_and_memo_are_those_of_single_opcodes(
    tensors: int, chunks: int, load: Callable[..., tuple[Any, list[Any]]]
) -> None:
    data = pickle.dumps(metadata_of(tensors, chunks), protocol=4)
    quick, single = load(data, single=False), load(data, single=True)
    assert quick[0] == single[0]
    same_memo(quick[1], single[1])


def test_tensors_of_one_shape_are_matched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the first two tensors, the second of which refers to classes and names by number."""
    matched: list[int] = []
    pattern = records._OPENING_PATTERN
    match = pattern.match
    monkeypatch.setattr(pattern, "match", lambda data, at: matched.append(at) or match(data, at))
    listed = {
        f"w.{n}": meta.TensorStorageMetadata(
            meta.TensorProperties(torch.bfloat16),
            torch.Size([4]),
            [meta.ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))],
        )
        for n in range(50)
    }
    found = loads(pickle.dumps(meta.Metadata(listed), protocol=4), TABLE, label="it")
    tensors = list(found.state["state_dict_metadata"].values())
    assert len(matched) == 1
    parts = [{id(t.state[key]) for t in tensors} for key in ("properties", "chunks")]
    assert [len(p) for p in parts] == [50, 50]  # only what cannot change is shared


def pickled(body: bytes) -> bytes:
    """A pickle whose first memo numbers are the classes 0 to 2, and the names 3 to 5."""
    head = b"\x80\x04"
    for module, name in (
        (meta.__name__, "TensorStorageMetadata"),
        (meta.__name__, "TensorProperties"),
        ("torch", "Size"),
    ):
        head += b"c%s\n%s\n\x940" % (module.encode(), name.encode())
    for text in (b"properties", b"size", b"chunks"):
        head += b"\x8c%c%s\x940" % (len(text), text)
    return head + body + b"."


def tensor(state: bytes, kind: bytes = b"h\x01", size: bytes = b"h\x02K\x04\x85\x94\x85\x94R\x94") -> bytes:
    """A tensor's metadata with this state of its properties."""
    return (
        b"h\x00)\x81\x94}\x94(h\x03" + kind + b")\x81\x94(" + state + b"t\x94bh\x04" + size + b"h\x05]\x94ub"
    )


@pytest.mark.parametrize(
    "state",
    [
        b"h\x03\x88\x89NK\x05M\x01\x02J\xff\xff\xff\xff",
        b"h\x06K\x00K\x00K\x00",  # the tensor itself
        b"h\x07K\x00K\x00K\x00",  # its dict
        b"j\x08\x00\x00\x00K\x00K\x00K\x00",  # the record that is being filled
    ],
    ids=["every kind", "itself", "its dict", "the record"],
)
def test_states_of_every_kind(state: bytes, load: Callable[..., tuple[Any, list[Any]]]) -> None:
    # Of the second tensor, the same numbers are those of the first.
    data = pickled(tensor(state) + tensor(state) + tensor(state) + b"\x87")
    quick, single = load(data, single=False), load(data, single=True)
    assert quick[0] == single[0]
    same_memo(quick[1], single[1])


@pytest.mark.parametrize(
    "body",
    [
        tensor(b"h\xc8K\x00K\x00K\x00"),  # a number that nothing has
        tensor(b"K\x00" * 4, kind=b"h\x03"),  # a text is called
        tensor(b"K\x00" * 4, size=b"h\x03K\x04\x85\x94\x85\x94R\x94"),
    ],
    ids=["unknown number", "no class", "no size"],
)
def test_what_is_wrong_stays_wrong(body: bytes, load: Callable[..., tuple[Any, list[Any]]]) -> None:
    for single in (False, True):
        with pytest.raises(MalformedCheckpoint):
            load(pickled(body), single=single)


def test_every_cut_is_an_error() -> None:
    data = pickled(tensor(b"K\x00" * 4))
    loads(data, TABLE, label="it")
    for end in range(1, len(data)):
        with pytest.raises(MalformedCheckpoint):
            loads(data[:end], TABLE, label="it")
