"""Meta's model-parallel files: every generation is joined bit by bit, and nothing partial is taken for it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import meta_llama
import pytest
import torch
from meta_llama import Tensors, llama, llama4
from safetensors.torch import load_file, save_file

import ckptcore
from ckptcore.cli.main import run
from ckptcore.conversion.pipeline import validate

PARTS = ("consolidated-00001-of-00002.safetensors", "consolidated-00002-of-00002.safetensors")
GENERATIONS: dict[str, tuple[Callable[[], Tensors], int, dict[str, object]]] = {
    "Llama 2": (llama, 2, {"vocab_size": -1}),
    "Llama 3": (llama, 3, {}),
    "Llama 4": (llama4, 4, {"moe_args": {"num_experts": meta_llama.EXPERTS}}),
}


@pytest.fixture(autouse=True)
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTCORE_CATALOG_URL", f"sqlite:///{tmp_path}/catalog.db")


def codes(folder: Path) -> set[str]:
    found = validate(ckptcore.open(str(folder)), "bytes").findings
    return {f.code for f in found if f.severity == "error"}


def joined(folder: Path, *options: str) -> Tensors | None:
    """Return what `consolidate` makes, None where it ends with another code than 0."""
    out = folder.parent / "out.safetensors"
    out.unlink(missing_ok=True)
    if run(["consolidate", str(folder), str(out), *options]) != 0:
        assert not out.exists()
        return None
    return load_file(out)


def equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", GENERATIONS)
def test_generations(name: str, ranks: int, tmp_path: Path) -> None:
    make, generation, more = GENERATIONS[name]
    tensors = make()
    # More ranks than heads of keys: each rank has a copy of a head, which the shapes contradict.
    ranks = 2 if name == "Llama 4" else min(ranks, 2 * meta_llama.KEYS)
    meta_llama.save(tmp_path / "run", tensors, ranks, generation, **more)
    manifest = ckptcore.open(str(tmp_path / "run"))
    assert (manifest.format, manifest.origin["mesh"]) == ("meta", {"tp": ranks})
    assert not codes(tmp_path / "run")
    assert equal(joined(tmp_path / "run") or {}, tensors)


def _unlink(at: int) -> Callable[[list[Path]], None]:
    return lambda paths: paths[at].unlink()


def _swap(paths: list[Path]) -> None:
    shutil.copy(paths[0], paths[-1])


def _link(paths: list[Path]) -> None:
    paths[-1].unlink()
    paths[-1].symlink_to(paths[0].name)


def _cut(paths: list[Path]) -> None:
    os.truncate(paths[-1], paths[-1].stat().st_size * 2 // 3)


def _rewrite(change: Callable[[Tensors], None], *which: int) -> Callable[[list[Path]], None]:
    def damage(paths: list[Path]) -> None:
        for at in which:
            tensors = torch.load(paths[at])
            change(tensors)
            torch.save(tensors, paths[at])

    return damage


def _without(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[name]

    return change


def _narrow(tensors: Tensors) -> None:
    tensors["layers.0.feed_forward.w1.weight"] = tensors["layers.0.feed_forward.w1.weight"][:-1].clone()


def _last_layer(tensors: Tensors) -> None:
    for name in [n for n in tensors if n.startswith("layers.1.")]:
        del tensors[name]


def _other_norm(tensors: Tensors) -> None:
    tensors["norm.weight"] = tensors["norm.weight"] + 1


def _module(paths: list[Path]) -> None:
    torch.save(torch.nn.Linear(2, 2), paths[1])


ALL = (0, 1, 2, 3)
DAMAGES: dict[str, tuple[Callable[[list[Path]], None], set[str]]] = {
    "first missing": (_unlink(0), {"missing-file"}),
    "middle missing": (_unlink(1), {"missing-file"}),
    "last missing": (_unlink(-1), {"missing-file"}),
    "a link to the first": (_link, {"missing-file"}),
    "a copy of the first": (_swap, {"mixed-saves"}),
    "a tensor of one rank": (_rewrite(_without("layers.1.attention.wq.weight"), 2), {"hole"}),
    "a norm of one rank": (_rewrite(_without("norm.weight"), 2), {"mixed-saves"}),
    "a tensor of all ranks": (_rewrite(_without("layers.1.feed_forward.w3.weight"), *ALL), {"hole"}),
    "a layer of all ranks": (_rewrite(_last_layer, *ALL), {"missing-file", "unproven-parts"}),
    "another norm": (_rewrite(_other_norm, 3), {"replica-mismatch"}),
    "fewer rows": (_rewrite(_narrow, 3), {"item-mismatch", "hole"}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage(damage: str, tmp_path: Path) -> None:
    paths = meta_llama.save(tmp_path / "run", llama(), 4)
    change, wanted = DAMAGES[damage]
    change(paths)
    assert wanted <= codes(tmp_path / "run")
    assert joined(tmp_path / "run") is None


@pytest.mark.parametrize("damage", [_cut, _module])
def test_a_file_that_cannot_be_read(damage: Callable[[list[Path]], None], tmp_path: Path) -> None:
    damage(meta_llama.save(tmp_path / "run", llama(), 2))
    assert run(["validate", str(tmp_path / "run")]) not in (0, 2)
    assert joined(tmp_path / "run") is None


def test_nothing_states_the_number_of_ranks(tmp_path: Path) -> None:
    tensors = llama()
    meta_llama.save(tmp_path / "run", tensors)
    (tmp_path / "run/params.json").unlink()
    assert codes(tmp_path / "run") == {"unproven-parts"}
    assert equal(joined(tmp_path / "run", "--allow-incomplete") or {}, tensors)


def test_copies_of_the_heads_of_keys_are_not_joined(tmp_path: Path) -> None:
    """Each of 4 ranks has one of 2 heads: nothing says which of them are copies."""
    paths = meta_llama.save(tmp_path / "run", llama(), 4)
    for path in paths:
        tensors = torch.load(path)
        for name in [n for n in tensors if ".wk." in n or ".wv." in n]:
            tensors[name] = tensors[name].repeat(2, 1)
        torch.save(tensors, path)
    assert codes(tmp_path / "run") == {"unmerged-tensor"}


@pytest.mark.parametrize("lost", ["layers.1.", "layers.1.feed_forward.w2."])
@pytest.mark.parametrize("files", [("consolidated.safetensors",), ("consolidated.00.pth",), PARTS])
def test_a_complete_file_has_all_layers_of_its_params(
    files: tuple[str, ...], lost: str, tmp_path: Path
) -> None:
    """Mistral's files, and those of one rank: nothing but params.json says which layers there are."""
    tensors, run_folder = llama(), tmp_path / "run"
    meta_llama.save(run_folder, tensors, 1)
    (run_folder / "consolidated.00.pth").unlink()
    for is_damaged in (False, True):
        kept = {n: t for n, t in tensors.items() if not (is_damaged and n.startswith(lost))}
        middle = len(kept) // 2 if files[1:] else len(kept)
        for path, names in zip(files, (list(kept)[:middle], list(kept)[middle:]), strict=False):
            part = {name: kept[name] for name in names}
            (save_file if path.endswith("safetensors") else torch.save)(part, run_folder / path)
        assert bool(codes(run_folder)) is is_damaged
    assert joined(run_folder) is None


