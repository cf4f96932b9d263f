"""LoRA adapters that Megatron's trainers save become what peft opens: merged, they are the trainer's weights.

Names and layouts are Megatron-Bridge's (peft/utils.py, peft/canonical_lora.py). All values are small
integers: sums of products are exact whatever their order, and merged weights are compared bit for bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from safetensors.torch import load_file

import ckptcore
from ckptcore.errors import NameMismatch, UsageError

transformers: Any = pytest.importorskip("transformers")
peft: Any = pytest.importorskip("peft")

from paths import FIXTURES  # noqa: E402
from samples import unpack  # noqa: E402
from trainer_names import hub_model, megatron  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
State = dict[str, torch.Tensor]
RANK, ALPHA = 4, 8
CANONICAL = {"_target_": "megatron.bridge.peft.canonical_lora.CanonicalLoRA"}
LAYERS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
FAMILIES = [
    ("llama", "stacked"),
    ("llama", "layers"),
    ("qwen2", "stacked"),
    ("qwen3", "layers"),
    ("gemma3", "layers"),
    ("phi3", "stacked"),
    ("gpt2", "layers"),
]


def random_integers(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).float()


def base_model(family: str, form: str) -> tuple[dict[str, Any], State, State]:
    """(config, the hub's tensors, Megatron's) of a tiny model of whole numbers."""
    config, hub = hub_model(family)
    hub = {n: random_integers(i, *t.shape) for i, (n, t) in enumerate(sorted(hub.items()))}
    return config, hub, megatron(config, hub, form)


def pairs_for(trained: State, layers: tuple[str, ...] = LAYERS) -> State:
    """An adapter below every linear layer of a model, as LoRA of Megatron-Bridge makes it."""
    adapter: State = {}
    for name, weight in trained.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight" and module.rpartition(".")[2] in layers:
            *stack, rows, columns = weight.shape
            seed = len(adapter)
            adapter[f"{module}.adapter.linear_in.weight"] = random_integers(seed, *stack, RANK, columns)
            adapter[f"{module}.adapter.linear_out.weight"] = random_integers(seed + 1, *stack, rows, RANK)
    return adapter


def merged_by_hand(trained: State, adapter: State) -> State:
    """Megatron's weights with the adapter in them."""
    merged = dict(trained)
    for name, lora_b in adapter.items():
        if name.endswith(".linear_out.weight"):
            lora_a = adapter[name.replace(".linear_out.", ".linear_in.")]
            weight = f"{name.partition('.adapter.')[0]}.weight"
            merged[weight] = merged[weight] + lora_b @ lora_a * (ALPHA / RANK)
    return merged


def put(folder: Path, state: State, peft_section: dict[str, Any] | None = None) -> Path:
    """Write an iteration's folder, as Megatron-Core does."""
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    torch.save({"iteration": 10, "checkpoint_version": 3.0}, folder / "common.pt")
    metadata = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(metadata))
    section = {"_target_": "megatron.bridge.peft.lora.LoRA", "dim": RANK, "alpha": ALPHA, "dropout": 0.0}
    content = {"peft": section | (peft_section or {})}
    (folder / "run_config.yaml").write_text(yaml.safe_dump(content))
    return folder


def put_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def export(source: Path, target: Path, **options: Any) -> Any:
    return ckptcore.convert(str(source), str(target), verb="export", catalog=False, **options)


