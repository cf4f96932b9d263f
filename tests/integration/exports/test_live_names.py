"""Live transformers modules under the hub's names: what `save_pretrained` writes, from rules alone.

The oracle is transformers itself. Every element of a module is another random number, and what our map makes
of the module's tensors, read through the manifest, must be those of the files that it saves.
"""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckptcore
from ckptcore.errors import MissingDependency, NameMismatch, UsageError

transformers: Any = pytest.importorskip("transformers", minversion="5.0")

import small_models  # noqa: E402
from families import FAMILIES  # noqa: E402
from trainer_names import tiny_model  # noqa: E402

from ckptcore.core.manifest import TensorSpec  # noqa: E402
from ckptcore.naming.maps import from_transformers, hub_config, hyperparameters, live_families  # noqa: E402
from ckptcore.naming.maps.agreement import agreement  # noqa: E402
from ckptcore.naming.maps.conversion import convert  # noqa: E402
from ckptcore.naming.maps.matching import match  # noqa: E402
from ckptcore.planning import live_maps  # noqa: E402

SOME = (
    "deepseek_v3",
    "deepseek_v4",  # a renaming finds its final norm, which is none of what it is for
    "gemma3",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "llama4_text",
    "mixtral",
    "nemotron_h",
    "olmoe",
    "qwen3_5_moe_text",
    "qwen3_moe",
)
Config = Mapping[str, Any]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``hub/``: what `save_pretrained` writes; ``live/``: a DCP folder with the module's names;
    ``live.safetensors``: the same."""
    folder = tmp_path_factory.mktemp("mixtral")
    model = small_models.filled("mixtral")
    model.save_pretrained(folder / "hub")
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "live")
    save_file({n: t.clone() for n, t in model.state_dict().items()}, folder / "live.safetensors")
    return folder


def test_frozen_steps_are_what_transformers_has() -> None:
    """`python -m ckptcore.naming.maps.from_transformers FOLDER` makes them anew."""
    assert transformers.__version__ == live_families.frozen_version()
    file = resources.files(live_families.__package__) / "transformers" / "steps.toml"
    made = from_transformers.steps_toml(from_transformers.entries(), transformers.__version__)
    assert made == file.read_text("utf-8")


def test_frozen_defaults_of_configs_are_those_of_transformers() -> None:
    """And a config of any of these classes contradicts neither itself nor its own defaults."""
    file = resources.files(live_families.__package__) / "transformers" / hub_config.FROZEN
    assert from_transformers.configs_toml(transformers.__version__) == file.read_text("utf-8")
    for kind in tomllib.loads(file.read_text("utf-8"))["class"]:
        form = json.loads(transformers.CONFIG_MAPPING[kind]().to_json_string(use_diff=False))
        found = agreement(
            hyperparameters.Config("full", "hf-hub", form),
            [hyperparameters.Config("unset", "hf-hub", {"model_type": kind})],
        )
        assert not found.contradictions, kind


@pytest.mark.usefixtures("asked_here")
def test_a_part_of_a_live_module_is_exported_with_a_warning(mixtral: Path, tmp_path: Path) -> None:
    """As of trainers' names: what was left out by name is no error; half of a tensor's pieces still are."""
    options = {"verb": "export", "catalog": False, "arch": "mixtral"}
    source = str(mixtral / "live")
    done = ckptcore.convert(source, str(tmp_path / "out"), include=["*.layers.1.*"], **options)
    assert [w.code for w in done.warnings if w.code == "not-loadable"]
    found = load_file(tmp_path / "out/model.safetensors")
    all_tensors = {n: t for f in (mixtral / "hub").glob("*.safetensors") for n, t in load_file(f).items()}
    assert found.keys() == {n for n in all_tensors if n.startswith("model.layers.1.")}
    assert all(torch.equal(found[n], all_tensors[n]) for n in found)


@pytest.mark.soak
def test_frozen_families_are_what_transformers_has() -> None:
    file = resources.files(live_families.__package__) / "transformers" / "families.toml"
    found = from_transformers.families()
    assert from_transformers.families_toml(found, transformers.__version__) == file.read_text("utf-8")


@pytest.mark.parametrize("model_type", ["deepseek_v4", "maskformer", "shieldgemma2", "mixtral", "gemma3"])
def test_names_of_both_worlds_are_recognised(model_type: str) -> None:
    """Also where a step finds something in a name that is not its own: the loader takes the name itself."""
    model = small_models.build(model_type)
    family = live_families.frozen_family(model.config.to_dict())
    assert family is not None
    assert live_families.world_of(family, small_models.live(model)) == "hf-live"
    assert live_families.world_of(family, small_models.saved(model)) == "hf-hub"


@pytest.mark.alike(4)
@pytest.mark.parametrize("model_type", SOME)
def test_files_are_what_transformers_saves(model_type: str, tmp_path: Path) -> None:
    model = small_models.filled(model_type)
    prove(model, tmp_path)
    assert_same_steps(model)


@pytest.mark.soak
def test_every_model_is_saved_as_transformers_saves_it(tmp_path: Path) -> None:
    """Of about 640 model types some 500 can be built small; what cannot be mapped is refused by class."""
    proven, skipped, refused, wrong = 0, [], [], []
    for model_type in small_models.model_types():
        try:
            model = small_models.filled(model_type, most=15_000_000)
        except LookupError as error:
            skipped.append(f"{model_type}: {error}"[:200])
            continue
        folder = tmp_path / model_type
        folder.mkdir()
        try:
            prove(model, folder)
            proven += 1
        except UsageError as error:
            refused.append(f"{model_type}: {error}")
        except Exception as error:  # all of them are seen, and then none may be
            wrong.append(f"{model_type}: {type(error).__name__}: {error}"[:500])
        shutil.rmtree(folder)
    print(
        f"{proven} model types; {len(refused)} refused, {len(skipped)} not built:",
        *refused,
        *skipped,
        sep="\n",
    )
    assert wrong == []
    assert proven > 450
    assert all("arbitrary Python" in reason for reason in refused)
    assert len(refused) < 3


def prove(model: Any, folder: Path) -> None:
    """Live to hub, element by element; and back, where every rule has an inverse."""
    model.save_pretrained(folder / "hub")
    config = json.loads((folder / "hub/config.json").read_text())
    family = live_families.frozen_family(config)
    assert family is not None, type(model).__name__
    state = {n: t.clone().contiguous() for n, t in model.state_dict().items() if hasattr(t, "shape")}
    save_file(state, folder / "live.safetensors")
    source = ckptcore.open(str(folder / "live.safetensors"))
    rules = live_families.live_map(family, state, config, {n: t.shape for n, t in state.items()})
    made = convert(source, rules, {}).manifest
    saved = files(folder / "hub")
    got = {t.fqn: ckptcore.read(made, t.fqn) for t in made.tensors}
    assert saved.keys() <= got.keys()
    for name, tensor in saved.items():
        assert same(got[name], tensor), name
    for name in got.keys() - saved.keys():  # of tensors that share their values, one is saved
        assert any(same(got[name], t) for t in saved.values()), f"{name} is not saved"
    if any(rule.one_way for rule in rules.rules):
        return
    save_file({n: t.contiguous() for n, t in got.items()}, folder / "all.safetensors")
    back = live_families.hub_map(family, got, config, {n: t.shape for n, t in got.items()}, state)
    live = convert(ckptcore.open(str(folder / "all.safetensors")), back, {}).manifest
    assert {t.fqn for t in live.tensors} == state.keys()
    for name, tensor in state.items():
        assert same(ckptcore.read(live, name), tensor), name


def test_parts_of_other_lengths_than_each_other(tmp_path: Path) -> None:
    """`save_pretrained` cuts 28 channels of convolutions into 10, 10 and 8."""
    config = transformers.OlmoHybridConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=4,
        linear_num_value_heads=2,
        linear_value_head_dim=6,
        pad_token_id=0,
    )
    model = transformers.OlmoHybridForCausalLM(config)
    small_models.refill(model)
    prove(model, tmp_path)
    saved = files(tmp_path / "hub")
    lengths = [saved[f"model.layers.0.linear_attn.{p}_conv1d.weight"].shape[0] for p in "qkv"]
    assert lengths == [10, 10, 8]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def files(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}


def assert_same_steps(model: Any) -> None:
    """The frozen family's steps are those that transformers collects for this model, scopes included."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    family = live_families.frozen_family(model.config.to_dict())
    assert family is not None
    wanted = [
        (t.scope_prefix, t.compiled_sources.pattern)
        for t in get_model_conversion_mapping(model, add_legacy=False)
    ]
    assert [(s.scope, s.form.to_live.find) for s in family.steps] == wanted


