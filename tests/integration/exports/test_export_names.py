"""Names: an export has every tensor that transformers needs to open it, and no other.

The oracle is transformers itself: what it saves, and what it says it lacks when it opens an export.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckptcore
from ckptcore.errors import NameMismatch, UsageError

transformers: Any = pytest.importorskip("transformers", minversion="5.0")

import small_models  # noqa: E402

from ckptcore.planning.config_folder import ConfigFolder, check_names  # noqa: E402
from ckptcore.planning.transformers_conversion import compare  # noqa: E402

SOME = (
    "bert",
    "deepseek_v3",
    "gemma3",
    "gpt_oss",
    "jamba",
    "kimi_linear",
    "mixtral",
    "nemotron_h",
    "olmoe",
    "qwen2_5_vl",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_vl_moe",
    "t5",
)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``ckpt/``: a small Mixtral under the hub's names; ``live/``: under the model's own; ``hub/``."""
    folder = tmp_path_factory.mktemp("mixtral")
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=52,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            architectures=["MixtralForCausalLM"],
        )
    )
    model.save_pretrained(folder / "hub")
    dcp.save({"model": load_file(folder / "hub/model.safetensors")}, checkpoint_id=folder / "ckpt")
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "live")
    return folder


def export(source: Path, target: Path, config: Path, **options: Any) -> Any:
    return ckptcore.convert(str(source), str(target), verb="export", config=str(config), **options)


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize("names", ["ckpt", "live"])
def test_both_forms_open_as_the_same_model(mixtral: Path, tmp_path: Path, names: str) -> None:
    export(mixtral / names, tmp_path / "out", mixtral / "hub")
    got, info = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    want = transformers.MixtralForCausalLM.from_pretrained(mixtral / "hub").state_dict()
    assert all(torch.equal(t, want[n]) for n, t in got.state_dict().items())


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize(
    ("gone", "named"),
    [
        (["*.experts.2.*", "*.experts.3.*"], r"missing: .*experts\.2\.w.*and 7 more"),
        (["*.block_sparse_moe.gate.weight"], r"missing: .*layers\.0\.block_sparse_moe\.gate\.weight"),
        (["*layers.1*experts.0.w2.weight"], r"missing: \S*layers\.1\S*experts\.0\.w2\.weight(?m:$)"),
        (["*layers.0*experts.1.w1.weight", "*layers.0*experts.2.w3.weight"], r"missing: .*1\.w1.*2\.w3"),
    ],
)
def test_parts_of_what_is_put_together_are_missed(
    mixtral: Path, tmp_path: Path, gone: list[str], named: str
) -> None:
    with pytest.raises(NameMismatch, match=named):
        export(mixtral / "ckpt", tmp_path / "out", mixtral / "hub", exclude=gone)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("process_of_its_own")
