"""Maps: does every family come out as the hub has it, from every form of every world?"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptcore
from ckptcore.core.manifest import Manifest
from ckptcore.errors import NameMismatch, UsageError
from ckptcore.naming.maps.declaration import ArchMap, built_in_maps, read_maps
from ckptcore.naming.maps.layout import parse_layout, solved
from ckptcore.naming.rename import remap
from ckptcore.naming.worlds import suspected
from ckptcore.planning.name_maps import MappedNames, map_names

pytest.importorskip("transformers", minversion="5.0")

import trainer_names
from trainer_names import FAMILIES, WORLDS, State

hub_model = cache(trainer_names.hub_model)


def cases() -> Iterator[tuple[str, str, str]]:
    for arch, (_, _, worlds) in FAMILIES.items():
        for world in worlds:
            forms = WORLDS[world][1]
            if world == "torchtitan" and arch == "deepseek_v3":
                forms = ("old", "linear")
            if world == "megatron" and not any(k in FAMILIES[arch][1] for k in _EXPERTS):
                forms = ("stacked", "layers") if arch != "gpt2" else ("layers",)
            for form in forms:
                yield arch, world, form


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def stored(folder: Path, state: State) -> Manifest:
    dcp.save({"model": {n: t.contiguous() for n, t in state.items()}}, checkpoint_id=folder)
    return ckptcore.open(str(folder))


def mapped(manifest: Manifest, config: dict[str, Any] | None, arch: str = "auto") -> MappedNames:
    bare = remap(manifest, prefix="model.")
    world = suspected(t.fqn for t in bare.manifest.tensors)
    assert world is not None
    return map_names(bare, world, arch=arch, to="hf-hub", source=manifest, config=config, url="hub")


def made(folder: Path, arch: str, world: str, form: str) -> tuple[Manifest, dict[str, Any], State]:
    config, hub = hub_model(arch)
    return stored(folder, WORLDS[world][0](config, dict(hub), form)), config, hub


@pytest.mark.parametrize(("arch", "world", "form"), list(cases()))
def test_comes_out_as_the_hub_has_it(tmp_path: Path, arch: str, world: str, form: str) -> None:
    manifest, config, hub = made(tmp_path, arch, world, form)
    found = mapped(manifest, config).mapped.manifest
    assert {t.fqn: t.shape for t in found.tensors} == {n: tuple(t.shape) for n, t in hub.items()}
    for name, tensor in hub.items():
        assert torch.equal(ckptcore.read(found, name), tensor), name


def _table() -> set[tuple[str, str]]:
    return {(a, w) for a, (_, _, worlds) in FAMILIES.items() for w in worlds}


def test_every_map_has_a_line_in_the_table() -> None:
    written = {(m.arch, m.world) for m in built_in_maps() if not m.refused and m.to == "hf-hub"}
    tried_elsewhere = {("olmo", "olmo"), ("olmo2", "olmo"), ("olmoe", "olmo_core")}
    assert written - tried_elsewhere == _table()


def test_every_rule_says_why_it_has_no_way_back() -> None:
    for rules in built_in_maps():
        for rule in rules.rules:
            assert bool(rule.one_way) == bool(rule.drop or rule.drops or rule.repeats or rule.add)


def _mutated(rules: ArchMap, old: str, new: str) -> ArchMap:
    """The llama map of Megatron with something else in a shared text."""
    from ckptcore.naming.maps import declaration

    text = (Path(declaration.__file__).parent / "shared/megatron.toml").read_text()
    assert old in text
    groups = declaration.tomllib.loads(text.replace(old, new))
    held = {k: declaration.GroupForm.model_validate(v) for k, v in groups.items()}
    with pytest.MonkeyPatch.context() as patch:
        read = declaration._groups
        patch.setattr(declaration, "_groups", lambda name: held if name == "megatron" else read(name))
        family = (Path(declaration.__file__).parent / "families/llama.toml").read_text()
        return next(m for m in read_maps(family, "llama") if m.world == "megatron")


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
    bare = remap(manifest, prefix="model.").manifest
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
    if numbers.keys() == {"hidden_size"}:  # no shape needs it
        assert mapped(manifest, config | numbers).map.arch == "llama"
        return
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


def test_an_unknown_vocabulary_is_said(tmp_path: Path) -> None:
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


def test_what_has_no_rules_yet_is_refused_by_name(tmp_path: Path) -> None:
    state = {
        "embedding.word_embeddings.weight": torch.ones(8, 4),
        "decoder.layers.0.mixer.in_proj.weight": torch.ones(8, 4),
        "decoder.final_layernorm.weight": torch.ones(4),
    }
    with pytest.raises(UsageError, match="Mamba layers"):
        mapped(stored(tmp_path, state), None)


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
        read_maps(text, "x")


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