@pytest.mark.parametrize("model_type", ["gemma3", "mixtral", "qwen2_5_vl", "nemotron_h"])
def test_names_that_are_the_hubs_stay(model_type: str) -> None:
    """Also where saving would find something in them to rename once more."""
    model = small_models.build(model_type)
    family = live_families.frozen_family(model.config.to_dict())
    assert family is not None
    assert live_families.world_of(family, small_models.saved(model)) == "hf-hub"
    assert live_families.world_of(family, small_models.live(model)) == "hf-live"


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "qwen2_5_vl"])
@pytest.mark.usefixtures("asked_here")
def test_a_family_that_is_not_frozen_is_asked_of_transformers(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_models.build(model_type)
    config = model.config.to_dict()
    frozen = live_families.frozen_family(config)
    assert frozen is not None
    monkeypatch.setattr(live_maps, "frozen_family", lambda config: None)
    found = live_maps.family_of_config(config, dict.fromkeys(small_models.live(model), (1,)))
    assert found is not None
    assert found.steps == frozen.steps
    names = small_models.live(model)
    assert (
        live_families.live_map(found, names, config).rules
        == live_families.live_map(frozen, names, config).rules
    )


def test_another_text_model_is_another_family() -> None:
    """A vision model around Qwen3-MoE: its language model has experts, which the frozen one has not."""
    config = transformers.LlavaConfig(
        text_config=transformers.Qwen3MoeConfig(), architectures=["LlavaForConditionalGeneration"]
    )
    assert live_families.frozen_family(config.to_dict()) is None
    plain = transformers.LlavaConfig(architectures=["LlavaForConditionalGeneration"])
    assert live_families.frozen_family(plain.to_dict()) is not None


def test_without_transformers_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = {"model_type": "of_tomorrow", "architectures": ["TomorrowForCausalLM"]}
    with pytest.raises(MissingDependency, match=r"TomorrowForCausalLM.*not installed"):
        live_maps.family_of_config(config, {"model.layers.0.mlp.experts.gate_up_proj": (4, 2)})
    assert live_maps.family_of_config(config, {"model.layers.0.mlp.up_proj.weight": (4, 2)}) is None


def test_arbitrary_python_is_refused_by_class() -> None:
    model = small_models.build("ernie4_5_vl_moe")
    family = live_families.frozen_family(model.config.to_dict())
    assert family is not None
    with pytest.raises(UsageError, match="ErnieFuseAndSplitTextVisionExperts is arbitrary Python"):
        live_families.live_map(family, small_models.live(model))
    assert live_families.world_of(family, small_models.live(model)) == "hf-live"
    assert live_families.world_of(family, small_models.saved(model)) == "hf-hub"  # which need no map


def test_a_part_that_is_missing_is_named() -> None:
    """Of what is joined: nothing else may take its place."""
    model = small_models.build("hrm_text")
    config = model.config.to_dict()
    family = live_families.frozen_family(config)
    assert family is not None
    names = small_models.live(model)
    lost = next(n for n in names if n.endswith("self_attn.k_proj.weight"))
    left = [TensorSpec(n, "float32", s) for n, s in names.items() if n != lost]
    found = match(live_families.live_map(family, [t.fqn for t in left], config), left, {})
    assert not found.fits
    assert any(lost in problem for problem in found.problems)


@pytest.mark.parametrize("name", ["a.{b}.weight", "a.<b>.weight", "a : b", "\0", "", " a", "a\n"])
def test_names_that_mean_something_in_rules(name: str) -> None:
    family = live_families.called("MixtralForCausalLM")
    assert family is not None
    with pytest.raises(UsageError, match="mean something in rules"):
        live_families.live_map(family, [name, "model.layers.0.mlp.experts.gate_up_proj"])


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize("family", ["mixtral", "gemma3"])
def test_export_of_a_live_module(family: str, tmp_path: Path) -> None:
    """From shards of a mesh, ties included; the logits are those of transformers' own folder."""
    exported(family, tmp_path)


@pytest.mark.soak
@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize("family", FAMILIES)
def test_export_of_each_family(family: str, tmp_path: Path) -> None:
    exported(family, tmp_path)


def exported(family: str, folder: Path) -> None:
    model = tiny_model(family)
    model.save_pretrained(folder / "hub")
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "whole")
    ckptcore.convert(str(folder / "whole"), str(folder / "sharded"), verb="reshard", mesh="fsdp=3")
    ckptcore.convert(str(folder / "sharded"), str(folder / "out"), verb="export", config=str(folder / "hub"))
    wanted, got = files(folder / "hub"), files(folder / "out")
    assert got.keys() == wanted.keys()
    assert all(same(got[n], t) for n, t in wanted.items())
    ids = torch.arange(24).reshape(2, 12)
    logits = []
    for path in (folder / "hub", folder / "out"):
        opened, report = type(model).from_pretrained(path, output_loading_info=True)
        assert not any(report[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        with torch.no_grad():
            logits.append(opened.eval()(input_ids=ids).logits)
    assert torch.equal(*logits)


@pytest.mark.usefixtures("asked_here")
def test_export_to_a_live_module_and_stored(mixtral: Path, tmp_path: Path) -> None:
    options = {"verb": "export", "config": str(mixtral / "hub")}
    ckptcore.convert(str(mixtral / "hub"), str(tmp_path / "live"), names="hf-live", **options)
    ckptcore.convert(str(mixtral / "live"), str(tmp_path / "stored"), names="stored", **options)
    wanted = small_models.filled("mixtral").state_dict()
    for folder in ("live", "stored"):
        got = files(tmp_path / folder)
        assert got.keys() == wanted.keys()
        assert all(same(got[n], t) for n, t in wanted.items())


@pytest.mark.parametrize("arch", ["nothing", "mllama"])
def test_an_architecture_that_is_not_known(mixtral: Path, tmp_path: Path, arch: str) -> None:
    with pytest.raises(UsageError, match=arch):
        ckptcore.convert(str(mixtral / "live"), str(tmp_path / "out"), verb="export", arch=arch)
    assert not (tmp_path / "out").exists()


def test_a_module_of_which_nothing_is_known(mixtral: Path, tmp_path: Path) -> None:
    """Its names stay, and none are made up."""
    with pytest.raises(NameMismatch, match="unknown model"):
        ckptcore.convert(str(mixtral / "live"), str(tmp_path / "out"), verb="export", names="hf-live")
    ckptcore.convert(str(mixtral / "live"), str(tmp_path / "out"), verb="export")
    assert "model.layers.0.mlp.experts.gate_up_proj" in files(tmp_path / "out")


def test_each_config_has_its_own_heads() -> None:
    """Of a model whose vision tower and text model both permute."""
    steps = [s for e in live_families.frozen_entries() for s in live_families.frozen_steps(e) if s.numbers]
    places = {name: place for s in steps for name, place in s.numbers.items()}
    assert places == {
        "num_attention_heads": "num_attention_heads",
        "vision_config_num_attention_heads": "vision_config.num_attention_heads",
    }
    family = live_families.called("Kimi_K25ForConditionalGeneration")
    assert family is not None
    with pytest.raises(UsageError, match=r"does not say vision_config\.num_attention_heads"):
        live_families.live_map(family, small_models.live(small_models.build("kimi_k25")), {})


def test_mutated_rules_are_noticed(mixtral: Path) -> None:
    """Gate and up turned round, experts shifted, a rule dropped: the proof above would fail each time."""
    family = live_families.called("MixtralForCausalLM")
    assert family is not None
    source = ckptcore.open(str(mixtral / "live.safetensors"))
    rules = live_families.live_map(family, [t.fqn for t in source.tensors])
    wanted = files(mixtral / "hub")
    fused = next(r for r in rules.rules if len(r.to) == 2)
    turned = replace(
        fused, to=(replace(fused.to[0], name=fused.to[1].name), replace(fused.to[1], name=fused.to[0].name))
    )
    mutant = replace(rules, rules=tuple(turned if r is fused else r for r in rules.rules))
    made = convert(source, mutant, {}).manifest
    wrong = [n for n, t in wanted.items() if not same(ckptcore.read(made, n), t)]
    assert wrong
    assert all(".w1." in n or ".w3." in n for n in wrong)
    with pytest.raises(NameMismatch, match="gate_up_proj"):
        convert(source, replace(rules, rules=tuple(r for r in rules.rules if r is not fused)), {})
