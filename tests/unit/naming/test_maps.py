"""Maps: every family comes out as on the hub, from every form of every world."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptcore
from ckptcore.core.manifest import Manifest
from ckptcore.errors import AmbiguousModel, NameMismatch, UsageError
from ckptcore.naming.maps.declaration import ArchMap, built_in_maps, family_form, maps_of
from ckptcore.naming.maps.layout import parse_layout, solved
from ckptcore.naming.rename import ModelPart, remap
from ckptcore.naming.worlds import suspected
from ckptcore.planning.name_maps import MappedNames, NameRequest, map_names

pytest.importorskip("transformers", minversion="5.0")

import grids
import trainer_names
from families import FAMILIES, forms
from trainer_names import WORLDS, State

hub_model = cache(trainer_names.hub_model)


def cases() -> Iterator[tuple[str, str, str]]:
    for family, (_, _, worlds) in FAMILIES.items():
        yield from ((family, world, form) for world in worlds for form in forms(family, world))


def stored(folder: Path, state: State) -> Manifest:
    dcp.save({"model": {n: t.contiguous() for n, t in state.items()}}, checkpoint_id=folder)
    return ckptcore.open(str(folder))


def mapped(manifest: Manifest, config: dict[str, Any] | None, arch: str = "auto") -> MappedNames:
    bare = remap(manifest, model=ModelPart("model.", "by the test"))
    world = suspected(t.fqn for t in bare.manifest.tensors)
    assert world is not None
    return map_names(
        bare, world, NameRequest(arch=arch, to="hf-hub", source=manifest, config=config, url="hub")
    )


def made(folder: Path, arch: str, world: str, form: str) -> tuple[Manifest, dict[str, Any], State]:
    config, hub = hub_model(arch)
    if world == "nanotron":
        (folder / "model_config.json").write_text(json.dumps(trainer_names.nanotron_config(config, form)))
    return stored(folder, WORLDS[world][0](config, dict(hub), form)), config, hub


@pytest.mark.parametrize(
    ("arch", "world", "form"), grids.sliced(list(cases()), lambda row: (row[0], row[1:]))
)
def test_comes_out_as_the_hub_has_it(tmp_path: Path, arch: str, world: str, form: str) -> None:
    manifest, config, hub = made(tmp_path, arch, world, form)
    found = mapped(manifest, config).mapped.manifest
    assert {t.fqn: t.shape for t in found.tensors} == {n: tuple(t.shape) for n, t in hub.items()}
    for name, tensor in hub.items():
        assert torch.equal(ckptcore.read(found, name), tensor), name


@pytest.mark.parametrize("between", ["", "local_experts."])
@pytest.mark.parametrize("arch", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_whose_gate_and_up_are_apart(tmp_path: Path, arch: str, between: str) -> None:
    """As Megatron's readers name the halves of `linear_fc1`, below experts that are modules of their own."""
    config, hub = hub_model(arch)
    state: State = {}
    for name, tensor in WORLDS["megatron"][0](config, dict(hub), "sequential").items():
        head, mark, tail = name.partition(".experts.local_experts.")
        new = f"{head}.experts.{between}{tail}" if mark else name
        halves = tensor.chunk(2) if mark and new.endswith("linear_fc1.weight") else ()
        state |= {f"{new}_{x}": half for x, half in zip("wv", halves, strict=False)} or {new: tensor}
    assert sum(name.endswith("_w") for name in state)
    found = mapped(stored(tmp_path, state), config).mapped.manifest
    assert {t.fqn: t.shape for t in found.tensors} == {n: tuple(t.shape) for n, t in hub.items()}
    for name, tensor in hub.items():
        assert torch.equal(ckptcore.read(found, name), tensor), name


PREDICTION = {
    "megatron": ("decoder.layers.0.", "mtp.layers.0.transformer_layer.", "mtp.layers.0.", "final_layernorm"),
    "torchtitan": ("layers.0.", "mtp_layers.0.", "mtp_layers.0.", "mtp_norm"),
}


