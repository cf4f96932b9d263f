"""Devices: what a batch casts, computes and sums there has the bits of the host, however late it comes."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from devices import LateSlot, Operations
from pieces import numbered, write_dcp
from torch.utils._python_dispatch import TorchDispatchMode

import ckptcore
from ckptcore import Box, Settings
from ckptcore.core.dequantize import ADDED, FUNCTIONS
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Derived
from ckptcore.core.weighted_sums import packed_weights
from ckptcore.errors import BudgetTooSmall
from ckptcore.execution import device as module
from ckptcore.execution.device import DeviceSlot, DeviceSlots, host_buffer
from ckptcore.execution.device_batch import DeviceBatch, OutputRange, StoredInput, SumRequest
from ckptcore.fingerprints.device_sums import ROOM, DeviceSums
from ckptcore.fingerprints.sums import box_sum
from ckptcore.planning.tiles import DEVICE_BYTES, DEVICE_SLOTS, PINNED_BYTES, Budget, TensorPart
from ckptcore.reading.casting import derive_into

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
TILE = 1 << 20


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> type[LateSlot]:
    """Slots of a run are late ones; their counts begin at zero."""
    monkeypatch.setattr(module, "DeviceSlot", LateSlot)
    LateSlot.counts.clear()
    return LateSlot


def slots_of(device: str) -> DeviceSlots:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return DeviceSlots(device, TILE)


def through_slots(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions have slots, also on the CPU."""
    slots = module.DeviceSlots
    monkeypatch.setattr("ckptcore.execution.execute.slots_on", lambda _, nbytes: slots(device, nbytes))


def batch_of(device: str) -> DeviceBatch:
    return DeviceBatch(host_buffer(TILE, device), host_buffer(TILE, device))


def raw(values: torch.Tensor) -> np.ndarray:
    return values.reshape(-1).view(torch.uint8).numpy().copy()


def cast_in(batch: DeviceBatch, values: torch.Tensor, start: int, target: str, summed: bool = False) -> int:
    """Add a tensor that is cast; return where its bytes end in the output."""
    count, width = values.numel(), BY_NAME[target].itemsize
    box = Box.full(tuple(values.shape))
    asked = SumRequest(TensorPart(start, box, count * width, 0), box.shape) if summed else None
    place = OutputRange(start, count * width, target)
    memory = batch.cast(count, str(values.dtype).removeprefix("torch."), place, asked)
    assert memory is not None
    memory[:] = raw(values)
    return start + count * width


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_cast_as_torch(source: str, target: str, device: str) -> None:
    """Three tensors: two neighbours, and one behind a gap at an odd place."""
    slots, batch = slots_of(device), batch_of(device)
    torch.manual_seed(0)
    values = torch.cat([torch.randn(4099) * 100, torch.tensor([0.0, -0.0, 1e-30, 65504.0, 448.0])])
    values = values.to(getattr(torch, source))
    want, end = [], 0
    for gap, part in ((0, values), (0, values[:99]), (13, values[5:])):
        start = end + gap
        end = cast_in(batch, part, start, target)
        want.append((start, end, raw(part.to(getattr(torch, target)))))
    batch.run(slots)
    for start, end, bits in want:
        assert batch.output[start:end].tobytes() == bits.tobytes()