def test_embeddings_that_the_head_contradicts(tmp_path: Path) -> None:
    for path in meta_llama.save(tmp_path / "run", llama()):
        tensors = torch.load(path)
        tensors["tok_embeddings.weight"] = torch.zeros(meta_llama.VOCABULARY, meta_llama.WIDTH)
        torch.save(tensors, path)
    assert codes(tmp_path / "run") == {"unmerged-tensor"}


def test_experts_without_their_number(tmp_path: Path) -> None:
    meta_llama.save(tmp_path / "run", llama4(), 2, 4)
    assert codes(tmp_path / "run") == {"unmerged-tensor"}


def test_no_link_or_code(tmp_path: Path) -> None:
    """A pickle that names a function is not called: the value is left out with a finding."""

    class Hostile:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "executed",))

    paths = meta_llama.save(tmp_path / "run", llama())
    tensors = torch.load(paths[0])
    torch.save({**tensors, "extra": Hostile()}, paths[0])
    run(["validate", str(tmp_path / "run"), "--level", "bytes"])
    assert not (tmp_path / "executed").exists()


def test_params_that_are_no_numbers(tmp_path: Path) -> None:
    meta_llama.save(tmp_path / "run", llama())
    for odd in ({"dim": "16"}, {"n_heads": 0}, {"n_layers": 10**9}, {"n_kv_heads": None}, {"dim": [16]}):
        (tmp_path / "run/params.json").write_text(json.dumps(meta_llama.params(**odd)))
        assert run(["validate", str(tmp_path / "run")]) in (0, 1, 27), odd


