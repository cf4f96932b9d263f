"""Composer: one step of a folder is read, also inside of its tar; torchtune's own files beside it."""

from __future__ import annotations

import json
import tarfile
from io import BytesIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptcore
from ckptcore.cli.main import run
from ckptcore.conversion.pipeline import validate
from ckptcore.encodings.tar_members import tar_members
from ckptcore.encodings.torchzip.archive import is_tar
from ckptcore.errors import AmbiguousModel, MalformedCheckpoint, UnknownFormat, UnsupportedFormat

STATE = {
    "model": {"w": torch.arange(6.0).reshape(2, 3)},
    "metadata": {"world_size": 1, "torch_version": torch.__version__},
}


@pytest.fixture(autouse=True)
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTCORE_CATALOG_URL", f"sqlite:///{tmp_path}/catalog.db")


def save(path: Path, form: int = tarfile.PAX_FORMAT, member: str = "composer_states.pt") -> Path:
    """Write one step as Composer does: a tar of the folder with its one file."""
    content = BytesIO()
    torch.save({"state": STATE, "rng": []}, content)
    with tarfile.open(path, "w", format=form) as archive:
        folder = tarfile.TarInfo("")
        folder.type, folder.mtime = tarfile.DIRTYPE, 1795844532.25
        archive.addfile(folder)
        info = tarfile.TarInfo(member)
        info.size = content.tell()
        archive.addfile(info, BytesIO(content.getvalue()))
    return path


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_step_inside_of_a_tar(form: int, tmp_path: Path) -> None:
    path = save(tmp_path / "ep0-ba2-rank0.tar", form)
    report = validate(ckptcore.open(str(path)), "bytes")
    assert [f.code for f in report.findings if f.severity != "info"] == []
    assert run(["consolidate", str(path), str(tmp_path / "out.safetensors")]) == 0
    assert torch.equal(load_file(tmp_path / "out.safetensors")["state.model.w"], STATE["model"]["w"])
    assert ckptcore.open(str(tmp_path / "out.safetensors")).tensors


def test_one_step_at_a_time(tmp_path: Path) -> None:
    save(tmp_path / "ep0-ba2-rank0.tar")
    assert [t.fqn for t in ckptcore.open(str(tmp_path)).tensors] == ["state.model.w"]
    save(tmp_path / "ep0-ba4-rank0.tar")
    with pytest.raises(AmbiguousModel) as caught:
        ckptcore.open(str(tmp_path))
    assert "ep0-ba4-rank0.tar" in (caught.value.hint or "")


def test_every_cut_of_a_tar_is_noticed(tmp_path: Path) -> None:
    path = save(tmp_path / "ep0-ba2-rank0.tar")
    content = path.read_bytes()
    (member,) = tar_members(lambda start, n: content[start : start + n], len(content), "x")
    for length in range(512, member.start + -(-member.length // 512) * 512 + 1, 512):
        path.write_bytes(content[:length])
        with pytest.raises((MalformedCheckpoint, UnsupportedFormat, UnknownFormat)):
            ckptcore.open(str(path))


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.soak)])
def test_headers_of_a_tar_that_are_none(step: int, tmp_path: Path) -> None:
    path = save(tmp_path / "x.tar", tarfile.PAX_FORMAT)
    content = path.read_bytes()
    for at in range(0, 2048, step):
        changed = content[:at] + bytes([content[at] ^ 0x41]) + content[at + 1 :]
        path.write_bytes(changed)
        try:
            manifest = ckptcore.open(str(path))
        except (MalformedCheckpoint, UnsupportedFormat, UnknownFormat):
            continue
        assert torch.equal(ckptcore.read(manifest, "state.model.w"), STATE["model"]["w"]), at


def test_a_size_beyond_the_file() -> None:
    block = bytearray(512)
    block[:1], block[257:262], block[156:157] = b"x", b"ustar", b"0"
    block[124:136] = b"\x80" + (1 << 60).to_bytes(11, "big")
    block[148:156] = b"%06o\0 " % (sum(block) - sum(block[148:156]) + 256)
    data = bytes(block) + bytes(1024)
    assert is_tar(data[:512])
    with pytest.raises(MalformedCheckpoint):
        tar_members(lambda start, n: data[start : start + n], len(data), "x")


def test_another_tar_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormat):
        ckptcore.open(str(save(tmp_path / "x.tar", member="other.pt")))


def test_the_version_of_torch_is_a_text(tmp_path: Path) -> None:
    """A value that trainers save as it is; without it the record of the ranks would be left out."""
    torch.save({"w": torch.ones(2), "about": {"torch": torch.__version__}}, tmp_path / "model.pt")
    (blob,) = ckptcore.open(str(tmp_path)).blobs
    assert (blob.tree, blob.refused) == ({"torch": str(torch.__version__)}, ())


def test_torchtune_s_adapter_beside_its_model(tmp_path: Path) -> None:
    folder = tmp_path / "epoch_0"
    folder.mkdir()
    torch.save({"layers.0.w": torch.ones(2)}, folder / "model-00001-of-00001.bin")
    torch.save({"layers.0.w.lora_a": torch.ones(2)}, folder / "adapter_model.pt")
    manifest = ckptcore.open(str(folder))
    assert [t.fqn for t in manifest.tensors] == ["layers.0.w"]
    assert [(f.code, f.file) for f in manifest.findings] == [("stray-file", "adapter_model.pt")]
    (folder / "model-00001-of-00001.bin").unlink()
    assert [t.fqn for t in ckptcore.open(str(folder)).tensors] == ["layers.0.w.lora_a"]


def test_the_state_of_torchtune_is_no_model(tmp_path: Path) -> None:
    """It is one file of a run: the next step is the newest epoch."""
    for name in ("epoch_0", "epoch_1"):
        (tmp_path / name).mkdir()
        torch.save({"w": torch.ones(2)}, tmp_path / name / "model-00001-of-00001.bin")
    (tmp_path / "recipe_state").mkdir()
    torch.save({"seed": torch.ones(1)}, tmp_path / "recipe_state" / "recipe_state.pt")
    with pytest.raises(UnknownFormat) as caught:
        ckptcore.open(str(tmp_path))
    assert caught.value.hint == "name one of them, such as epoch_1"
    assert json.dumps(caught.value.message).count("epoch_1/") >= 1


@pytest.mark.parametrize("content", [b"", b"\0" * 10240, b"cut"])
def test_a_tar_of_something_else_is_no_second_save(content: bytes, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    (tmp_path / "code.tar").write_bytes(content)
    assert [t.fqn for t in ckptcore.open(str(tmp_path)).tensors] == ["w"]
