"""The maps from Megatron: its own GPTModel computes the logits that transformers computes from the export.

Nothing of ours says here how names or layouts map: Megatron-Core makes the weights, or takes those of a
sample, and both models answer the same question in float32. ``CKPTCORE_MEGATRON_PYTHON`` names an interpreter
with megatron-core; without it these tests are skipped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import megatron_models
import pytest
import torch
import torch.distributed.checkpoint as dcp
import trainer_names
from megatron_models import Answers
from safetensors.torch import load_file, save_file
from samples import FIXTURES, unpack

import ckptcore

transformers: Any = pytest.importorskip("transformers", minversion="5.0")

pytestmark = pytest.mark.soak

EXACT, LATENT = 1e-5, 1e-3  # of logits whose standard deviation is about 1; latent attention rounds more
SAMPLES = {
    "gpt_llama_tp2pp2_0.19.2": "hf_llama",
    "gpt_qwen2_tied_bias_tp2pp2_0.19.2": "hf_qwen2",
    "gpt_deepseekv3_tp2pp2_0.19.2": "hf_deepseekv3",
    "gpt_mixtral_ep2pp2_0.19.2": "hf_mixtral",
}


@pytest.fixture(scope="module")
def folders(request: pytest.FixtureRequest) -> dict[str, Path]:
    """Name -> folder, of samples and truths."""
    cache = request.config.rootpath / ".pytest_cache/samples"
    roots = [unpack(cache, FIXTURES / name) for name in ("megatron-core.tar.zst", "maps/truths.tar.zst")]
    return {p.name: p for root in roots for p in root.iterdir()}


def opened(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def export(source: Path, target: Path, config: Path) -> None:
    ckptcore.convert(str(source), str(target), verb="export", catalog=False, config=str(config))


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.as_tensor(model(ids).logits)


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    difference = float((a - b).abs().max())
    print(f"logits differ by {difference:.1e}")
    return difference


# What the hub's tiny configs must say so that Megatron-Core computes the same.
EQUAL: dict[str, dict[str, Any]] = {
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "swiglu_limit": 7.0}
}
# Those whose norms have other names with Transformer Engine, and dense ones.
WITH_ENGINE = (
    "llama",
    "qwen3_moe",
    "mixtral",
    "glm4_moe",
    "llama4",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
)
IDS = torch.randint(40, (2, 8), generator=torch.Generator().manual_seed(1))


def family(arch: str) -> dict[str, Any]:
    """The hub's config of a tiny model."""
    config, _ = trainer_names.hub_model(arch)
    return config | EQUAL.get(arch, {}) | {"dtype": "float32"}


