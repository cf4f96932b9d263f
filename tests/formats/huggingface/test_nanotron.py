"""nanotron: every tensor is joined from its ranks' files, and nothing partial is taken for a step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from paths import FIXTURES
from safetensors.torch import load_file, save_file

import ckptcore
from ckptcore.cli.main import run
from ckptcore.conversion.pipeline import validate
from ckptcore.errors import MalformedCheckpoint, NotComplete, UnsupportedFormat

Tensors = dict[str, torch.Tensor]
SAMPLE = FIXTURES / "nanotron" / "nanotron_tp2"
EVERYTHING = "None,None,None"


@pytest.fixture(autouse=True)
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTCORE_CATALOG_URL", f"sqlite:///{tmp_path}/catalog.db")


def errors(folder: Path) -> set[str]:
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


def slices(dim: int, dims: int, start: int, stop: int) -> str:
    return "|".join(f"{start},{stop},None" if d == dim else EVERYTHING for d in range(dims))


def save(root: Path, tp: int = 2, pp: int = 2, experts: int = 2) -> Tensors:
    """Write a step as nanotron 1.5 does (serialize/weights.py, parallel/sharded_parameters.py); return it."""
    generator = torch.Generator().manual_seed(7)
    full: Tensors = {}

    def put(
        name: str, shape: tuple[int, ...], dim: int | None, stage: int, parts: tuple[int, ...] = ()
    ) -> None:
        tensor = full[name] = torch.randn(shape, generator=generator)
        *folders, leaf = name.split(".")
        folder = root.joinpath("model", *folders)
        folder.mkdir(parents=True, exist_ok=True)
        if dim is None:
            save_file({"data": tensor}, folder / f"model_{leaf}.safetensors")
            return
        of_experts = experts if "experts" in name else 1
        world = tp * of_experts
        chunks = parts or (shape[dim],)
        for rank in range(world):
            pairs, local, here, there = [], [], 0, 0
            for rows in chunks:
                own = rows // world
                start = there + rank * own
                local.append(tensor.narrow(dim, start, own))
                pair = slices(dim, len(shape), start, start + own)
                full_dim = EVERYTHING if len(chunks) == 1 else f"{here},{here + own},None"
                first = "|".join(full_dim if d == dim else EVERYTHING for d in range(len(shape)))
                pairs.append(f"{first}#{pair}")
                here, there = here + own, there + rows
            sizes = ", ".join(f"np.int64({n})" if d == dim and parts else str(n) for d, n in enumerate(shape))
            texts = {
                "version": "1.5",
                "unsharded_shape": f"({sizes}{',' if len(shape) == 1 else ''})",
                "local_global_slices_pairs": ";".join(pairs),
            }
            exp = f"_exp-rank-{rank // tp}-of-{of_experts}" if of_experts > 1 else ""
            file = f"model_{leaf}_pp-rank-{stage}-of-{pp}_tp-rank-{rank % tp}-of-{tp}{exp}.safetensors"
            save_file({"data": torch.cat(local, dim).contiguous()}, folder / file, texts)

    put("model.token_position_embeddings.pp_block.token_embedding.weight", (16, 8), 0, 0)
    for n in range(2):
        layer = f"model.decoder.{n}.pp_block"
        put(f"{layer}.input_layernorm.weight", (8,), None, n % pp)
        put(f"{layer}.attn.qkv_proj.weight", (32, 8), 0, n % pp, (16, 8, 8))
        put(f"{layer}.attn.qkv_proj.bias", (32,), 0, n % pp, (16, 8, 8))
        put(f"{layer}.attn.o_proj.weight", (8, 16), 1, n % pp)
        put(f"{layer}.post_attention_layernorm.weight", (8,), None, n % pp)
        if experts == 1:
            put(f"{layer}.mlp.gate_up_proj.weight", (32, 8), 0, n % pp, (16, 16))
            put(f"{layer}.mlp.down_proj.weight", (8, 16), 1, n % pp)
            continue
        put(f"{layer}.mlp.experts.0.down_proj.weight", (8, 16), 1, n % pp)
        put(f"{layer}.mlp.router.weight", (2, 8), None, n % pp)
    put("model.final_layer_norm.pp_block.weight", (8,), None, pp - 1)
    put("model.lm_head.pp_block.weight", (16, 8), 0, pp - 1)
    metadata = {"version": "1.5", "tp": tp, "dp": 1, "cp": 1, "metas": {"last_train_step": 20}}
    (root / "checkpoint_metadata.json").write_text(json.dumps(metadata))
    config = {"num_hidden_layers": 2, "tie_word_embeddings": False, "intermediate_size": 16}
    (root / "model_config.json").write_text(json.dumps(config))
    (root / "config.yaml").write_text("parallelism: {}\n")
    return full


def test_what_nanotron_itself_wrote(tmp_path: Path) -> None:
    shutil.copytree(SAMPLE / "ckpt", tmp_path / "20")
    (tmp_path / "latest.txt").write_text("20")
    manifest = ckptcore.open(str(tmp_path))
    assert (manifest.format, manifest.origin["step"]) == ("nanotron", 20)
    assert manifest.origin["mesh"] == {"pp": 1, "tp": 2}
    assert {f.code for f in manifest.findings} == {"unproven-whole"}  # it has no model_config.json
    assert equal(joined(tmp_path / "20") or {}, load_file(SAMPLE / "expected.safetensors"))


@pytest.mark.parametrize(("tp", "pp", "experts"), [(1, 1, 1), (2, 2, 2), (4, 1, 1)])
def test_every_mesh(tp: int, pp: int, experts: int, tmp_path: Path) -> None:
    full = save(tmp_path / "20", tp, pp, experts)
    assert not {f.code for f in ckptcore.open(str(tmp_path / "20")).findings}
    assert equal(joined(tmp_path / "20") or {}, full)


def test_every_file_is_needed(tmp_path: Path) -> None:
    """Ranks of a cut tensor by its name, others by the layers of model_config.json and their siblings."""
    save(tmp_path / "20")
    for path in sorted((tmp_path / "20" / "model").rglob("*.safetensors")):
        if "router" in str(path):  # of both layers: a layer's is missed beside the other's
            continue
        content = path.read_bytes()
        path.unlink()
        assert errors(tmp_path / "20") & {"missing-file", "hole"}, path
        path.write_bytes(content[:-1])
        with pytest.raises(MalformedCheckpoint):
            ckptcore.open(str(tmp_path / "20"))
        path.write_bytes(content)
    assert not errors(tmp_path / "20")


@pytest.mark.alike(3)
@pytest.mark.parametrize(
    "pattern",
    [
        *("decoder/1", "decoder/0", "decoder", "decoder/*/pp_block/mlp", "decoder/*/pp_block/mlp/down_proj"),
        *("lm_head", "final_layer_norm"),
    ],
)
def test_every_folder_is_needed(pattern: str, tmp_path: Path) -> None:
    save(tmp_path / "20", experts=1)
    for folder in (tmp_path / "20/model/model").glob(pattern):
        shutil.rmtree(folder)
    assert "missing-file" in errors(tmp_path / "20")
    assert joined(tmp_path / "20") is None
    assert joined(tmp_path / "20", "--allow-incomplete") is not None


def test_layers_of_which_nothing_states_a_number(tmp_path: Path) -> None:
    save(tmp_path / "20")
    (tmp_path / "20/model_config.json").unlink()
    shutil.rmtree(tmp_path / "20/model/model/decoder")
    messages = [f.message for f in ckptcore.open(str(tmp_path / "20")).findings]
    assert "decoder.0 is in no file, and every such model has it" in messages


def test_a_file_of_another_rank(tmp_path: Path) -> None:
    save(tmp_path / "20")
    for path in sorted((tmp_path / "20").rglob("*_tp-rank-1-of-2*.safetensors")):
        content = path.read_bytes()
        shutil.copy(str(path).replace("tp-rank-1", "tp-rank-0"), path)
        assert "hole" in errors(tmp_path / "20"), path
        path.write_bytes(content)


def _renamed(root: Path, old: str, new: str) -> None:
    for path in sorted(root.rglob(f"*{old}*")):
        path.rename(str(path).replace(old, new))


MIXED: dict[str, Callable[[Path], object]] = {
    "another tp": lambda root: _renamed(root / "model/model/lm_head", "-of-2_tp", "-of-3_tp"),
    "another stage": lambda root: _renamed(
        root / "model/model/lm_head", "pp-rank-1-of-2_tp-rank-1", "pp-rank-0-of-2_tp-rank-1"
    ),
    "a rank beyond": lambda root: _renamed(root / "model/model/lm_head", "tp-rank-1-of-2", "tp-rank-2-of-2"),
    "more layers": lambda root: shutil.copytree(
        root / "model/model/decoder/1", root / "model/model/decoder/2"
    ),
    "another count": lambda root: (root / "checkpoint_metadata.json").write_text(
        json.dumps({"version": "1.5", "tp": 4, "dp": 1, "metas": {}})
    ),
    "another version of a file": lambda root: restated(next(root.rglob("*_tp-rank-1-of-2*.safetensors"))),
    "a full one beside": lambda root: save_file(
        {"data": torch.ones(16, 8)}, root / "model/model/lm_head/pp_block/model_weight.safetensors"
    ),
}


def restated(path: Path) -> None:
    """As after a flipped bit in the header."""
    path.write_bytes(path.read_bytes().replace(b'"version":"1.5"', b'"version":"1.4"'))


@pytest.mark.parametrize("name", MIXED)
def test_files_of_two_saves(name: str, tmp_path: Path) -> None:
    save(tmp_path / "20")
    MIXED[name](tmp_path / "20")
    assert errors(tmp_path / "20") & {"mixed-saves", "item-mismatch"}
    assert joined(tmp_path / "20") is None


def test_a_save_that_did_not_finish(tmp_path: Path) -> None:
    full = save(tmp_path / "20")
    (tmp_path / "20/checkpoint_metadata.json").unlink()
    assert errors(tmp_path / "20") == {"not-complete"}
    assert joined(tmp_path / "20") is None
    assert equal(joined(tmp_path / "20", "--allow-incomplete") or {}, full)
    save(tmp_path / "10")
    (tmp_path / "latest.txt").write_text("20")
    with pytest.raises(NotComplete) as caught:
        ckptcore.open(str(tmp_path))
    assert caught.value.values["last_complete"] == "10"


@pytest.mark.parametrize("folder", ["model", "model/model", "model/model/lm_head/pp_block"])
def test_a_folder_inside_of_a_step(folder: str, tmp_path: Path) -> None:
    save(tmp_path / "20")
    with pytest.raises(UnsupportedFormat) as caught:
        ckptcore.open(str(tmp_path / "20" / folder))
    assert "checkpoint_metadata.json" in (caught.value.hint or "")


def texts() -> Iterator[tuple[str, str]]:
    pairs, shape = "local_global_slices_pairs", "unsharded_shape"
    yield shape, "(16, 8, 1)"
    yield shape, "(16,)"
    yield shape, "(-16, 8)"
    yield shape, "__import__('os').mkdir('x')"
    yield shape, "[16, 8]"
    yield shape, "(16, 9)"
    for text in ("", "None", "0,8,None|None,None,None", "0,8,2|None,None,None#0,8,2|None,None,None"):
        yield pairs, text
    yield pairs, "None,None,None|None,None,None#-8,None,None|None,None,None"
    yield pairs, "None,None,None|None,None,None#0,7,None|None,None,None"
    yield pairs, "0,4,None|None,None,None#0,4,None|None,None,None"
    yield pairs, ";".join(["None,None,None|None,None,None#0,8,None|None,None,None"] * 2)
    yield pairs, "None,None,None|None,None,None#12,20,None|None,None,None"
    yield pairs, json.dumps([[["(0, 8)"], ["(0, 8)"]]])


@pytest.mark.parametrize(("key", "text"), [*texts()])
def test_boxes_that_are_none(key: str, text: str, tmp_path: Path) -> None:
    save(tmp_path / "20")
    path = next((tmp_path / "20/model/model/lm_head/pp_block").glob("*_tp-rank-0*"))
    stored = {
        "version": "1.5",
        "unsharded_shape": "(16, 8)",
        "local_global_slices_pairs": "None,None,None|None,None,None#0,8,None|None,None,None",
    }
    save_file(load_file(path), path, {**stored, key: text})
    with pytest.raises(MalformedCheckpoint):
        ckptcore.open(str(tmp_path / "20"))


@pytest.mark.parametrize("key", ["version", "tp", "dp", "metas"])
def test_metadata_that_is_none(key: str, tmp_path: Path) -> None:
    save(tmp_path / "20")
    path = tmp_path / "20/checkpoint_metadata.json"
    for text in (json.dumps({**json.loads(path.read_text()), key: None}), "[]", "{"):
        path.write_text(text)
        with pytest.raises(MalformedCheckpoint):
            ckptcore.open(str(tmp_path / "20"))


def test_a_value_beside_a_tensor(tmp_path: Path) -> None:
    """nanotron 0.4 stores a flag beside parameters of Mamba."""
    full = save(tmp_path / "20")
    path = tmp_path / "20/model/model/final_layer_norm/pp_block/model_weight.safetensors"
    save_file({**load_file(path), "_no_weight_decay": torch.tensor(True)}, path)
    name = "model.final_layer_norm.pp_block.weight._no_weight_decay"
    assert equal(joined(tmp_path / "20") or {}, full | {name: torch.tensor(True)})


def test_the_state_of_a_run_is_named(tmp_path: Path) -> None:
    save(tmp_path / "20")
    (tmp_path / "20/optimizer").mkdir()
    torch.save({"state": {}}, tmp_path / "20/optimizer/optimizer_pp-0-of-1_tp-0-of-2_exp-0-of-1.pt")
    (finding,) = ckptcore.open(str(tmp_path / "20")).findings
    assert (finding.code, finding.severity) == ("stray-file", "warning")