def with_prediction(arch: str, world: str, form: str) -> tuple[State, dict[str, Any], State]:
    """(stored, config, hub) of a model with a layer of multi-token prediction, built as its last layer is."""
    config, hub = hub_model(arch)
    config, hub = config | {"num_nextn_predict_layers": 1}, dict(hub)
    make, count = WORLDS[world][0], config["num_hidden_layers"]
    own = {n: torch.randn_like(t) for n, t in trainer_names.below(hub, count - 1).items()}
    state = make(config, dict(hub), form)
    alone = {n: t for n, t in hub.items() if ".layers." not in n}
    alone |= {f"model.layers.0.{n}": t for n, t in own.items()}
    old, new, beside, norm = PREDICTION[world]
    for name, tensor in make(config | {"num_hidden_layers": 1}, alone, form).items():
        if name.startswith(old):
            state[new + name.removeprefix(old)] = tensor
    more = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", norm: "shared_head.norm"}
    for name, of_hub in more.items():
        own[f"{of_hub}.weight"] = state[f"{beside}{name}.weight"] = torch.randn(
            16, 32 if name == "eh_proj" else 1
        )
    return state, config, hub | {f"model.layers.{count}.{n}": t for n, t in own.items()}


@pytest.mark.parametrize(
    ("arch", "world", "form"),
    [
        ("deepseek_v3", "megatron", "grouped"),
        ("deepseek_v32", "megatron", "layers"),
        ("glm4_moe", "megatron", "sequential"),
        ("deepseek_v3", "torchtitan", "old"),
        ("deepseek_v3", "torchtitan", "linear"),
    ],
)
def test_layers_of_multi_token_prediction_are_behind_the_others(
    tmp_path: Path, arch: str, world: str, form: str
) -> None:
    """As the hub counts them, and loaders of other programs look for them; transformers has none."""
    state, config, hub = with_prediction(arch, world, form)
    found = mapped(stored(tmp_path, state), config).mapped.manifest
    assert {t.fqn: t.shape for t in found.tensors} == {n: tuple(t.shape) for n, t in hub.items()}
    for name, tensor in hub.items():
        assert torch.equal(ckptcore.read(found, name), tensor), name


def test_latent_keys_and_values_may_be_apart(tmp_path: Path) -> None:
    """By head, keys above values: (q k nope, v)."""
    config, hub = hub_model("deepseek_v3")
    state = WORLDS["megatron"][0](config, dict(hub), "layers")
    for n in range(config["num_hidden_layers"]):
        both = state.pop(f"decoder.layers.{n}.self_attention.linear_kv_up_proj.weight").view(4, 16, 8)
        for x, rows in (("k", slice(8)), ("v", slice(8, 16))):
            name = f"decoder.layers.{n}.self_attention.linear_{x}_up_proj.weight"
            state[name] = both[:, rows].reshape(32, 8)
    found = mapped(stored(tmp_path, state), config).mapped.manifest
    for name, tensor in hub.items():
        assert torch.equal(ckptcore.read(found, name), tensor), name


def test_half_a_layer_of_multi_token_prediction_is_refused(tmp_path: Path) -> None:
    state, config, _ = with_prediction("glm4_moe", "megatron", "grouped")
    for gone in ("self_attention.linear_proj.weight", "input_layernorm.weight"):
        del state[f"mtp.layers.0.transformer_layer.{gone}"]
    with pytest.raises(
        NameMismatch, match=r"mtp/megatron/input-norm/input-norm .*mtp/megatron/attention/out"
    ):
        mapped(stored(tmp_path, state), config)


@pytest.mark.parametrize(("count", "over"), [(1, []), (0, ["model.layers.2.eh_proj.weight"]), (10**6, ...)])
def test_prediction_layers_are_no_left_over(count: int, over: Any) -> None:
    """transformers ignores them in models of the published number of layers alone; the config counts them."""
    from ckptcore.planning.meta_model import describe

    config, hub = hub_model("glm4_moe")
    shapes = {n: list(t.shape) for n, t in hub.items()} | {"model.layers.2.eh_proj.weight": [16, 32]}
    answer = describe(config | {"num_nextn_predict_layers": count}, shapes)
    assert answer["unexpected"] == (["model.layers.2.eh_proj.weight"] if over is ... else over)