@pytest.mark.parametrize("target", ["float16", "bfloat16", "float32", "float8_e5m2"])
@pytest.mark.parametrize("source", [*FLOATS, "complex64"])
def test_a_nan_has_the_bits_that_the_host_gives_it(
    source: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another device writes other NaNs; here one that writes all ones."""
    target = "complex128" if source == "complex64" else target
    monkeypatch.setattr(module, "DeviceSlot", OnesForNan)
    slots, kind = DeviceSlots("cpu", TILE), getattr(torch, source)
    values = torch.tensor([1.0, torch.nan, -torch.nan, -2.0] * 9).to(kind)
    for part in (values, values[:1], values[1:2]):
        batch = batch_of("cpu")
        end = cast_in(batch, part, 0, target)
        batch.run(slots)
        assert batch.output[:end].tobytes() == raw(part.to(getattr(torch, target))).tobytes()


class OnesForNan(DeviceSlot):
    """A device whose casts make all ones of a NaN."""

    def _begin(self, work: Callable[[DeviceSlot], None]) -> None:
        with _OnesForNan():
            super()._begin(work)


class _OnesForNan(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and args[0].dtype != args[1].dtype:
            wide = args[1].half() if args[1].element_size() == 1 else args[1]
            octets = args[0].view(torch.uint8).view(-1, args[0].element_size())
            octets[wide.isnan()] = 0xFF
        return result


@pytest.mark.parametrize("device", DEVICES)
def test_sums_of_a_batch(device: str) -> None:
    slots, batch = slots_of(device), batch_of(device)
    tensors = [torch.randn(300, 130), torch.randn(4097).half(), torch.full((70, 65), torch.nan).double()]
    end = 0
    for tensor in tensors:
        end = cast_in(batch, tensor, end, "float32" if tensor.dtype != torch.float32 else "float16", True)
    sums, uncast = batch.run(slots)
    assert [part.box.shape for part, _ in sums] == [tuple(t.shape) for t in tensors]
    for tensor, (part, total) in zip(tensors, sums, strict=True):
        dtype = str(tensor.dtype).removeprefix("torch.")
        assert total == box_sum(dtype, tuple(tensor.shape), part.box, raw(tensor))
    assert not uncast


def scaled(shape: tuple[int, int], nan: bool = False) -> tuple[Derived, list[tuple[torch.Tensor, str]]]:
    weight = (torch.randn(shape) * 50).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-shape[0] // 8), -(-shape[1] // 8))
    if nan:
        scale[0, 0] = torch.nan
    return Derived("fp8_block", (0, 1), (8, 8)), [(weight, "float8_e4m3fn"), (scale, "float32")]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("target", ["float32", "bfloat16"])
def test_what_is_computed(target: str, nan: bool, device: str) -> None:
    """Two boxes in a batch, beside a cast: results, sums before the cast, and the elements before it."""
    slots, batch = slots_of(device), batch_of(device)
    end, want = cast_in(batch, torch.randn(33).half(), 0, target), []
    for shape in ((24, 40), (9, 17)):
        node, inputs = scaled(shape, nan)
        box, nbytes = Box.full(shape), prod(shape) * BY_NAME[target].itemsize
        needs = [StoredInput(tuple(t.shape), dtype) for t, dtype in inputs]
        part = TensorPart(end, box, nbytes, 0)
        memories = batch.compute(node, part, needs, OutputRange(end, nbytes, target), shape, uncast=True)
        assert memories is not None
        for memory, (tensor, _) in zip(memories, inputs, strict=True):
            memory[:] = raw(tensor)
        result, spare = np.zeros(nbytes, np.uint8), np.zeros(prod(shape) * 4, np.uint8)
        arrays = [
            (raw(t).view(np.uint8 if d != "float32" else np.uint32).reshape(t.shape), d) for t, d in inputs
        ]
        derive_into(node, box, arrays, result, target, spare)
        before = result if target == "float32" else spare
        want.append((part, result.tobytes(), before.tobytes(), box_sum("float32", shape, box, before)))
        end += nbytes
    sums, uncast = batch.run(slots)
    for (part, result, before, total), summed, elements in zip(want, sums, uncast, strict=True):
        assert batch.output[part.tensor : part.tensor + part.nbytes].tobytes() == result
        assert (summed, elements[0], elements[1].tobytes()) == ((part, total), part, before)


def test_a_full_batch_takes_no_more() -> None:
    batch = DeviceBatch(np.zeros(1 << 10, np.uint8), np.zeros(1 << 12, np.uint8))
    assert batch.cast(200, "float32", OutputRange(0, 400, "float16")) is not None
    assert batch.cast(60, "float32", OutputRange(400, 120, "float16")) is None, "no room for what is read"
    assert batch.cast(56, "float32", OutputRange(400, 112, "float16")) is not None
    narrow = DeviceBatch(np.zeros(1 << 10, np.uint8), np.zeros(1 << 12, np.uint8))
    assert narrow.cast(257, "float8_e5m2", OutputRange(0, 1028, "float32")) is None, "no room for results"
    many = DeviceBatch(np.zeros(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8))
    added = [many.cast(1, "float32", OutputRange(8 * n, 2, "float16")) is not None for n in range(5000)]
    assert added == [n < module.ANSWERS for n in range(5000)]


def checkpoint(folder: Path) -> str:
    """Columns, and rows of another dtype, stored with dims in another order; small tensors; one not cast."""
    tensor = numbered((610, 670))
    columns = [Box((0, 0), (610, 300)), Box((0, 300), (610, 370))]
    state = {f"small.{n}": (numbered((7, 3), start=n), [Box.full((7, 3))]) for n in range(60)}
    state |= {"a": (tensor, columns), "b": (tensor.to(torch.bfloat16), [Box.full((610, 670))])}
    state |= {"h": (tensor.half(), [Box.full((610, 670))]), "n": (numbered((5,)).long(), [Box.full((5,))])}
    nans = numbered((100, 90))
    nans[50, 7] = torch.nan
    write_dcp(folder, state | {"nans": (nans, [Box.full((100, 90))])}, turn=True)
    return str(folder)


@pytest.mark.parametrize(
    "options",
    [
        {"settings": {}},
        {"settings": {"fingerprint": True, "stats": True}},
        {"settings": {"verify": False, "digest": False}},
        {"to": "torch_save", "settings": {}},
        {"to": "dcp", "settings": {"fingerprint": True}},
    ],
    ids=lambda options: "-".join(options["settings"]) + options.get("to", ""),
)
def test_a_conversion_through_a_late_device_is_the_same(
    options: dict[str, dict[str, bool]], tmp_path: Path, late: type[LateSlot], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint(tmp_path / "ckpt")
    given, settings = {"dtype": "fp16", "to": options.get("to", "safetensors")}, options["settings"]
    outputs = [tmp_path / "host", tmp_path / "device"]
    host = ckptcore.convert(source, str(outputs[0]), settings=Settings(**settings), **given)
    through_slots("cpu", monkeypatch)
    there = ckptcore.convert(source, str(outputs[1]), settings=Settings(1 << 22, 2, **settings), **given)
    assert late.counts["waits"] > 1
    assert there.fingerprint == host.fingerprint
    files = [{p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()} for folder in outputs]
    names = [name for name in files[0] if name.endswith((".safetensors", ".pt", ".distcp"))]
    assert names
    for name in names:
        assert files[0][name] == files[1][name], name


def test_a_buffer_that_cannot_be_had_is_a_matter_of_the_budget() -> None:
    with pytest.raises(BudgetTooSmall, match="cannot allocate a buffer of 140737488355328 bytes"):
        host_buffer(1 << 47, "cpu")  # more than a process can address


def test_a_device_is_used_for_what_is_cast_or_computed(tmp_path: Path) -> None:
    """What only moves stays on the host, and the plan says so; nothing asks for the device."""
    write_dcp(tmp_path / "ckpt", {"a": (numbered((8, 8)), [Box.full((8, 8))])})
    there = Settings(device="cuda:7")
    ready = ckptcore.prepare(str(tmp_path / "ckpt"), str(tmp_path / "out"), settings=there)
    assert [(f.code, f.message) for f in ready.warnings] == [
        ("unused-option", "--device cuda:7 is not used: no tensor is cast or computed, and the CPU copies")
    ]
    ckptcore.execute(ready, settings=there)
    found = ckptcore.fingerprint(str(tmp_path / "ckpt"), settings=there)
    assert [f.code for f in found.warnings] == ["unused-option"]


@pytest.mark.parametrize("workers", [1, 2, 4, 8, 16, 64])
def test_bounds_of_a_device_and_of_pinned_memory(workers: int) -> None:
    """They hold for all workers together, as many as on the CPU."""
    budget = Budget.of(Settings(memory=1 << 30, workers=workers, device="cuda"))
    assert DEVICE_SLOTS * 2 * (budget.tile + ROOM) <= DEVICE_BYTES
    assert 3 * workers * budget.tile <= PINNED_BYTES
    assert budget.usual == budget.tile >= 1 << 20
    assert Settings(device="cuda").threads == Settings().threads
    assert Budget.of(Settings(memory=1 << 20, workers=2, device="cuda")).tile == 1 << 17


@pytest.mark.soak
def test_what_a_gigabyte_asks_of_a_device(tmp_path: Path, late: type[LateSlot], monkeypatch: Any) -> None:
    """128 MiB of float32: a wait, and a copy each way, for each batch; a few kernels; little more memory."""
    parts = [Box((512 * n, 0), (512, 8192)) for n in range(8)]
    write_dcp(tmp_path / "ckpt", {"a": (torch.rand(4096, 8192), parts)})
    tile = Budget.of(Settings(workers=4, device="cuda")).tile
    monkeypatch.setattr("ckptcore.execution.execute.slots_on", lambda _, __: module.DeviceSlots("cpu", tile))
    monkeypatch.setattr(Budget, "of", classmethod(lambda cls, _: Budget(tile, 4, on_device=True)))
    settings = Settings(workers=4, fingerprint=True)
    ckptcore.convert(str(tmp_path / "ckpt"), str(tmp_path / "out"), settings=settings, dtype="bf16")
    counts, batches = late.counts, -(-(128 << 20) // tile)
    assert counts["bytes to the device"] == 128 << 20
    assert batches <= counts["waits"] == counts["to the device"] <= batches + 2
    assert counts["back"] == 2 * counts["waits"]  # results, and one copy of flags and sums
    assert counts["kernels"] <= 200 * batches
    assert not counts["hidden waits"]
    assert DEVICE_SLOTS * (2 * tile + counts["most bytes"]) <= DEVICE_BYTES
    assert counts["most bytes"] <= ROOM


Shape = tuple[int, ...]


def computed_inputs() -> dict[str, tuple[Shape, list[tuple[Shape, str]], tuple[Any, ...]]]:
    """Output shape, inputs and params for functions of each kind, some MiB each."""
    shape, n = (512, 4096), 512 * 4096
    codes, scales = (shape, "float8_e4m3fn"), ((4, 32), "float32")
    runs, flat = ((n // 256,), "float32"), (256, *shape)
    table: dict[str, tuple[Shape, list[tuple[Shape, str]], tuple[Any, ...]]] = {
        "fp8_block": (shape, [codes, scales], (128, 128)),
        "scaled": (shape, [codes, ((1,), "float32")], (1,)),
        "scaled_rows": (shape, [codes, ((512,), "float32")], (1,)),
        "scaled_experts": ((2, 512, 2048), [((2, 512, 2048), "float8_e4m3fn"), ((2,), "float32")], (1,)),
        "mxfp4": (shape, [((512, 128, 16), "uint8"), ((512, 128), "uint8")], ()),
        "affine_block": (shape, [(shape, "int8"), scales, ((4, 32), "int8")], (128, 128)),
        "flat_scaled": (shape, [codes, runs], flat),
        "flat_mapped": (shape, [(shape, "uint8"), runs, ((256,), "float32")], flat),
        "flat_mapped_4bit": (shape, [((n // 2,), "uint8"), runs, ((16,), "float32")], flat),
        "zeros_float32": (shape, [], shape),
    }
    for dtype in ADDED:
        table[f"add_{dtype}"] = (shape, [(shape, dtype)], (1.0,))
        table[f"sum_{dtype}"] = table[f"mean_{dtype}"] = (shape, [(shape, dtype)] * 3, (3,))
        table[f"padded_{dtype}"] = (shape, [((500, 4096), dtype)], (500, *shape))
    for name in FUNCTIONS:
        if name.startswith("weighted_"):
            table[name] = (shape, [(shape, "float32")] * 2, tuple(range(1, 3)))
        if name.startswith("adapted_"):
            pair = [((8, 4096), "float32"), ((512, 8), "float32")]
            table[name] = (shape, [(shape, "float32"), *pair], (*packed_weights([0.5]), 8, 0))
    return table


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_no_function_waits_for_a_device(fn: str) -> None:
    """Each mixes no memory of host and device, asks for no value, and has few kernels for 8 MiB."""
    shape, inputs, params = computed_inputs()[fn]
    box = Box.full(shape)
    # On the meta device there is no value to ask for.
    sources = [torch.empty(s, dtype=getattr(torch, d), device="meta") for s, d in inputs]
    out = torch.empty(shape, dtype=getattr(torch, FUNCTIONS[fn].dtype), device="meta")
    with Operations() as operations:
        FUNCTIONS[fn].fill(torch, box, sources, params, out)
    assert operations.kernels < 100
    assert operations.most_bytes <= ROOM


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("box", [Box((100, 0), (300, 4096)), Box((0, 0, 0), (3, 700, 4096))], ids=str)
def test_sums_ask_for_no_value(dtype: str, box: Box) -> None:
    """What a sum copies to the device is copied once, and not with each box."""
    sums, copied = DeviceSums(torch, "meta"), list[int]()
    elements = torch.empty(box.numel * BY_NAME[dtype].itemsize, dtype=torch.uint8, device="meta")
    shape = (4, 700, 4096)[-len(box.shape) :]
    for _ in range(2):
        with mock.patch.object(sums, "_on_device", wraps=sums._on_device) as copies:
            sums.box_total(dtype, shape, box, elements)
        copied.append(copies.call_count)
    assert copied[0] > 0 == copied[1]
