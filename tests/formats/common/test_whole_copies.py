"""Compare consolidated files with ranks' parts: every element, and findings name both places."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from paths import FIXTURES
from safetensors.torch import load_file, save_file

import ckptcore
from ckptcore.core.manifest import Manifest
from ckptcore.errors import CkptError

VERL = FIXTURES / "torch" / "verl_fsdp2_4r"


@pytest.fixture
def actor(tmp_path: Path) -> Path:
    """A step's folder of a real verl job, with a copy of the model as saved by `hf_model`."""
    folder = tmp_path / "actor"
    shutil.copytree(VERL / "ckpt" / "global_step_10" / "actor", folder)
    bare = ckptcore.open(str(folder))
    tensors = {t.fqn: ckptcore.read(bare, t.fqn) for t in bare.tensors}
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for path, part in files.items():
        save_file({n: tensors[n] for n in part}, folder / "huggingface" / path, {"format": "pt"})
    listed = {n: path for path, part in files.items() for n in part}
    (folder / "huggingface" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    return folder


def findings(folder: Path, level: str = "bytes") -> list[tuple[str, str | None]]:
    found = ckptcore.check(ckptcore.open(str(folder)), level)
    return [(f.code, f.fqn) for f in found.findings if f.code not in ("unproven", "no-checksum")]


def span(path: Path, name: str) -> tuple[int, int]:
    """The range of a tensor's bytes in a safetensors file."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    start, stop = json.loads(raw[8 : 8 + size])[name]["data_offsets"]
    return 8 + size + start, 8 + size + stop


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def consolidated(folder: Path) -> list[Path]:
    return sorted((folder / "huggingface").glob("*.safetensors"))


def test_equal_copies_are_proven_and_change_nothing(actor: Path, tmp_path: Path) -> None:
    manifest = ckptcore.open(str(actor))
    assert findings(actor) == []
    assert manifest.own is not None
    bare = tmp_path / "bare"
    shutil.copytree(actor, bare, ignore=lambda _, names: [n for n in names if n.endswith("safetensors")])
    assert ckptcore.open(str(bare)).digest == manifest.digest
    ckptcore.convert(str(actor), str(tmp_path / "out"))
    ckptcore.convert(str(bare), str(tmp_path / "out-bare"))
    for path in (tmp_path / "out").iterdir():
        assert path.read_bytes() == (tmp_path / "out-bare" / path.name).read_bytes()
    assert Manifest.load(manifest.dump()).dump() == manifest.dump()


@pytest.mark.soak
@pytest.mark.parametrize("end", [0, -1])
def test_a_flipped_bit_in_a_consolidated_file(end: int, actor: Path, tmp_path: Path) -> None:
    """In every tensor of the consolidated files: first byte or last."""
    names = sorted(t.fqn for t in ckptcore.open(str(actor)).tensors)
    for path in consolidated(actor):
        for name in load_file(path):
            start, stop = span(path, name)
            flip(path, start if end == 0 else stop - 1)
            (found,) = [
                f
                for f in ckptcore.check(ckptcore.open(str(actor)), "bytes").findings
                if f.severity == "error"
            ]
            assert (found.code, found.fqn) == ("replica-mismatch", name)
            assert f"huggingface/{path.name}" in found.message
            assert "model_world_size_4_rank_" in found.message
            flip(path, start if end == 0 else stop - 1)
    flip(path, span(path, names[1])[0])
    with pytest.raises(CkptError) as caught:
        ckptcore.convert(str(actor), str(tmp_path / "out"))
    assert caught.value.exit_code != 70
    assert not (tmp_path / "out").exists()
    ckptcore.convert(str(actor), str(tmp_path / "out"), exclude=[names[1]])


def test_a_changed_element_in_a_ranks_file(actor: Path) -> None:
    """With a valid checksum around it, so that only the copy shows it."""
    path = actor / "model_world_size_4_rank_2.pt"
    tree = torch.load(path, weights_only=False)
    name = "model.embed_tokens.weight"
    tree[name]._local_tensor.view(-1)[-1] += 1
    torch.save(tree, path)
    (found,) = [
        f for f in ckptcore.check(ckptcore.open(str(actor)), "bytes").findings if f.severity == "error"
    ]
    assert (found.code, found.fqn) == ("replica-mismatch", name)
    assert "model_world_size_4_rank_2.pt" in found.message
    assert "huggingface/" in found.message


@pytest.mark.parametrize("kinds", [("model",), ("model", "extra_state")])
@pytest.mark.parametrize("opened", ["", ".."])
def test_under_the_names_of_the_manifest(kinds: tuple[str, ...], opened: str, actor: Path) -> None:
    """Several kinds of files, and the folder above."""
    for kind in kinds[1:]:
        for rank in range(4):
            torch.save({"lr": 1.0}, actor / f"{kind}_world_size_4_rank_{rank}.pt")
    path = consolidated(actor)[0]
    name = next(iter(load_file(path)))
    flip(path, span(path, name)[0])
    found = findings((actor / opened).resolve())
    assert ("replica-mismatch", f"model.{name}" if kinds[1:] else name) in found


def test_tensors_that_cannot_be_compared_are_findings(actor: Path) -> None:
    """Another dtype or shape, a tensor that no rank has, a cut file, a stale one."""
    one, two = consolidated(actor)
    tensors = load_file(one)
    first, second, *_ = tensors
    tensors[first] = tensors[first].to(torch.float64)
    tensors[second] = tensors[second][..., :1].clone()
    save_file(tensors | {"strange": torch.ones(2)}, one, {"format": "pt"})
    index = actor / "huggingface" / "model.safetensors.index.json"
    contents = json.loads(index.read_text())
    contents["weight_map"]["strange"] = one.name
    index.write_text(json.dumps(contents))
    shutil.copy(two, two.with_name("stale.safetensors"))  # not in the index, so not compared
    flip(two.with_name("stale.safetensors"), -1)
    two.write_bytes(two.read_bytes()[:4])
    found = ckptcore.check(ckptcore.open(str(actor)), "bytes")
    assert found.ok
    messages = [f.message for f in found.findings if f.code == "consolidated-differs"]
    for part in (
        "strange is in huggingface/, but in no rank's file",
        f"{first} is of another dtype",
        f"{second} is ",
        f"cannot read huggingface/{two.name}",
    ):
        assert any(part in m for m in messages), part
    assert {f"huggingface/{two.name}", "huggingface/stale.safetensors"} <= set(found.unproven)
    index.write_text("{")
    assert any("is no" in m.message for m in ckptcore.open(str(actor)).findings)


def test_a_tensor_that_was_saved_once_is_no_difference(actor: Path) -> None:
    """transformers saves tied weights once."""
    (actor / "huggingface" / "model.safetensors.index.json").unlink()
    consolidated(actor)[1].unlink()
    assert findings(actor) == []
