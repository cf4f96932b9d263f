"""Memory is filled by several threads, in pieces, directly or through buffers, with the bits of one read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from custody_copies import flip, tensor_bytes
from pieces import numbered, write_dcp

import ckptcore
from ckptcore import Box
from ckptcore.errors import DamagedCheckpoint
from ckptcore.reading import fill_memory as module

SHAPE = (48, 40)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _several_threads_and_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 1 << 10)
    monkeypatch.setattr(module, "usable_cores", lambda: 4)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Rows of three ranks, columns of two, a tensor that is stored column by column, and a scalar."""
    rows = [Box((at, 0), (16, 40)) for at in (0, 16, 32)]
    columns = [Box((0, at), (48, 20)) for at in (0, 20)]
    tensors = {
        "rows": (numbered(SHAPE, start=1), rows),
        "columns": (numbered(SHAPE, start=2), columns),
        "turned": (numbered((40, 48), start=3).t(), [Box.full(SHAPE)]),
        "scalar": (numbered((), start=4), [Box.full(())]),
    }
    write_dcp(tmp_path / "ckpt", tensors, files=2)
    return tmp_path / "ckpt"


def expected() -> dict[str, torch.Tensor]:
    turned = numbered((40, 48), start=3).t()
    named = {"rows": numbered(SHAPE, start=1), "columns": numbered(SHAPE, start=2), "turned": turned}
    return named | {"scalar": numbered((), start=4)}


def load(source: Path, state: dict[str, Any], **options: Any) -> None:
    ckptcore.load_into(ckptcore.open(str(source)), state, strict=True, **options)


def require_equal(state: dict[str, torch.Tensor], dtype: torch.dtype | None = None) -> None:
    for name, value in expected().items():
        assert torch.equal(state[name].cpu(), value.to(dtype or value.dtype)), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [None, torch.float64, torch.bfloat16])
def test_every_layout_and_dtype(source: Path, dtype: torch.dtype | None, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    state = {k: torch.zeros(v.shape, dtype=dtype or v.dtype, device=device) for k, v in expected().items()}
    load(source, state)
    require_equal(state, dtype)


class LateStream:
    """A stream of a device, whose copies happen when a thread waits for them, and not before."""

    def __init__(self) -> None:
        self.copies: list[Callable[[], object]] = []

    def record_event(self) -> LateStream:
        """Return what waits for the copies so far."""
        return self

    def synchronize(self) -> None:
        for copy in self.copies:
            copy()
        self.copies.clear()


class LateRing(module._Ring):
    """The ring of a device, with plain buffers for pinned ones, and copies that come as late as they may."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = LateStream()
        self._buffers = [np.empty(module.PIECE, np.uint8) for _ in range(2)]

    def next(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        staged: torch.Tensor = super().next(shape, dtype)
        assert staged.data_ptr() == self._buffers[self._turn].ctypes.data  # no new memory for a box
        return staged

    def send(self, staged: torch.Tensor, out: torch.Tensor) -> None:
        self._stream.copies.append(lambda: out.copy_(staged))
        self._handed[self._turn] = self._stream.record_event()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_buffer_is_reused_when_its_copy_has_ended(
    source: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a device copies beside the reads is what was read, however late it copies."""
    monkeypatch.setattr(module, "_Ring", LateRing)
    state = {name: torch.zeros(SHAPE, dtype=dtype) for name in ("rows", "columns")}
    load(source, state)
    for name, filled in state.items():
        assert torch.equal(filled, expected()[name].to(dtype)), name


def test_memory_with_gaps(source: Path) -> None:
    room = torch.zeros(48, 80)
    state = {k: torch.zeros_like(v) for k, v in expected().items()} | {"rows": room[:, ::2]}
    load(source, state)
    require_equal(state)
    assert not room[:, 1::2].any()


def test_in_inference_mode(source: Path) -> None:
    with torch.inference_mode():
        state = {k: torch.zeros(v.shape, dtype=torch.float64) for k, v in expected().items()}
        load(source, state)
    require_equal(state, torch.float64)


def test_memory_that_tensors_share_has_the_last_of_them(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads must not mix two tensors in one memory: these are filled in order, in one thread."""
    used: list[tuple[int, int]] = []
    run = module._run

    def watched(manifest: Any, store: Any, records: Any, fills: Any, threads: int, copies: bool) -> None:
        used.append((len(fills), threads))
        run(manifest, store, records, fills, threads, copies)

    monkeypatch.setattr(module, "_run", watched)
    one = torch.zeros(SHAPE)
    state = {k: torch.zeros_like(v) for k, v in expected().items()} | {"columns": one, "rows": one}
    load(source, state)
    assert torch.equal(one, expected()["rows"])
    assert used == [(2, 4), (2, 1)]


def test_pieces_of_a_record_add_up_to_its_checksum(source: Path) -> None:
    row = numbered(SHAPE, start=1)[40].numpy().tobytes()
    data = next(path for path in source.glob("*.distcp") if row in path.read_bytes())
    raw = bytearray(data.read_bytes())
    raw[raw.index(row)] ^= 1
    data.write_bytes(raw)
    state = {k: torch.zeros_like(v) for k, v in expected().items()}
    with pytest.raises(DamagedCheckpoint, match=r"rows: .*CRC-32"):
        load(source, state)
    load(source, state, verify=False)


def test_a_record_with_more_than_its_tensor_is_compared_with_its_checksum(tmp_path: Path) -> None:
    """A slice keeps all of its storage in a `.pt`: what is read of it never adds up to the record."""
    file = tmp_path / "slice.pt"
    rows = torch.arange(32.0).reshape(8, 4)
    torch.save({"rows": rows[2:6], "all": torch.ones(3)}, file)
    flip(*tensor_bytes(file, rows[3]))
    opened = ckptcore.open(str(file))
    with pytest.raises(DamagedCheckpoint, match=r"rows: .*CRC-32"):
        ckptcore.load_into(opened, {"rows": torch.zeros(4, 4)})
    with pytest.raises(DamagedCheckpoint, match=r"rows: .*CRC-32"):
        ckptcore.read(opened, "rows")
    assert torch.equal(ckptcore.read(opened, "rows", Box((0, 0), (1, 4))), rows[2:3])  # a part of it


def test_ranks_of_a_machine_share_its_cores(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = [torch.zeros(SHAPE)]
    assert module.threads_for(memory) == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert module.threads_for(memory) == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert module.threads_for(memory) == 1