def _table() -> set[tuple[str, str]]:
    return {(a, w) for a, (_, _, worlds) in FAMILIES.items() for w in worlds}


def test_every_map_has_a_line_in_the_table() -> None:
    written = {(m.arch, m.world) for m in built_in_maps() if not m.refused and m.to == "hf-hub"}
    assert written == _table()


def test_every_rule_says_why_it_has_no_way_back() -> None:
    for rules in built_in_maps():
        for rule in rules.rules:
            assert bool(rule.one_way) == bool(rule.drop or rule.drops or rule.repeats)


def _mutated(rules: ArchMap, old: str, new: str) -> ArchMap:
    """The llama map of Megatron with something else in a shared text."""
    from ckptcore.naming.maps import declaration

    text = (Path(declaration.__file__).parent / "shared/megatron.toml").read_text()
    assert old in text
    groups = declaration.tomllib.loads(text.replace(old, new))
    forms_of_groups = {k: declaration.GroupForm.model_validate(v) for k, v in groups.items()}
    with pytest.MonkeyPatch.context() as patch:
        read = declaration._groups
        patch.setattr(
            declaration, "_groups", lambda name: forms_of_groups if name == "megatron" else read(name)
        )
        family = (Path(declaration.__file__).parent / "families/llama.toml").read_text()
        return next(m for m in maps_of(family_form(family, "llama"), "llama") if m.world == "megatron")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(kv_heads (q + k + v) head_dim)", "(kv_heads (k + q + v) head_dim)"),
        ("(kv_heads (q + k + v) head_dim)", "((q + k + v) kv_heads head_dim)"),
        ("(gate + up) ffn) h", "(up + gate) ffn) h"),
    ],
)
def test_another_order_is_another_model(tmp_path: Path, old: str, new: str) -> None:
    """What the comparison with the hub's tensors is worth: each of these would pass a check of shapes."""
    from ckptcore.naming.maps.conversion import convert

    manifest, _, hub = made(tmp_path, "llama", "megatron", "layers")
    bare = remap(manifest, model=ModelPart("model.", "by the test")).manifest
    numbers = {"heads": 4, "kv_heads": 2, "vocab": 40}
    found = convert(bare, _mutated(built_in_maps()[0], old, new), numbers).manifest
    assert {t.fqn: t.shape for t in found.tensors} == {n: tuple(t.shape) for n, t in hub.items()}
    assert any(not torch.equal(ckptcore.read(found, n), t) for n, t in hub.items())


def test_missing_and_left_over_tensors_are_named(tmp_path: Path) -> None:
    config, hub = hub_model("qwen3_moe")
    state = WORLDS["megatron"][0](config, dict(hub), "sequential")
    del state["decoder.layers.1.mlp.experts.local_experts.2.linear_fc2.weight"]
    state["decoder.layers.0.adapter.weight"] = torch.ones(2)
    with pytest.raises(NameMismatch) as caught:
        mapped(stored(tmp_path, state), config)
    message = caught.value.message
    assert "no rule for decoder.layers.0.adapter.weight" in message
    assert "nothing makes model.layers.1.mlp.experts.2.down_proj.weight" in message


@pytest.mark.parametrize("arch", ["llama", "gemma3", "deepseek_v3", "gpt2"])
@pytest.mark.parametrize(
    "name",
    [
        "rotary_pos_emb.inv_freq",
        "rotary_emb.inv_freq",
        "decoder.layers.0.self_attention.rotary_emb.inv_freq",
        "decoder.rotary_pos_emb.inv_freq",
    ],
)
def test_stored_frequencies_are_left_out_with_a_reason(tmp_path: Path, arch: str, name: str) -> None:
    config, hub = hub_model(arch)
    state = WORLDS["megatron"][0](config, dict(hub), "layers") | {name: torch.ones(2)}
    found = mapped(stored(tmp_path, state), config)
    assert {t.fqn for t in found.mapped.manifest.tensors} == set(hub)
    (gone,) = [d for d in found.mapped.dropped if d.fqn.endswith("inv_freq")]
    assert gone.rule == "computed from the config"


