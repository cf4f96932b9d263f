"""Models of diffusers, trained and saved in any way, become the folder that their `from_pretrained` opens."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

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


# --- pipelines ------------------------------------------------------------------------------------


def stable_diffusion() -> Any:
    """A tiny pipeline with models of two libraries, a tokenizer and a scheduler."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    torch.manual_seed(1)
    vocabulary = {"<|startoftext|>": 0, "<|endoftext|>": 1, "a</w>": 2, "b</w>": 3}
    text = CLIPTextConfig(
        vocab_size=4,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=8,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return diffusers.StableDiffusionPipeline(
        vae=tiny("AutoencoderKL"),
        text_encoder=CLIPTextModel(text).eval(),
        tokenizer=CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=8),
        unet=tiny("UNet2DConditionModel"),
        scheduler=diffusers.DDIMScheduler(num_train_timesteps=10),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def ddpm() -> Any:
    """A pipeline of one model."""
    torch.manual_seed(2)
    blocks = {
        "down_block_types": ("DownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "UpBlock2D"),
    }
    unet = diffusers.UNet2DModel(**BLOCKS, **blocks, layers_per_block=1, sample_size=8)
    return diffusers.DDPMPipeline(unet.eval(), diffusers.DDPMScheduler(num_train_timesteps=10))


PIPELINES = {"StableDiffusionPipeline": stable_diffusion, "DDPMPipeline": ddpm}


def models_of(pipeline: Any) -> dict[str, Any]:
    return {n: m for n, m in pipeline.components.items() if isinstance(m, torch.nn.Module)}


@pytest.mark.parametrize("kind", PIPELINES)
def test_a_pipeline_is_exported_as_one_folder(tmp_path: Path, kind: str) -> None:
    pipeline = PIPELINES[kind]()
    pipeline.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    result = export(tmp_path / "saved", tmp_path / "out", max_file_size="30KB")
    assert [w.code for w in result.warnings] == []
    opened = getattr(diffusers, kind).from_pretrained(tmp_path / "out")
    assert opened.scheduler.to_json_string() == pipeline.scheduler.to_json_string()
    index, written_index = (
        json.loads((tmp_path / n / "model_index.json").read_text()) for n in ("saved", "out")
    )
    assert written_index == index
    assert models_of(opened).keys() == models_of(pipeline).keys()
    for name, model in models_of(pipeline).items():
        require_equal(models_of(opened)[name].state_dict(), model.state_dict())
        assert type(models_of(opened)[name]) is type(model)
    beside = {p.relative_to(tmp_path / "saved") for p in (tmp_path / "saved").rglob("*.json")}
    written = {p.relative_to(tmp_path / "out") for p in (tmp_path / "out").rglob("*.json")}
    assert {p for p in beside ^ written if ".index." not in p.name} == set()
    exported = ckptcore.open(str(tmp_path / "out"))
    assert exported.format == "diffusers"
    assert {t.fqn for t in exported.tensors} == {
        t.fqn for t in ckptcore.open(str(tmp_path / "saved")).tensors
    }


def test_a_pipeline_in_half(tmp_path: Path) -> None:
    """The configs of transformers' models name the dtype, as those of `save_pretrained` do."""
    pipeline = stable_diffusion()
    pipeline.save_pretrained(tmp_path / "saved")
    export(tmp_path / "saved", tmp_path / "out", dtype="bf16")
    assert json.loads((tmp_path / "out/text_encoder/config.json").read_text())["dtype"] == "bfloat16"
    opened = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path / "out", torch_dtype=torch.bfloat16)
    for name, model in models_of(pipeline.to(torch.bfloat16)).items():
        require_equal(models_of(opened)[name].state_dict(), model.state_dict())


def test_a_pipeline_is_verified(tmp_path: Path) -> None:
    """Names by each model's class, values by the source; one changed element is found."""
    stable_diffusion().save_pretrained(tmp_path / "saved")
    export(tmp_path / "saved", tmp_path / "out", dtype="fp16")
    verify = partial(
        ckptcore.verify_export, str(tmp_path / "out"), against=str(tmp_path / "saved"), catalog=False
    )
    proof = verify()
    assert {c.name: c.verdict for c in proof.checks} == dict.fromkeys([c.name for c in proof.checks], "ok")
    path = tmp_path / "out/unet" / WEIGHTS
    state = load_file(path)
    state["conv_in.bias"][3] += 1
    save_file(state, path, {"format": "pt"})
    assert [c.name for c in verify().checks if c.verdict == "failed"] == ["fingerprints"]
    state.pop("conv_in.bias")
    save_file(state, path, {"format": "pt"})
    assert {c.name for c in verify().checks if c.verdict == "failed"} >= {"elements", "names"}


@pytest.mark.parametrize("name", ["unet", "text_encoder"])
def test_a_model_of_a_pipeline_that_does_not_fit_its_config(tmp_path: Path, name: str) -> None:
    stable_diffusion().save_pretrained(tmp_path / "saved")
    path = tmp_path / "saved" / name / "config.json"
    sizes = {"cross_attention_dim": 12} if name == "unet" else {"hidden_size": 12}
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    with pytest.raises(NameMismatch, match=f"{name}: .*other shape"):
        export(tmp_path / "saved", tmp_path / "out")
    assert not (tmp_path / "out").exists()
