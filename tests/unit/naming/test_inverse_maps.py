"""Inverse maps: what the hub has comes out as each trainer has it, and back, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptcore
from ckptcore.core.manifest import Manifest
from ckptcore.errors import NameMismatch
from ckptcore.naming.rename import Mapped, remap
from ckptcore.naming.worlds import parse_world
from ckptcore.planning.name_maps import MappedNames, map_names

pytest.importorskip("transformers", minversion="5.0")

import trainer_names
from families import FAMILIES, forms
from trainer_names import WORLDS, State

hub_model = cache(trainer_names.hub_model)

# Form of a trainer's checkpoint in `trainer_names` -> generation of its names.
GENERATION_OF = {
    "torchtitan": {"old": "wq", "linear": "qkv_linear", "fused": "wqkv"},
    "olmo_core": {"one": "default", "dropless": "dropless"},
    "olmo": {"one": ""},
}
PADDED = {
    "megatron": ("embedding.word_embeddings.weight", "output_layer.weight"),
    "olmo_core": ("embeddings.weight", "lm_head.w_out.weight"),
}
# In torch_dist, norms are called like the linear layers behind them.
FUSED_NORMS = {
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}
# Layers that are not alike have no first dim of their own: each stacked tensor would lack layers.
MIXED = {"glm4_moe", "deepseek_v3", "deepseek_v32", "llama4"}


def pairs() -> Iterator[tuple[str, str, str]]:
    for family, (_, _, worlds) in FAMILIES.items():
        yield from ((family, world, form) for world in worlds for form in forms(family, world))


def generation(family: str, world: str, form: str) -> str:
    if family == "gpt2":
        return "fused"
    return GENERATION_OF.get(world, {}).get(form, form)


def hub_manifest(folder: Path, family: str, state: State | None = None) -> Manifest:
    config, hub = hub_model(family)
    folder.mkdir(exist_ok=True)
    tensors = {n: t.contiguous() for n, t in (hub if state is None else state).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return ckptcore.open(str(folder))


def to_trainer(mapped: Mapped, source: Manifest, to: str, **options: Any) -> MappedNames:
    world, of = parse_world(to)
    options = {"arch": "auto", "config": None, "url": "", "untried": True, "generation": of} | options
    return map_names(mapped, "hf-hub", to=world, source=source, **options)


def equal(manifest: Manifest, state: State) -> None:
    assert {t.fqn: t.shape for t in manifest.tensors} == {n: tuple(t.shape) for n, t in state.items()}
    for name, tensor in state.items():
        assert torch.equal(ckptcore.read(manifest, name), tensor), name


def trainer_state(family: str, world: str, form: str) -> State:
    """What a trainer has of the hub's model: no rows pad its vocabulary, and biases of experts are zero."""
    config, hub = hub_model(family)
    state = WORLDS[world][0](config, dict(hub), form)
    for name in PADDED.get(world, ()):
        if name in state:
            state[name] = state[name][: config["vocab_size"]]
    if form == "stacked":
        for old, new in FUSED_NORMS.items():
            state = {n.replace(old, new): t for n, t in state.items()}
    return state


@pytest.mark.grid
@pytest.mark.parametrize(("family", "world", "form"), list(pairs()))
def test_comes_out_as_the_trainer_has_it_and_back(tmp_path: Path, family: str, world: str, form: str) -> None:
    source = hub_manifest(tmp_path / "hub", family)
    bare = remap(source)
    if form == "stacked" and family in MIXED:
        with pytest.raises(NameMismatch, match=f"no map takes hf-hub names of {FAMILIES[family][0]}"):
            to_trainer(bare, source, f"{world}:{form}")
        return
    found = to_trainer(bare, source, f"{world}:{generation(family, world, form)}".rstrip(":"))
    names = {t.fqn for t in found.mapped.manifest.tensors}
    state = trainer_state(family, world, form)
    for name, _, _ in found.conversion.zeros:  # routers of the hub have none
        state[name] = torch.zeros(4)
    equal(found.mapped.manifest, state)
    assert names == state.keys()
    options = {"arch": found.map.arch, "to": "hf-hub", "source": source, "config": None, "url": ""}
    back = map_names(found.mapped, world, **options)
    equal(back.mapped.manifest, hub_model(family)[1])