def merged_by_peft(config: dict[str, Any], hub: State, folder: Path) -> State:
    """The hub's tensors after `PeftModel.from_pretrained` and `merge_and_unload`."""
    loaded = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(loaded, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(hub, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    opened = peft.PeftModel.from_pretrained(model, folder)
    names = {n.replace(".default", "") for n in opened.state_dict() if ".lora_" in n}
    assert load_file(folder / "adapter_model.safetensors").keys() == names
    state: State = opened.merge_and_unload().state_dict()
    return state


@pytest.mark.parametrize(
    ("family", "form"),
    [*FAMILIES[:2], *(pytest.param(*pair, marks=pytest.mark.soak) for pair in FAMILIES[2:])],
)
def test_merged_weights_are_the_trainers(tmp_path: Path, family: str, form: str) -> None:
    config, hub, trained = base_model(family, form)
    adapter = pairs_for(trained)
    source = put(tmp_path / "iter_0000010", adapter)
    named = put_config(tmp_path / "hub", config)
    result = export(source, tmp_path / "out", config=str(named))
    assert "not-loadable" not in [w.code for w in result.warnings]
    export(put(tmp_path / "merged", merged_by_hand(trained, adapter)), tmp_path / "want", config=str(named))
    want = load_file(tmp_path / "want" / "model.safetensors")
    got = merged_by_peft(config, hub, tmp_path / "out")
    assert want.keys() <= got.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []
    assert any(not torch.equal(hub[name], want[name]) for name in hub)


def canonical(config: dict[str, Any], hub: State, parts: dict[str, str]) -> tuple[State, State]:
    """(adapters of single parts of fused layers, the hub's tensors with these merged)."""
    adapter, want = State(), dict(hub)
    for layer in range(config["num_hidden_layers"]):
        for part, hub_name in parts.items():
            weight = f"model.layers.{layer}.{hub_name}.weight"
            rows, columns = hub[weight].shape
            below = "self_attention.linear_qkv" if part in "qkv" else "mlp.linear_fc1"
            name = f"decoder.layers.{layer}.{below}.adapter.adapter_{part}"
            lora_a, lora_b = random_integers(1, RANK, columns), random_integers(2, rows, RANK)
            adapter |= {f"{name}.linear_in.weight": lora_a, f"{name}.linear_out.weight": lora_b}
            want[weight] = hub[weight] + lora_b @ lora_a * (ALPHA / RANK)
    return adapter, want


def test_canonical_adapters(tmp_path: Path) -> None:
    config, hub, _ = base_model("llama", "layers")
    adapter, want = canonical(config, hub, {"q": "self_attn.q_proj", "v": "self_attn.v_proj"})
    source = put(tmp_path / "iter_0000010", adapter, CANONICAL)
    export(source, tmp_path / "out", config=str(put_config(tmp_path / "hub", config)))
    got = merged_by_peft(config, hub, tmp_path / "out")
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


def test_the_order_of_rows_must_be_known(tmp_path: Path) -> None:
    """Nothing in a tensor of one box tells how many ranks have put their halves in it."""
    config, hub, _ = base_model("llama", "layers")
    adapter, _ = canonical(config, hub, {"up": "mlp.up_proj"})
    source = put(tmp_path / "iter_0000010", adapter, CANONICAL)
    with pytest.raises(UsageError, match="whose number nothing proves"):
        export(source, tmp_path / "out", config=str(put_config(tmp_path / "hub", config)))


@pytest.fixture(scope="module")
def bridge(request: pytest.FixtureRequest) -> Path:
    """What Megatron-Bridge 0.3.1 and Megatron-Core 0.16.1 saved, and the logits of their models."""
    archive = FIXTURES / "maps/megatron_lora.tar.zst"
    return unpack(request.config.rootpath / ".pytest_cache/samples", archive)


@pytest.mark.parametrize("saved", ["lora_tp2", "canonical_tp1"])
def test_logits_are_those_of_the_trainer(bridge: Path, tmp_path: Path, saved: str) -> None:
    source, config = bridge / f"{saved}_full" / "iter_0000010", str(bridge)
    export(source, tmp_path / "base", config=config, exclude=["*.adapter.*"])
    export(source, tmp_path / "adapter", config=config)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    opened = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    want = torch.load(bridge / f"{saved}_logits.pt")
    with torch.no_grad():
        got = opened(input_ids=torch.arange(12)[None]).logits
        with opened.disable_adapter():
            plain = opened(input_ids=torch.arange(12)[None]).logits
    assert (got - want).abs().max() < 1e-4  # two libraries compute them
    assert (plain - want).abs().max() > 1


def test_canonical_adapters_of_several_ranks(bridge: Path, tmp_path: Path) -> None:
    """Megatron-Bridge saves rows of gate and up in an order that depends on its ranks."""
    source = bridge / "canonical_tp2_adapter" / "iter_0000010"
    with pytest.raises(UsageError, match=r"boxes from rows 0, 12, 24, 36"):
        export(source, tmp_path / "out", config=str(bridge))
    export(source, tmp_path / "part", config=str(bridge), exclude=["*.linear_fc1.*"])
    assert (tmp_path / "part" / "adapter_model.safetensors").exists()


def test_halves_that_are_apart(tmp_path: Path) -> None:
    """`singleton_local_shards`: gate and up are tensors of their own, and share what reads the input."""
    config, _, trained = base_model("llama", "layers")
    adapter = pairs_for(trained, ("linear_fc1",))
    together = put(tmp_path / "together", adapter)
    apart = State()
    for name, tensor in adapter.items():
        if ".linear_out." in name:
            apart[f"{name}_w"], apart[f"{name}_v"] = (half.clone() for half in tensor.chunk(2))
        else:
            apart[name] = tensor
    named = str(put_config(tmp_path / "hub", config))
    export(together, tmp_path / "a", config=named)
    export(put(tmp_path / "apart", apart), tmp_path / "b", config=named)
    a, b = (load_file(tmp_path / x / "adapter_model.safetensors") for x in "ab")
    assert len(a) == 4 * config["num_hidden_layers"]
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("wrapper", ["", ".to_wrap"])
def test_a_base_with_an_adapter(tmp_path: Path, wrapper: str) -> None:
    """The adapter is exported; the base is, where the adapter is excluded by name."""
    config, hub, trained = base_model("llama", "stacked")
    adapter = pairs_for(trained)
    base = {
        n.replace(f"{x}.", f"{x}{wrapper}.", 1) if (x := next((y for y in LAYERS if y in n), "")) else n: t
        for n, t in trained.items()
    }
    source = put(tmp_path / "iter_0000010", base | adapter)
    named = str(put_config(tmp_path / "hub", config))
    result = export(source, tmp_path / "out", config=named)
    alone = export(put(tmp_path / "alone", adapter), tmp_path / "want", config=named)
    files = [tmp_path / x / "adapter_model.safetensors" for x in ("out", "want")]
    assert files[0].read_bytes() == files[1].read_bytes()
    dropped = {name for name, rule in result.dropped if "base weight" in rule}
    assert dropped == base.keys()
    assert not any("base weight" in rule for _, rule in alone.dropped)
    export(source, tmp_path / "base", config=named, exclude=["*.adapter.*"])
    got = load_file(tmp_path / "base" / "model.safetensors")
    assert got.keys() == hub.keys()
    assert all(torch.equal(got[name], hub[name]) for name in hub)


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("*linear_qkv*linear_in*", "lacks"),
        ("*linear_fc2*linear_out*", "lacks"),
        ("*.0.*linear_proj*linear_in*", "lacks"),
    ],
)
def test_half_an_adapter_is_refused(tmp_path: Path, lost: str, message: str) -> None:
    config, _, trained = base_model("llama", "layers")
    source = put(tmp_path / "iter_0000010", pairs_for(trained))
    with pytest.raises(NameMismatch, match=message):
        export(source, tmp_path / "out", config=str(put_config(tmp_path / "hub", config)), exclude=[lost])
    assert not (tmp_path / "out").exists()


