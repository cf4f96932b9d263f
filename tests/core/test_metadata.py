"""`.metadata` whose records have the right classes and the wrong insides."""

from __future__ import annotations

import copyreg
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint.filesystem import _StorageInfo

import ckptcore
from ckptcore.errors import MalformedCheckpoint


class Odd:
    """Pickled as an instance of ``cls`` whose state is a tuple, which no writer of torch makes."""

    def __init__(self, cls: type, *state: Any) -> None:
        self.cls, self.state = cls, state

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copyreg.__newobj__, (self.cls,), self.state


GOOD_CHUNK = meta.ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
GOOD_PLACE = _StorageInfo("__0_0.distcp", 0, 8)


@pytest.mark.parametrize(
    ("chunk", "place"),
    [
        (Odd(meta.ChunkStorageMetadata, torch.Size([0])), GOOD_PLACE),
        (Odd(meta.ChunkStorageMetadata), GOOD_PLACE),
        (GOOD_CHUNK, Odd(_StorageInfo, "__0_0.distcp")),
        (GOOD_CHUNK, Odd(_StorageInfo, "__0_0.distcp", 0, 8, None, None)),
    ],
    ids=["a chunk without sizes", "a chunk of nothing", "a place of one field", "a place of five"],
)
def test_records_of_another_length_are_malformed(chunk: Any, place: Any, tmp_path: Path) -> None:
    tensor = meta.TensorStorageMetadata(meta.TensorProperties(), torch.Size([2]), [chunk])
    whole = meta.Metadata({"w": tensor}, storage_data={meta.MetadataIndex("w", [0]): place})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(whole, 4))
    (tmp_path / "__0_0.distcp").write_bytes(bytes(8))
    with pytest.raises(MalformedCheckpoint):
        ckptcore.open(str(tmp_path))
