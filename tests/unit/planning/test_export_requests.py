"""What a request of an export says when something else is meant: GGUF, a hub name, a moving average."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptcore
from ckptcore.errors import SourceUnreadable, UsageError
from ckptcore.operations.export_target import target_of
from ckptcore.planning.compose import compose
from ckptcore.planning.request import Request

WEIGHTS = {"a.weight": torch.ones(2, 3), "b.weight": torch.zeros(3)}


@pytest.mark.parametrize("verb", ["export", "consolidate"])
@pytest.mark.parametrize("name", ["out/D.gguf", "s3://bucket/D.gguf/"])
def test_a_gguf_file_is_made_by_llama_cpp(verb: str, name: str) -> None:
    with pytest.raises(UsageError) as caught:
        Request("/a", name, verb)
    assert "D.gguf" in caught.value.message
    assert "convert_hf_to_gguf" in caught.value.hint
    assert "--outfile D.gguf" in caught.value.hint


def test_a_sweeps_target_is_no_gguf_file() -> None:
    with pytest.raises(UsageError, match="no such file is written here"):
        target_of({"verb": "export", "destination": "{root}/../out/{name}.gguf"})


def test_a_source_on_the_hub_is_fetched_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceUnreadable) as caught:
        ckptcore.open("Qwen/Qwen3-0.6B")
    assert "hf download Qwen/Qwen3-0.6B --local-dir DIR" in caught.value.hint
    (tmp_path / "runs").mkdir()
    for url in ("runs/step-3", str(tmp_path / "a"), "nothing"):
        with pytest.raises(SourceUnreadable) as caught:
            ckptcore.open(url)
        assert "hf download" not in caught.value.hint


@pytest.mark.parametrize("optimizer", [True, False])
def test_a_moving_average_is_left_out_with_a_finding(tmp_path: Path, optimizer: bool) -> None:
    state = {"model": WEIGHTS, "ema_model": {n: t + 1 for n, t in WEIGHTS.items()}}
    if optimizer:
        moments = {n: {"exp_avg": t, "exp_avg_sq": t} for n, t in WEIGHTS.items()}
        state["optim"] = {"state": moments}  # type: ignore[dict-item]
    dcp.save(state, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    manifest = ckptcore.open(str(tmp_path / "ckpt"))
    done = compose(Request(str(tmp_path / "ckpt"), str(tmp_path / "out"), "export"), manifest)
    assert done.model is not None
    assert done.model.prefix == "model."
    (other,) = [w for w in done.warnings if w.code == "other-part"]
    assert "ema_model" in other.message
    assert "--model-prefix ema_model." in other.hint
    request = Request(str(tmp_path / "ckpt"), str(tmp_path / "out"), "export", model_prefix="ema_model.")
    assert not [w for w in compose(request, manifest).warnings if w.code == "other-part"]
