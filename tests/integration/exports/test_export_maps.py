"""Exports of trainers' checkpoints are bit for bit the hub's folders of the same weights.

The truths were made by Megatron-Bridge's and OLMo-core's own converters, or are the models that Megatron was
loaded from.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from export_results import REAL
from safetensors.torch import load_file
from samples import FIXTURES, unpack

import ckptcore
from ckptcore.errors import NameMismatch

CASES = dict(pair for pairs in REAL.values() for pair in pairs)


@pytest.fixture(scope="module")
def truths(request: pytest.FixtureRequest) -> Path:
    return unpack(request.config.rootpath / ".pytest_cache/samples", FIXTURES / "maps/truths.tar.zst")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for f in sorted(folder.glob("*.safetensors")) for n, t in load_file(f).items()}


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[Any, ...]]:
    return {
        n: (t.dtype, t.shape, t.reshape(-1).view(torch.uint8).numpy().tobytes()) for n, t in tensors.items()
    }


def export(source: Path, target: Path, **options: Any) -> Any:
    return ckptcore.convert(str(source), str(target), verb="export", **options)


@pytest.mark.alike(2)
@pytest.mark.parametrize("trained", CASES)
def test_an_export_is_the_hub_s_folder(truths: Path, tmp_path: Path, trained: str) -> None:
    """By what the checkpoint itself says: its arguments, its config, its names and shapes."""
    done = export(truths / trained, tmp_path / "out")
    truth = weights(truths / CASES[trained])
    assert bits(weights(tmp_path / "out")) == bits(truth)
    assert done.map_digest
    model = ckptcore.model_part(ckptcore.open(truths / trained))
    assert bits({spec.fqn: ckptcore.read(model, spec.fqn) for spec in model.tensors}) == bits(truth)
    live = {name: torch.empty_like(tensor) for name, tensor in truth.items()}
    assert ckptcore.load_into(model, live) == []
    assert bits(live) == bits(truth)
    proof = ckptcore.verify_export(str(tmp_path / "out"), against=str(truths / trained))
    assert {c.name: c.verdict for c in proof.checks if c.verdict != "not-done"} == {
        "elements": "ok",
        "fingerprints": "ok",
        "finite": "ok",
    }


@pytest.mark.soak
def test_with_a_config_the_model_class_agrees(truths: Path, tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers", minversion="5.0")
    source, hub = truths / "gpt_qwen2_tied_bias_tp2pp2_0.19.2/ckpt", truths / "hf_qwen2"
    export(source, tmp_path / "out", config=str(hub))
    tokens = torch.arange(24).reshape(2, 12)
    logits = [
        transformers.AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32)(tokens).logits
        for f in (tmp_path / "out", hub)
    ]
    assert torch.equal(*logits)


def test_a_plan_shows_the_map_and_its_numbers(truths: Path, tmp_path: Path) -> None:
    source = truths / "gpt_llama_tp2pp2_0.19.2/ckpt"
    argv = ["plan", str(source), str(tmp_path / "out"), "--verb", "export", "--output", "json"]
    argv += ["--save", str(tmp_path / "plan")]
    done = subprocess.run([*warm.command(), *argv], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)["map"]
    assert (plan["from"], plan["to"], plan["arch"]) == ("megatron", "hf-hub", "llama")
    assert plan["numbers"]["heads"] == {
        "value": 4,
        "source": "the checkpoint's `args` says num_attention_heads = 4",
    }
    qkv = next(m for m in plan["tensors"] if m["name"] == "model.layers.3.self_attn.k_proj.weight")
    assert qkv["rule"] == "megatron/attention/qkv"
    assert qkv["sources"] == ["decoder.layers.self_attention.linear_qkv.weight"]
    saved = json.loads((tmp_path / "plan/head.json").read_text())
    assert {m[0]: m[1] for m in saved["made"]} == {m["name"]: m["rule"] for m in plan["tensors"]}
    apply = ["apply", str(tmp_path / "plan"), "--no-catalog"]
    assert subprocess.run([*warm.command(), *apply], capture_output=True).returncode == 0
    assert bits(weights(tmp_path / "out")) == bits(weights(truths / "hf_llama"))


def test_stored_names_can_be_kept(truths: Path, tmp_path: Path) -> None:
    export(truths / "gpt_llama_tp2pp2_0.19.2/ckpt", tmp_path / "out", names="stored")
    assert "decoder.layers.self_attention.linear_qkv.weight" in weights(tmp_path / "out")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_attention_heads": 8, "num_key_value_heads": 4}, "num_attention_heads = 8.* = 4"),
        ({"rope_theta": 5e5, "rope_parameters": None}, "rope_theta = 500000.*rotary_base = 10000"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps = 1e-06.*norm_epsilon = 1e-05"),
    ],
)
def test_a_config_that_contradicts_the_arguments_is_refused(
    truths: Path, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    shutil.copytree(truths / "hf_llama", tmp_path / "config")
    path = tmp_path / "config/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(NameMismatch, match=message):
        export(truths / "gpt_llama_tp2pp2_0.19.2/ckpt", tmp_path / "out", config=str(tmp_path / "config"))
    assert not (tmp_path / "out").exists()


def test_a_cast_and_several_files_change_nothing_else(truths: Path, tmp_path: Path) -> None:
    export(truths / "gpt_llama_tp2pp2_0.19.2/ckpt", tmp_path / "out", dtype="fp32", max_file_size=20_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    truth = {n: t.float() for n, t in weights(truths / "hf_llama").items()}
    assert bits(weights(tmp_path / "out")) == bits(truth)


def test_a_flipped_bit_in_a_tensor_that_was_split_is_found(truths: Path, tmp_path: Path) -> None:
    """The checksum of a record holds for what was cut out of it, too."""
    shutil.copytree(truths / "gpt_llama_tp2pp2_0.19.2/ckpt", tmp_path / "ckpt")
    manifest = ckptcore.open(str(tmp_path / "ckpt"))
    row = int(manifest.chunks.first[manifest.index["embedding.word_embeddings.weight"] + 1]) - 1
    item = manifest.items[int(manifest.chunks.item[row])]
    path = tmp_path / "ckpt" / manifest.files[item.file].path
    data = bytearray(path.read_bytes())
    data[item.start + item.length - 1200] ^= 1  # in a row that pads the vocabulary, which is not exported
    path.write_bytes(bytes(data))
    with pytest.raises(ckptcore.CkptError) as caught:
        export(tmp_path / "ckpt", tmp_path / "out")
    assert caught.value.exit_code == 1


def test_an_item_of_another_shape_is_found(truths: Path, tmp_path: Path) -> None:
    """A view into an item relies on the metadata: the item must have that shape."""
    from dataclasses import replace

    from ckptcore.errors import DamagedCheckpoint
    from ckptcore.naming.maps.conversion import convert
    from ckptcore.naming.maps.declaration import built_in_maps
    from ckptcore.naming.rename import remap

    manifest = ckptcore.open(str(truths / "gpt_llama_tp2pp2_0.19.2/ckpt"))
    part = remap(manifest, include=["decoder.*", "embedding.*", "output_layer.*"]).manifest
    rules = next(m for m in built_in_maps() if (m.arch, m.world) == ("llama", "megatron"))
    found = convert(part, rules, {"heads": 4, "kv_heads": 2, "vocab": 100}).manifest
    assert found.items.holds is not None
    name = "model.layers.0.mlp.gate_proj.weight"
    assert ckptcore.read(found, name).shape == (48, 32)
    holds = found.items.holds.copy()
    holds[:, -2:] = holds[:, [-1, -2]]  # as many elements, in another shape
    wrong = replace(found, items=replace(found.items, holds=holds))
    with pytest.raises(DamagedCheckpoint, match="metadata has"):
        ckptcore.read(wrong, name)


def test_a_source_that_was_split_lends_no_fingerprint(truths: Path, tmp_path: Path) -> None:
    """Fingerprints of an export are those of its source's tensors only where these are the same ones."""
    catalog = f"sqlite:///{tmp_path}/catalog.db"
    source = truths / "gpt_llama_tp2pp2_0.19.2/ckpt"
    export(source, tmp_path / "out", catalog=catalog, settings=ckptcore.Settings(fingerprint=True))
    from ckptcore.catalog import open_catalog

    detail = open_catalog(catalog).show(str(source))
    fingerprinted = {t.fqn for t in detail.tensors if t.fingerprint}
    assert detail.checkpoint.fingerprint is None
    assert "decoder.final_layernorm.weight" in fingerprinted
    assert not fingerprinted & {
        "decoder.layers.self_attention.linear_qkv.weight",
        "embedding.word_embeddings.weight",
        "output_layer.weight",
    }
