"""Small tensors are read many at a time: the same bytes, and damage in any one of them is found and named."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pieces import numbered, write_dcp
from safetensors import safe_open

from ckptcore import Box, convert
from ckptcore.errors import CkptError, DamagedCheckpoint
from ckptcore.execution import small_tensors
from ckptcore.execution.small_tensors import SmallTensors
from ckptcore.planning.file_plan import PlannedTensor
from ckptcore.planning.request import Settings

NAME = "model.small.{}".format


def full(tensor: Any) -> list[Box]:
    return [Box.full(tuple(tensor.shape))]


def state() -> dict[str, tuple[Any, list[Box]]]:
    """Complete ones, some cut in rows, some in columns, scalars, other dtypes, and one that is not small."""
    made: dict[str, tuple[Any, list[Box]]] = {}
    for n in range(40):
        tensor = numbered((16, 8), start=1000 * n)
        made[NAME(n)] = (tensor, full(tensor))
    for n in range(40, 52):
        rows = [Box((0, 0), (8, 8)), Box((8, 0), (8, 8))]
        made[NAME(n)] = (numbered((16, 8), start=1000 * n), rows)
    for n in range(52, 62):
        columns = [Box((0, 0), (16, 4)), Box((0, 4), (16, 4))]
        made[NAME(n)] = (numbered((16, 8), start=1000 * n), columns)
    for n in range(62, 72):
        made[NAME(n)] = (numbered((), start=n), [Box((), ())])
    for n in range(72, 81):
        tensor = numbered((16, 16), "int16", start=n)
        made[NAME(n)] = (tensor, full(tensor))
    large = numbered((128, 128), start=7)
    made[NAME(81)] = (large, full(large))
    return made


def saved(tensor: Any) -> bytes:
    with io.BytesIO() as file:
        torch.save(tensor, file)
        return file.getvalue()


@pytest.fixture(autouse=True)
def no_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates are of the process, and as many as earlier tests left room for."""
    monkeypatch.setattr("ckptcore.encodings.torchzip.templates._templates", {})


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors were filled by each call."""
    calls: list[int] = []
    read = SmallTensors.read

    def noted(self: SmallTensors, *given: Any) -> frozenset[int]:
        filled = read(self, *given)
        calls.append(len(filled))
        return filled

    monkeypatch.setattr(SmallTensors, "read", noted)
    return calls


@pytest.mark.parametrize(
    ("to", "settings"),
    [
        ("safetensors", Settings()),
        ("safetensors", Settings(memory=1 << 20, workers=2)),
        ("torch_save", Settings(fingerprint=True)),
    ],
)
def test_the_bytes_are_those_of_one_by_one(
    tmp_path: Path, counted: list[int], monkeypatch: pytest.MonkeyPatch, to: str, settings: Settings
) -> None:
    write_dcp(tmp_path / "ckpt", state(), files=3)
    many, single = tmp_path / "many.out", tmp_path / "single.out"
    ours = convert(str(tmp_path / "ckpt"), str(many), to=to, settings=settings)
    # Complete and in rows, scalars, int16; those in columns are read one by one. A source that was written a
    # moment ago may be read a second time.
    assert set(counted) == {40 + 12 + 10 + 9}
    monkeypatch.setattr(SmallTensors, "read", lambda *_: frozenset())
    theirs = convert(str(tmp_path / "ckpt"), str(single), to=to, settings=settings)
    assert read_all(many) == read_all(single)
    assert ours.fingerprint == theirs.fingerprint
    if to == "safetensors":
        (path,) = many.rglob("*.safetensors") if many.is_dir() else (many,)
        with safe_open(path, "pt") as file:
            for name, (tensor, _) in state().items():
                assert file.get_tensor(name).equal(tensor), name


def read_all(place: Path) -> dict[str, bytes]:
    files = [place] if place.is_file() else [p for p in place.rglob("*") if p.suffix != ".md" and p.is_file()]
    return {path.name if place.is_dir() else "": path.read_bytes() for path in files}


@pytest.mark.parametrize("what", ["payload", "payload's CRC-32", "id", "header", "directory", "end"])
def test_damage_in_one_of_many_is_found_and_named(tmp_path: Path, counted: list[int], what: str) -> None:
    tensors = {NAME(n): numbered((16, 8), start=1000 * n) for n in range(40)}
    write_dcp(tmp_path / "ckpt", {name: (tensor, full(tensor)) for name, tensor in tensors.items()}, files=1)
    path = tmp_path / "ckpt" / "__0_0.distcp"
    raw = bytearray(path.read_bytes())
    payload = raw.index(tensors[NAME(23)].numpy().tobytes())
    begin = raw.rindex(b"archive/data.pkl", 0, payload) - 30
    end = raw.index(b"PK\x05\x06", payload)
    row = raw.index(b"archive/data/0", raw.index(b"PK\x01\x02", payload)) - 46
    place = {
        "payload": payload + 5,
        "payload's CRC-32": row + 16,
        "id": raw.index(b"archive/.data/serialization_id", payload) + 100,
        "header": begin + 1,
        "directory": raw.index(b"PK\x01\x02", payload) + 2,
        "end": end + 1,
    }[what]
    if what == "id":
        digits = re.compile(rb"[0-9]{30,}").search(raw, payload)
        assert digits is not None
        place = digits.start() + 3
    raw[place] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CkptError, match=re.escape(NAME(23))) as caught:
        convert(str(tmp_path / "ckpt"), str(tmp_path / "out"), to="safetensors")
    assert isinstance(caught.value, DamagedCheckpoint)
    assert not (tmp_path / "out").exists()
    assert sum(counted) < 40


def test_a_file_that_ends_early_is_reported(tmp_path: Path) -> None:
    tensors = {NAME(n): numbered((16, 8), start=1000 * n) for n in range(40)}
    write_dcp(tmp_path / "ckpt", {name: (tensor, full(tensor)) for name, tensor in tensors.items()}, files=1)
    path = tmp_path / "ckpt" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-700])
    with pytest.raises(CkptError):
        convert(str(tmp_path / "ckpt"), str(tmp_path / "out"), to="safetensors")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_read_together_is_read_one_by_one(
    tmp_path: Path, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {NAME(n): numbered((16, 8), start=1000 * n) for n in range(40)}
    write_dcp(tmp_path / "ckpt", {name: (tensor, full(tensor)) for name, tensor in tensors.items()}, files=1)

    def refuse(*_: Any) -> None:
        raise DamagedCheckpoint("one of them")

    monkeypatch.setattr("ckptcore.execution.small_tensors.AlikeZips", refuse)
    convert(str(tmp_path / "ckpt"), str(tmp_path / "out"), to="safetensors")
    assert set(counted) == {0}
    (path,) = (tmp_path / "out").rglob("*.safetensors")
    with safe_open(path, "pt") as file:
        assert all(file.get_tensor(name).equal(tensor) for name, tensor in tensors.items())


def test_no_small_tensor_becomes_an_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {NAME(n): numbered((16, 8), start=1000 * n) for n in range(300)}
    write_dcp(tmp_path / "ckpt", {name: (t, full(t)) for name, t in tensors.items()}, files=2)
    made: list[str] = []
    init = PlannedTensor.__init__

    def noted(self: PlannedTensor, name: str, *rest: Any) -> None:
        made.append(name)
        init(self, name, *rest)

    monkeypatch.setattr(PlannedTensor, "__init__", noted)
    convert(str(tmp_path / "ckpt"), str(tmp_path / "out"), to="safetensors")
    assert not made


@pytest.mark.parametrize("extra", [0, small_tensors._FEWEST - 1, small_tensors._FEWEST])
def test_more_than_a_buffer_takes_at_once(tmp_path: Path, counted: list[int], extra: int) -> None:
    """A scalar of 4 bytes is an item of a KiB: one job has more items than the buffer of 64 KiB holds."""
    item = len(saved(numbered(())))
    together = (64 << 10) // item
    assert small_tensors._FEWEST < together < 64
    count = 3 * together + extra
    tensors = {NAME(n): numbered((), start=n) for n in range(count)}
    write_dcp(tmp_path / "ckpt", {name: (tensor, full(tensor)) for name, tensor in tensors.items()}, files=1)
    settings = Settings(memory=1 << 20, workers=4)
    convert(str(tmp_path / "ckpt"), str(tmp_path / "out.safetensors"), settings=settings)
    alone = extra if extra < small_tensors._FEWEST else 0
    assert set(counted) == {count - alone}  # once more for a source that was written a moment ago
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert all(file.get_tensor(name).equal(tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(("side", "together"), [(80, True), (90, False)])  # items of 27 and of 34 KiB
def test_larger_items_are_read_one_by_one(
    tmp_path: Path, counted: list[int], side: int, together: bool
) -> None:
    tensors = {NAME(n): numbered((side, side), start=n) for n in range(9)}
    assert (len(saved(tensors[NAME(0)])) <= small_tensors._LARGEST) == together
    write_dcp(tmp_path / "ckpt", {name: (tensor, full(tensor)) for name, tensor in tensors.items()}, files=1)
    convert(str(tmp_path / "ckpt"), str(tmp_path / "out.safetensors"))
    assert set(counted) == ({9} if together else set())
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert all(file.get_tensor(name).equal(tensor) for name, tensor in tensors.items())
