"""Exports: names, dtypes, ties and the files beside the weights, held against transformers itself."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import warm
from safetensors.torch import load_file

import ckptcore
from ckptcore.errors import NameMismatch, UnsupportedDtype, UsageError

transformers: Any = pytest.importorskip("transformers")

from tiny_llama import tiny_llama  # noqa: E402


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``ckpt/``: model and AdamW state of a tied Llama, as DCP saves them; ``config/``; ``logits.pt``."""
    folder = tmp_path_factory.mktemp("llama")
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.arange(12)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    from torch.distributed.checkpoint.state_dict import get_state_dict

    state, optim = get_state_dict(model, optimizer)
    assert "lm_head.weight" in state  # stored twice, as trainers do
    dcp.save({"model": state, "optim": optim, "step": 3}, checkpoint_id=folder / "ckpt")
    model.config.save_pretrained(folder / "config")
    (folder / "config" / "tokenizer.json").write_text('{"a": 1}')
    (folder / "config" / "model.safetensors").write_bytes(b"weights of another time")
    torch.save(model.eval()(input_ids=ids).logits, folder / "logits.pt")
    return folder


@pytest.fixture(scope="module")
def exported(llama: Path) -> Path:
    ckptcore.convert(str(llama / "ckpt"), str(llama / "hf"), verb="export", config=str(llama / "config"))
    return llama / "hf"


def test_logits_are_equal_bit_for_bit(llama: Path, exported: Path) -> None:
    code = (
        "import sys, torch, transformers; "
        "m = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval(); "
        "want = torch.load(sys.argv[2]); got = m(input_ids=torch.arange(12)[None]).logits; "
        "sys.exit(0 if torch.equal(got, want) else 'logits differ')"
    )
    argv = [*warm.python(), "-c", code, str(exported), str(llama / "logits.pt")]
    run = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_tied_weights_are_stored_once_and_declared(exported: Path) -> None:
    names = set(load_file(exported / "model.safetensors"))
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert "`lm_head.weight` is `model.embed_tokens.weight`" in (exported / "README.md").read_text()


def test_files_beside_the_weights(llama: Path, exported: Path) -> None:
    assert sorted(p.name for p in exported.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert json.loads((exported / "config.json").read_text()) == json.loads(
        (llama / "config/config.json").read_text()
    )


def test_ties_that_do_not_hold_stop_the_export(llama: Path, tmp_path: Path) -> None:
    state = {"model": {n: t.clone() for n, t in ckpt_tensors(llama).items()}}
    state["model"]["lm_head.weight"][5, 7] += 1
    dcp.save(state, checkpoint_id=tmp_path / "ckpt")
    tied = r"lm_head.weight is tied to .*tie_word_embeddings.* differ in 1 of 3072 elements"
    with pytest.raises(NameMismatch, match=tied):  # it was trained so: nothing is damaged
        ckptcore.convert(
            str(tmp_path / "ckpt"), str(tmp_path / "hf"), verb="export", config=str(llama / "config")
        )
    assert not (tmp_path / "hf").exists()


@pytest.mark.usefixtures("asked_here")
def test_names_that_the_model_does_not_have(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(NameMismatch, match=r"missing: model\.norm\.weight"):
        ckptcore.convert(
            str(llama / "ckpt"),
            str(tmp_path / "hf"),
            verb="export",
            config=str(llama / "config"),
            exclude=["*model.norm.weight"],
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("asked_here")
def test_shapes_that_the_model_does_not_have(llama: Path, tmp_path: Path) -> None:
    config = json.loads((llama / "config/config.json").read_text()) | {"vocab_size": 97}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(NameMismatch, match=r"embed_tokens\.weight \[96, 32\] \(config says \[97, 32\]\)"):
        ckptcore.convert(str(llama / "ckpt"), str(tmp_path / "hf"), verb="export", config=str(tmp_path))


def ckpt_tensors(llama: Path) -> dict[str, torch.Tensor]:
    manifest = ckptcore.open(str(llama / "ckpt"))
    names = [t.fqn for t in manifest.tensors if t.fqn.startswith("model.")]
    return {n.removeprefix("model."): ckptcore.read(manifest, n) for n in names}


def test_casts_round_as_torch_does_and_keep_exceptions(llama: Path, tmp_path: Path) -> None:
    ckptcore.convert(
        str(llama / "ckpt"),
        str(tmp_path / "hf"),
        verb="export",
        dtype="bf16",
        dtype_for=[("*norm.weight", "keep"), ("lm_head.*", "fp16")],
        max_file_size=8192,
    )
    found: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "hf").glob("*.safetensors"):
        found |= load_file(file)
    for name, tensor in ckpt_tensors(llama).items():
        kind = torch.bfloat16
        if name.endswith("norm.weight"):
            kind = torch.float32
        elif name.startswith("lm_head."):
            kind = torch.float16
        assert torch.equal(found[name], tensor.to(kind)), name
        assert found[name].dtype == kind


@pytest.mark.usefixtures("asked_here")
def test_the_config_names_the_dtype_that_was_written(llama: Path, tmp_path: Path) -> None:
    config = json.loads((llama / "config/config.json").read_text()) | {"dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ckptcore.convert(
        str(llama / "ckpt"), str(tmp_path / "hf"), verb="export", config=str(tmp_path), dtype="bf16"
    )
    assert json.loads((tmp_path / "hf/config.json").read_text())["dtype"] == "bfloat16"


def test_files_are_packed_as_the_hub_packs_them(llama: Path, tmp_path: Path) -> None:
    hub: Any = pytest.importorskip("huggingface_hub")
    ckptcore.convert(str(llama / "ckpt"), str(tmp_path / "hf"), verb="export", max_file_size=8192)
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    tensors = {n: ckpt_tensors(llama)[n].clone() for n in index["weight_map"]}
    split = hub.split_torch_state_dict_into_shards(
        tensors, max_shard_size=8192, filename_pattern="model{suffix}.safetensors"
    )
    assert split.tensor_to_filename == index["weight_map"]
    assert split.metadata["total_size"] == index["metadata"]["total_size"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include": ["nothing*"]}, "matches nothing"),
        ({"dtype": "int8"}, "not a floating-point dtype"),
        ({"dtype_for": [("nothing", "bf16")]}, "matches nothing"),
        ({"tie": [("a", "b")]}, "not in the output"),
        ({"config": "nowhere"}, "--config"),
        ({"to": "gguf"}, "unknown format 'gguf'"),
    ],
)
def test_arguments_that_say_nothing(
    llama: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        ckptcore.convert(str(llama / "ckpt"), str(tmp_path / "out"), verb="export", **options)
    assert list(tmp_path.iterdir()) == []


def test_two_names_that_become_one(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(NameMismatch, match="would both be called"):
        ckptcore.convert(
            str(llama / "ckpt"),
            str(tmp_path / "out"),
            verb="export",
            rename=[("model.layers.0.", "x."), ("model.layers.1.", "x.")],
        )


def test_no_cast_is_proposed_for_complex_numbers(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2, dtype=torch.complex128)}, tmp_path / "m.pt")
    with pytest.raises(UnsupportedDtype) as caught:
        ckptcore.convert(str(tmp_path / "m.pt"), str(tmp_path / "out"), verb="export", dtype="bf16")
    assert "cast it" not in caught.value.hint
    assert "exclude=" in caught.value.hint
    ckptcore.convert(str(tmp_path / "m.pt"), str(tmp_path / "out"), verb="export", to="torch_save")
