"""A source goes only if its copy holds all of it: also what its reader does not turn into a tensor.

Each test saves, consolidates and retires by ordinary commands.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from damaging import Folder
from safetensors import safe_open
from safetensors.torch import save_file

import ckptcore
from ckptcore.cli.main import run
from ckptcore.core.object_tree import decode

LORA = {"format": "pt", "ss_network_dim": "16", "ss_tag_frequency": '{"a": 1}'}
STATE = {"w": torch.arange(6.0), "b": torch.ones(3), "step": 7}


class Run:
    """A run of two steps below a watched root; the first is consolidated, and may go."""

    def __init__(self, tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.tmp, self.url, self._capsys = tmp, str(tmp / "catalog.sqlite"), capsys
        self.source, self.copy = tmp / "runs/llama/step-1", tmp / "out/step-1"
        self.source.mkdir(parents=True)

    def cli(self, *arguments: object) -> str:
        code = run([*map(str, arguments), "--catalog", self.url])
        out, err = self._capsys.readouterr()
        assert code == 0, (arguments, err)
        return out

    def consolidated(self, verb: str = "consolidate", *options: object) -> Run:
        newest = self.source.with_name("step-2")
        shutil.copytree(self.source, newest)
        self.cli("catalog", "root", "add", "r", self.tmp / "runs")
        self.cli(verb, self.source, self.copy, "--fingerprint", *options)
        self.cli("consolidate", newest, self.tmp / "out/step-2", "--fingerprint")
        return self

    def retire(self, *options: object) -> dict[str, object]:
        fixed = ("--keep-last", 1, "--yes", "--grace", 0, "--output", "json")
        answer = json.loads(self.cli("retire", *fixed, *options))
        return next(each for each in answer["checkpoints"] if each["step"] == 1)

    def keeps(self, name: str, kind: str) -> None:
        """The source stays, the reason says what is not in the copy, and the user may name that."""
        before = files_of(self.source)
        for options in ((), ("--fingerprint",)):
            item = self.retire(*options)
            assert item["fate"] == "unsafe", item
            assert {"name": name, "kind": kind} in item["unproven"], item
            assert files_of(self.source) == before
        self.deletes("--accept-loss", name)

    def deletes(self, *options: object) -> None:
        item = self.retire(*options)
        assert item["fate"] == "deleted", item
        assert not self.source.exists()


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(tmp_path, capsys)


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as opened:
        return dict(opened.metadata())


def with_record(data: bytes, name: str, content: bytes) -> bytes:
    """The same torch zip with one more record, which its pickle does not name."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            new.writestr(zipfile.ZipInfo(info.filename), old.read(info))
        top = old.infolist()[0].filename.partition("/")[0]
        new.writestr(zipfile.ZipInfo(f"{top}/{name}"), content)
    return out.getvalue()


def replaced_items(folder: Path, change: object, tmp: Path, before: bytes = b"") -> str:
    """Change each item of a DCP folder of one file, with bytes before the first one; return the file."""
    opened = Folder(folder, tmp / "never")
    meta, out = opened.load(), bytearray(before)
    for place in opened.places():
        item = change(place, opened.read(place))  # type: ignore[operator]
        meta.storage_data[place.key].offset, meta.storage_data[place.key].length = len(out), len(item)
        out += item
        data = place.file
    data.write_bytes(out)
    opened.dump(meta)
    return str(data.relative_to(folder))


# ----------------------------------------------------------------------------------- what is carried


def test_keys_of_users_in_a_safetensors_header(it: Run) -> None:
    save_file({"w": torch.ones(4)}, it.source / "model.safetensors", metadata=LORA)
    it.consolidated()
    assert metadata(it.copy / "model.safetensors") == LORA
    it.deletes()


def test_a_copy_without_them_replaces_nothing(it: Run) -> None:
    save_file({"w": torch.ones(4)}, it.source / "model.safetensors", metadata=LORA)
    it.consolidated("consolidate", "--exclude", "__metadata__")
    assert metadata(it.copy / "model.safetensors") == {"format": "pt"}
    it.keeps("__metadata__", "object")


def test_a_copy_that_lost_one_of_them_by_hand(it: Run) -> None:
    save_file({"w": torch.ones(4)}, it.source / "model.safetensors", metadata=LORA)
    it.consolidated()
    save_file({"w": torch.ones(4)}, it.copy / "model.safetensors", metadata={"format": "pt"})
    assert it.retire("--fingerprint")["fate"] == "unsafe"


