"""Read what transformers 5 saves from several ranks: shards without an index, and the optimizer below."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckptcore

pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH, ROWS = 4, 8
CONFIG = {"model_type": "llama", "vocab_size": ROWS, "hidden_size": WIDTH}


def model() -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(0)
    return {
        "model.embed_tokens.weight": torch.randn(ROWS, WIDTH, generator=numbers),
        "model.norm.weight": torch.randn(WIDTH, generator=numbers),
    }


def saved(folder: Path, optimizer: str = "optimizer") -> Path:
    """Write as two ranks do (transformers/distributed/checkpoint.py); `of-00001` counts no shards."""
    folder.mkdir()
    for rank in range(2):
        rows = {name: w.chunk(2)[rank].contiguous() for name, w in model().items()}
        offsets = {name: {"saved_offsets": [rank * len(w), *[0] * (w.dim() - 1)]} for name, w in rows.items()}
        about = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
        save_file(rows, folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors", metadata=about)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    state = {name: {"exp_avg": w * 2} for name, w in model().items()}
    dcp.save({"optimizer": {"state": state}}, checkpoint_id=folder / optimizer, no_dist=True)
    return folder


def findings(source: Path, severity: str = "error", **options: Any) -> set[str]:
    report = ckptcore.check(ckptcore.open(str(source), **options))
    return {f.code for f in report.findings if f.severity == severity}


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize("optimizer", ["optimizer", "adamw_state"])
def test_model_and_optimizer_are_one_checkpoint(optimizer: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "ckpt", optimizer)
    manifest = ckptcore.open(str(source))
    assert ckptcore.check(manifest, "bytes").ok
    ckptcore.convert(str(source), str(tmp_path / "all.safetensors"))
    states = {f"optimizer.state.{name}.exp_avg": w * 2 for name, w in model().items()}
    read, expected = load_file(tmp_path / "all.safetensors"), {**model(), **states}
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], w) for name, w in expected.items())
    ckptcore.convert(str(source), str(tmp_path / "model"), verb="export", config="none")
    read = load_file(tmp_path / "model" / "model.safetensors")
    assert read.keys() == model().keys()
    ckptcore.convert(str(source), str(tmp_path / "dcp"), verb="reshard", to="dcp", mesh="fsdp=2")
    target = {"optimizer": {"state": {n: {"exp_avg": torch.zeros_like(w)} for n, w in model().items()}}}
    dcp.load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    state = target["optimizer"]["state"]
    assert all(torch.equal(state[name]["exp_avg"], w * 2) for name, w in model().items())


@pytest.mark.parametrize("lost", [1, 2])
def test_a_shard_is_missing(lost: int, tmp_path: Path) -> None:
    """Nothing but config.json shows that there was one more rank."""
    source = saved(tmp_path / "ckpt")
    (source / f"shard-{lost:05d}-model-00001-of-00001.safetensors").unlink()
    assert findings(source)
    (source / "config.json").unlink()
    assert findings(source)


def test_an_optimizer_that_cannot_be_read_stops_nothing_else(tmp_path: Path) -> None:
    source = saved(tmp_path / "ckpt")
    (source / "optimizer" / ".metadata").write_bytes(b"\x80\x04.")
    assert findings(source) == {"malformed-metadata"}
    (source / "optimizer" / ".metadata").unlink()
    assert findings(source) == {"not-complete"}


def test_another_checkpoint_below_is_named(tmp_path: Path) -> None:
    source = saved(tmp_path / "ckpt")
    dcp.save({"model": model()}, checkpoint_id=source / "step-5", no_dist=True)
    assert findings(source) == set()
    assert "unread-state" in findings(source, "warning")
    assert not any("step-5" in f.path for f in ckptcore.open(str(source)).files)
