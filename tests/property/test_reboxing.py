"""Reboxing: from any partition of a tensor into any other, over any files, every element is right.

The writer of these tests lays out raw boxes, which no format does; numpy slices say what must be in
them. Whatever the cut, every stored checksum is proven, and a flipped bit never gets through.
"""

from __future__ import annotations

import struct
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pieces import numbered, part, partitions, shapes, write_dcp
from samples import value

from ckptcore import Box, CkptError, Settings, api
from ckptcore.core.manifest import TensorSpec
from ckptcore.execution.execute import execute_files
from ckptcore.execution.plan_run import PlanRun
from ckptcore.formats.base import Arrangement, FileLayout, Layout, Literal, Slot
from ckptcore.naming.rename import Mapped
from ckptcore.planning.plan import Target, load_file_plan, make_plan, save_plan
from ckptcore.store import open_store

Boxes = dict[str, list[Box]]
Piece = tuple[int, Box]
slow = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
DTYPES = ["float32", "int64", "bfloat16", "uint8", "float64"]


def layout(files: list[list[Piece]]) -> Layout:
    """A layout of the given boxes in the given files."""

    def arrange(request: Arrangement) -> tuple[FileLayout, ...]:
        return tuple(_layout(f"{n}.raw", request.tensors, pieces) for n, pieces in enumerate(files))

    return Layout(arrange)


def _layout(path: str, tensors: Any, pieces: list[Piece]) -> FileLayout:
    at, slots = 3, []
    for n, (t, box) in enumerate(pieces):
        slots.append(Slot(n, at))
        at += TensorSpec("", tensors[t].dtype, box.shape).nbytes
    return FileLayout(
        path,
        at,
        tuple(t for t, _ in pieces),
        tuple(slots),
        (Literal(0, b"raw"),),
        False,
        tuple(box for _, box in pieces),
    )


def rebox(source: Path, out: Path, files: list[list[Piece]], means: Settings) -> Any:
    """Writes the boxes; gives the receipts. The plan goes by disk, as it does between machines."""
    manifest = api.open(str(source))
    target = Target("raw")
    arrangement = target.arrangement(manifest.tensors)
    plan, made = make_plan(Mapped(manifest, (), ()), target, layout(files), arrangement)
    with closing(open_store(str(out / "plan"))) as saved:
        save_plan(saved, plan, made)
        with closing(open_store(str(source))) as store:
            run = PlanRun(
                digest=plan.digest,
                load=lambda i: load_file_plan(saved, i),
                total=plan.bytes_out,
                source=store,
                items=plan.items,
                unchanged=lambda _: None,
                files=open_store(str(out / "files")),
                receipts=open_store(str(out / "receipts")),
            )
            return execute_files(run, [f.index for f in plan.files], means)


@st.composite
def states(draw: st.DrawFn) -> tuple[dict[str, tuple[Any, list[Box]]], list[list[Piece]]]:
    """Tensors in boxes, and other boxes of them dealt to files."""
    state, pieces = {}, []
    for number in range(draw(st.integers(1, 3))):
        shape = draw(shapes)
        tensor = numbered(shape, draw(st.sampled_from(DTYPES)), number)
        state[f"t{number}.w"] = (tensor, draw(partitions(shape)))
        pieces += [(number, box) for box in draw(partitions(shape))]
    count = draw(st.integers(1, 4))
    pieces = draw(st.permutations(pieces))
    return state, [pieces[n::count] for n in range(count)]


@slow
@given(states(), st.integers(1, 3), st.booleans())
def test_any_boxes_into_any_boxes(
    given_: tuple[dict[str, tuple[Any, list[Box]]], list[list[Piece]]], workers: int, turn: bool
) -> None:
    state, files = given_
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_dcp(folder / "ckpt", state, turn=turn)
        receipts = rebox(folder / "ckpt", folder, files, Settings(memory=1 << 20, workers=workers))
        truth = [tensor for tensor, _ in state.values()]
        for n, pieces in enumerate(files):
            wanted = b"raw" + b"".join(value(part(truth[t], box).contiguous())[2] for t, box in pieces)
            assert (folder / "files" / f"{n}.raw").read_bytes() == wanted
        assert [(r.pending, r.unverified) for r in receipts] == [((), 0)] * len(files)


@slow
@given(states(), st.data())
def test_a_flipped_bit_never_gets_through(
    given_: tuple[dict[str, tuple[Any, list[Box]]], list[list[Piece]]], data: st.DataObject
) -> None:
    """However few of a record's bytes a file needs, all of them are proven before the end."""
    state, files = given_
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_dcp(folder / "ckpt", state)
        manifest = api.open(str(folder / "ckpt"))
        number = data.draw(st.integers(0, manifest.num_tensors - 1))
        chunk = data.draw(st.sampled_from([c for c in manifest.chunks_of(number) if c.box.numel]))
        item = manifest.items[chunk.item]
        path = folder / "ckpt" / manifest.files[item.file].path
        raw = bytearray(path.read_bytes())
        name_at = raw.index(b"archive/data/0", item.start)
        name_length, extra_length = struct.unpack_from("<HH", raw, name_at - 4)  # of the local header
        length = manifest.tensors[number].nbytes // manifest.tensors[number].numel * chunk.box.numel
        byte = name_at + name_length + extra_length + data.draw(st.integers(0, length - 1))
        raw[byte] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(raw)
        with pytest.raises(CkptError, match=r"CRC-32") as error:
            rebox(folder / "ckpt", folder, files, Settings(memory=1 << 20, workers=1))
        assert error.value.exit_code == 1
