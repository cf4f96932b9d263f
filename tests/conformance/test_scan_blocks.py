"""`validate` reads records, files, values and copies in blocks: each block counts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptcore.checking import scan as module
from ckptcore.core.manifest import Envelope, Item, Manifest, TensorSpec
from ckptcore.core.manifest_builder import Builder
from ckptcore.errors import Finding
from ckptcore.store import open_store
from ckptcore.utils.command_process import VARIABLE

REAL = module._BLOCK
# Block in bytes, shape of a tensor of float32 with several of them; the last one is small.
SEVERAL = [(REAL, (1100, 1000)), (64, (7, 5)), (64, (50,)), (64, (3, 1, 19))]
Change = Callable[[torch.Tensor], object]


@pytest.fixture(params=SEVERAL, ids=["real", "rows", "one dim", "long rows"])
def shape(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, ...]:
    block, found = request.param
    monkeypatch.setattr(module, "_BLOCK", block)
    return tuple(found)


def tensor(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def stored(folder: Path, *values: torch.Tensor) -> Manifest:
    """A tensor of which each value is a complete copy, in a file of its own."""
    builder = Builder()
    row = builder.tensor(TensorSpec("w", "float32", tuple(values[0].shape)))
    for n, value in enumerate(values):
        path = folder / f"{n}.pt"
        torch.save(value, path)
        size = path.stat().st_size
        item = builder.item(Item(builder.file(path.name, size), 0, size, Envelope.TORCHZIP))
        builder.chunk(row, (0,) * value.dim(), tuple(value.shape), item)
    return builder.build("test", str(folder), {})


def scanned(manifest: Manifest) -> list[Finding]:
    found, unverified, bare = module.scan(
        manifest, open_store(manifest.root), skip_files=set(), values=True, workers=2, progress=None
    )
    assert (unverified, bare) == (0, set())
    return found


def changed(value: torch.Tensor, places: list[int], to: float) -> torch.Tensor:
    copy = value.clone()
    copy.view(-1)[places] = to
    return copy


@pytest.mark.parametrize("at", [0, -1])
def test_a_flip_in_any_block_of_a_record(tmp_path: Path, shape: tuple[int, ...], at: int) -> None:
    value = tensor(shape)
    manifest = stored(tmp_path, value)
    assert scanned(manifest) == []
    raw = bytearray((tmp_path / "0.pt").read_bytes())
    payload = value.numpy().tobytes()
    raw[raw.index(payload) + at % len(payload)] ^= 1
    (tmp_path / "0.pt").write_bytes(raw)
    assert [(f.code, f.fqn, f.file) for f in scanned(manifest)] == [("crc-mismatch", "w", "0.pt")]


@pytest.mark.parametrize("turned", [False, True])
def test_values_of_any_block_are_counted(tmp_path: Path, shape: tuple[int, ...], turned: bool) -> None:
    value = changed(changed(tensor(shape), [0, -1], torch.nan), [1, -2, -3], torch.inf)
    if turned:  # as a column-major matrix is stored
        order = tuple(reversed(range(value.dim())))
        value = value.permute(order).contiguous().permute(order)
    (found,) = scanned(stored(tmp_path, value))
    assert found.message == f"w: 2 NaN and 3 Inf of {value.numel()} elements"


@pytest.mark.parametrize("places", [[0], [-1], [2, -1], [-1, -2, -3]])
def test_copies_differ_in_any_block(tmp_path: Path, shape: tuple[int, ...], places: list[int]) -> None:
    value = tensor(shape)
    assert scanned(stored(tmp_path, value, value)) == []
    (found,) = scanned(stored(tmp_path, value, changed(value, places, -7.0)))
    first = min(p % value.numel() for p in places)
    index: Any = [int(n) for n in torch.unravel_index(torch.tensor(first), shape)]
    assert (found.code, found.fqn) == ("replica-mismatch", "w")
    assert f"{len(places)} of {value.numel()} elements" in found.message
    assert str(index) in found.message


@pytest.mark.parametrize("at", [0, -1])
def test_a_flip_in_any_block_of_a_file(tmp_path: Path, shape: tuple[int, ...], at: int) -> None:
    nbytes = torch.Size(shape).numel() * 4
    raw = bytearray(n % 251 for n in range(nbytes))
    (tmp_path / "data").write_bytes(raw)
    recorded = {module.SHA256: {"data": hashlib.sha256(raw).hexdigest(), "gone": "0" * 64}}
    manifest = Builder().build("test", str(tmp_path), recorded)
    store = open_store(str(tmp_path))
    assert list(module.mismatches(manifest, store)) == []
    raw[at] ^= 1
    (tmp_path / "data").write_bytes(raw)
    assert [(f.code, f.file) for f in module.mismatches(manifest, store)] == [("digest-mismatch", "data")]


def test_several_processes_find_the_same_in_the_same_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = tensor((40, 30))
    manifest = stored(
        tmp_path, value, changed(value, [7], torch.nan), value, changed(value, [3, 9], -7.0), value
    )
    raw = bytearray((tmp_path / "2.pt").read_bytes())
    raw[raw.index(value.numpy().tobytes())] ^= 1
    (tmp_path / "2.pt").write_bytes(raw)
    found = []
    for count in ("1", "2"):
        monkeypatch.setenv(VARIABLE, count)
        found.append(scanned(manifest))
    assert found[0] == found[1]
    assert {f.code for f in found[0]} == {"crc-mismatch", "replica-mismatch", "not-finite"}
