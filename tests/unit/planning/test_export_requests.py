"""What a request of an export says when something else is meant: GGUF, a hub name, a moving average."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptcore
from ckptcore.errors import SourceUnreadable, UsageError
from ckptcore.operations.export_target import target_of
from ckptcore.planning.compose import compose
from ckptcore.planning.config_folder import require_possible
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


@pytest.mark.parametrize(
    ("config", "possible"),
    [
        ({"num_local_experts": 4, "num_experts_per_tok": 2}, True),
        ({"num_local_experts": 4, "num_experts_per_tok": 4}, True),
        ({"num_local_experts": 4, "num_experts_per_tok": 5}, False),
        ({"num_local_experts": 4, "num_experts_per_tok": 0}, False),
        ({"num_local_experts": 4, "num_experts_per_tok": -1}, False),
        ({"num_experts": 4, "num_experts_per_tok": 10**30}, False),
        ({"text_config": {"n_routed_experts": 4, "num_experts_per_tok": 99}}, False),
        ({"num_experts": 1, "num_experts_per_tok": 2}, True),  # Jamba's, without a router
        ({"num_experts_per_tok": 2}, True),
    ],
)
def test_a_token_visits_experts_that_there_are(config: dict[str, object], possible: bool) -> None:
    """transformers builds a model of any number, which fails when it runs."""
    with nullcontext() if possible else pytest.raises(UsageError, match="num_experts_per_tok = "):
        require_possible(config, "--config x", [(4, 8)] * 12)
