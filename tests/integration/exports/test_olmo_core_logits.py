"""The maps from OLMo-core: its own Transformer computes the logits that transformers computes.

OLMo-core makes the weights, or takes those of a sample; both models answer the same question in float32.
``CKPTCORE_OLMO_CORE_3_PYTHON`` names an interpreter with ai2-olmo-core 3.0.0; without it these are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import trainer_names
from paths import JOBS
from samples import FIXTURES, unpack

import ckptcore

transformers: Any = pytest.importorskip("transformers", minversion="5.0")

pytestmark = pytest.mark.soak

VARIABLE = "CKPTCORE_OLMO_CORE_3_PYTHON"
LIMIT = 1e-5  # of logits whose standard deviation is about 1
IDS = torch.randint(40, (2, 8), generator=torch.Generator().manual_seed(1))
NORM = {"name": "rms", "eps": 1e-6, "bias": False, "dtype": "float32"}
# Family -> (block, form of its experts, whether queries and keys have norms, by head).
FAMILIES: dict[str, tuple[str, str, str]] = {
    "llama": ("default", "", ""),
    "qwen2": ("default", "", ""),
    "qwen3": ("default", "", "head"),
    "gemma3": ("peri_norm", "", "head"),
    "olmo2": ("reordered_norm", "", "all"),
    "olmo3": ("reordered_norm", "", "all"),
    "olmoe": ("moe", "default", "all"),
    "olmoe dropless": ("moe", "dropless", "all"),
    "flex_olmo": ("moe_reordered_norm", "default", "all"),
    "flex_olmo dropless": ("moe_reordered_norm", "dropless", "all"),
}


def hub_config(arch: str) -> dict[str, Any]:
    config, _ = trainer_names.hub_model(arch)
    return config | {"dtype": "float32", "num_experts_per_tok": 2} | EQUAL.get(arch, {})


TIED = "qwen3 tied"  # a head that is the embeddings


# Windows are wider than the question is long.
EQUAL: dict[str, dict[str, Any]] = {"olmo3": {"sliding_window": 64}, "gemma3": {"sliding_window": 64}}


def olmo_config(config: dict[str, Any], block: str, experts: str, norms: str) -> dict[str, Any]:
    """The config of OLMo-core's Transformer, as it writes it."""
    named = "olmo_core.nn.transformer.config.Transformer"
    rope = config["rope_parameters"]
    norm = {**NORM, "eps": config["rms_norm_eps"], "_CLASS_": "olmo_core.nn.layer_norm.LayerNormConfig"}
    attention = {
        "name": "default",
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "head_dim": config.get("head_dim"),
        "bias": config["model_type"] == "qwen2",
        "rope": {
            "name": "default",
            "theta": int(rope.get("full_attention", rope)["rope_theta"]),
            "_CLASS_": "olmo_core.nn.rope.RoPEConfig",
        },
        "qk_norm": norm if norms else None,
        "use_head_qk_norm": norms == "head",
        "dtype": "float32",
        "type": "attention",
        "_CLASS_": "olmo_core.nn.attention.AttentionConfig",
    }
    wide = {"hidden_size": config["intermediate_size"], "dtype": "float32"}
    mlp = wide | {"name": "default", "bias": False, "_CLASS_": "olmo_core.nn.feed_forward.FeedForwardConfig"}
    moe = wide | {
        "name": experts,
        "num_experts": config.get("num_experts"),
        "router": {
            "name": "default",
            "top_k": 2,
            "gating_function": "softmax",
            "_CLASS_": "olmo_core.nn.moe.router.MoERouterConfig",
        },
        "_CLASS_": "olmo_core.nn.moe.moe.MoEConfig",
    }
    if experts == "default":
        moe["capacity_factor"] = 8.0  # no token is dropped
    form = {
        "name": "moe" if experts else "default",
        "d_model": config["hidden_size"],
        "vocab_size": 48,
        "n_layers": config["num_hidden_layers"],
        "block": {
            "name": block,
            "sequence_mixer": attention,
            "layer_norm": norm,
            "feed_forward_moe" if experts else "feed_forward": moe if experts else mlp,
            "_CLASS_": f"{named}BlockConfig",
        },
        "lm_head": {
            "name": "default",
            "layer_norm": norm,
            "bias": False,
            "dtype": "float32",
            "_CLASS_": "olmo_core.nn.lm_head.LMHeadConfig",
        },
        "dtype": "float32",
        "_CLASS_": f"{named}Config",
    }
    if config["model_type"] == "gemma3_text":
        mlp["activation"] = "gelu_tanh"
        window = {
            "pattern": [config["sliding_window"]],
            "force_full_attention_on_first_layer": False,
            "force_full_attention_on_last_layer": False,
            "_CLASS_": "olmo_core.nn.attention.SlidingWindowAttentionConfig",
        }
        turned = attention["rope"] | {"theta": int(rope["sliding_attention"]["rope_theta"])}
        local = form["block"] | {"sequence_mixer": attention | {"rope": turned, "sliding_window": window}}
        kinds = ["local" if kind == "sliding_attention" else "global" for kind in config["layer_types"]]
        form |= {"block": {"local": local, "global": form["block"]}, "block_pattern": kinds}
        form["embed_scale"] = config["hidden_size"] ** 0.5
    return form


