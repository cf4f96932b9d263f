"""Test that the CRC-32 behind a zip record's payload is compared with that of the directory."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import torch

from ckptcore.checking.examine import inspect
from ckptcore.encodings.torchzip import templates
from ckptcore.encodings.torchzip.archive import DESCRIPTOR, Window
from ckptcore.encodings.torchzip.templates import AlikeZips, read_tensor
from ckptcore.errors import ChecksumMismatch


def saved(value: object) -> bytes:
    with io.BytesIO() as file:
        torch.save(value, file)
        return file.getvalue()


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def crcs(data: bytes) -> list[int]:
    """The positions of the CRC-32 in every descriptor."""
    return [at + 4 for at in range(len(data)) if data.startswith(DESCRIPTOR, at)]


def of(data: bytes, name: str) -> int:
    """The position of the CRC-32 behind a record's payload."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (number,) = [n for n, each in enumerate(archive.infolist()) if each.filename.endswith(name)]
    return crcs(data)[number]


def window(data: bytes, reads: list[int] | None = None) -> Window:
    def read(at: int, count: int) -> bytes:
        if reads is not None:
            reads.append(count)
        return data[at : at + count]

    return Window(read, len(data))


@pytest.mark.parametrize("known", [False, True])  # whether a zip of the kind was read before
@pytest.mark.parametrize("size", [6, 60_000])  # read entirely; only its head and its tail
def test_a_flip_behind_a_payload_is_found(monkeypatch: pytest.MonkeyPatch, size: int, known: bool) -> None:
    monkeypatch.setattr(templates, "_templates", {})
    data = saved(torch.arange(float(size)))
    if known:
        reads: list[int] = []
        read_tensor(window(data), "intact")
        read_tensor(window(data, reads), "intact")
        assert len(reads) == (1 if size == 6 else 2)  # no more than before
    for at in (of(data, "data/0"), of(data, "data/0") + 3, of(data, "serialization_id")):
        with pytest.raises(ChecksumMismatch, match=r"in the directory, and \w{8} behind its payload"):
            read_tensor(window(flipped(data, at)), "zip")
    read_tensor(window(data), "intact")


def test_a_flip_in_one_of_many_small_zips_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "_templates", {})
    data = saved(torch.arange(6.0))
    content = data + flipped(data, of(data, "data/0")) + data
    start, good = AlikeZips(memoryview(content), len(data)).payloads("float32", (6,), "zips")
    assert good.tolist() == [True, False, True]
    assert data[start : start + 4] == bytes(4)


def test_a_file_is_refused_before_its_tensors_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    data = saved({"w": torch.arange(60_000.0)})
    path.write_bytes(data)
    assert [t.fqn for t in inspect(str(path)).tensors] == ["w"]
    path.write_bytes(flipped(data, of(data, "data/0")))
    with pytest.raises(ChecksumMismatch, match="data/0"):
        inspect(str(path))
