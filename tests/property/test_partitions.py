"""Partitions: every element is copied exactly once, whatever boxes it comes in and goes out in.

Numpy slices say what must come out.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pieces import numbered, part, partitions, shapes, write_dcp
from samples import differences, read_safetensors, value

from ckptcore import Box, CkptError, Manifest, Settings, api

slow = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(autouse=True)
def _torch() -> None:
    """Imported outside the timed examples."""
    import torch  # noqa: F401


@st.composite
def states(draw: st.DrawFn) -> dict[str, tuple[Any, list[Box]]]:
    out = {}
    for number in range(draw(st.integers(1, 4))):
        shape = draw(shapes)
        dtype = draw(st.sampled_from(["float32", "int64", "bfloat16", "uint8", "float64"]))
        out[f"t{number}.w"] = (numbered(shape, dtype, number), draw(partitions(shape)))
    return out


def folders() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@slow
@given(states(), st.integers(1, 4), st.booleans(), st.data())
def test_any_boxes_in_any_boxes_out(
    state: dict[str, tuple[Any, list[Box]]], files: int, turn: bool, data: st.DataObject
) -> None:
    """Whole tensors, and any box of them, from any partition; the check proves it complete."""
    for folder in folders():
        write_dcp(folder / "ckpt", state, files, turn)
        manifest = api.open(str(folder / "ckpt"))
        assert api.check(manifest, "bytes").ok
        for fqn, (tensor, _) in state.items():
            assert value(api.read(manifest, fqn)) == value(tensor)
            offset = tuple(data.draw(st.integers(0, n)) for n in tensor.shape)
            shape = tuple(data.draw(st.integers(0, n - o)) for n, o in zip(tensor.shape, offset, strict=True))
            box = Box(offset, shape)
            assert value(api.read(manifest, fqn, box)) == value(part(tensor, box))


@slow
@given(states(), st.integers(1, 400), st.sampled_from(["safetensors", "torch_save"]))
def test_any_boxes_into_files(state: dict[str, tuple[Any, list[Box]]], max_file_size: int, to: str) -> None:
    """Consolidated into files of any size, nothing is missing, twice there, or elsewhere."""
    from samples import read_torch, tensors_of

    for folder in folders():
        write_dcp(folder / "ckpt", state)
        many = {"max_file_size": max_file_size} if to == "safetensors" else {}
        dst = folder / ("out" if to == "safetensors" else "out.pt")
        result = api.convert(str(folder / "ckpt"), str(dst), to=to, **many)
        found = read_safetensors(dst) if to == "safetensors" else tensors_of(read_torch(dst))
        truth = {fqn: value(tensor) for fqn, (tensor, _) in state.items()}
        assert sorted(found) == sorted(truth)
        assert not differences(truth, found)
        written = [f for f in [dst, *dst.rglob("*")] if f.is_file() and f.name != "README.md"]
        assert result.nbytes == sum(f.stat().st_size for f in written)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_tensors_above_the_budget(data: st.DataObject) -> None:
    """A tensor of several budgets, cut in any way, is put together tile by tile."""
    shape = data.draw(st.sampled_from([(1 << 21,), (1021, 1031), (3, 700, 331), (700_001, 2)]))
    boxes = data.draw(partitions(shape, 12))
    turn = data.draw(st.booleans())
    dtype = data.draw(st.sampled_from([None, "bf16"]))
    for folder in folders():
        tensor = numbered(shape)
        write_dcp(folder / "ckpt", {"w": (tensor, boxes)}, 3, turn)
        means = Settings(memory=1 << 20, workers=data.draw(st.integers(1, 3)))
        options = {"dtype": dtype} if dtype else {}
        api.convert(str(folder / "ckpt"), str(folder / "out"), settings=means, **options)
        import torch

        truth = tensor.to(torch.bfloat16) if dtype else tensor
        assert read_safetensors(folder / "out") == {"w": value(truth)}


@slow
@given(st.data())
def test_a_partition_without_a_box_has_a_hole(data: st.DataObject) -> None:
    """Whichever box is taken away, the check says hole and nothing is converted."""
    shape = data.draw(shapes)
    boxes = data.draw(partitions(shape))
    gone = data.draw(st.integers(0, len(boxes) - 1))
    for folder in folders():
        left = boxes[:gone] + boxes[gone + 1 :]
        write_dcp(
            folder / "ckpt", {"w": (numbered(shape), left), "other": (numbered((2,)), [Box((0,), (2,))])}
        )
        report = api.check(api.open(str(folder / "ckpt")), "coverage")
        assert [f.code for f in report.findings if f.severity == "error"] == ["hole"]
        with pytest.raises(CkptError) as error:
            api.convert(str(folder / "ckpt"), str(folder / "out"))
        assert error.value.exit_code == 1
        assert not (folder / "out").exists()


@slow
@given(st.data())
def test_a_partition_with_another_box_overlaps(data: st.DataObject) -> None:
    """A box more is a replica when it is one of the boxes, and an overlap otherwise."""
    shape = data.draw(shapes)
    boxes = data.draw(partitions(shape))
    offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    extent = tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))
    more = Box(offset, extent)
    if more.offset in {b.offset for b in boxes}:
        return  # one place per offset in this format
    for folder in folders():
        write_dcp(folder / "ckpt", {"w": (numbered(shape), [*boxes, more])})
        report = api.check(api.open(str(folder / "ckpt")), "coverage")
        assert {f.code for f in report.findings if f.severity == "error"} == {"overlap"}


@slow
@given(states())
def test_manifests_travel(state: dict[str, tuple[Any, list[Box]]]) -> None:
    """A manifest's file form is the manifest, and its digest does not depend on its root."""
    for folder in folders():
        write_dcp(folder / "ckpt", state)
        manifest = api.open(str(folder / "ckpt"))
        loaded = Manifest.load(manifest.dump())
        assert loaded.digest == manifest.digest
        assert loaded.tensors == manifest.tensors
        for number in range(manifest.num_tensors):
            assert list(loaded.chunks_of(number)) == list(manifest.chunks_of(number))
        (folder / "ckpt").rename(folder / "elsewhere")
        assert api.open(str(folder / "elsewhere")).digest == manifest.digest
