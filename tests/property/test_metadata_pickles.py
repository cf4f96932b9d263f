"""Changed `.metadata`: what is read is what Python's pickle makes of the same opcodes, or it is refused."""

from __future__ import annotations

import datetime
import io
import pickle
import pickletools
import random
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptcore
from ckptcore.encodings.pickle.records import Record
from ckptcore.encodings.pickle.torch_globals import OBJECT_TABLE
from ckptcore.encodings.pickle.unpickler import Call, loads
from ckptcore.errors import CkptError, MalformedCheckpoint

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint import metadata as meta  # noqa: E402
from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: E402

SHAPES: tuple[tuple[int, ...], ...] = ((4,), (4, 2), (300, 3), ())
GET, PUT, INT = (b"h", b"j"), b"\x94", b"K"
_MODULES = ("torch.distributed.checkpoint.", "torch", "collections", "pathlib")


def metadata_of(rng: random.Random) -> meta.Metadata:
    """Metadata of a few tensors of few or many ranks; long runs are read in columns."""
    listed: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    ranks, share = rng.choice((1, 2, 3, 40)), rng.random() < 0.5
    properties = meta.TensorProperties(torch.float32)
    for t in range(rng.choice((1, 2, 3, 5))):
        rest = rng.choice(SHAPES)[1:]
        if rng.random() < 0.5:
            properties = meta.TensorProperties(rng.choice((torch.bfloat16, torch.int64)))
        chunks = []
        for rank in range(ranks):
            offset = torch.Size((rank, *(0 for _ in rest)))
            chunks.append(meta.ChunkStorageMetadata(offset, torch.Size((1, *rest))))
            index = meta.MetadataIndex(f"w.{t}", offset if share else torch.Size(list(offset)), rank)
            stored[index] = _StorageInfo(f"__{rank % 3}_0.distcp", 9000 * t + rank, 5000 + rank)
        listed[f"w.{t}"] = meta.TensorStorageMetadata(properties, torch.Size((ranks, *rest)), chunks)
    return meta.Metadata(listed, {name: (name,) for name in listed}, stored)


def opcodes(data: bytes) -> list[bytes]:
    """The opcodes of a pickle with their arguments, without frames."""
    at = [pos for _, _, pos in pickletools.genops(data)]
    split = [data[a:b] for a, b in zip(at, [*at[1:], len(data)], strict=True)]
    return [op for op in split if op[:1] != b"\x95"]


def get(number: int) -> bytes:
    return b"h" + bytes([number]) if number < 256 else b"j" + number.to_bytes(4, "little")


def changed(ops: list[bytes], rng: random.Random) -> bytes:
    """The pickle with one change, or a few."""
    ops = list(ops)
    made = [ops[i - 1] for i, op in enumerate(ops) if op == PUT]  # by memo number
    texts = [n for n, op in enumerate(made) if op[:1] == b"\x8c"]
    objects, dicts, lists = ([n for n, op in enumerate(made) if op == kind] for kind in (b"\x81", b"}", b"]"))

    def value() -> bytes:
        return rng.choice([b"K\x05", b"N", get(rng.choice(texts)), get(rng.choice(objects)), get(lists[0])])

    def behind(opcode: bytes, *more: bytes) -> None:
        at = rng.choice([i for i, op in enumerate(ops) if op == opcode]) + 1
        ops[at:at] = more

    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        gets = [i for i, op in enumerate(ops) if op[:1] in GET]
        numbers = [i for i, op in enumerate(ops) if op[:1] == INT]
        one, other, start = rng.choice(gets), rng.choice(gets), rng.randrange(len(ops))
        text = get(rng.choice(texts))
        match rng.randrange(10):
            case 0:
                ops[one] = get(rng.randrange(len(made)))
            case 1:
                ops[one] = ops[other]
            case 2:
                ops[one], ops[other] = ops[other], ops[one]
            case 3:
                ops[rng.choice(numbers)] = INT + bytes([rng.choice((0, 1, 2, 3, 5, 255))])
            case 4:  # a pair more in a dict
                at = rng.choice([i for i, op in enumerate(ops) if op == b"u"])
                ops[at:at] = [text, value()]
            case 5:  # a second state, at once
                behind(b"b", b"}", text, value(), b"s", b"b")
            case 6:  # a second state of any object
                behind(b"b", get(rng.choice(objects)), b"}", text, value(), b"s", b"b", b"0")
            case 7:  # a pair more in any dict
                behind(b"b", get(rng.choice(dicts)), text, value(), b"s", b"0")
            case 8:
                behind(b"b", get(rng.choice(lists)), get(rng.choice(objects)), b"a", b"0")
            case _:
                del ops[start : start + rng.choice((1, 2, 3))]
    return b"".join(ops)


class OfTorch(pickle.Unpickler):
    """Python's own, with torch's classes."""

    def find_class(self, module: str, name: str) -> Any:
        # Python 3.11.0 to 3.11.3 pickle members of enums by their name.
        if not module.startswith(_MODULES) and (module, name) != ("builtins", "getattr"):
            raise pickle.UnpicklingError(module)
        return super().find_class(module, name)


Tensors = dict[str, tuple[str, tuple[int, ...], list[Any]]]


def by_python(data: bytes) -> Tensors:
    """dtype, shape and chunks with their places, by name."""
    found = OfTorch(io.BytesIO(data)).load()
    tensors: Tensors = {}
    for name, tensor in found.state_dict_metadata.items():
        rows = []
        for chunk in tensor.chunks:
            offset = tuple(chunk.offsets)
            place = found.storage_data.get(meta.MetadataIndex(name, torch.Size(offset)))
            where = place and (place.relative_path, place.offset, place.length)
            rows.append((offset, tuple(chunk.sizes), where))
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        tensors[name] = dtype, tuple(tensor.size), sorted(rows, key=repr)
    return tensors


