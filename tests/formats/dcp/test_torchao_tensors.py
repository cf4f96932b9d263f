"""Tensors of torchao: read as the tensors that they wrap, or as their values, bit by bit those of torchao."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from samples import FIXTURES
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import Metadata as SavedMetadata

import ckptcore
from ckptcore.cli.main import run
from ckptcore.conversion.pipeline import validate
from ckptcore.core.box import Box
from ckptcore.formats.dcp.wrapped_tensors import inner_box

pytestmark = pytest.mark.filterwarnings("ignore")
SHAPE, RUN = (64, 96), 64
Values = Callable[[dict[str, Any]], torch.Tensor]


def flat(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (values.reshape(len(scale), -1) * scale[:, None]).reshape(SHAPE)


def nibbles(codes: torch.Tensor) -> torch.Tensor:
    return torch.stack([codes >> 4, codes & 15], dim=-1).reshape(-1)


def affine(inner: dict[str, Any]) -> torch.Tensor:
    rows, columns = (n // m for n, m in zip(SHAPE, inner["scale"].shape, strict=True))

    def each(part: torch.Tensor) -> torch.Tensor:
        return part.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)

    zero = each(inner["zero_point"]) if "zero_point" in inner else 0
    return (inner["qdata"].float() - zero) * each(inner["scale"])


def drawn(seed: int = 0) -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    runs = SHAPE[0] * SHAPE[1] // RUN
    return {
        "codes": torch.randint(0, 256, SHAPE, generator=numbers).to(torch.uint8),
        "packed": torch.randint(0, 256, (SHAPE[0] * SHAPE[1] // 2,), generator=numbers).to(torch.uint8),
        "floats": torch.randn(SHAPE, generator=numbers).to(torch.float8_e4m3fn),
        "ints": torch.randint(-128, 128, SHAPE, generator=numbers).to(torch.int8),
        "scale": torch.rand(runs, generator=numbers),
        "rows": torch.rand(SHAPE[0], 1, generator=numbers),
        "groups": torch.rand(SHAPE[0], 12, generator=numbers),
        "zeros": torch.randint(-9, 9, (SHAPE[0], 12), generator=numbers).to(torch.int8),
        "qmap": torch.randn(256, generator=numbers),
        "qmap4": torch.randn(16, generator=numbers),
    }


D = drawn()
# Class -> its module, its inner tensors and other attributes, and what its values are.
CLASSES: dict[str, tuple[str, dict[str, Any], Values]] = {
    "OptimState8bit": (
        "torchao.optim.subclass_8bit",
        {"codes": D["codes"], "scale": D["scale"], "qmap": D["qmap"], "signed": True, "block_size": RUN},
        lambda i: flat(i["qmap"][i["codes"].int()], i["scale"]),
    ),
    "OptimState4bit": (
        "torchao.optim.subclass_4bit",
        {
            "codes": D["packed"],
            "scale": D["scale"],
            "qmap": D["qmap4"],
            "signed": True,
            "_shape": torch.Size(SHAPE),
            "block_size": RUN,
        },
        lambda i: flat(i["qmap"][nibbles(i["codes"]).int()], i["scale"]),
    ),
    "OptimStateFp8": (
        "torchao.optim.subclass_fp8",
        {"codes": D["floats"], "scale": D["scale"], "block_size": RUN},
        lambda i: flat(i["codes"].float(), i["scale"]),
    ),
    "Int8Tensor": (
        "torchao.quantization",
        {"qdata": D["ints"], "scale": D["groups"], "zero_point": D["zeros"], "block_size": [1, 8]},
        affine,
    ),
    "Float8Tensor": (
        "torchao.quantization",
        {"qdata": D["floats"], "scale": D["rows"], "block_size": [1, 96], "mm_config": None},
        affine,
    ),
}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[Any, torch.Tensor]]:
    """Make a tensor that pickles as torchao's, and the values that it shows."""

    def dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.is_pinned.default:
            return False
        return args[0]  # a copy of it

    def make(name: str, **others: Any) -> tuple[Any, torch.Tensor]:
        module, inner, values = CLASSES[name]
        inner = {**inner, **others}
        space = {"__torch_dispatch__": classmethod(dispatch), "__module__": module}
        kind = type(name, (torch.Tensor,), space)
        for part in ("torchao", module):
            monkeypatch.setitem(sys.modules, part, ModuleType(part))
        monkeypatch.setattr(sys.modules[module], name, kind, raising=False)
        tensor = torch.Tensor._make_wrapper_subclass(kind, SHAPE, dtype=torch.float32)  # type: ignore[attr-defined]
        tensor.__dict__.update(inner)
        return tensor, values(inner)

    return make


Make = Callable[..., tuple[Any, torch.Tensor]]
OTHERS = {"model.b": torch.ones(7), "model.long": torch.arange(5000.0)}


def codes(source: Path | str) -> set[str]:
    return {f.code for f in validate(ckptcore.open(str(source)), "bytes").findings}