def test_other_keys_of_an_index(it: Run) -> None:
    places = {}
    for n, (name, tensor) in enumerate({"a": torch.ones(2), "b": torch.ones(3)}.items(), 1):
        places[name] = f"model-{n:05d}-of-00002.safetensors"
        save_file({name: tensor}, it.source / places[name], metadata={"format": "pt"})
    form = {"metadata": {"total_size": 20, "note": "mine"}, "owner": ["me"], "weight_map": places}
    (it.source / "model.safetensors.index.json").write_text(json.dumps(form))
    it.consolidated("consolidate", "--max-file-size", "12B")
    written = json.loads((it.copy / "model.safetensors.index.json").read_text())
    assert written["owner"] == ["me"]
    assert written["metadata"]["note"] == "mine"
    it.deletes()


def test_attributes_of_a_parameter(it: Run) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.note = {"lr_scale": 0.5}  # type: ignore[attr-defined]
    torch.save({"w": weight}, it.source / "model.pt")
    it.consolidated()
    (blob,) = ckptcore.open(str(it.copy)).blobs
    assert (blob.key, decode(blob.tree)) == ("__attributes__", {"w": {"note": {"lr_scale": 0.5}}})
    it.deletes()


def test_an_export_to_the_hub_says_what_it_leaves_out(it: Run, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"w": torch.ones(4)}, it.source / "model.safetensors", metadata=LORA)
    assert run(["export", str(it.source), str(it.copy), "--no-catalog", "--output", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["dropped"] == [["__metadata__", "an export holds the model only"]]
    assert metadata(it.copy / "model.safetensors") == {"format": "pt"}


# ------------------------------------------------------------------------- what belongs to nothing


def test_bytes_of_a_distcp_that_no_record_covers(it: Run) -> None:
    dcp.save(dict(STATE), checkpoint_id=it.source, no_dist=True)
    name = replaced_items(it.source, lambda _place, item: item, it.tmp, b"precious" * 64)
    it.consolidated().keeps(name, "unused bytes")


def test_a_zip_record_that_the_pickle_does_not_name(it: Run) -> None:
    torch.save(STATE, it.source / "model.pt")
    path = it.source / "model.pt"
    path.write_bytes(with_record(path.read_bytes(), "notes.txt", b"mine"))
    it.consolidated().keeps("model.pt", "unused bytes")


def test_a_zip_record_inside_an_item(it: Run) -> None:
    dcp.save(dict(STATE), checkpoint_id=it.source, no_dist=True)

    def hidden(place: object, item: bytes) -> bytes:
        return with_record(item, "data/9", b"hidden" * 5) if place.tensor else item  # type: ignore[attr-defined]

    name = replaced_items(it.source, hidden, it.tmp)
    it.consolidated().keeps(name, "unused bytes")


def test_attributes_of_a_tensor_inside_an_item(it: Run) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=it.source, no_dist=True)
    weight = torch.nn.Parameter(torch.ones(3))
    weight.note = "mine"  # type: ignore[attr-defined]
    saved = io.BytesIO()
    torch.save(weight, saved)
    name = replaced_items(it.source, lambda _place, _item: saved.getvalue(), it.tmp)
    it.consolidated().keeps(name, "unused bytes")


def test_elements_of_a_storage_that_no_tensor_has(it: Run) -> None:
    torch.save({"w": torch.arange(12.0)[2:5]}, it.source / "model.pt")
    it.consolidated().keeps("model.pt", "unused bytes")


def test_one_file(it: Run) -> None:
    """The files beside it stay, its own bytes go."""
    os.rmdir(it.source)
    path = it.source.with_name("step-1.pt")
    torch.save(STATE, path)
    path.write_bytes(with_record(path.read_bytes(), "notes.txt", b"mine"))
    it.cli("catalog", "root", "add", "r", it.tmp / "runs")
    newest = path.with_name("step-2.pt")
    torch.save(STATE | {"step": 8}, newest)
    for each in (path, newest):
        it.cli("consolidate", each, it.tmp / "out" / each.stem, "--fingerprint")
    it.source = path
    item = it.retire()
    assert item["fate"] == "unsafe", item
    assert {"name": "step-1.pt", "kind": "unused bytes"} in item["unproven"], item
    it.deletes("--accept-loss", "step-1.pt")


# ------------------------------------------------------------------------------ what the reader knows


def test_a_description_that_the_reader_did_not_read(it: Run) -> None:
    """Its name says that it describes; nothing of it is in the copy."""
    dcp.save(dict(STATE), checkpoint_id=it.source, no_dist=True)
    (it.source / "metadata.json").write_text('{"mine": 1}')
    it.consolidated().keeps("metadata.json", "file")


def test_a_file_that_was_read_and_is_of_another_save(it: Run) -> None:
    save_file({"w": torch.ones(4)}, it.source / "model.safetensors", metadata={"format": "pt"})
    save_file({"w": torch.zeros(4)}, it.source / "other.safetensors", metadata={"format": "pt"})
    (it.source / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": {"w": "model.safetensors"}})
    )
    it.consolidated().keeps("other.safetensors", "file")
