"""A worker that reads one job after the other keeps its buffers: fresh memory costs as much as a copy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptcore.checking.examine import inspect
from ckptcore.comparison import box_walk, fingerprint, tensor_processes
from ckptcore.comparison.opened import OpenSide
from ckptcore.planning.request import Settings
from ckptcore.planning.tiles import paged_buffer
from ckptcore.reading.gather import Bytes
from ckptcore.utils.workers import CountedMeter


def test_jobs_of_a_worker_share_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"layer.{n}.weight": np.full((64, 64), n, np.float32) for n in range(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    manifest, settings, sizes = inspect(str(tmp_path)), Settings(workers=1), list[int]()
    alone = fingerprint.sum_tensors(
        [OpenSide("", manifest)], range(4), settings, CountedMeter(lambda nbytes: None)
    )

    def allocate(nbytes: int) -> Bytes:
        sizes.append(nbytes)
        return paged_buffer(nbytes)

    monkeypatch.setattr(tensor_processes, "paged_buffer", allocate)
    monkeypatch.setattr(box_walk, "paged_buffer", allocate)
    share = fingerprint.sum_tensors.__module__, fingerprint.sum_tensors.__name__
    setup = tensor_processes._Setup(share, (("", manifest, False),), settings)
    read, _ = tensor_processes.begin(setup, lambda nbytes: None)
    sums = [read(([row], [row]))[1][0] for row in range(4)]
    assert sums == alone
    assert len(sizes) == 2  # a tile, and the scratch memory, of the only thread