def test_shapes_of_another_model(tmp_path: Path) -> None:
    config, _, trained = base_model("llama", "layers")
    adapter = pairs_for(trained)
    named = str(put_config(tmp_path / "hub", config))
    name = "decoder.layers.1.mlp.linear_fc2.adapter.linear_out.weight"
    for other in (adapter[name][:-1], adapter[name][:, :-1]):
        source = put(tmp_path / f"iter_{other.shape[0]}_{other.shape[1]}", adapter | {name: other.clone()})
        with pytest.raises(NameMismatch):
            export(source, tmp_path / "out", config=named)


def test_a_config_of_another_rank(tmp_path: Path) -> None:
    config, _, trained = base_model("llama", "layers")
    source = put(tmp_path / "iter_0000010", pairs_for(trained), {"dim": 2 * RANK})
    with pytest.raises(NameMismatch, match="rank 4"):
        export(source, tmp_path / "out", config=str(put_config(tmp_path / "hub", config)))


def test_alpha_is_in_no_shape(tmp_path: Path) -> None:
    config, _, trained = base_model("llama", "layers")
    source = put(tmp_path / "iter_0000010", pairs_for(trained), {"alpha": None})
    named = put_config(tmp_path / "hub", config)
    export(source, tmp_path / "out", config=str(named))
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["lora_alpha"] == RANK
    (source / "run_config.yaml").unlink()
    with pytest.raises(UsageError, match="no adapter_config") as caught:
        export(source, tmp_path / "none", config=str(named))
    assert "'*.adapter.*'" in (caught.value.hint or "")
    (named / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 3}))
    export(source, tmp_path / "named", config=str(named))
    written = json.loads((tmp_path / "named/adapter_config.json").read_text())
    assert (written["lora_alpha"], written["r"]) == (3, RANK)


def test_without_a_config_rows_cannot_be_split(tmp_path: Path) -> None:
    _, _, trained = base_model("llama", "layers")
    source = put(tmp_path / "iter_0000010", pairs_for(trained))
    with pytest.raises((NameMismatch, UsageError), match="is not known"):
        export(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("decoder.layers.0.mlp.linear_fc1.adapter.weight_magnitude", "magnitudes"),
        ("decoder.layers.0.mlp.experts.linear_fc1.adapter.linear_in.weight", "experts"),
        ("decoder.layers.0.mlp.linear_fc1.adapter.lora_new.weight", "LoRA alone"),
    ],
)
def test_other_adapters_are_refused_by_name(tmp_path: Path, name: str, message: str) -> None:
    config, _, trained = base_model("llama", "layers")
    source = put(tmp_path / "iter_0000010", pairs_for(trained) | {name: torch.ones(4)})
    with pytest.raises(UsageError, match=message) as caught:
        export(source, tmp_path / "out", config=str(put_config(tmp_path / "hub", config)))
    assert "names='stored'" in (caught.value.hint or "")
    assert not (tmp_path / "out").exists()
