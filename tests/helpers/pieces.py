"""Pieces: any partition of a tensor into boxes, and a DCP folder that holds it so.

A small writer of torch.distributed.checkpoint folders lays tensors out in any boxes at all, which
torch's own writer does not.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ckptcore import Box

Shape = tuple[int, ...]
shapes = st.lists(st.integers(1, 9), max_size=4).map(tuple)


@st.composite
def partitions(draw: st.DrawFn, shape: Shape, pieces: int = 7, least: int = 0) -> list[Box]:
    """Cuts of a tensor into boxes: one of them is cut in two repeatedly."""
    parts = [Box.full(shape)]
    for _ in range(draw(st.integers(least, pieces)) if shape else 0):
        at = draw(st.integers(0, len(parts) - 1))
        box = parts[at]
        wide = [d for d, n in enumerate(box.shape) if n > 1]
        if not wide:
            continue
        dim = draw(st.sampled_from(wide))
        cut = draw(st.integers(1, box.shape[dim] - 1))
        low = tuple(cut if d == dim else n for d, n in enumerate(box.shape))
        high = tuple(n - cut if d == dim else n for d, n in enumerate(box.shape))
        start = tuple(o + cut if d == dim else o for d, o in enumerate(box.offset))
        parts[at : at + 1] = [Box(box.offset, low), Box(start, high)]
    return draw(st.permutations(parts))


def part(tensor: Any, box: Box) -> Any:
    return tensor[tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))]


def write_dcp(
    folder: Path, state: dict[str, tuple[Any, list[Box]]], files: int = 2, turn: bool = False
) -> None:
    """A checkpoint folder with these chunks, dealt to the files in turn. turn: strides reversed."""
    import torch
    from torch.distributed.checkpoint import metadata as m
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    data = [io.BytesIO() for _ in range(files)]
    meta = m.Metadata({}, {}, {}, m.StorageMeta())
    count = 0
    for fqn, (tensor, boxes) in state.items():
        spec = m.TensorStorageMetadata(m.TensorProperties(dtype=tensor.dtype), tensor.shape, [])
        meta.state_dict_metadata[fqn] = spec
        meta.planner_data[fqn] = (fqn,)
        for box in boxes:
            chunk = part(tensor, box).clone()
            if turn and chunk.dim() > 1:
                back = tuple(reversed(range(chunk.dim())))
                chunk = chunk.permute(back).contiguous().permute(back)
            spec.chunks.append(m.ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)))
            out = data[count % files]
            start = out.tell()
            item = io.BytesIO()
            torch.save(chunk, item)
            out.write(item.getvalue())
            place = _StorageInfo(f"__{count % files}_0.distcp", start, len(item.getvalue()))
            meta.storage_data[m.MetadataIndex(fqn, torch.Size(box.offset))] = place
            count += 1
    folder.mkdir()
    for number, out in enumerate(data):
        (folder / f"__{number}_0.distcp").write_bytes(out.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(meta))


def numbered(shape: Shape, dtype: str = "float32", start: int = 0) -> Any:
    """Every element tells its place."""
    import torch

    count = int(np.prod(shape, dtype=np.int64))
    return (torch.arange(count) + start).to(getattr(torch, dtype)).reshape(shape)
