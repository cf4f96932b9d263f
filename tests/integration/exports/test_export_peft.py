"""LoRA adapters inside checkpoints become what peft opens: the same logits, and no base weight."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckptcore
from ckptcore.errors import NameMismatch, UsageError
from ckptcore.naming.peft import find_adapter

transformers: Any = pytest.importorskip("transformers")
peft: Any = pytest.importorskip("peft")

from tiny_llama import tiny_llama  # noqa: E402

pytestmark = pytest.mark.filterwarnings(  # of peft, about transformers and adapters
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
IDS = torch.arange(12)[None]
LORAS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "ranks": {
        "target_modules": ["q_proj", "down_proj"],
        "rank_pattern": {"down_proj": 2},
        "use_rslora": True,
    },
    "dora": {"target_modules": ["o_proj"], "use_dora": True},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "embedding": {"target_modules": ["embed_tokens", "k_proj"]},
    "biases": {"target_modules": ["q_proj"], "bias": "lora_only"},
    "all biases": {"target_modules": ["q_proj"], "bias": "all"},
    "lora biases": {"target_modules": ["q_proj"], "lora_bias": True},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [1, 2]}},
    "linear": {"target_modules": "all-linear"},
    "expressions": {
        "target_modules": r"model\.layers\.\d\.(self_attn\.(q|v)|mlp\.down)_proj",
        "rank_pattern": {r"layers\.1\..*_proj": 2},
    },
    "whole embeddings": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "whole norms": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "norm"]},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with biases, as `save_pretrained` writes it."""
    folder: Path = tmp_path_factory.mktemp("base")
    tiny_llama(
        vocab_size=48, hidden_size=16, intermediate_size=24, attention_bias=True, tie_word_embeddings=False
    ).save_pretrained(folder)
    return folder


def trained(base: Path, adapter_name: str = "default", **lora: Any) -> Any:
    """A live module with an adapter whose every tensor differs from its start."""
    model = transformers.LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(r=4, lora_alpha=12, task_type="CAUSAL_LM", **lora)
    live = peft.get_peft_model(model, config, adapter_name=adapter_name)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in live.parameters():
            if parameter.requires_grad:
                parameter += torch.randn_like(parameter) / 4
    return live.eval()


def put(live: Any, folder: Path, *, config: bool = True, name: str = "default") -> Path:
    """Saves a live module with DCP, its adapter's config beside."""
    dcp.save({"model": live.state_dict()}, checkpoint_id=folder, no_dist=True)
    if config:
        live.peft_config[name].save_pretrained(folder / "lora_adapter")
    return folder


def export(source: Path, target: Path, **options: Any) -> Any:
    return ckptcore.convert(str(source), str(target), verb="export", catalog=False, **options)


def reopened(base: Path, folder: Path) -> Any:
    model = transformers.LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(model, folder).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.as_tensor(model(input_ids=IDS).logits)


@pytest.mark.alike(5)
@pytest.mark.parametrize("kind", LORAS)
def test_logits_are_equal_bit_for_bit(base: Path, tmp_path: Path, kind: str) -> None:
    live = trained(base, **LORAS[kind])
    result = export(put(live, tmp_path / "ckpt"), tmp_path / "out")
    live.save_pretrained(tmp_path / "hub", save_embedding_layers=False)
    want = load_file(tmp_path / "hub/adapter_model.safetensors")
    got = load_file(tmp_path / "out/adapter_model.safetensors")
    assert got.keys() == want.keys()
    assert all(torch.equal(got[n], want[n]) for n in want)
    assert torch.equal(logits(reopened(base, tmp_path / "out")), logits(live))
    assert "not-loadable" not in [w.code for w in result.warnings]
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def test_the_base_differs_from_the_adapted(base: Path) -> None:
    plain = transformers.LlamaForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    assert not torch.equal(logits(trained(base, target_modules=["q_proj"])), logits(plain))


def test_what_verl_saves(base: Path, tmp_path: Path) -> None:
    actor = tmp_path / "global_step_10/actor"
    actor.mkdir(parents=True)
    live = trained(base, target_modules=["q_proj", "v_proj"])
    torch.save(live.state_dict(), actor / "model_world_size_1_rank_0.pt")
    (actor / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 1}')
    live.peft_config["default"].save_pretrained(actor / "lora_adapter")
    transformers.AutoConfig.from_pretrained(base).save_pretrained(actor / "huggingface")
    (actor / "huggingface/tokenizer.json").write_text("{}")
    export(tmp_path / "global_step_10", tmp_path / "out")
    assert torch.equal(logits(reopened(base, tmp_path / "out")), logits(live))
    assert (tmp_path / "out/tokenizer.json").exists()
    assert not (tmp_path / "out/config.json").exists()


