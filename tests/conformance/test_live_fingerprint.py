"""Test that a live, sharded state has the fingerprint of the checkpoint that it saves."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import warm
from driver import REPOSITORY, Cli
from paths import JOBS

import ckptcore
from ckptcore.errors import DamagedCheckpoint, NameMismatch, UnsupportedDtype, UsageError
from ckptcore.fingerprints.device_sums import DeviceSums
from ckptcore.loading import live_fingerprint
from ckptcore.loading.live_fingerprint import BoxSum, SummedTensor

VALUES = torch.randn(301, 40, generator=torch.Generator().manual_seed(3))


def test_four_ranks_have_the_fingerprint_of_their_folder(tmp_path: Path, cli: Cli) -> None:
    """Under HSDP, tensor parallelism and FSDP1's tensors, with the moments of an optimizer."""
    done = subprocess.run(
        [*warm.python(), str(JOBS / "fingerprint_job.py"), str(tmp_path / "ckpt")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=dict(os.environ) | {"PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    live = json.loads(done.stdout)
    saved = ckptcore.fingerprint(tmp_path / "ckpt")
    rows = sorted(saved.as_dict()["tensors"], key=lambda row: str(row["fqn"]))
    assert live == saved.as_dict() | {"tensors": rows, "unverified": 0}
    assert live["fingerprint"] in cli("fingerprint", str(tmp_path / "ckpt")).stdout


def odd_values() -> dict[str, Any]:
    """Return tensors whose memory is not their elements in order."""
    return {
        "columns": VALUES[:, 3:17],
        "transposed": VALUES.t(),
        "conjugated": torch.complex(VALUES, -VALUES).conj(),
        "expanded": VALUES[:1].expand(5, 40),
        "flags": VALUES > 0,
        "half": {"a": VALUES.half(), "b": VALUES.bfloat16(), "c": VALUES.to(torch.float8_e4m3fn)},
        "wide": torch.complex(VALUES, VALUES).to(torch.complex128),
        "scalar": torch.tensor(2.0),
        "empty": torch.empty(3, 0),
        "step": 3,
    }


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_device: bool) -> None:
    """Alike by the arithmetic of an accelerator, and in several tiles."""
    if on_device:
        device = DeviceSums(torch, "cpu")
        as_there = lambda dtype, shape, box, flat: device.box_sum(dtype, shape, box, torch.from_numpy(flat))  # noqa: E731
        monkeypatch.setattr(live_fingerprint, "box_sum", as_there)
    monkeypatch.setattr(live_fingerprint, "PIECE", 5000)
    dcp.save(odd_values(), checkpoint_id=tmp_path / "ckpt")
    saved, live = ckptcore.fingerprint(tmp_path / "ckpt"), ckptcore.fingerprint_state(odd_values())
    assert live.differing(saved) == ()
    assert (live.fingerprint, live.map_digest) == (saved.fingerprint, saved.map_digest)


def test_what_differs_is_named() -> None:
    one, other = (
        ckptcore.fingerprint_state({"w": VALUES, "gone": VALUES}),
        {"w": VALUES.clone(), "new": VALUES},
    )
    assert ckptcore.fingerprint_state(other).differing(one) == ("gone", "new")
    other["w"].view(torch.int32)[300, 39] ^= 1 << 31
    assert ckptcore.fingerprint_state(other).differing(one) == ("gone", "new", "w")
    same = {"w": VALUES.bfloat16(), "gone": VALUES.clone()}  # a cast is a difference
    assert ckptcore.fingerprint_state(same).differing(one) == ("w",)


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ({"w": torch.empty(3, device="meta")}, UsageError),
        ({"w": torch.eye(3).to_sparse()}, UsageError),
        ({"w": torch.empty(3, dtype=torch.bits8)}, UnsupportedDtype),
        ({"w.x": VALUES, "w": {"x": VALUES}}, NameMismatch),
        (7, UsageError),
    ],
    ids=["meta", "sparse", "bits", "twice", "no state"],
)
def test_what_has_no_fingerprint(state: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="cannot fingerprint"):
        ckptcore.fingerprint_state(state)


def part(*boxes: tuple[Sequence[int], Sequence[int], int], rank: int = 0, shape: int = 8) -> dict[str, Any]:
    box_sums = [BoxSum(ckptcore.Box(tuple(at), tuple(size)), (total, 1), rank) for at, size, total in boxes]
    return {"w": SummedTensor("float32", (shape,), box_sums)}


def test_parts_of_ranks() -> None:
    """Equal boxes count once, and must be equal; together they are exactly the tensor's elements."""
    first, second = ([0], [4], 7), ([4], [4], 9)
    merged = live_fingerprint._merged([part(first), part(second, rank=1), part(first, rank=2), part(rank=3)])
    full = live_fingerprint._fingerprints(merged)
    assert full == live_fingerprint._fingerprints(part(first, second))
    assert full != live_fingerprint._fingerprints(part(first, ([4], [4], 10)))
    with pytest.raises(DamagedCheckpoint, match=r"cannot fingerprint w: ranks 0 and 5 "):
        live_fingerprint._merged([part(first), part(([0], [4], 8), rank=5)])
    with pytest.raises(NameMismatch, match="cannot fingerprint w: it is"):
        live_fingerprint._merged([part(first), part(first, shape=9)])
    for boxes in ([first], [second], [first, second, ([0], [8], 16)], []):
        with pytest.raises(UsageError, match="exactly once"):
            live_fingerprint._fingerprints(part(*boxes))
