"""Runs of records read column by column: the same as one by one, and nothing else is taken for one."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptcore
from ckptcore.encodings.pickle.columns import Texts
from ckptcore.encodings.pickle.record_runs import RecordRuns
from ckptcore.encodings.pickle.unpickler import Columns, loads
from ckptcore.errors import MalformedCheckpoint
from ckptcore.formats.dcp.metadata import TABLE

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint import metadata as meta  # noqa: E402
from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: E402

HEAD = ")\x81\x94}\x94("  # how an instance begins, if these were bytes


def metadata_of(ranks: int, shapes: dict[str, tuple[int, ...]], share: bool = False) -> meta.Metadata:
    """Metadata of a job whose tensors are cut along dim 0, a row a rank, or whole on rank 0.

    share: whether names and offsets are the same objects everywhere, as one process leaves them.
    """
    listed: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    offsets: dict[tuple[str, int], Any] = {}
    paths = [f"__{rank}_0.distcp" for rank in range(ranks)]
    for name, shape in shapes.items():
        chunks = []
        for rank in range(ranks if shape else 1):
            offset = torch.Size((rank, *(0 for _ in shape[1:]))[: len(shape)])
            sizes = torch.Size((1, *shape[1:])[: len(shape)])
            offsets[name, rank] = offset
            chunks.append(meta.ChunkStorageMetadata(offset, sizes))
        properties = meta.TensorProperties(dtype=torch.bfloat16)
        listed[name] = meta.TensorStorageMetadata(properties, torch.Size(shape), chunks)
    for rank in range(ranks):
        at = rank << 33  # numbers of every width
        for name, shape in shapes.items():
            if shape or not rank:
                own = name if share else (name + ".")[:-1]
                index = meta.MetadataIndex(own, index=rank)
                offset = offsets[name, rank] if share else torch.Size(list(offsets[name, rank]))
                object.__setattr__(index, "offset", offset)
                stored[index] = _StorageInfo(paths[rank], at, 2000)
                at += 2000
    listed["note"] = meta.BytesStorageMetadata()
    stored[meta.MetadataIndex("note")] = _StorageInfo(paths[0], 0, 5)
    return meta.Metadata(listed, {name: (name,) for name in shapes}, stored)


SHAPES: dict[str, tuple[int, ...]] = {
    "a.weight": (300, 7),
    "a.bias": (300,),
    "scale": (),
    "conv": (300, 3, 5, 2, 4),
    "cube": (300, 2, 70000),
    "names.may.be.long." * 12: (300, 1),
    f"looks.like.{HEAD}.one": (300, 2),
    "größe": (300,),
}


def digest(folder: Path, data: bytes) -> str:
    """Of the manifest that a folder with this `.metadata` has."""
    folder.mkdir(exist_ok=True)
    (folder / ".metadata").write_bytes(data)
    (folder / "__0_0.distcp").touch()
    return ckptcore.open(str(folder)).digest


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Reads no runs from here on."""
    return lambda: monkeypatch.setattr(
        RecordRuns, "follow", lambda self, shortcuts, call, at, stack, marks: at
    )


@pytest.mark.grid
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 70, 300])
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_columns_hold_what_single_records_hold(
    tmp_path: Path, one_by_one: Callable[[], None], ranks: int, share: bool, protocol: int
) -> None:
    data = pickle.dumps(metadata_of(ranks, SHAPES, share), protocol=protocol)
    quick = digest(tmp_path / "at", data)
    one_by_one()
    assert digest(tmp_path / "at", data) == quick


@pytest.mark.parametrize(("ranks", "tensors"), [(1, 900), (2, 500), (3, 400), (5, 300), (33, 60), (65, 40)])
def test_short_lists_between_many_frames(
    tmp_path: Path, one_by_one: Callable[[], None], ranks: int, tensors: int
) -> None:
    """Lists of chunks that are shorter than a run is worth, in a pickle of several frames."""
    kinds = ((ranks, 4), (ranks,), (), (ranks, 2, 2))
    shapes = {f"layers.{n}.weight": kinds[n % 4] for n in range(tensors)}
    data = pickle.dumps(metadata_of(ranks, shapes), protocol=4)
    quick = digest(tmp_path / "at", data)
    one_by_one()
    assert digest(tmp_path / "at", data) == quick


def test_most_records_are_read_in_runs() -> None:
    data = pickle.dumps(metadata_of(300, SHAPES), protocol=4)
    state = loads(data, TABLE, label="it").state
    chunks = state["state_dict_metadata"]["a.weight"].state["chunks"]
    assert sum(c.count for c in chunks if type(c) is Columns) > 280
    places = [c.count for c in state["storage_data"] if type(c) is Columns]
    assert sum(places) > 0.95 * 300 * 7