@pytest.fixture(scope="module")
def truths(request: pytest.FixtureRequest) -> Path:
    return unpack(request.config.rootpath / ".pytest_cache/samples", FIXTURES / "maps/truths.tar.zst")


@pytest.fixture(scope="module")
def olmo(tmp_path_factory: pytest.TempPathFactory, truths: Path) -> dict[str, dict[str, Any]]:
    """What OLMo-core answers, from one process: of every family, and of the sample."""
    folder = tmp_path_factory.mktemp("olmo")
    asked: dict[str, dict[str, Any]] = {}
    for name, family in FAMILIES.items():
        model = olmo_config(hub_config(name.split()[0]), *family)
        asked[name] = {"model": model, "ids": IDS, "state": None}
    step = truths / "olmo3/step3"
    manifest = ckptcore.open(str(step))
    state = {
        t.fqn.removeprefix("model."): ckptcore.read(manifest, t.fqn)
        for t in manifest.tensors
        if t.fqn.startswith("model.")
    }
    model = json.loads((step / "config.json").read_text())["model"]
    asked["sample"] = {"model": model, "ids": IDS, "state": state}
    found = answers(list(asked.values()), folder)
    return {name: {**asked[name], **a} for name, a in zip(asked, found, strict=True)}


def answers(asked: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """What OLMo-core answers to questions of its job, which has files in the folder."""
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip(f"no interpreter with ai2-olmo-core 3.0.0: {VARIABLE} can name one")
    torch.save(asked, folder / "asked.pt")
    argv = [python, "-W", "ignore", str(JOBS / "olmo_core_logits_job.py")]
    argv += [str(folder / "asked.pt"), str(folder / "answer.pt")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, Any]] = torch.load(folder / "answer.pt", weights_only=True)
    return found


@torch.no_grad()
def apart(folder: Path, answer: torch.Tensor) -> float:
    """How far transformers' logits of a folder are from an answer."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    found = model.eval()(IDS).logits
    assert found.std() > 0.05
    difference = float((found - answer[..., : found.shape[-1]]).abs().max())
    print(f"logits differ by {difference:.1e}")
    return difference


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize("name", FAMILIES)
def test_olmo_cores_own_model_agrees_with_the_export(
    olmo: dict[str, dict[str, Any]], tmp_path: Path, name: str
) -> None:
    """Random weights of its Transformer, saved by its own names, exported, opened by transformers."""
    dcp.save({"model": olmo[name]["state"]}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    trained = {"model": olmo[name]["model"], "dataset": {"tokenizer": {"vocab_size": 40}}}
    (tmp_path / "ckpt/config.json").write_text(json.dumps(trained))
    (tmp_path / "config.json").write_text(json.dumps(hub_config(name.split()[0])))
    options = {"verb": "export", "catalog": False, "config": str(tmp_path / "config.json")}
    ckptcore.convert(str(tmp_path / "ckpt"), str(tmp_path / "out"), **options)
    assert apart(tmp_path / "out", olmo[name]["logits"]) < LIMIT


@pytest.mark.usefixtures("asked_here")
def test_the_truth_beside_the_sample_is_olmo_cores_own(
    olmo: dict[str, dict[str, Any]], truths: Path, tmp_path: Path
) -> None:
    hub = truths / "olmo3/hf_export"
    assert apart(hub, olmo["sample"]["logits"]) < LIMIT
    ckptcore.convert(str(truths / "olmo3/step3"), str(tmp_path / "out"), verb="export", config=str(hub))
    assert apart(tmp_path / "out", olmo["sample"]["logits"]) < LIMIT


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize("name", [*FAMILIES, TIED])
def test_olmo_cores_own_model_loads_what_the_way_back_makes(tmp_path: Path, name: str) -> None:
    """From the step's own config.json; it computes the logits of the model on the hub.

    This model has no biases that balance experts.
    """
    arch, _, experts = name.partition(" ")
    fields = hub_config(arch) | ({"tie_word_embeddings": True} if name == TIED else {})
    config = transformers.CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    torch.manual_seed(2)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            drawn = torch.randn(tensor.shape)
            tensor.copy_(1 + drawn / 8 if "norm" in key else drawn / 4)
    model.save_pretrained(tmp_path / "hub")
    names = f"olmo_core:{experts}" if experts and name != TIED else "olmo_core"
    step = tmp_path / "step"
    ckptcore.convert(str(tmp_path / "hub"), str(step), to="olmo_core", names=names, catalog=False)
    manifest = ckptcore.open(str(step))
    state = {t.fqn.removeprefix("model."): ckptcore.read(manifest, t.fqn) for t in manifest.tensors}
    state = {n: t for n, t in state.items() if not n.endswith("score_bias")}
    trained = json.loads((step / "config.json").read_text())["model"]
    if experts == "default":
        trained["block"]["feed_forward_moe"]["capacity_factor"] = 8.0  # no token is dropped
    (found,) = answers([{"model": trained, "ids": IDS, "state": state}], tmp_path)
    assert apart(tmp_path / "hub", found["logits"]) < LIMIT