@pytest.mark.grid
@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize("arguments", [argparse.Namespace(lr=0.1), {"lr": 0.1}, {"x": torch.ones(2)}])
@pytest.mark.parametrize("key", ["model", "net"])
def test_the_part_that_a_map_takes_is_found_or_named(tmp_path: Path, key: str, arguments: object) -> None:
    config, hub = hub_model("llama")
    state = WORLDS["megatron"][0](config, dict(hub), "layers")
    torch.save({key: state, "args": arguments}, tmp_path / "m.pt")
    (tmp_path / "config.json").write_text(json.dumps(config))
    source, target = str(tmp_path / "m.pt"), str(tmp_path / "out")
    prefix = None
    if key == "net" and isinstance(arguments, dict) and "x" in arguments:  # two parts with tensors
        with pytest.raises(AmbiguousModel) as caught:
            ckptcore.convert(source, target, verb="export", catalog=False)
        assert caught.value.hint == f"name it: model_prefix='{key}.'"
        prefix = f"{key}."
    ckptcore.convert(source, target, verb="export", catalog=False, model_prefix=prefix)


@pytest.mark.parametrize(("changed", "why"), [(None, "inner is not known"), (3, "no_rope_layer = 3")])
def test_rotary_pairs_of_nanotron_are_not_guessed(tmp_path: Path, changed: Any, why: str) -> None:
    """Releases that do not record their order had another one; layers without them are another model."""
    manifest, config, _ = made(tmp_path, "llama", "nanotron", "halves")
    recorded = trainer_names.nanotron_config(config, "halves") | {"no_rope_layer": changed}
    if changed is None:
        del recorded["rope_interleaved"]
    (tmp_path / "model_config.json").write_text(json.dumps(recorded))
    with pytest.raises(NameMismatch, match=why):
        mapped(manifest, config)


@pytest.mark.parametrize("form", ["layers", "grouped"])
def test_the_last_expert_of_every_layer_is_missed_by_its_router(tmp_path: Path, form: str) -> None:
    """No config says how many there are."""
    config, hub = hub_model("deepseek_v3")
    state = WORLDS["megatron"][0](config, dict(hub), form)
    of_experts = [n for n in state if ".mlp.experts." in n]
    for name in of_experts:
        if form == "layers":
            state[name] = state[name][:3]
        elif name.endswith("3"):
            del state[name]
    with pytest.raises(NameMismatch, match=r"experts is 3 by .* 4 by .*router|mlp\.experts\.3\.gate_proj"):
        mapped(stored(tmp_path, state), None)


def test_a_missing_layer_is_named(tmp_path: Path) -> None:
    config, hub = hub_model("llama")
    state = WORLDS["megatron"][0](config, dict(hub), "layers")
    state = {n: t for n, t in state.items() if ".layers.1." not in n}
    with pytest.raises(NameMismatch, match=r"nothing makes model.layers.1\.input_layernorm.weight"):
        mapped(stored(tmp_path, state), config)


def test_an_unknown_number_is_asked_for(tmp_path: Path) -> None:
    manifest, _, _ = made(tmp_path, "llama", "torchtitan", "old")
    with pytest.raises(NameMismatch, match=r"kv_heads is not known|heads is not known|q is not known"):
        mapped(manifest, None)