def by_ckptcore(folder: Path) -> Tensors:
    manifest = ckptcore.open(str(folder))
    chunks, tensors = manifest.chunks, Tensors()
    for t, spec in enumerate(manifest.tensors):
        rows, rank = [], len(spec.shape)
        for n in range(int(chunks.first[t]), int(chunks.first[t + 1])):
            at = int(chunks.item[n])
            item = None if at < 0 else manifest.items[at]
            where = item and (manifest.files[item.file].path, item.start, item.length)
            rows.append((tuple(chunks.lo[n, :rank].tolist()), tuple(chunks.shape[n, :rank].tolist()), where))
        tensors[spec.fqn] = spec.dtype, spec.shape, sorted(rows, key=repr)
    return tensors


def pickles(seed: int, bases: int, each: int) -> Iterator[bytes]:
    rng = random.Random(seed)
    for _ in range(bases):
        ops = opcodes(pickle.dumps(metadata_of(rng), protocol=rng.choice((4, 5))))
        for _ in range(each):
            yield changed(ops, rng)


@pytest.mark.parametrize("seed", [1, 2, pytest.param(3, marks=pytest.mark.soak)])
def test_what_is_read_is_what_python_reads(seed: int, tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"__{rank}_0.distcp").write_bytes(bytes(8))
    read = 0
    for data in pickles(seed, *((12, 25) if seed < 3 else (400, 25))):
        (tmp_path / ".metadata").write_bytes(data)
        try:
            found = by_ckptcore(tmp_path)
        except CkptError:
            continue
        try:
            expected = by_python(data)
        except Exception:  # Python cannot read it: whatever torch's classes raise
            continue
        read += 1
        assert found == expected
    assert read > 20


# --- each difference alone ------------------------------------------------------------------------


def small(changes: dict[bytes, bytes], *, ranks: int = 1) -> bytes:
    """Metadata of one tensor, with opcodes replaced where they come first."""
    offsets = [torch.Size([n]) for n in range(ranks)]
    chunks = [meta.ChunkStorageMetadata(o, torch.Size([1])) for o in offsets]
    tensor = meta.TensorStorageMetadata(meta.TensorProperties(torch.float32), torch.Size([ranks]), chunks)
    places = {meta.MetadataIndex("w", o): _StorageInfo("__0_0.distcp", n, 999) for n, o in enumerate(offsets)}
    ops = b"".join(opcodes(pickle.dumps(meta.Metadata({"w": tensor}, storage_data=places), 4)))
    for old, new in changes.items():
        assert old in ops
        ops = ops.replace(old, new, 1)
    return ops


def test_of_a_name_in_a_record_twice_the_last_value_counts(tmp_path: Path) -> None:
    # Of the second row's place, `offset` is 0 first, and 1 behind it.
    data = small({}, ranks=2)
    number = data.rindex(b"K\x01h")
    name = data[number - 2 : number]
    assert name[:1] == b"h"
    data = data[:number] + b"K\x00" + name + data[number:]
    (tmp_path / ".metadata").write_bytes(data)
    (tmp_path / "__0_0.distcp").write_bytes(bytes(8))
    assert by_ckptcore(tmp_path) == by_python(data)


STATES: dict[str, Any] = {"uuid": uuid.UUID(int=1), "bytesio": io.BytesIO(b"one"), "dtype": np.dtype("<f8")}
SECOND = {
    "uuid": pickle.dumps({"int": 2}, 2)[2:-1],
    "bytesio": pickle.dumps((b"two", 0, None), 4)[11:-1],
    "dtype": pickle.dumps((3, ">", None, None, None, -1, -1, 0), 2)[2:-1],
}


@pytest.mark.parametrize("kind", STATES)
def test_a_second_state_is_refused(kind: str) -> None:
    data = pickle.dumps(STATES[kind], 4)
    loads(data, OBJECT_TABLE, label="it")
    with pytest.raises(MalformedCheckpoint, match="twice"):
        loads(data[:-1] + SECOND[kind] + b"b.", OBJECT_TABLE, label="it")


def test_dates_have_no_state() -> None:
    data = pickle.dumps(datetime.date(2024, 1, 2), 4)
    with pytest.raises(MalformedCheckpoint, match="cannot set the state"):
        loads(data[:-1] + b"}b.", OBJECT_TABLE, label="it")


RECORDS = {"m.Record": Call("m.Record", lambda *_: Record("record", ()))}
RECORD = b"cm\nRecord\n)R"


def test_a_dict_has_no_part_in_the_state_of_a_record_that_is_gone() -> None:
    """Without memo numbers a value of a dict that is replaced is freed, and its address used again."""
    state, other = b"}X\x01\x00\x00\x00aK\x01s", b"}X\x01\x00\x00\x00bK\x02s"
    pair = b"X\x01\x00\x00\x00k" + RECORD + state + b"b"
    data = b"\x80\x02](" + (b"}(" + pair + b"X\x01\x00\x00\x00kK\x01u" + other) * 9 + b"e."
    assert loads(data, RECORDS, label="it") == [{"k": 1}, {"b": 2}] * 9


def test_a_state_is_not_changed_after_it_was_set() -> None:
    for state in (b"}q\x05", b"N}q\x05\x86"):
        data = b"\x80\x02" + RECORD + state + b"bh\x05X\x01\x00\x00\x00zK\x09s\x86."
        with pytest.raises(MalformedCheckpoint, match="already the state"):
            loads(data, RECORDS, label="it")
