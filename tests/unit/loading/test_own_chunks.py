"""Tensors that list their own chunks, as `torch.distributed.checkpoint` lets them: filled, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import ckptcore
from ckptcore.errors import NameMismatch, UsageError

FULL = torch.arange(24.0).reshape(4, 6)


@pytest.fixture
def manifest(tmp_path: Path) -> ckptcore.Manifest:
    dcp.save({"first": torch.ones(2), "table": FULL}, checkpoint_id=tmp_path / "ckpt")
    return ckptcore.open(str(tmp_path / "ckpt"))


class Listed(torch.Tensor):
    """A tensor of 4 x 6 elements; its memory is in chunks, by offset."""

    chunks: dict[tuple[int, int], tuple[torch.Size, Any]]

    @staticmethod
    def __new__(cls, chunks: dict[tuple[int, int], tuple[torch.Size, Any]]) -> Listed:
        made = torch.Tensor._make_wrapper_subclass(cls, (4, 6), dtype=torch.float32)
        made.chunks = chunks
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(function)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), size) for at, (size, _) in self.chunks.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Any:
        assert index.offset is not None
        return self.chunks[index.offset[0], index.offset[1]][1]


def test_every_chunk_is_filled(manifest: ckptcore.Manifest) -> None:
    """In place, also where the memory of one is not contiguous; one without elements is not asked for."""
    left, right = torch.zeros(2, 4), torch.zeros(2, 3).t()
    chunks = {(1, 2): (left.shape, left), (0, 0): (right.shape, right), (3, 6): (torch.Size([1, 0]), None)}
    assert ckptcore.load_into(manifest, {"table": Listed(chunks)}) == ["first"]
    assert torch.equal(left, FULL[1:3, 2:6])
    assert torch.equal(right, FULL[0:3, 0:2])


def test_local_shards(manifest: ckptcore.Manifest) -> None:
    """torch's own: columns beside each other."""
    shards = [torch.zeros(4, 2, dtype=torch.float16), torch.zeros(4, 4, dtype=torch.float16)]
    ckptcore.load_into(manifest, {"table": LocalShardsWrapper(shards, [(0, 0), (0, 2)])})
    assert torch.equal(torch.cat(shards, 1), FULL.half())


@pytest.mark.parametrize(
    ("at", "size", "memory", "error"),
    [
        ((0, 4), (4, 4), torch.zeros(4, 4), NameMismatch),
        ((0, 0), (4, 2), torch.zeros(2, 4), NameMismatch),
        ((0, 0), (4, 2), torch.zeros(4, 2, device="meta"), UsageError),
        ((0, 0), (4, 2), torch.zeros(4, 1).expand(4, 2), UsageError),
    ],
    ids=["outside", "another shape", "no memory", "expanded"],
)
def test_wrong_chunks_are_refused(
    at: tuple[int, int], size: tuple[int, int], memory: Any, error: Any, manifest: ckptcore.Manifest
) -> None:
    """Before anything is filled."""
    first = torch.zeros(2)
    state = {"first": first, "table": Listed({at: (torch.Size(size), memory)})}
    with pytest.raises(error, match="table"):
        ckptcore.load_into(manifest, state)
    assert first.sum() == 0