@pytest.mark.soak
def test_frames_that_begin_inside_a_value_are_not_skipped(one_by_one: Callable[[], None]) -> None:
    data = pickle.dumps(metadata_of(300, SHAPES), protocol=4)
    at = data.index(b"storage_data")
    while data[at] != 0x95 or int.from_bytes(data[at + 1 : at + 9], "little") >> 17:
        at += 1
    header = data[at : at + 9]
    # The same opcodes, with the header some bytes earlier: before an opcode, or inside one.
    changed = [data[: at - n] + header + data[at - n : at] + data[at + 9 :] for n in range(1, 40)]
    quick = [outcome(one) for one in changed]
    one_by_one()
    slow = [outcome(one) for one in changed]
    assert quick == slow
    assert {-1, 300} == set(slow)


def outcome(data: bytes) -> int:
    """How many chunks the metadata has of the first tensor; -1 when it is malformed."""
    try:
        chunks = loads(data, TABLE, label="it").state["state_dict_metadata"]["a.weight"].state["chunks"]
    except MalformedCheckpoint:
        return -1
    return sum(c.count if type(c) is Columns else 1 for c in chunks)


@pytest.mark.parametrize("opcode", [b"0", b"2", b"a", b"s", b"\x86", b"\x94", b"b", b"R", b"1", b"t"])
def test_an_opcode_between_records_is_not_passed_over(opcode: bytes, one_by_one: Callable[[], None]) -> None:
    """Either way it is an error, or the same tree."""
    data = pickle.dumps(metadata_of(200, {"w": (200, 4)}), protocol=4)
    for record in (data.index(b"__100_0.distcp"), data.index(b"offsets") + 4000):
        at = data.index(b"ub", record) + 2
        results = []
        changed = data[:at] + opcode + data[at:]
        for turn in range(2):
            if turn:
                one_by_one()
            try:
                state = loads(changed, TABLE, label="it").state
                chunks = state["state_dict_metadata"]["w"].state["chunks"]
                results.append(sum(c.count if type(c) is Columns else 1 for c in chunks))
            except MalformedCheckpoint:
                results.append(-1)
        assert results[0] in (-1, results[1]), opcode


def test_every_cut_is_an_error() -> None:
    data = pickle.dumps(metadata_of(130, {"w": (130, 4), "b": (130,)}), protocol=4)
    for end in range(1, len(data), 997):
        with pytest.raises(MalformedCheckpoint):
            loads(data[:end], TABLE, label="it")


def test_later_references_into_a_run_are_found() -> None:
    """An offset that the metadata names once more, far behind the run that it is part of."""
    metadata = metadata_of(200, {"w": (200, 4)}, share=True)
    data = pickle.dumps(metadata, protocol=4)
    state = loads(data, TABLE, label="it").state
    seen = set()
    for index in state["storage_data"]:
        rows = range(index.count) if type(index) is Columns else [None]
        for row in rows:
            fqn, offset, _ = index.state if row is None else index.state(0, row)
            seen.add((fqn, offset))
    assert seen == {("w", (n, 0)) for n in range(200)} | {("note", None)}


@pytest.mark.parametrize("shared", [True, False])
def test_places_with_a_codec(shared: bool, tmp_path: Path) -> None:
    """Each place has a list of one descriptor, its own or the same for all."""
    one, count = ["stream.zstd"], 300
    chunks, places = [], {}
    for n in range(count):
        offset, size = torch.Size((4 * n, 3)), torch.Size((4, 3))
        chunks.append(meta.ChunkStorageMetadata(offset, size))
        codec = None if n % 7 == 6 else one if shared else ["stream.zstd"]
        places[meta.MetadataIndex("w", offset, n)] = _StorageInfo(f"__{n % 3}_0.distcp", 90 * n, 80, codec)
    properties = meta.TensorProperties(dtype=torch.float32)
    listed = {"w": meta.TensorStorageMetadata(properties, torch.Size((4 * count, 6)), chunks)}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(meta.Metadata(listed, storage_data=places), protocol=4))
    (tmp_path / "__0_0.distcp").write_bytes(b"")
    items = ckptcore.open(str(tmp_path)).items
    assert [items[n].codec for n in range(count)] == ["" if n % 7 == 6 else "zstd" for n in range(count)]
    assert [items[n].start for n in range(count)] == [90 * n for n in range(count)]


def chunks_of(data: bytes) -> dict[str, list[Any]]:
    """The chunks that each tensor has, as records or runs of them."""
    listed = loads(data, TABLE, label="it").state["state_dict_metadata"]
    return {name: entry.state["chunks"] for name, entry in listed.items() if entry.kind[0] == "T"}


def rows_of(chunks: list[Any]) -> list[Any]:
    """The fields of each chunk."""
    return [
        state
        for c in chunks
        for state in ([c.state(0, n) for n in range(c.count)] if type(c) is Columns else [c.state])
    ]


def test_equal_lists_are_decoded_once() -> None:
    data = pickle.dumps(metadata_of(300, {f"layers.{n}": (300, 4) for n in range(40)}), protocol=4)
    runs = [c for chunks in chunks_of(data).values() for c in chunks if type(c) is Columns]
    assert len(runs) == 40
    assert len({id(c) for c in runs}) < 5


