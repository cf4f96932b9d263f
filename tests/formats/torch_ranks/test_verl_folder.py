"""verl keeps config and tokenizer in `huggingface/` beside its rank files: a reshard carries them there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from olmo_samples import tensors
from paths import FIXTURES

import ckptcore
from ckptcore.planning.compose import compose
from ckptcore.planning.request import Request

ACTOR = FIXTURES / "torch" / "verl_fsdp2_4r" / "ckpt" / "global_step_10" / "actor"
BESIDE = {
    "generation_config.json": b'{"do_sample": true}',
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b'{"model_max_length": 64}',
    "additional_chat_templates/tools.jinja": b"{{ messages }}",
    "notes.txt": b"not a file of a model",
}


@pytest.fixture
def actor(tmp_path: Path) -> Path:
    """A step's folder of a real verl job, with a tokenizer as `save_checkpoint` writes it."""
    folder = tmp_path / "actor"
    shutil.copytree(ACTOR, folder)
    for name, data in BESIDE.items():
        path = folder / "huggingface" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_config_and_tokenizer_go_along(actor: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ckptcore.convert(str(actor), str(out), verb="reshard", to="torch_ranks", mesh="fsdp=2")
    wanted = {n: d for n, d in BESIDE.items() if n != "notes.txt"}
    wanted["config.json"] = (actor / "huggingface" / "config.json").read_bytes()
    assert contents(out / "huggingface") == wanted
    names = {p.name for p in out.iterdir()}
    assert names == {
        "fsdp_config.json",
        "huggingface",
        "model_world_size_2_rank_0.pt",
        "model_world_size_2_rank_1.pt",
    }
    written = ckptcore.open(str(out))
    assert ckptcore.check(written, "bytes").ok
    assert tensors(written) == tensors(ckptcore.open(str(actor)))
    # The next reshard finds them there.
    ckptcore.convert(str(out), str(tmp_path / "next"), verb="reshard", to="torch_ranks", mesh="fsdp=3")
    assert contents(tmp_path / "next" / "huggingface") == wanted
    # Formats without such a folder get none.
    ckptcore.convert(str(actor), str(tmp_path / "dcp"), verb="reshard", to="dcp", mesh="fsdp=2")
    assert not (tmp_path / "dcp" / "huggingface").exists()


def test_options_choose_others_or_none(actor: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "qwen2", "num_attention_heads": 4}))
    (other / "tokenizer.json").write_bytes(b'{"version": "2.0"}')
    asked = {"verb": "reshard", "to": "torch_ranks", "mesh": "fsdp=2"}
    ckptcore.convert(str(actor), str(tmp_path / "a"), config=str(other), **asked)
    assert contents(tmp_path / "a" / "huggingface") == contents(other)
    ckptcore.convert(str(actor), str(tmp_path / "b"), config="none", tokenizer="none", **asked)
    assert not (tmp_path / "b" / "huggingface").exists()
    # Numbers for the check of heads are no model's config.
    numbers = tmp_path / "numbers.json"
    numbers.write_text(json.dumps({"num_attention_heads": 4}))
    ckptcore.convert(str(actor), str(tmp_path / "c"), config=str(numbers), tokenizer="none", **asked)
    assert not (tmp_path / "c" / "huggingface").exists()


def test_configs_that_differ_are_left(actor: Path) -> None:
    (actor / "hf_other").mkdir()
    (actor / "hf_other" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    request = Request(str(actor), str(actor.parent / "out"), "reshard", to="torch_ranks", mesh="fsdp=2")
    composed = compose(request, ckptcore.open(str(actor)))
    assert composed.extra == {}
    (found,) = [f for f in composed.warnings if f.code == "left-beside"]
    assert "no config and no tokenizer is written to huggingface/: cannot choose" in found.message
    assert "--config" in str(found.hint)


def test_sources_without_any(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(4)}, tmp_path / "x.pt")
    ckptcore.convert(
        str(tmp_path / "x.pt"), str(tmp_path / "out"), verb="reshard", to="torch_ranks", mesh="fsdp=2"
    )
    assert not (tmp_path / "out" / "huggingface").exists()