@pytest.mark.parametrize("name", ["default", "sft"])
@pytest.mark.parametrize("wrap", ["module.", "_fsdp_wrapped_module.", ""])
def test_names_in_wrappers_and_without_a_peft_model(base: Path, tmp_path: Path, name: str, wrap: str) -> None:
    live = trained(base, name, target_modules=["q_proj"])
    bare = {wrap + n.removeprefix("base_model.model."): t for n, t in live.state_dict().items()}
    dcp.save({"model": bare, "step": 3}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    live.peft_config[name].save_pretrained(tmp_path / "lora")
    export(tmp_path / "ckpt", tmp_path / "out", config=str(tmp_path / "lora/adapter_config.json"))
    assert torch.equal(logits(reopened(base, tmp_path / "out")), logits(live))


def test_an_adapters_own_folder_stays_what_it_is(base: Path, tmp_path: Path) -> None:
    live = trained(base, target_modules=["q_proj"], modules_to_save=["lm_head"])
    live.save_pretrained(tmp_path / "hub")
    export(tmp_path / "hub", tmp_path / "out")
    assert torch.equal(logits(reopened(base, tmp_path / "out")), logits(live))
    assert ckptcore.open(str(tmp_path / "out")).num_tensors == len(
        load_file(tmp_path / "hub/adapter_model.safetensors")
    )


def test_a_config_file_of_any_name_and_a_cast(base: Path, tmp_path: Path) -> None:
    live = trained(base, target_modules=["q_proj"])
    source = put(live, tmp_path / "ckpt", config=False)
    live.peft_config["default"].save_pretrained(tmp_path / "x")
    (tmp_path / "x/adapter_config.json").rename(tmp_path / "my.cfg")
    export(source, tmp_path / "out", config=str(tmp_path / "my.cfg"), dtype="bf16")
    found = load_file(tmp_path / "out/adapter_model.safetensors")
    assert {t.dtype for t in found.values()} == {torch.bfloat16}
    card = (tmp_path / "out/README.md").read_text()
    assert card.startswith("---\nlibrary_name: peft\n")
    assert "- adapter: LoRA, r 4, lora_alpha 12\n" in card


def test_without_a_config_alpha_is_not_known(base: Path, tmp_path: Path) -> None:
    source = put(trained(base, target_modules=["q_proj"]), tmp_path / "ckpt", config=False)
    with pytest.raises(UsageError, match=r"no adapter_config\.json was found") as caught:
        export(source, tmp_path / "out")
    assert "config=" in caught.value.hint
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match=r"has no adapter_config\.json"):
        export(source, tmp_path / "out", config=str(base))
    result = export(source, tmp_path / "one.safetensors")
    assert all(n.startswith("base_model.model.") for n in load_file(tmp_path / "one.safetensors"))
    assert result.destination.endswith("one.safetensors")
    export(source, tmp_path / "base", exclude=["*.lora_*"])
    assert any(n.endswith("q_proj.base_layer.weight") for n in load_file(tmp_path / "base/model.safetensors"))