@pytest.mark.parametrize("cut", [64, 99, 200, 299])
def test_lists_that_begin_alike(cut: int, one_by_one: Callable[[], None]) -> None:
    """A list that ends or goes on where a known one does not, or has one other chunk."""
    metadata = metadata_of(300, {f"layers.{n}": (300, 4) for n in range(12)})
    for n, name in enumerate(list(metadata.state_dict_metadata)[:12]):
        listed = metadata.state_dict_metadata[name]
        assert isinstance(listed, meta.TensorStorageMetadata)
        if n % 3 == 1:
            del listed.chunks[cut:]
        elif n % 3 == 2:
            listed.chunks[cut - 1] = meta.ChunkStorageMetadata(torch.Size((n, 0)), torch.Size((1, 3)))
    data = pickle.dumps(metadata, protocol=4)
    quick = {name: rows_of(chunks) for name, chunks in chunks_of(data).items()}
    one_by_one()
    assert {name: rows_of(chunks) for name, chunks in chunks_of(data).items()} == quick
    assert {len(rows) for rows in quick.values()} == {cut, 300}


def test_later_references_into_a_repeated_run_are_found() -> None:
    """Offsets of every list, which the places name once more."""
    metadata = metadata_of(200, {f"layers.{n}": (200, n % 3) for n in range(9)}, share=True)
    state = loads(pickle.dumps(metadata, protocol=4), TABLE, label="it").state
    seen = set()
    for index in state["storage_data"]:
        for row in range(index.count) if type(index) is Columns else [None]:
            fqn, offset, _ = index.state if row is None else index.state(0, row)
            seen.add((fqn, offset))
    assert len(seen) == 9 * 200 + 1
    assert seen >= {(f"layers.{n}", (at, 0)) for n in range(9) for at in range(200)}


def test_frames_that_begin_inside_a_repeated_run(one_by_one: Callable[[], None]) -> None:
    data = pickle.dumps(metadata_of(300, {f"layers.{n}": (300, 7) for n in range(16)}), protocol=4)
    headers, at = [], 2
    while at < data.index(b"storage_data"):
        headers.append(at)
        at += 9 + int.from_bytes(data[at + 1 : at + 9], "little")
    before, at = headers[1] + 9, headers[2]

    def moved(n: int) -> bytes:
        """The same opcodes, with a frame that ends, and the next that begins, some bytes earlier."""
        length = (at - n - before).to_bytes(8, "little")
        return b"".join(
            (data[: before - 8], length, data[before : at - n], data[at : at + 9], data[at - n : at])
        )

    changed = [moved(n) + data[at + 9 :] for n in range(0, 60, 3)]

    def outcomes() -> list[Any]:
        found: list[Any] = []
        for one in changed:
            try:
                found.append(
                    {
                        name: sum(c.count if type(c) is Columns else 1 for c in chunks)
                        for name, chunks in chunks_of(one).items()
                    }
                )
            except MalformedCheckpoint:
                found.append(None)
        return found

    quick = outcomes()
    one_by_one()
    assert outcomes() == quick
    assert None in quick
    assert quick[0] is not None


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        ("record_runs", "_MOST", 65),
        ("record_runs", "_USUAL", 1),
        ("record_runs", "_REPEATS", 1),
        ("record_runs", "_REPEATED", 64),
        ("record_runs", "_BEGINNING", 2),
        ("columns", "_BYTES", 2000),
        ("columns", "_MOST_FRAMES", 1),
        ("columns", "_QUICK", 2),
        ("records", "_ALIKE", 1),
    ],
)
def test_bounds_change_no_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str, value: int
) -> None:
    """Real metadata reaches each of them; here they are small."""
    shapes = {f"layers.{n}": ((120, 7), (), (300, 2, 3), (120,))[n % 4] for n in range(9)}
    data = pickle.dumps(metadata_of(120, shapes), protocol=4)
    wanted = digest(tmp_path / "at", data)
    monkeypatch.setattr(import_module(f"ckptcore.encodings.pickle.{module}"), name, value)
    assert digest(tmp_path / "at", data) == wanted


@pytest.mark.parametrize("quick", [1, 40, 1 << 16])
def test_texts_beyond_those_found_by_hash(monkeypatch: pytest.MonkeyPatch, quick: int) -> None:
    monkeypatch.setattr(import_module("ckptcore.encodings.pickle.columns"), "_QUICK", quick)
    names = ["", "\0", "\0\0", "x" * 255, "x" * 254, "\u00fc" * 127]
    names += [f"{n}." + "w" * (n % 250) for n in range(300)]
    texts = Texts()
    for batch in (names[:9], names, names[::-1], [f"{n}" for n in range(300)], names[::7]):
        raw = [name.encode() for name in batch]
        length = np.array([len(each) for each in raw], np.int64)
        found = texts.find(b"".join(raw) + bytes(256), np.cumsum(length) - length, length)
        assert [texts.values[n] for n in found.tolist()] == batch
    assert len(set(texts.values)) == len(texts.values)
