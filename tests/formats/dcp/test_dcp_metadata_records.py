"""`.metadata` whose records have the right classes and the wrong insides."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as meta

import ckptcore
from ckptcore.errors import MalformedCheckpoint
from ckptcore.formats.dcp import metadata

CHUNK, PLACE = meta.ChunkStorageMetadata, filesystem._StorageInfo
GOOD_CHUNK = (torch.Size([0]), torch.Size([2]))
GOOD_PLACE = ("__0_0.distcp", 0, 8, None)


def odd(cls: type, monkeypatch: pytest.MonkeyPatch, *state: Any) -> Any:
    """Pickled as an instance of ``cls`` whose state is a tuple, which no writer of torch makes."""
    members = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__getstate__": lambda _: state,
    }
    fake = type(cls.__name__, (), members)
    monkeypatch.setattr(sys.modules[cls.__module__], cls.__name__, fake)  # pickle looks it up by name
    return fake()


@pytest.mark.parametrize(
    ("chunk", "place"),
    [
        (GOOD_CHUNK[:1], GOOD_PLACE),
        ((7,), GOOD_PLACE),
        (GOOD_CHUNK, GOOD_PLACE[:1]),
        (GOOD_CHUNK, (*GOOD_PLACE, None)),
    ],
    ids=["a chunk without sizes", "a chunk of a number", "a place of one field", "a place of five"],
)
def test_records_of_another_length_are_malformed(
    chunk: tuple[Any, ...], place: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = [odd(CHUNK, monkeypatch, *chunk)]
    tensor = meta.TensorStorageMetadata(meta.TensorProperties(), torch.Size([2]), chunks)
    places = {meta.MetadataIndex("w", [0]): odd(PLACE, monkeypatch, *place)}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(meta.Metadata({"w": tensor}, storage_data=places), 4))
    (tmp_path / "__0_0.distcp").write_bytes(bytes(8))
    with pytest.raises(MalformedCheckpoint):
        ckptcore.open(str(tmp_path))


def test_a_list_that_repeats_one_chunk_is_refused_before_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[object] = []
    monkeypatch.setattr(metadata.Ragged, "add", lambda _, size: copied.append(size))
    size = torch.Size([1] * 64)
    chunks = [meta.ChunkStorageMetadata(torch.Size([0] * 64), size)] * 2000  # 2 bytes each
    tensor = meta.TensorStorageMetadata(meta.TensorProperties(), size, chunks)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(meta.Metadata({"w": tensor}, storage_data={}), 4))
    (tmp_path / "__0_0.distcp").write_bytes(bytes(8))
    with pytest.raises(MalformedCheckpoint, match="more chunks than its size allows"):
        ckptcore.open(str(tmp_path))
    assert not copied
