"""Decoded items: what a map cuts into many views is decoded once, and not once for each of them."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard

import ckptcore
from ckptcore.encodings import codecs
from ckptcore.errors import CkptError
from ckptcore.planning.tiles import Budget
from ckptcore.reading import decoded_items


@pytest.mark.alike(2)
@pytest.mark.parametrize("kept", [decoded_items._MOST_KEPT, 1])
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
    read = codecs._decode_steps
    monkeypatch.setattr(codecs, "_decode_steps", lambda *a: decoded.append(a) or read(*a))
    monkeypatch.setattr(decoded_items, "_IN_MEMORY", in_memory)
    monkeypatch.setattr(decoded_items, "_LEAST", min(kept, decoded_items._LEAST))
    monkeypatch.setattr(decoded_items, "_MOST_KEPT", kept)
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
        (1, decoded_items._MOST_KEPT),  # as many as may be kept
        (decoded_items._KEPT_BYTES // 5, 5),  # as many as their bytes allow
        (decoded_items._KEPT_BYTES + 1, decoded_items._LEAST),  # some, however large
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_items_that_were_used_last_are_kept(length: int, most: int, seed: int) -> None:
    rng, items, expected = random.Random(seed), decoded_items.DecodedItems(), list[int]()
    for _ in range(400):
        index = rng.randrange(most + 3)
        made: list[int] = []
        found = items.of(index, lambda made=made: made.append(1) or Item(length))  # type: ignore[misc,return-value]
        assert found.length == length
        assert bool(made) == (index not in expected)
        expected = [*(n for n in expected if n != index), index][-most:]


_PEAK = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def saved(folder: Path, layers: int, width: int, *, compressed: bool) -> dict[str, torch.Tensor]:
    """Write a checkpoint whose items are each cut in two; return its tensors."""
    state = {}
    for n in range(layers):
        name = f"decoder.layers.{n}."
        state[name + "input_layernorm.weight"] = torch.randn(64)
        state[name + "pre_mlp_layernorm.weight"] = torch.randn(64)
        state[name + "self_attention.linear_qkv.weight"] = torch.randn(192, 64)
        state[name + "self_attention.linear_proj.weight"] = torch.randn(64, 64)
        state[name + "mlp.linear_fc1.weight"] = torch.randn(2 * width, 64)
        state[name + "mlp.linear_fc2.weight"] = torch.randn(64, width)
    state["decoder.final_layernorm.weight"] = torch.randn(64)
    state["embedding.word_embeddings.weight"] = torch.randn(64, 64)
    state["output_layer.weight"] = torch.randn(64, 64)
    extensions = [ZStandard()] if compressed else []
    dcp.save(state, storage_writer=FileSystemWriter(folder, _extensions=extensions), no_dist=True)
    numbers = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    (folder / "config.json").write_text(json.dumps(numbers))
    return state


@pytest.mark.soak
def test_memory_of_decoded_items_belongs_to_the_budget(tmp_path: Path) -> None:
    peaks = []
    for compressed in (False, True):
        source, target = tmp_path / f"ckpt-{compressed}", tmp_path / f"out-{compressed}"
        saved(source, 24, 6800, compressed=compressed)  # items of 3.3 MiB and of half of it
        command = [sys.executable, "-m", "ckptcore", "export", str(source), str(target), "--config", "none"]
        means = ["--memory", "32MiB", "--workers", "2", "--no-catalog"]
        run = subprocess.run(
            [sys.executable, "-c", _PEAK, *command, *means], check=True, capture_output=True, text=True
        )
        peaks.append(int(run.stdout) << 10)
    assert peaks[1] - peaks[0] < 48 << 20  # of the budget; and zstandard, with its window for each worker


def test_what_memory_has_no_room_for_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = saved(tmp_path / "ckpt", 12, 1200, compressed=True)  # items of 600 KiB
    decoded: list[Any] = []
    read = codecs._decode_steps
    monkeypatch.setattr(codecs, "_decode_steps", lambda *a: decoded.append(a) or read(*a))
    taken: list[int] = []
    take, slot, slots = decoded_items.DecodedRoom.take, decoded_items.DecodedRoom.slot, list[int]()

    def taking(self: decoded_items.DecodedRoom, nbytes: int) -> bool:
        granted = take(self, nbytes)
        taken.append(self.taken)
        return granted

    def slotted(self: decoded_items.DecodedRoom) -> tuple[int, int]:
        found = slot(self)
        slots.append(found[1])
        return found

    monkeypatch.setattr(decoded_items.DecodedRoom, "take", taking)
    monkeypatch.setattr(decoded_items.DecodedRoom, "slot", slotted)
    settings = ckptcore.Settings(workers=1, memory=16 << 20)
    ckptcore.convert(
        str(tmp_path / "ckpt"), str(tmp_path / "out"), verb="export", config="none", settings=settings
    )
    room = Budget.of(settings).decoded
    assert 0 < max(taken) <= room == 4 << 20
    assert slots
    assert len(decoded) <= 2 * len(state)  # as they are read, and when records are proven
    made = ckptcore.open(str(tmp_path / "out"))
    for n in range(12):
        up, down = (f"model.layers.{n}.mlp.{name}_proj.weight" for name in ("up", "down"))
        assert torch.equal(ckptcore.read(made, up), state[f"decoder.layers.{n}.mlp.linear_fc1.weight"][1200:])
        assert torch.equal(ckptcore.read(made, down), state[f"decoder.layers.{n}.mlp.linear_fc2.weight"])


def test_a_slot_serves_one_item_after_another(tmp_path: Path) -> None:
    room = decoded_items.DecodedRoom(0, str(tmp_path))
    (file, one), (_, two) = room.slot(), room.slot()
    room.give_back_slot(one)
    assert room.slot() == (file, one)
    assert two == decoded_items._IN_MEMORY


@pytest.mark.parametrize("memory", [1 << 20, 2 << 20, 64 << 20, 1 << 30])
@pytest.mark.parametrize("workers", [1, 4])
def test_budgets_beside_decoded_items(memory: int, workers: int) -> None:
    budget = Budget.of(ckptcore.Settings(memory=memory, workers=workers))
    less = budget.beside_decoded
    assert 0 < less.tile <= budget.tile
    assert 4 * workers * less.tile + budget.decoded == 4 * workers * budget.tile
    if memory >= 64 << 20:
        assert budget.decoded >= memory // 4


@pytest.mark.parametrize(
    ("number", "code", "step"),
    [
        (errno.ENOSPC, "disk-full", "or raise memory=: a quarter of it takes decoded items"),
        (errno.EACCES, "destination-unwritable", "check the path and its permissions"),
    ],
)
def test_no_place_for_decoded_items(
    number: int, code: str, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "ckpt", 2, 1200, compressed=True)

    def full(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(decoded_items, "decode_to_place", full)
    with pytest.raises(CkptError) as found:
        ckptcore.convert(
            str(tmp_path / "ckpt"),
            str(tmp_path / "out"),
            verb="export",
            config="none",
            settings=ckptcore.Settings(workers=1, memory=1 << 20),
        )
    assert found.value.code == code
    assert step in found.value.hint
    assert not (tmp_path / "out").exists()
