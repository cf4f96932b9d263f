"""A cast to 16 bits keeps in float32 what the model class keeps: the oracle is transformers' own cast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptcore

transformers: Any = pytest.importorskip("transformers", minversion="5.0")

import small_models  # noqa: E402

from ckptcore.naming.maps import live_families  # noqa: E402
from ckptcore.planning.transformers_conversion import HALF, kept_in_float32  # noqa: E402

BIAS = "e_score_correction_bias"
# Models with strict lists, lists for float16, parameters created in float32, buffers, and none of them.
SOME = ("deepseek_v3", "ernie4_5_moe", "t5")
MORE = ("gpt_oss", "hunyuan_v1_moe", "mixtral", "reformer")


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def a_model(model_type: str) -> Any:
    """A small model; of those whose default config has no such module, one that has it."""
    if model_type == "hunyuan_v1_moe":
        config = transformers.CONFIG_MAPPING[model_type](
            vocab_size=96,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=4,
            moe_topk=2,
        )
        model = transformers.HunYuanMoEV1ForCausalLM(config)
        small_models.refill(model)
        model.config.architectures = [type(model).__name__]
        return model.eval()
    if model_type == "deepseek_v3":
        sizes = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
        heads = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
        config = transformers.DeepseekV3Config(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=48,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            v_head_dim=8,
            first_k_dense_replace=1,
            **sizes,
            **heads,
        )
        model = transformers.DeepseekV3ForCausalLM(config)
        small_models.refill(model)
        model.config.architectures = [type(model).__name__]
        return model.eval()
    return small_models.filled(model_type)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for f in folder.glob("*.safetensors") for n, t in load_file(f).items()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert {n: t.dtype for n, t in one.items()} == {n: t.dtype for n, t in other.items()}
    assert all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize("model_type", [*SOME, *(pytest.param(t, marks=pytest.mark.soak) for t in MORE)])
def test_casts_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    model = a_model(model_type)
    model.save_pretrained(tmp_path / "hub")
    for dtype in ("bf16", "fp16"):
        wide = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
        reloaded = type(model).from_pretrained(tmp_path / "hub", dtype=wide)
        reloaded.save_pretrained(tmp_path / f"wanted-{dtype}")
        out = tmp_path / dtype
        done = ckptcore.convert(str(tmp_path / "hub"), str(out), verb="export", dtype=dtype, catalog=False)
        assert_equal(tensors(out), tensors(tmp_path / f"wanted-{dtype}"))
        some = any(t.dtype == torch.float32 for t in tensors(out).values())
        assert [w.code for w in done.warnings if "float32" in w.code] == (["kept-float32"] if some else [])
        proof = ckptcore.verify_export(str(out), against=str(tmp_path / "hub"))
        assert all(c.verdict == "ok" for c in proof.checks), [str(c) for c in proof.checks]


@pytest.fixture
def deepseek(tmp_path: Path) -> Path:
    model = a_model("deepseek_v3")
    model.save_pretrained(tmp_path / "hub")
    return tmp_path / "hub"


@pytest.mark.usefixtures("asked_here")
def test_a_named_dtype_overrides(deepseek: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    more = {"dtype": "bf16", "dtype_for": [(f"*.{BIAS}", "bf16")]}
    ckptcore.convert(str(deepseek), str(out), verb="export", catalog=False, **more)
    assert {t.dtype for t in tensors(out).values()} == {torch.bfloat16}


@pytest.mark.usefixtures("asked_here")
def test_what_is_stored_in_16_bits_stays_as_it_is(deepseek: Path, tmp_path: Path) -> None:
    stored = {n: t.to(torch.bfloat16) for n, t in tensors(deepseek).items()}
    save_file(stored, deepseek / "model.safetensors", {"format": "pt"})
    ckptcore.convert(str(deepseek), str(tmp_path / "out"), verb="export", dtype="bf16", catalog=False)
    assert_equal(tensors(tmp_path / "out"), stored)


@pytest.mark.usefixtures("asked_here")
def test_a_rounded_bias_fails_the_proof(deepseek: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ckptcore.convert(str(deepseek), str(out), verb="export", dtype="bf16", catalog=False)
    rounded = {n: t.to(torch.bfloat16) for n, t in tensors(out).items()}
    save_file(rounded, out / "model.safetensors", {"format": "pt"})
    proof = ckptcore.verify_export(str(out), against=str(deepseek))
    assert [p.name for c in proof.checks for p in c.problems] == [f"model.layers.1.mlp.gate.{BIAS}"]


def test_without_a_class_a_name_is_a_warning(deepseek: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = ckptcore.convert(
        str(deepseek), str(out), verb="export", dtype="bf16", config="none", catalog=False
    )
    (warning,) = [w for w in done.warnings if w.code == "rounded-float32"]
    assert BIAS in warning.message
    kept = {"dtype": "bf16", "dtype_for": [(f"*{BIAS}", "keep")]}
    done = ckptcore.convert(
        str(deepseek), str(tmp_path / "kept"), verb="export", config="none", catalog=False, **kept
    )
    assert "rounded-float32" not in {w.code for w in done.warnings}


def test_without_transformers_the_frozen_lists_decide(
    deepseek: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptcore.planning.config_folder.find_spec", lambda name: None)
    out = tmp_path / "out"
    ckptcore.convert(str(deepseek), str(out), verb="export", dtype="bf16", catalog=False)
    kept = {n for n, t in tensors(out).items() if t.dtype == torch.float32}
    assert kept == {f"model.layers.1.mlp.gate.{BIAS}"}


@pytest.mark.parametrize(
    "model_type",
    [
        "ernie4_5_moe",
        "t5",
        *(pytest.param(t, marks=pytest.mark.soak) for t in ("glm4_moe", "gpt_oss", "reformer", "xlnet")),
    ],
)
def test_frozen_lists_are_those_of_the_class(model_type: str) -> None:
    assert_frozen(model_type)


@pytest.mark.soak
def test_frozen_lists_are_those_of_every_class() -> None:
    several = 0
    for model_type in small_models.model_types():
        try:
            several += assert_frozen(model_type)
        except LookupError:
            continue
    assert several > 60


def assert_frozen(model_type: str) -> bool:
    """Return whether the class keeps something."""
    model = small_models.build(model_type)
    family = live_families.frozen_family(model.config.to_dict())
    assert family is not None
    with torch.device("meta"):
        narrow = type(model)._from_config(model.config, dtype=torch.bfloat16)
    names = {n for n, t in narrow.state_dict().items() if hasattr(t, "dtype") and t.is_floating_point()}
    module = live_families.LiveFamily(family.form, (), family.version)  # names are the module's own
    kept = {dtype: kept_in_float32(narrow, dtype) for dtype in HALF}
    for dtype, wanted in kept.items():
        assert live_families.float32_names(module, names, dtype) == wanted, (model_type, dtype)
    return any(kept.values())
