"""Read and write floats of four bits: torch keeps two in an element, and safetensors counts each (``F4``)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckptcore
from ckptcore.errors import UnsupportedDtype

PACKED = getattr(torch, "float4_e2m1fn_x2", None)
pytestmark = pytest.mark.skipif(PACKED is None, reason="the dtype comes with torch 2.8")


def packed(*shape: int) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=numbers).view(PACKED)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(bits(one), bits(other))


STATE = {"experts": packed(2, 3, 4), "row": packed(5), "none": packed(0, 4), "w": torch.randn(3, 2)}


@pytest.mark.parametrize("kind", ["torch", "dcp", "safetensors"])
def test_they_become_what_safetensors_writes(kind: str, tmp_path: Path) -> None:
    own, source, out = tmp_path / "own.safetensors", tmp_path / "a", tmp_path / "out.safetensors"
    save_file(STATE, own)
    if kind == "torch":
        torch.save(STATE, source)
    elif kind == "dcp":
        dcp.save(dict(STATE), checkpoint_id=source, no_dist=True)
    else:
        source = own
    assert ckptcore.check(ckptcore.open(str(source)), "values").ok
    ckptcore.convert(str(source), str(out))
    read, expected = load_file(out), load_file(own)
    assert read.keys() == expected.keys()
    assert all(equal(read[name], expected[name]) for name in expected)
    assert ckptcore.diff(ckptcore.open(str(out)), ckptcore.open(str(own))).equal
    back = tmp_path / "back.pt"
    ckptcore.convert(str(out), str(back))
    loaded = torch.load(back, weights_only=True)
    assert all(equal(loaded[name], STATE[name]) for name in STATE)


def test_ranks_get_their_elements(tmp_path: Path) -> None:
    """Shards end between elements, never inside of one; their offsets in a header are torch's."""
    source = tmp_path / "a.pt"
    torch.save({"experts": packed(2, 3, 4)}, source)
    ckptcore.convert(
        str(source),
        str(tmp_path / "dcp"),
        verb="reshard",
        to="dcp",
        mesh="fsdp=2",
        serialization="safetensors",
    )
    out = {"experts": torch.zeros(2, 3, 4, dtype=torch.uint8).view(PACKED)}
    ckptcore.load_into(ckptcore.open(str(tmp_path / "dcp")), out)
    assert equal(out["experts"], packed(2, 3, 4))


def test_differences_have_bits(tmp_path: Path) -> None:
    for name, flipped in (("a", 0), ("b", 255)):
        data = bits(packed(2, 4)).clone()
        data[3] ^= flipped
        save_file({"w": data.view(PACKED).reshape(2, 4)}, tmp_path / f"{name}.safetensors")
    found = ckptcore.diff(*(ckptcore.open(str(tmp_path / f"{n}.safetensors")) for n in "ab"))
    assert not found.equal


def test_a_tensor_without_dims_stays_in_its_form(tmp_path: Path) -> None:
    """safetensors counts values in the last dim, so that there is none to count in."""
    torch.save({"one": packed(1)[0], "w": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(UnsupportedDtype, match="one"):
        ckptcore.convert(str(tmp_path / "a.pt"), str(tmp_path / "out.safetensors"))
    ckptcore.convert(str(tmp_path / "a.pt"), str(tmp_path / "out.pt"))
    assert equal(torch.load(tmp_path / "out.pt", weights_only=True)["one"], packed(1)[0])
