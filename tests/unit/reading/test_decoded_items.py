"""Decoded items: what a map cuts into many views is decoded once, and not once for each of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard

import ckptcore
from ckptcore.encodings import codecs
from ckptcore.reading import payload


@pytest.mark.parametrize("kept", [payload._MOST_KEPT, 1])
@pytest.mark.parametrize("in_memory", [8 << 20, 0])
def test_an_item_of_many_views_is_decoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: int, kept: int
) -> None:
    layers = 24
    state = {
        "decoder.layers.input_layernorm.weight": torch.randn(layers, 8),
        "decoder.layers.pre_mlp_layernorm.weight": torch.randn(layers, 8),
        "decoder.layers.self_attention.linear_qkv.weight": torch.randn(layers, 32, 8),
        "decoder.layers.self_attention.linear_proj.weight": torch.randn(layers, 8, 16),
        "decoder.layers.mlp.linear_fc1.weight": torch.randn(layers, 24, 8),
        "decoder.layers.mlp.linear_fc2.weight": torch.randn(layers, 8, 12),
        "decoder.final_layernorm.weight": torch.randn(8),
        "embedding.word_embeddings.weight": torch.randn(40, 8),
        "output_layer.weight": torch.randn(40, 8),
    }
    dcp.save(
        state, storage_writer=FileSystemWriter(tmp_path / "ckpt", _extensions=[ZStandard()]), no_dist=True
    )
    decoded: list[Any] = []
    read = codecs._decoded
    monkeypatch.setattr(codecs, "_decoded", lambda *a: decoded.append(a) or read(*a))
    monkeypatch.setattr(payload, "_IN_MEMORY", in_memory)
    monkeypatch.setattr(payload, "_LEAST", min(kept, payload._LEAST))
    monkeypatch.setattr(payload, "_MOST_KEPT", kept)
    numbers = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    (tmp_path / "ckpt/config.json").write_text(json.dumps(numbers))  # evidence for the map, and not carried
    settings = ckptcore.Settings(workers=1)
    ckptcore.convert(
        str(tmp_path / "ckpt"), str(tmp_path / "out"), verb="export", config="none", settings=settings
    )
    made = ckptcore.open(str(tmp_path / "out"))
    assert len(made.tensors) == 3 + 9 * layers
    for n in range(layers):
        up, down = (f"model.layers.{n}.mlp.{name}_proj.weight" for name in ("up", "down"))
        assert torch.equal(ckptcore.read(made, up), state["decoder.layers.mlp.linear_fc1.weight"][n, 12:])
        assert torch.equal(ckptcore.read(made, down), state["decoder.layers.mlp.linear_fc2.weight"][n])
    once = len(decoded) <= 2 * len(state)  # as they are read, and when records are proven
    assert once == (kept > 1)


class Item:
    """A decoded item without bytes."""

    def __init__(self, length: int) -> None:
        self.length = length


@pytest.mark.parametrize(
    ("length", "most"),
    [
        (1, payload._MOST_KEPT),  # as many as may be kept
        (payload._KEPT_BYTES // 5, 5),  # as many as their bytes allow
        (payload._KEPT_BYTES + 1, payload._LEAST),  # some, however large
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_items_that_were_used_last_are_kept(length: int, most: int, seed: int) -> None:
    rng, items, expected = random.Random(seed), payload.DecodedItems(), list[int]()
    for _ in range(400):
        index = rng.randrange(most + 3)
        made: list[int] = []
        found = items.of(index, lambda made=made: made.append(1) or Item(length))  # type: ignore[misc,return-value]
        assert found.length == length
        assert bool(made) == (index not in expected)
        expected = [*(n for n in expected if n != index), index][-most:]
