"""Chunks and items that a builder keeps in columns give the manifest that rows give."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptcore.core.manifest import Envelope, Item, TensorSpec
from ckptcore.core.manifest_builder import Builder


@settings(deadline=None)
@given(st.data(), st.integers(0, 3))
def test_chunks_added_at_once(data: st.DataObject, width: int) -> None:
    """With rows before and behind them, unplaced chunks, skipped tensors and tensors of a lower rank."""
    dim = st.integers(0, 9)
    table = data.draw(st.lists(st.tuples(st.integers(-1, 2), st.integers(0, width)), max_size=8))
    offset, shape = (
        np.array([[data.draw(dim) for _ in range(width)] for _ in table], np.int64).reshape(len(table), width)
        for _ in range(2)
    )
    before, behind = data.draw(st.booleans()), data.draw(st.booleans())
    codec = np.array([data.draw(st.integers(0, 1)) for _ in table], np.int64)
    kept = np.array([data.draw(st.booleans()) for _ in table], np.bool_)
    made = []
    for at_once in (True, False):
        builder = Builder()
        for n in range(3):
            builder.tensor(TensorSpec(f"t.{n}", "uint8", (1,) * width))
        file = builder.file("data", 1 << 20)

        def one(builder: Builder = builder, file: int = file) -> None:
            builder.chunk(1, (2,) * width, (3,) * width, builder.plain_item(file, 7, 8, Envelope.RAW))

        if before:
            one()
        places = np.array([(file, 10 * n, 10) for n in range(len(table))], np.int64).reshape(-1, 3)
        envelope = np.full(len(table), int(Envelope.TORCHZIP))
        names = {n: f"member {n}" for n in np.flatnonzero(kept).tolist()}
        if at_once:
            item = builder.items(places, envelope, codec, ("", "zstd"), names, kept)
            tensor = np.array([t for t, _ in table], np.int64)
            builder.chunks(tensor, offset, shape, np.array([r for _, r in table], np.int64), item)
        else:
            items = [
                builder.item(Item(*place, Envelope.TORCHZIP, ("", "zstd")[c], None, names[n])) if keep else -1
                for n, (place, c, keep) in enumerate(zip(places.tolist(), codec, kept, strict=True))
            ]
            for n, (tensor_of, rank) in enumerate(table):
                builder.chunk(tensor_of, tuple(offset[n, :rank]), tuple(shape[n, :rank]), items[n])
        if behind:
            one()
        made.append((builder.item_bytes, builder.build("test", "nowhere", {}).dump()))
    assert made[0] == made[1]