@pytest.mark.grid
@pytest.mark.parametrize("saver", ["dcp", "torch"])
@pytest.mark.parametrize("name", CLASSES)
def test_values_and_inner_tensors(name: str, saver: str, made: Make, tmp_path: Path) -> None:
    tensor, values = made(name)
    source = tmp_path / ("saved" if saver == "dcp" else "saved.pt")
    state = {**OTHERS, "model.w": tensor}
    dcp.save(state, checkpoint_id=source, no_dist=True) if saver == "dcp" else torch.save(state, source)
    assert codes(source) == set()
    assert run(["consolidate", str(source), str(tmp_path / "values.safetensors")]) == 0
    found = load_file(tmp_path / "values.safetensors")
    assert found.keys() == {*OTHERS, "model.w"}
    assert torch.equal(found["model.w"], values)
    part = ckptcore.read(ckptcore.open(str(source)), "model.w", Box((3, 5), (11, 20)))
    assert torch.equal(part, values[3:14, 5:25])
    assert run(["consolidate", str(source), str(tmp_path / "i.safetensors"), "--keep-quantized"]) == 0
    found = load_file(tmp_path / "i.safetensors")
    inner = {k: v for k, v in CLASSES[name][1].items() if isinstance(v, torch.Tensor)}
    assert found.keys() == {*OTHERS, *(f"model.w.{part}" for part in inner)}
    for key, value in inner.items():
        assert torch.equal(found[f"model.w.{key}"].view(torch.uint8), value.view(torch.uint8))
    # What was written as it is stored has what says how it is meant.
    assert torch.equal(ckptcore.read(ckptcore.open(str(tmp_path / "i.safetensors")), "model.w"), values)


def test_a_class_that_is_not_known(made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its inner tensors are read, and no values are guessed; nor of a layout that is not the known one."""
    tensor, _ = made("Int8Tensor", act_pre_scale=torch.ones(96))
    torch.save({"w": tensor, "b": torch.ones(2)}, tmp_path / "more.pt")
    names = {spec.fqn for spec in ckptcore.open(str(tmp_path / "more.pt")).tensors}
    assert names == {"b", "w.qdata", "w.scale", "w.zero_point", "w.act_pre_scale"}
    tensor, _ = made("OptimStateFp8", block_size=RUN * 2)
    torch.save({"w": tensor}, tmp_path / "sizes.pt")
    assert {spec.fqn for spec in ckptcore.open(str(tmp_path / "sizes.pt")).tensors} == {"w.codes", "w.scale"}
    monkeypatch.setitem(CLASSES, "Newer", (*CLASSES["Int8Tensor"],))
    torch.save({"w": made("Newer")[0]}, tmp_path / "newer.pt")
    names = {spec.fqn for spec in ckptcore.open(str(tmp_path / "newer.pt")).tensors}
    assert names == {"w.qdata", "w.scale", "w.zero_point"}


def test_small_tensors(made: Make, tmp_path: Path) -> None:
    """An item may be longer than the tensor that it shows itself as: one that is shorter tells."""
    small = torch.Tensor._make_wrapper_subclass(type(made("Float8Tensor")[0]), (4, 6), dtype=torch.float32)  # type: ignore[attr-defined]
    inner = {
        "qdata": torch.ones(4, 6).to(torch.float8_e4m3fn),
        "scale": torch.rand(4, 1),
        "block_size": [1, 6],
    }
    small.__dict__.update(inner)
    dcp.save({**OTHERS, "small": small}, checkpoint_id=tmp_path / "alone", no_dist=True)
    assert codes(tmp_path / "alone") == {"unreadable-part"}
    state = {**OTHERS, "small": small, "large": made("Float8Tensor")[0]}
    small.__class__ = type(state["large"])
    dcp.save(state, checkpoint_id=tmp_path / "beside", no_dist=True)
    assert codes(tmp_path / "beside") == set()
    found = ckptcore.read(ckptcore.open(str(tmp_path / "beside")), "small")
    assert torch.equal(found, inner["qdata"].float() * inner["scale"])


def sharded(folder: Path, make: Make, name: str, pieces: list[dict[str, Any]], boxes: list[Box]) -> None:
    """Write a DCP folder of a tensor whose shards are such tensors, one file each."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    folder.mkdir()
    chunks, places = [], {}
    for number, (piece, box) in enumerate(zip(pieces, boxes, strict=True)):
        tensor, _ = make(name)
        tensor = torch.Tensor._make_wrapper_subclass(type(tensor), box.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        tensor.__dict__.update(piece)
        path = folder / f"__{number}_0.distcp"
        torch.save(tensor, path)
        chunks.append(ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)))
        place = MetadataIndex("w", torch.Size(box.offset), 0)
        places[place] = _StorageInfo(path.name, 0, path.stat().st_size)
    properties = TensorProperties(dtype=torch.float32)
    entry = TensorStorageMetadata(properties, torch.Size(SHAPE), chunks)
    (folder / ".metadata").write_bytes(pickle.dumps(SavedMetadata({"w": entry}, {}, places)))