@pytest.mark.parametrize(
    "numbers",
    [
        {"num_attention_heads": 3},
        {"num_attention_heads": 4, "num_key_value_heads": 0},
        {"num_key_value_heads": 8},
        {"num_key_value_heads": -2},
        {"num_key_value_heads": 10**40},
        {"vocab_size": 10**9},
        {"num_hidden_layers": 2**30},
        {"num_hidden_layers": 1},
        {"head_dim": 7},
        {"hidden_size": float("nan")},
    ],
)
def test_numbers_that_make_no_sense_are_refused(tmp_path: Path, numbers: dict[str, Any]) -> None:
    manifest, config, _ = made(tmp_path, "llama", "megatron", "layers")
    with pytest.raises(NameMismatch):
        mapped(manifest, config | numbers)


def test_names_that_no_pattern_has_are_left_over(tmp_path: Path) -> None:
    config, hub = hub_model("llama")
    state = WORLDS["megatron"][0](config, dict(hub), "layers")
    for odd in ("decoder.layers.\0.x._extra_state", "decoder.layers.01.input_layernorm.weight", "%d%s"):
        state[odd] = torch.ones(2)
    with pytest.raises(NameMismatch) as caught:
        mapped(stored(tmp_path, state), config)
    assert len(caught.value.values["unexpected"]) == 3


def test_layouts_that_nothing_tells_apart_are_refused(tmp_path: Path) -> None:
    """Experts as wide as the model: transposed or not, the shapes are the same."""
    _, hub = hub_model("olmoe")
    config = dict(hub_model("olmoe")[0]) | {"intermediate_size": 16}
    square = {n: t[:16, :16] if ".experts." in n else t for n, t in hub.items()}
    manifest = stored(tmp_path, WORLDS["olmo_core"][0](config, square, "dropless"))
    with pytest.raises(UsageError, match="cannot find the layout of olmoe"):
        mapped(manifest, config)
    trained = {"model": {"block": {"name": "moe", "feed_forward_moe": {"name": "dropless"}}}}
    (tmp_path / "config.json").write_text(json.dumps(trained))
    found = mapped(manifest, config).mapped.manifest
    for name, tensor in square.items():
        assert torch.equal(ckptcore.read(found, name), tensor), name


def test_an_unknown_vocabulary_is_a_warning(tmp_path: Path) -> None:
    manifest, config, _ = made(tmp_path, "llama", "megatron", "layers")
    found = mapped(manifest, {k: v for k, v in config.items() if k != "vocab_size"})
    assert [w.code for w in found.warnings] == ["assumed-size"]
    assert found.mapped.manifest.tensors[0].shape == (48, 16)


def test_architectures_that_differ_must_be_named(tmp_path: Path) -> None:
    config, hub = hub_model("olmo2")
    manifest = stored(tmp_path, WORLDS["olmo_core"][0](config, dict(hub), "one"))
    numbers = {k: v for k, v in config.items() if k not in ("model_type", "architectures")}
    assert mapped(manifest, numbers).map.arch == "olmo2"
    with pytest.raises(NameMismatch):
        mapped(manifest, numbers, arch="llama")
    with pytest.raises(UsageError, match="no map takes olmo_core names of architecture 'mixtral'"):
        mapped(manifest, numbers, arch="mixtral")


def test_maps_with_another_familys_names_are_chosen_by_name_alone(tmp_path: Path) -> None:
    manifest, config, _ = made(tmp_path, "phi3", "megatron", "stacked")
    numbers = {k: v for k, v in config.items() if k not in ("model_type", "architectures")}
    assert mapped(manifest, numbers).map.arch == "llama"
    assert mapped(manifest, numbers, arch="phi3").map.arch == "phi3"
    assert mapped(manifest, config).map.because == "--config hub says phi3"


def test_a_config_that_the_trainer_cannot_express_is_refused(tmp_path: Path) -> None:
    manifest, config, _ = made(tmp_path, "granitemoe", "megatron", "layers")
    with pytest.raises(NameMismatch, match=r"--config hub says residual_multiplier = 0\.22"):
        mapped(manifest, config | {"residual_multiplier": 0.22})


