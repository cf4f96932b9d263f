"""Test that unsupported formats are refused by name, and that supported ones are read exactly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import gaps
import pytest
from samples import (
    SAMPLES,
    Sample,
    Tensors,
    differences,
    expected_tensors,
    prefix_of,
    read_safetensors,
    tree_digest,
)

if TYPE_CHECKING:
    from driver import Cli

# What safetensors or torch.load opens as it is: everything in it is compared.
OPENED_AS_IT_IS = {"safetensors", "torch_save"}


def test_refused_by_name_or_exact(other: Sample, cli: Cli, tmp_path: Path) -> None:
    """A sample that is not a DCP folder is either refused with a reason, or read bit for bit."""
    for number, folder in enumerate(other.checkpoints):
        before = tree_digest(folder)
        dst = tmp_path / str(number)
        done = cli("consolidate", folder, dst, "--output", "json")
        assert tree_digest(folder) == before
        assert "Traceback" not in done.stderr, done
        refusal = gaps.lookup(gaps.REFUSED_OTHER, other.name)
        if refusal or done.code:
            codes = refusal.codes if refusal else frozenset({"unsupported-format", "unknown-format"})
            assert not dst.exists()
            assert done.code == (refusal.exit if refusal else done.json["error"]["exit_code"])
            assert done.json["error"]["code"] in codes, done
            assert done.json["error"]["hint"]
            continue
        found = read_safetensors(dst)
        plain = cli("inspect", folder, "--output", "json").json["format"] in OPENED_AS_IT_IS
        theirs = stored(folder, other) if plain else {}
        if theirs:
            assert sorted(found) == sorted(theirs)
            assert not differences(theirs, found)
        if gaps.lookup(gaps.STORED_DIFFERS, other.name):
            continue
        for kept in (other.root / "expected.safetensors", other.root / "expected_optim.safetensors"):
            if kept.exists():
                truth = expected_tensors(kept)
                if not any(n.startswith("model.") for n in found):  # a state dict without a container
                    truth = {n.removeprefix("model."): v for n, v in truth.items()}
                prefix = prefix_of(truth, found)
                assert prefix is not None, f"{kept.name} is not what the checkpoint holds"
                assert not differences(truth, found, prefix)


def stored(folder: Path, sample: Sample) -> Tensors:
    """The tensors of a folder of safetensors files or of a torch file, by the foreign reader."""
    from samples import read_torch, tensors_of

    if folder.is_file():
        return tensors_of(read_torch(folder, trusted=not sample.corpus))
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        single = folder / "model.safetensors"  # what transformers would open
        return read_safetensors(single if single.exists() else folder)
    out: Tensors = {}
    for name in sorted(set(json.loads(index.read_text())["weight_map"].values())):
        out |= read_safetensors_loose(folder / name)
    return out


def read_safetensors_loose(path: Path) -> Tensors:
    """Read a file with the safetensors library."""
    from safetensors.torch import load_file
    from samples import value

    return {k: value(v) for k, v in load_file(path).items()}


@pytest.mark.parametrize("content", ["empty-folder", "text-files", "text-file", "empty-file"])
def test_nothing_known(content: str, cli: Cli, tmp_path: Path) -> None:
    """A folder that is not a checkpoint is reported as such, with the next step."""
    source = tmp_path / "thing"
    if content.endswith("file"):
        source.write_bytes(b"hello\n" if content == "text-file" else b"")
    else:
        source.mkdir()
        if content == "text-files":
            (source / "notes.txt").write_text("hello")
    for verb in (["inspect", source], ["validate", source], ["consolidate", source, tmp_path / "o"]):
        done = cli(*verb, "--output", "json")
        assert done.code == 4, done
        assert done.json["error"]["code"] == "unknown-format"
        assert done.json["error"]["hint"]
    assert not (tmp_path / "o").exists()


def test_a_folder_of_two_checkpoints_names_them(
    cli: Cli, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Two checkpoints side by side, in an unknown layout: the error for the folder above names both."""
    found = {s.name: s for s in request.config.stash[SAMPLES]}
    root = found["accelerate_fsdp2_2r"].root
    for old, new in (("pytorch_model_fsdp_0", "one"), ("optimizer_0", "other")):
        shutil.copytree(root / "ckpt" / old, tmp_path / "both" / new)
    done = cli("consolidate", tmp_path / "both", tmp_path / "out", "--output", "json")
    assert done.code in {4, 5}, done
    error = done.json["error"]
    text = error["message"] + error["hint"] + json.dumps(error["values"])
    assert "one" in text
    assert "other" in text
