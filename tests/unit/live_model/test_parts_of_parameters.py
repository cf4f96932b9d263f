"""Test which elements of a sharded parameter a tensor of the files has, on each rank."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckptcore.core.box import Box
from ckptcore.core.manifest import Chunk, View
from ckptcore.errors import UsageError
from ckptcore.live_model import fingerprint_model
from ckptcore.live_model.from_checkpoint import device_of

PARAMETER = torch.arange(4 * 6 * 5, dtype=torch.float32).reshape(4, 6, 5)
# A tensor of the files -> how it is made of the parameter.
VIEWS = {
    "expert 2": PARAMETER[2],
    "expert 1, transposed": PARAMETER[1].T,
    "half of the rows of expert 3": PARAMETER[3, 3:],
    "a column of all experts": PARAMETER[:, 4, 1:3],
    "one element": PARAMETER[1, 2, 3:4],
    "all, in another order": PARAMETER.permute(2, 0, 1),
}
# Where ranks cut each dim.
CUTS = [([0, 2, 4], [0, 6], [0, 5]), ([0, 1, 4], [0, 4, 6], [0, 5]), ([0, 4], [0, 3, 6], [0, 2, 3, 5])]


def parts(monkeypatch: pytest.MonkeyPatch, view: torch.Tensor, box: Box) -> list[tuple[Box, torch.Tensor]]:
    """Return what a rank with a box of the parameter has of a view, behind 7 rows of the file's tensor."""
    memory = PARAMETER[tuple(slice(a, b) for a, b in zip(box.offset, box.end, strict=True))].clone()
    monkeypatch.setattr(fingerprint_model, "pieces", lambda *each: [(memory, box)])
    where = View(view.storage_offset() * 4, tuple(view.stride()))
    offset = (7,) + (0,) * (view.dim() - 1)
    chunk = Chunk(0, Box(offset, tuple(view.shape)), 0, where)
    return list(fingerprint_model._views("files", chunk, "parameter", PARAMETER))


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_the_parts_of_all_ranks_are_the_tensor(
    monkeypatch: pytest.MonkeyPatch, name: str, cuts: tuple[list[int], ...]
) -> None:
    view = VIEWS[name]
    rebuilt, count = torch.full((7 + view.shape[0], *view.shape[1:]), -1.0), 0
    spans = [list(itertools.pairwise(cut)) for cut in cuts]
    for corner in itertools.product(*spans):
        box = Box(tuple(a for a, _ in corner), tuple(b - a for a, b in corner))
        for part, memory in parts(monkeypatch, view, box):
            assert tuple(memory.shape) == part.shape
            rebuilt[tuple(slice(a, b) for a, b in zip(part.offset, part.end, strict=True))] = memory
            count += part.numel
    assert count == view.numel()
    assert torch.equal(rebuilt[7:], view)


def test_a_tensor_that_is_no_box_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="not comparable: parameter is sharded, and files is no box of it"):
        parts(monkeypatch, PARAMETER.reshape(24, 5), Box((0, 0, 0), (2, 6, 5)))


def test_a_device_is_one_of_the_mesh() -> None:
    mesh: Any = SimpleNamespace(device_type="cpu", get_coordinate=lambda: [0])
    assert device_of(mesh, None) == device_of(None, None) == torch.device("cpu")
    with pytest.raises(UsageError, match=r"must be one of the mesh, cpu \(got cuda:0\)"):
        device_of(mesh, "cuda:0")
    mesh.get_coordinate = lambda: None
    with pytest.raises(UsageError, match="this rank is not in the mesh"):
        device_of(mesh, None)