def test_nothing_is_imported_from_the_current_folder(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may be the checkpoint's; and the process of its own says what the one here says.

    An export asks several times, each question in a process: here is one of them.
    """
    state = load_file(mixtral / "hub/model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items() if ".experts.3." not in name}
    (tmp_path / "transformers.py").write_text("open('imported', 'w')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NameMismatch, match=r"missing: \S*experts\.3\.") as caught:
        check_names(folder_of(json.loads((mixtral / "hub/config.json").read_text())), shapes)
    assert caught.value.exit_code == 13
    assert [p.name for p in tmp_path.iterdir()] == ["transformers.py"]


@pytest.mark.usefixtures("asked_here")
def test_experts_are_numbered_without_gaps(mixtral: Path, tmp_path: Path) -> None:
    """Four of them would be stacked, whichever they are."""
    with pytest.raises(NameMismatch, match=r"missing: .*experts\.1\..*unexpected: .*experts\.7\."):
        export(
            mixtral / "ckpt",
            tmp_path / "out",
            mixtral / "hub",
            rename=[
                (
                    f"model.layers.{k}.block_sparse_moe.experts.1.",
                    f"model.layers.{k}.block_sparse_moe.experts.7.",
                )
                for k in range(2)
            ],
        )


@pytest.mark.usefixtures("asked_here")
def test_a_tie_that_the_config_does_not_have(mixtral: Path, tmp_path: Path) -> None:
    """The model would start with a random head."""
    state = load_file(mixtral / "hub/model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    dcp.save({"model": state}, checkpoint_id=tmp_path / "ckpt")
    with pytest.raises(NameMismatch, match=r"missing: lm_head\.weight"):
        export(
            tmp_path / "ckpt",
            tmp_path / "out",
            mixtral / "hub",
            tie=[("lm_head.weight", "model.embed_tokens.weight")],
        )


@pytest.mark.usefixtures("asked_here")
def test_fused_parameters_are_warned_of(mixtral: Path) -> None:
    config = folder_of(json.loads((mixtral / "hub/config.json").read_text()))
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig.from_pretrained(mixtral / "hub"))
    expected = check_names(config, small_models.live(model))
    (warning,) = expected.kept_names()
    assert warning.code == "fused-names"
    with pytest.raises(NameMismatch, match="not what save_pretrained of "):
        expected.require_exact(renaming=True)
    assert "model.layers.0.mlp.experts.gate_up_proj" in warning.message
    assert check_names(config, small_models.saved(model)).warnings == ()


def folder_of(config: Mapping[str, Any]) -> ConfigFolder:
    return ConfigFolder("memory", {"config.json": json.dumps(config).encode()})


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_5_moe_text", "nemotron_h"])
def test_models_whose_patterns_refer_to_groups(model_type: str) -> None:
    """Through the process that builds the model; with names that are renamed on the way."""
    model = small_models.build(model_type)
    config = folder_of(model.config.to_dict())
    names = small_models.saved(model)
    assert check_names(config, names).warnings == ()
    lost = next(n for n in reversed(names) if n.endswith("norm.weight"))
    with pytest.raises(NameMismatch, match=f"missing: {re.escape(lost)}"):
        check_names(config, {n: s for n, s in names.items() if n != lost})


@pytest.mark.usefixtures("asked_here")
def test_ties_are_in_the_names_of_the_export() -> None:
    """lm_head shares the embedding, which the hub's files call otherwise than the model."""
    model = small_models.build("qwen2_5_vl")
    model.config.tie_word_embeddings = model.config.text_config.tie_word_embeddings = True
    names = small_models.saved(model)
    assert "model.embed_tokens.weight" in names
    found = check_names(folder_of(model.config.to_dict()), names)
    assert found.ties == (("lm_head.weight", "model.embed_tokens.weight"),)
    without = {n: s for n, s in names.items() if n != "lm_head.weight"}
    assert check_names(folder_of(model.config.to_dict()), without).ties == ()


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "of_tomorrow"}, "has no model type 'of_tomorrow'"),
        ({"model_type": "timm_wrapper", "architectures": ["TimmWrapperModel"]}, "requires the"),
    ],
)
def test_models_that_cannot_be_built_here_go_unchecked(config: dict[str, Any], message: str) -> None:
    if "timm" in config["model_type"] and transformers.utils.is_timm_available():
        pytest.skip("timm is installed")
    (warning,) = check_names(folder_of(config), {"a": (1,)}).warnings
    assert warning.code == "names-unchecked"
    assert message in warning.message


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["LlamaForCausalLM"]},
        {"model_type": "llama", "architectures": ["pipeline"]},
        {"model_type": "llama", "architectures": [3]},
        {"model_type": "llama", "hidden_size": "wide"},
        {"model_type": ["llama"]},
        {"model_type": "llama", "hidden_size": -1},
    ],
)
def test_configs_that_describe_no_model(config: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="builds no model"):
        check_names(folder_of(config), {"a": (1,)})


@pytest.mark.parametrize("joined", [False, True])
def test_a_layer_too_many_is_no_prediction(joined: bool) -> None:
    """What predicts another token joins two inputs; the last decoder layer of another config does not."""
    model = small_models.build("deepseek_v3")
    names = small_models.saved(model)
    model.config.num_nextn_predict_layers = 1
    last = model.config.num_hidden_layers
    more = {
        n.replace(f"layers.{last - 1}.", f"layers.{last}."): s
        for n, s in names.items()
        if f"layers.{last - 1}." in n
    }
    if joined:
        more[f"model.layers.{last}.eh_proj.weight"] = (4, 8)
    found = compare(model, names | more)
    assert found.unexpected == ([] if joined else [*more])
    assert found.missing == []