def changed(key: str, value: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda form: form | {key: value}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (changed("r", 8), NameMismatch, "q_proj has rank 4 .config says 8"),
        (changed("lora_alpha", None), UsageError, "lora_alpha"),
        (changed("peft_type", "IA3"), UsageError, "IA3"),
        (changed("target_modules", ["q_proj", "v_proj"]), NameMismatch, "v_proj is a target"),
        (changed("target_modules", ["v_proj"]), NameMismatch, "q_proj has an adapter, but is not a target"),
        (changed("use_dora", True), NameMismatch, "use_dora is True"),
        (changed("modules_to_save", ["lm_head"]), NameMismatch, "modules_to_save names lm_head"),
        (changed("rank_pattern", {"q_proj": 3}), NameMismatch, "config says 3"),
        (
            changed("rank_pattern", {r"layers\.1.*proj": 3}),
            NameMismatch,
            "layers.1.self_attn.q_proj has rank 4",
        ),
        (changed("target_modules", r".*\.[qv]_proj"), NameMismatch, "v_proj is a target"),
        (
            changed("target_modules", r".*1.*\.q_proj"),
            NameMismatch,
            "layers.0.self_attn.q_proj has an adapter",
        ),
        (
            changed("target_modules", "(q_proj"),
            NameMismatch,
            "target_modules cannot be matched: .*unterminated",
        ),
    ],
)
def test_a_config_that_contradicts_the_tensors(
    base: Path, tmp_path: Path, change: Any, error: type[Exception], message: str
) -> None:
    source = put(trained(base, target_modules=["q_proj"]), tmp_path / "ckpt")
    path = source / "lora_adapter/adapter_config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(error, match=message):
        export(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_shapes_and_names_tell_is_filled_in(base: Path, tmp_path: Path) -> None:
    live = trained(base, target_modules=["q_proj", "v_proj"])
    source = put(live, tmp_path / "ckpt", config=False)
    (tmp_path / "a.json").write_text('{"peft_type": "LORA", "lora_alpha": 12}')
    export(source, tmp_path / "out", config=str(tmp_path / "a.json"))
    assert torch.equal(logits(reopened(base, tmp_path / "out")), logits(live))


def test_the_head_of_a_classifier_has_one_of_two_names(base: Path, tmp_path: Path) -> None:
    """peft names both in modules_to_save; a model has one of them."""
    config = transformers.AutoConfig.from_pretrained(base, num_labels=3)
    lora = peft.LoraConfig(r=4, lora_alpha=12, task_type="SEQ_CLS", target_modules=["q_proj"])
    live = peft.get_peft_model(transformers.LlamaForSequenceClassification(config), lora)
    assert {"classifier", "score"} <= set(live.peft_config["default"].modules_to_save)
    export(put(live, tmp_path / "ckpt"), tmp_path / "out")
    live.save_pretrained(tmp_path / "hub")
    names = load_file(tmp_path / "hub/adapter_model.safetensors").keys()
    assert load_file(tmp_path / "out/adapter_model.safetensors").keys() == names
    headless = put(live, tmp_path / "headless")
    with pytest.raises(NameMismatch, match="modules_to_save names"):
        export(headless, tmp_path / "no", exclude=["*.score.*"])


@pytest.mark.parametrize("target", ["q_proj", "gate_proj"])
@pytest.mark.parametrize("beside", ["base", "config", "nothing"])
def test_one_ranks_rows_of_lora_b(base: Path, tmp_path: Path, target: str, beside: str) -> None:
    """They have the rank of lora_A: only the module that is adapted shows that rows are missing."""
    live = trained(base, target_modules=[target])
    state = {n: t for n, t in live.state_dict().items() if "lora_" in n or beside == "base"}
    state = {n: t.chunk(2)[0].clone() if "lora_B" in n else t for n, t in state.items()}
    dcp.save({"model": state}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    live.peft_config["default"].save_pretrained(tmp_path / "ckpt/lora_adapter")
    if beside == "config":
        (tmp_path / "ckpt/config.json").write_bytes((base / "config.json").read_bytes())
    if beside == "nothing":
        result = export(tmp_path / "ckpt", tmp_path / "out")
        assert "names-unchecked" in [w.code for w in result.warnings]
        return
    with pytest.raises(NameMismatch, match=target):
        export(tmp_path / "ckpt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_packed_base_weight_says_nothing(base: Path, tmp_path: Path) -> None:
    """QLoRA with FSDP: four bits an element, in a column of the dtype that FSDP flattens."""
    live = trained(base, target_modules=["q_proj"])
    state = live.state_dict()
    for name in [n for n in state if n.endswith("base_layer.weight")]:
        state[name] = torch.zeros(state[name].numel() // 4, 1, dtype=torch.bfloat16)
        state[f"{name}.absmax"] = torch.ones(4)
    dcp.save({"model": state}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    live.peft_config["default"].save_pretrained(tmp_path / "ckpt/lora_adapter")
    result = export(tmp_path / "ckpt", tmp_path / "out")
    assert "names-unchecked" in [w.code for w in result.warnings]


def test_modules_of_an_mlp_that_do_not_fit_each_other(base: Path, tmp_path: Path) -> None:
    live = trained(base, target_modules=["gate_proj", "up_proj", "down_proj"])
    state = {n: t for n, t in live.state_dict().items() if "lora_" in n}
    state = {n: t.chunk(2)[0].clone() if "up_proj.lora_B" in n else t for n, t in state.items()}
    dcp.save({"model": state}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    live.peft_config["default"].save_pretrained(tmp_path / "ckpt/lora_adapter")
    with pytest.raises(NameMismatch, match="up_proj is adapted as"):
        export(tmp_path / "ckpt", tmp_path / "out")


def test_half_of_a_pair_is_no_adapter(base: Path, tmp_path: Path) -> None:
    source = put(trained(base, target_modules=["q_proj"]), tmp_path / "ckpt")
    with pytest.raises(NameMismatch, match=r"lacks .*layers\.1\.self_attn\.q_proj\.lora_B\.weight"):
        export(source, tmp_path / "out", exclude=["*layers.1*lora_B*"])


def test_one_of_several_adapters_is_chosen_by_hand(base: Path, tmp_path: Path) -> None:
    live = trained(base, target_modules=["q_proj"])
    live.add_adapter("other", peft.LoraConfig(r=2, target_modules=["v_proj"]))
    source = put(live, tmp_path / "ckpt")
    with pytest.raises(UsageError, match="default, other") as caught:
        export(source, tmp_path / "out")
    assert "exclude='*.other.*'" in caught.value.hint
    export(source, tmp_path / "out", exclude=["*.other.*"])
    assert torch.equal(logits(reopened(base, tmp_path / "out")), logits(live))


def test_a_damaged_base_weight_does_not_keep_the_adapter(base: Path, tmp_path: Path) -> None:
    """It is left out: what is wrong with it is no matter of the adapter's."""
    live = trained(base, target_modules=["q_proj"])
    writer = dcp.FileSystemWriter(tmp_path / "ckpt", single_file_per_rank=False)
    dcp.save({"model": live.state_dict()}, storage_writer=writer, no_dist=True)
    live.peft_config["default"].save_pretrained(tmp_path / "ckpt/lora_adapter")
    manifest = ckptcore.open(str(tmp_path / "ckpt"))
    row = [t.fqn for t in manifest.tensors].index("model.base_model.model.model.norm.weight")
    (chunk,) = manifest.chunks_of(row)
    (tmp_path / "ckpt" / manifest.files[manifest.items[chunk.item].file].path).unlink()
    export(tmp_path / "ckpt", tmp_path / "out")
    assert torch.equal(logits(reopened(base, tmp_path / "out")), logits(live))


def test_models_without_lora_have_no_adapter() -> None:
    assert find_adapter(["model.embed.weight", "lora_head.weight", "x.lora_gate.weight"]) is None
    assert find_adapter([]) is None


def test_names_say_whether_an_adapter_is_meant(base: Path, tmp_path: Path) -> None:
    live = trained(base, target_modules=["q_proj"])
    source = put(live, tmp_path / "ckpt")
    export(source, tmp_path / "out", names="peft")
    assert torch.equal(logits(reopened(base, tmp_path / "out")), logits(live))
    export(source, tmp_path / "stored", names="stored", config="none")
    assert load_file(tmp_path / "stored/model.safetensors").keys() == live.state_dict().keys()
    dcp.save({"model": {"a.weight": torch.ones(2)}}, checkpoint_id=tmp_path / "plain", no_dist=True)
    with pytest.raises(UsageError, match="has no adapter"):
        export(tmp_path / "plain", tmp_path / "no", names="peft")


@pytest.mark.usefixtures("asked_here")
def test_a_model_may_hold_lora_weights_for_good(tmp_path: Path) -> None:
    names = [f"model.layers.0.q_proj.lora_{x}.{y}.weight" for x in "AB" for y in ("speech", "vision")]
    dcp.save({"model": {n: torch.ones(2, 2) for n in names}}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    (tmp_path / "config.json").write_text('{"model_type": "phi4mm"}')
    with pytest.raises(UsageError, match="one adapter of several"):
        export(tmp_path / "ckpt", tmp_path / "out", config="none")
    export(tmp_path / "ckpt", tmp_path / "out", config=str(tmp_path / "config.json"))
    assert sorted(load_file(tmp_path / "out/model.safetensors")) == names
