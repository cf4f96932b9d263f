"""Models of diffusers, trained and saved in any way, become the folder that their `from_pretrained` opens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckptcore
from ckptcore.errors import NameMismatch, UsageError

diffusers: Any = pytest.importorskip("diffusers")

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
WEIGHTS = "diffusion_pytorch_model.safetensors"
BLOCKS = {"block_out_channels": (8, 16), "norm_num_groups": 4}
KINDS: dict[str, dict[str, Any]] = {
    "UNet2DConditionModel": {
        **BLOCKS,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 8,
        "attention_head_dim": 4,
        "layers_per_block": 1,
        "sample_size": 8,
    },
    "AutoencoderKL": {
        **BLOCKS,
        "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
        "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
    },
    "DiTTransformer2DModel": {
        "num_attention_heads": 2,
        "attention_head_dim": 4,
        "num_layers": 2,
        "sample_size": 4,
        "norm_num_groups": 4,
        "num_embeds_ada_norm": 10,
    },
    "FluxTransformer2DModel": {
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "joint_attention_dim": 8,
        "pooled_projection_dim": 8,
        "axes_dims_rope": (2, 2, 4),
        "in_channels": 4,
    },
}


def tiny(kind: str) -> Any:
    torch.manual_seed(0)
    return getattr(diffusers, kind)(**KINDS[kind]).eval()


def export(source: Path, target: Path, **options: Any) -> Any:
    return ckptcore.convert(str(source), str(target), verb="export", catalog=False, **options)


def reopened(kind: str, folder: Path) -> Any:
    model, info = getattr(diffusers, kind).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model


def require_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    assert [n for n in want if not torch.equal(got[n], want[n])] == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_job_saved_opens(tmp_path: Path, kind: str) -> None:
    model = tiny(kind)
    model.save_config(tmp_path / "config")
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    result = export(tmp_path / "ckpt", tmp_path / "out", config=str(tmp_path / "config"))
    assert [w.code for w in result.warnings if w.code in ("names-unchecked", "not-loadable")] == []
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"README.md", "config.json", WEIGHTS}
    require_equal(reopened(kind, tmp_path / "out").state_dict(), model.state_dict())
    assert "library_name: diffusers" in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize("saved", ["safetensors", "bin", "sharded", "fp16"])
def test_what_save_pretrained_wrote(tmp_path: Path, saved: str) -> None:
    """From any of its forms to files of any size, whose index diffusers reads."""
    options: dict[str, Any] = {
        "bin": {"safe_serialization": False},
        "sharded": {"max_shard_size": "20KB"},
        "fp16": {"variant": "fp16"},
    }.get(saved, {})
    model = tiny("UNet2DConditionModel")
    model.save_pretrained(tmp_path / "saved", **options)
    export(tmp_path / "saved", tmp_path / "out", max_file_size="30KB")
    index = json.loads((tmp_path / f"out/{WEIGHTS}.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    require_equal(reopened("UNet2DConditionModel", tmp_path / "out").state_dict(), model.state_dict())


def test_another_model_is_refused(tmp_path: Path) -> None:
    model = tiny("AutoencoderKL")
    state = model.state_dict()
    torch.save(state, tmp_path / "model.pt")
    for number, (kind, message) in enumerate(
        {"UNet2DConditionModel": "missing", "AutoencoderKL": "other shape"}.items()
    ):
        config = tmp_path / f"config{number}"
        options = {**KINDS[kind], "block_out_channels": (8, 32)}
        getattr(diffusers, kind)(**options).save_config(config)
        with pytest.raises(NameMismatch, match=message):
            export(tmp_path / "model.pt", tmp_path / "out", config=str(config))
    state.popitem()
    torch.save(state, tmp_path / "part.pt")
    model.save_config(tmp_path / "right")
    with pytest.raises(NameMismatch, match="missing"):
        export(tmp_path / "part.pt", tmp_path / "out", config=str(tmp_path / "right"))
    assert not (tmp_path / "out").exists()


def test_a_config_without_a_model(tmp_path: Path) -> None:
    torch.save(tiny("AutoencoderKL").state_dict(), tmp_path / "model.pt")
    (tmp_path / "config").mkdir()
    path = tmp_path / "config" / "config.json"
    path.write_text(json.dumps({"_class_name": "SomethingNew"}))
    result = export(tmp_path / "model.pt", tmp_path / "out", config=str(path))
    assert "names-unchecked" in [w.code for w in result.warnings]
    path.write_text(json.dumps({"_class_name": "AutoencoderKL", "block_out_channels": "none"}))
    with pytest.raises(UsageError, match="diffusers builds no model"):
        export(tmp_path / "model.pt", tmp_path / "other", config=str(path))


def test_a_wrapper_is_removed(tmp_path: Path) -> None:
    model = tiny("AutoencoderKL")
    model.save_config(tmp_path / "config")
    torch.save({f"vae.{n}": t for n, t in model.state_dict().items()}, tmp_path / "model.pt")
    export(tmp_path / "model.pt", tmp_path / "out", config=str(tmp_path / "config"))
    require_equal(load_file(tmp_path / "out" / WEIGHTS), model.state_dict())