@pytest.mark.alike(5)
@pytest.mark.parametrize("model_type", SOME)
def test_one_tensor_more_or_less(model_type: str) -> None:
    attack(model_type, random.Random(model_type), 3)


@pytest.mark.soak
def test_every_model_that_can_be_built(request: pytest.FixtureRequest) -> None:
    """Of about 640 model types some 590 have a class that takes its default config."""
    built, skipped = 0, []
    for model_type in small_models.model_types():
        try:
            small_models.build(model_type)
        except LookupError as error:
            skipped.append(f"{model_type}: {error}")
            continue
        attack(model_type, random.Random(model_type), 4)
        built += 1
    print(f"{built} model types, without {len(skipped)}:", *skipped, sep="\n  ")
    assert built > 400


def attack(model_type: str, rng: random.Random, tries: int) -> None:
    """What fits passes, in both forms; with one tensor lost, added or turned it does not."""

    def fits(names: small_models.Shapes) -> bool:
        found = compare(small_models.build(model_type), names)
        return not (found.missing or found.unexpected or found.shapes or found.broken)

    model = small_models.build(model_type)
    names = small_models.saved(model)
    assert fits(small_models.live(model)), f"{model_type}: names of the model"
    exact = compare(small_models.build(model_type), names)
    assert (exact.names, exact.inexact) == ({}, []), f"{model_type}: names as saved are exact"
    inside = compare(small_models.build(model_type), {f"net.{n}": s for n, s in names.items()})
    assert exact.prefixes[:1] == [""], f"{model_type}: as saved"
    assert "net." in inside.prefixes, f"{model_type}: in an attribute"
    assert fits(names), f"{model_type}: names as saved"
    for lost in rng.sample(sorted(names), min(tries, len(names))):
        rest = {n: s for n, s in names.items() if n != lost}
        may = opens(small_models.build(model_type), rest)  # tied, or of no weight
        assert fits(rest) == may, f"{model_type}: without {lost}"
    turnable = sorted(n for n, s in names.items() if len(s) > 1 and s[0] != s[1])
    for name in rng.sample(turnable, min(2, len(turnable))):
        first, second, *others = names[name]
        assert not fits(names | {name: (second, first, *others)}), f"{model_type}: {name} turned"
    assert not fits(names | {"model.stranger.weight": (3,)}), f"{model_type}: one more"
    some = {n: s for n, s in names.items() if not re.search(r"experts\.[23]\.", n)}
    if len(some) < len(names):
        assert not fits(some), f"{model_type}: half of the experts"
        apart = {re.sub(r"experts\.1\.", "experts.7.", n): s for n, s in names.items()}
        assert not fits(apart), f"{model_type}: experts with a gap"


def opens(model: Any, names: small_models.Shapes) -> bool:
    """Whether transformers' own functions, as `from_pretrained` calls them, find everything in place."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig

    tensors = {n: torch.empty(s, device="meta") for n, s in names.items()}
    config = LoadStateDictConfig(weight_mapping=get_model_conversion_mapping(model), device_map={"": "meta"})
    info, _ = model._load_pretrained_model(model, tensors, None, config)
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)
    return not (info.missing_keys or info.unexpected_keys or info.mismatched_keys or info.conversion_errors)


def test_every_conversion_of_transformers_can_be_asked() -> None:
    """One parameter under every registered name: nothing is compiled, or taken for a pattern, by us."""
    from transformers import conversion_mapping

    class Little(transformers.PreTrainedModel):
        config_class = transformers.LlamaConfig
        base_model_prefix = "model"

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.lm_head = torch.nn.Linear(3, 5, bias=False)
            self.post_init()

    Little.__module__ = "transformers.models.little"  # what is the library's own has its conversions
    entries = sorted(conversion_mapping._build_checkpoint_conversion_mapping())
    assert len(entries) > 200
    for entry in entries:
        for name in ("lm_head.weight", "model.layers.0.mlp.experts.0.w1.[(*"):
            config = transformers.LlamaConfig()
            config.model_type = entry
            with torch.device("meta"):
                model = Little(config)
            found = compare(model, {"lm_head.weight": (5, 3), name: (5, 3)})
            assert found.unexpected == ([] if name == "lm_head.weight" else [name]), entry
            assert (found.missing, found.shapes, found.broken) == ([], [], []), entry