def test_shards(made: Make, tmp_path: Path) -> None:
    """Those of dim 0 are joined, runs of scales too; a cut through a run of elements is not."""
    inner, values = CLASSES["OptimState8bit"][1], made("OptimState8bit")[1]
    boxes = [Box((0, 0), (40, 96)), Box((40, 0), (24, 96))]
    pieces = [
        {**inner, "codes": inner["codes"][:40].clone(), "scale": inner["scale"][:60].clone()},
        {**inner, "codes": inner["codes"][40:].clone(), "scale": inner["scale"][60:].clone()},
    ]
    sharded(tmp_path / "a", made, "OptimState8bit", pieces, boxes)
    assert codes(tmp_path / "a") == set()
    assert torch.equal(ckptcore.read(ckptcore.open(str(tmp_path / "a")), "w"), values)
    (tmp_path / "a" / "__1_0.distcp").unlink()
    assert "missing-file" in codes(tmp_path / "a")
    pieces[1] = {**pieces[1], "qmap": inner["qmap"] + 1}
    sharded(tmp_path / "b", made, "OptimState8bit", pieces, boxes)
    assert codes(tmp_path / "b") == {"replica-mismatch"}
    columns = [Box((0, 0), (64, 48)), Box((0, 48), (64, 48))]
    halves = [
        {**inner, "codes": half.clone(), "scale": inner["scale"][:48].clone()}
        for half in inner["codes"].chunk(2, 1)
    ]
    sharded(tmp_path / "c", made, "OptimState8bit", halves, columns)
    assert codes(tmp_path / "c") == {"unreadable-part"}


@pytest.mark.parametrize(
    ("part", "shape", "box", "expected"),
    [
        ("codes", (4, 8), Box((4, 0), (4, 8)), (Box((4, 0), (4, 8)), (12, 8))),
        ("codes", (4, 4), Box((4, 0), (4, 8)), None),
        ("scale", (2,), Box((4, 0), (4, 8)), (Box((2,), (2,)), (6,))),
        ("scale", (3,), Box((4, 0), (4, 8)), None),
        ("scale", (2,), Box((4, 4), (8, 4)), None),
        ("qmap", (256,), Box((4, 0), (4, 8)), (Box((0,), (256,)), (256,))),
        ("unknown", (2,), Box((4, 0), (4, 8)), None),
        ("unknown", (2,), Box((0, 0), (12, 8)), (Box((0,), (2,)), (2,))),
    ],
)
def test_boxes_of_inner_tensors(part: str, shape: Any, box: Box, expected: Any) -> None:
    assert inner_box("torchao.optim.subclass_8bit.OptimState8bit", part, shape, box, (12, 8)) == expected


def test_blocks_of_weights() -> None:
    kind, outer = "torchao.quantization.Int8Tensor", (12, 8)
    assert inner_box(kind, "scale", (4, 2), Box((4, 0), (4, 8)), outer) == (Box((4, 0), (4, 2)), (12, 2))
    assert inner_box(kind, "scale", (4, 1), Box((0, 4), (12, 4)), outer) == (Box((0, 1), (4, 1)), (4, 2))
    assert inner_box(kind, "scale", (1, 1), Box((4, 0), (8, 8)), outer) is None


@pytest.mark.parametrize("name", ["dcp", "all.pt"])
def test_tensors_that_torchao_wrote(name: str) -> None:
    """States of AdamW8bit, AdamW4bit and AdamWFp8, and weights of Int8, Float8 and Intx, of torchao 0.18."""
    manifest = ckptcore.open(str(FIXTURES / "torchao" / name))
    expected = load_file(FIXTURES / "torchao" / "expected.safetensors")
    if name == "dcp":
        del expected["Intx.weight"]  # which DCP cannot save
    assert {spec.fqn for spec in manifest.tensors} == expected.keys()
    for spec in manifest.tensors:
        value = ckptcore.read(manifest, spec.fqn)
        assert torch.equal(value.to(expected[spec.fqn].dtype), expected[spec.fqn]), spec.fqn


def test_against_torchao(tmp_path: Path) -> None:
    """The classes of this file are drawn by hand; these are torchao's own."""
    optim = pytest.importorskip("torchao.optim")
    quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(96, 128, bias=False), torch.nn.Linear(128, 64))
    optimizer = optim.AdamW8bit(model.parameters(), lr=1e-3)
    model(torch.randn(4, 96)).sum().backward()
    optimizer.step()
    states = optimizer.state_dict()["state"]
    kept = {f"s.{n}.{k}": v for n, s in states.items() for k, v in s.items() if k != "step"}
    weights = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.LayerNorm(64)).bfloat16()
    for config in (quantization.Int8WeightOnlyConfig, quantization.Float8WeightOnlyConfig):
        quantization.quantize_(weights, config())
        kept |= {f"{config.__name__}.{k}": v for k, v in weights.state_dict().items()}
        weights = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.LayerNorm(64)).bfloat16()
    dcp.save(kept, checkpoint_id=tmp_path / "saved", no_dist=True)
    manifest = ckptcore.open(str(tmp_path / "saved"))
    assert len(manifest.derived) > 2
    for name, value in kept.items():
        wanted = (
            value.dequantize(torch.float32)
            if hasattr(value, "tensor_data_names") or hasattr(value, "codes")
            else value
        )
        assert torch.equal(ckptcore.read(manifest, name), wanted.detach()), name