def _hub_of(meta: Tensors) -> Tensors:
    """Return a Llama 4 as the hub has it, by the load hooks of Meta's model (llama-models, models/llama4)."""
    hub = {
        "model.embed_tokens.weight": meta["tok_embeddings.weight"],
        "model.norm.weight": meta["norm.weight"],
        "lm_head.weight": meta["output.weight"],
    }
    keys = meta_llama.KEYS * meta_llama.SIZE
    for n in range(2):
        at, to = f"layers.{n}.", f"model.layers.{n}."
        rows = meta[f"{at}attention.wqkv.weight"].split((meta_llama.WIDTH, keys, keys))
        hub |= {f"{to}self_attn.{x}_proj.weight": part for x, part in zip("qkv", rows, strict=True)}
        hub[f"{to}self_attn.o_proj.weight"] = meta[f"{at}attention.wo.weight"]
        hub[f"{to}input_layernorm.weight"] = meta[f"{at}attention.wqkv.layer_norm_weight"]
    inside, to = "layers.0.feed_forward.mlp", "model.layers.0."
    gate, up = meta[f"{inside}.fc1_weight"].chunk(2)
    hub |= {f"{to}feed_forward.gate_proj.weight": gate, f"{to}feed_forward.up_proj.weight": up}
    hub[f"{to}feed_forward.down_proj.weight"] = meta[f"{inside}.fc2_weight"]
    hub[f"{to}post_attention_layernorm.weight"] = meta[f"{inside}.layer_norm_weight"]
    inside, to = "layers.1.feed_forward", "model.layers.1."
    gate, up, down = (
        meta[f"{inside}.experts.moe_w_{k}"].unflatten(0, (meta_llama.EXPERTS, -1))
        for k in ("in_eD_F", "swiglu_eD_F", "out_eF_D")
    )
    hub[f"{to}feed_forward.experts.gate_up_proj"] = torch.cat([gate, up], 2)
    hub[f"{to}feed_forward.experts.down_proj"] = down
    hub[f"{to}feed_forward.router.weight"] = meta[f"{inside}.router_DE"].T
    hub[f"{to}post_attention_layernorm.weight"] = meta[f"{inside}.norm.weight"]
    for old, new in (("in_shared_FD", "gate"), ("swiglu_FD", "up"), ("out_shared_DF", "down")):
        hub[f"{to}feed_forward.shared_expert.{new}_proj.weight"] = meta[f"{inside}.w_{old}.weight"]
    return hub


@pytest.mark.parametrize("ranks", [1, 2])
def test_llama_4_gets_the_names_of_the_hub(tmp_path: Path, ranks: int) -> None:
    """Experts are made of rows of one matrix, after the ranks' columns of each are joined."""
    tensors = llama4()
    meta_llama.save(tmp_path / "run", tensors, ranks, 4, moe_args={"num_experts": meta_llama.EXPERTS})
    options = ("--names", "hf-hub", "--arch", "llama4")
    assert equal(joined(tmp_path / "run", *options) or {}, _hub_of(tensors))