def trained_sample(folders: dict[str, Path], trained: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the hub's config, logits that were stored with it) of a sample's truth."""
    hub = folders[SAMPLES[trained]]
    return json.loads((hub / "config.json").read_text()), torch.load(hub / "logits_fp32.pt")


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]) -> Answers:
    """What Megatron-Core answers: of every family with random weights, and of every sample."""
    asked = {}
    for arch, more in megatron_models.FAMILIES.items():
        config = family(arch)
        fields = megatron_models.megatron_config(config, more)
        asked[arch] = megatron_models.question(fields, megatron_models.gpt_model(config, 48), IDS)
    for trained in SAMPLES:
        config, stored = trained_sample(folders, trained)
        manifest = ckptcore.open(str(folders[trained] / "ckpt"))
        tensors = {t.fqn: ckptcore.read(manifest, t.fqn) for t in manifest.tensors}
        starts = ("decoder.", "embedding.", "output_layer.")
        tensors = {n: t for n, t in tensors.items() if n.startswith(starts) and "_extra_state" not in n}
        fields = megatron_models.megatron_config(config, megatron_models.FAMILIES[config["model_type"]])
        model = megatron_models.gpt_model(config, len(tensors["embedding.word_embeddings.weight"]))
        state = megatron_models.modules_of(tensors)
        asked[trained] = megatron_models.question(fields, model, stored["ids"], state)
    for arch, more in megatron_models.FAMILIES.items():
        config, folder = family(arch), tmp_path_factory.mktemp(arch)
        padded = from_hub(arch, folder)
        fields = megatron_models.megatron_config(config, more)
        question = megatron_models.question(fields, megatron_models.gpt_model(config, padded), IDS)
        asked[f"{arch} of the hub"] = question | {"folder": str(folder / "start/release")}
    for arch in WITH_ENGINE:
        config, folder = family(arch), tmp_path_factory.mktemp(arch)
        padded = from_hub(arch, folder, names="megatron:transformer-engine", allow_untried=True)
        fields = megatron_models.megatron_config(config, megatron_models.FAMILIES[arch])
        question = megatron_models.question(fields, megatron_models.gpt_model(config, padded), IDS)
        question |= {"folder": str(folder / "start/release"), "transformer_engine": True}
        asked[f"{arch} with Transformer Engine"] = question
    return megatron_models.answers(tmp_path_factory.mktemp("megatron"), asked)


def from_hub(arch: str, folder: Path, **options: Any) -> int:
    """Write the hub's model below a folder, and a start of it; return the rows of its vocabulary."""
    options = {"names": "megatron"} | options
    state = trainer_names.hub_model(arch)[1]
    (folder / "hub").mkdir()
    (folder / "hub/config.json").write_text(json.dumps(family(arch)))
    save_file(
        {n: t.contiguous() for n, t in state.items()}, folder / "hub/model.safetensors", {"format": "pt"}
    )
    ckptcore.convert(
        str(folder / "hub"),
        str(folder / "start"),
        verb="reshard",
        mesh="tp=2,pp=2",
        to="torch_dist",
        catalog=False,
        **options,
    )
    manifest = ckptcore.open(str(folder / "start"))
    return next(t.shape[0] for t in manifest.tensors if t.fqn == "embedding.word_embeddings.weight")


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize("arch", megatron_models.FAMILIES)
def test_megatron_begins_from_the_hub(megatron: Answers, tmp_path: Path, arch: str) -> None:
    """Its own loader finds every key, and its model the logits of transformers."""
    like_transformers(arch, megatron(f"{arch} of the hub")[1], tmp_path)


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize("arch", WITH_ENGINE)
def test_layers_of_transformer_engine_begin_from_the_hub(
    megatron: Answers, tmp_path: Path, arch: str
) -> None:
    """A strict load of the names of Megatron-Core's own specs for it, whose norms are plain torch."""
    like_transformers(arch, megatron(f"{arch} with Transformer Engine")[1], tmp_path)


def like_transformers(arch: str, answer: torch.Tensor, tmp_path: Path) -> None:
    """Require the logits of transformers from those of Megatron-Core."""
    config = family(arch)
    (tmp_path / "config.json").write_text(json.dumps(config))
    state = trainer_names.hub_model(arch)[1]
    save_file({n: t.contiguous() for n, t in state.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    found = logits(opened(tmp_path), IDS)
    assert found.std() > 0.05
    assert apart(found, answer[..., : found.shape[-1]]) < (LATENT if "kv_lora_rank" in config else EXACT)


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize("arch", megatron_models.FAMILIES)
def test_megatrons_own_model_agrees_with_the_export(megatron: Answers, tmp_path: Path, arch: str) -> None:
    """Random weights of GPTModel, saved by its own names, exported, opened by transformers."""
    config, (state, answer) = family(arch), megatron(arch)
    dcp.save({"model": state}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    export(tmp_path / "ckpt", tmp_path / "out", tmp_path / "config.json")
    found = logits(opened(tmp_path / "out"), IDS)
    assert found.std() > 0.05
    assert apart(found, answer[..., : found.shape[-1]]) < (LATENT if "kv_lora_rank" in config else EXACT)


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize("trained", SAMPLES)
def test_the_truth_beside_a_sample_is_megatrons_own(
    megatron: Answers, folders: dict[str, Path], tmp_path: Path, trained: str
) -> None:
    """The sample's tensors in GPTModel, the export in transformers, and the logits stored with the truth."""
    config, stored = trained_sample(folders, trained)
    limit = LATENT if "kv_lora_rank" in config else EXACT
    answer = megatron(trained)[1][..., : config["vocab_size"]]
    assert apart(answer, stored["logits"]) < limit
    export(folders[trained] / "ckpt", tmp_path / "out", folders[SAMPLES[trained]])
    assert apart(logits(opened(tmp_path / "out"), stored["ids"]), answer) < limit


def test_a_wrong_order_of_rows_is_far_off(folders: dict[str, Path], tmp_path: Path) -> None:
    """What the limit is worth: queries and keys of one layer with halves of heads exchanged."""
    hub = folders["hf_llama"]
    weights = {n: t for f in hub.glob("*.safetensors") for n, t in load_file(f).items()}
    name = "model.layers.1.self_attn.q_proj.weight"
    weights[name] = weights[name].view(4, 2, 4, -1).flip(1).reshape(weights[name].shape).contiguous()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((hub / "config.json").read_text())
    stored = torch.load(hub / "logits_fp32.pt", weights_only=True)
    assert apart(logits(opened(tmp_path), stored["ids"]), stored["logits"]) > 100 * EXACT