def test_what_megatron_bridge_says_of_a_run_counts(tmp_path: Path) -> None:
    """Its run_config.yaml has the model's fields below a key, and tags that are not followed."""
    manifest, config, hub = made(tmp_path, "llama", "megatron", "layers")
    model = "num_attention_heads: 4\n  num_query_groups: 2\n  vocab_size: 40\n  num_layers: 2\n"
    text = f"model:\n  _target_: a.b.Provider\n  gated_linear_unit: true\n  {model}"
    (tmp_path / "run_config.yaml").write_text(text)
    found = mapped(manifest, None)
    assert found.map.numbers["heads"] == (4, "run_config.yaml says num_attention_heads = 4")
    name = "model.layers.1.self_attn.k_proj.weight"
    assert torch.equal(ckptcore.read(found.mapped.manifest, name), hub[name])
    (tmp_path / "run_config.yaml").write_text(text.replace("unit: true", "unit: false"))
    with pytest.raises(NameMismatch, match="gated_linear_unit = false"):
        mapped(manifest, None, arch="llama")
    (tmp_path / "run_config.yaml").write_text(text.replace("heads: 4", "heads: 8"))
    with pytest.raises(NameMismatch, match=r"num_attention_heads = 4, run_config\.yaml says"):
        mapped(manifest, config)


def test_what_has_no_rules_yet_is_refused_by_name(tmp_path: Path) -> None:
    state = {
        "embedding.word_embeddings.weight": torch.ones(8, 4),
        "decoder.layers.0.mixer.x_proj.weight": torch.ones(8, 4),  # of the first Mamba
        "decoder.final_layernorm.weight": torch.ones(4),
    }
    config = {"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"]}
    for n, known_by in enumerate((config, None)):  # its config, and its names alone
        with pytest.raises(UsageError, match="Mamba layers"):
            mapped(stored(tmp_path / f"{n}", state), known_by)


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ('from = "a : (x + y) h"\nto = "b : x h"', "has a part of"),
        ('from = "a.{i} : h"\nto = "b : h"', "has a part of"),
        ('from = "a : h"\nto = "b : h k"', "has a part of"),
        ('from = "a : (h"\nto = "b : h"', "not closed"),
        ('from = "a"\nto = "b"\ndrop = "x"', "either `to` or `drop`"),
        ('from = "a"\nto = "<b>"', "no text for <b>"),
        ('from = "a"\nto = "b"\naxes = { x = "__import__(1)" }', "is not part of an expression"),
        ('from = "a"\nto = "b"\nelse = 1', "Extra inputs"),
    ],
)
def test_a_map_that_says_something_impossible_is_refused(rule: str, why: str) -> None:
    text = f'arch = "x"\n[[map]]\nworld = "megatron"\n[[map.rule]]\nname = "r"\n{rule}\n'
    with pytest.raises(UsageError, match=why):
        maps_of(family_form(text, "x"), "x")


def test_sizes_that_contradict_a_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 6"):
        solved(parse_layout("(g (q + k) d) h"), (16, 4), {"g": 2, "q": 2, "k": 1})


def test_parts_of_a_compressed_item_are_read() -> None:
    """An item behind a codec is larger than what is taken out of it; how large, the manifest still says."""
    from safetensors.torch import load_file
    from samples import FIXTURES

    from ckptcore.naming.maps.conversion import convert
    from ckptcore.naming.maps.declaration import RuleForm, compiled

    folder = FIXTURES / "torch/dcp_zstd_2r"
    truth = load_file(folder / "expected.safetensors")["w0"]
    manifest = remap(ckptcore.open(str(folder / "ckpt")), include=["w0"]).manifest
    rule = RuleForm.model_validate({"name": "r", "from": "w0 : row column", "to": "c.{column} : row"})
    rules = ArchMap("x", (), (), "megatron", "hf-hub", tuple(compiled(rule)))
    found = convert(manifest, rules, {}).manifest
    for column in range(truth.shape[1]):
        assert torch.equal(ckptcore.read(found, f"c.{column}"), truth[:, column])
