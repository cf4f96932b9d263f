"""One torch.save file: what is no plain state dict is refused by name, and nothing is lost in silence."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning_cases import VERSION
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import ckptcore
from ckptcore.core.box import Box
from ckptcore.core.object_tree import decode
from ckptcore.encodings.torchzip import reader
from ckptcore.errors import (
    DamagedCheckpoint,
    MalformedCheckpoint,
    NameMismatch,
    UnknownFormat,
    UnreadablePart,
    UnsupportedFormat,
)


def saved(folder: Path, tree: Any, name: str = "model.pt") -> Path:
    torch.save(tree, folder / name)
    return folder / name


def without(path: Path, record: str) -> Path:
    """A copy of a torch zip without one of its records."""
    made = path.with_name("less.pt")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(made, "w") as new:
        for entry in old.infolist():
            if not entry.filename.endswith(record):
                new.writestr(entry, old.read(entry))
    return made


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt", ".weights"])
def test_any_name_of_a_torch_zip(suffix: str, tmp_path: Path) -> None:
    """A folder with one such file is that file; an odd suffix must be named."""
    path = saved(tmp_path, {"w": torch.arange(4)}, f"model{suffix}")
    assert torch.equal(ckptcore.read(ckptcore.open(str(path)), "w"), torch.arange(4))
    if suffix == ".weights":
        with pytest.raises(UnknownFormat):
            ckptcore.open(str(tmp_path))
    else:
        assert ckptcore.open(str(tmp_path)).format == "torch_save"


def test_other_zips_are_not_recognised(tmp_path: Path) -> None:
    np.savez(tmp_path / "arrays.npz", w=np.ones(3))
    (tmp_path / "short.pt").write_bytes(b"PK")
    for name in ("arrays.npz", "short.pt"):
        with pytest.raises(UnknownFormat):
            ckptcore.open(str(tmp_path / name))


@pytest.mark.parametrize(("tree", "kind"), [([torch.ones(2)], "list"), (torch.ones(2), "tensor")])
def test_trees_that_are_not_dicts(tree: Any, kind: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormat, match=f"must contain a state dict .got {kind}"):
        ckptcore.open(str(saved(tmp_path, tree)))


def test_two_values_of_one_name(tmp_path: Path) -> None:
    """Names are paths joined with dots, and a key may contain one."""
    with pytest.raises(NameMismatch, match=r"two values have the name a\.b"):
        ckptcore.open(str(saved(tmp_path, {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}})))


def test_one_dict_under_two_names(tmp_path: Path) -> None:
    """Shared through the pickle's memo, as when a tied module is saved."""
    shared = {"w": torch.ones(2), "step": 3}
    manifest = ckptcore.open(str(saved(tmp_path, {"a": shared, "b": shared, "n": [1, 2], "m": [1, 2]})))
    assert {t.fqn for t in manifest.tensors} == {"a.w", "b.w"}
    assert {b.key for b in manifest.blobs} == {"a.step", "b.step", "n", "m"}


def test_a_missing_storage(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": torch.ones(2), "b": torch.zeros(3)})
    with pytest.raises(MalformedCheckpoint, match="no storage '1' for b"):
        ckptcore.open(str(without(path, "data/1")))


def test_values_of_unknown_classes_are_left_out_by_name(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.ones(2), "config": {"act": torch.nn.GELU}, "step": 3})
    manifest = ckptcore.open(str(path))
    assert [(f.code, f.fqn) for f in manifest.findings] == [("refused-global", "config")]
    ckptcore.convert(str(path), str(tmp_path / "out.pt"), to="torch_save")
    assert set(torch.load(tmp_path / "out.pt")) == {"w", "step"}


def test_tensors_in_an_unknown_class_are_reported(tmp_path: Path) -> None:
    """A pickled module, for example: its tensors cannot be read without running its code."""
    path = saved(tmp_path, {"w": torch.ones(2), "net": torch.nn.Linear(2, 3)})
    assert {t.fqn for t in ckptcore.open(str(path)).tensors} == {"w"}
    for verb in ("consolidate", "export"):
        with pytest.raises(UnreadablePart, match=r"torch\.nn\.modules\.linear\.Linear"):
            ckptcore.convert(str(path), str(tmp_path / "out"), verb=verb)
    ckptcore.convert(str(path), str(tmp_path / "out"), exclude=["net"])
    assert {t.fqn for t in ckptcore.open(str(tmp_path / "out")).tensors} == {"w"}


class Foreign:
    """A class that is on no allow-list."""

    def __init__(self) -> None:
        self.tensors = torch.ones(5)


def test_tensors_in_a_class_of_the_user(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.ones(2), "x": Foreign()})
    with pytest.raises(UnreadablePart, match="20 bytes of tensors inside"):
        ckptcore.convert(str(path), str(tmp_path / "out"))


def test_one_view_under_many_names(tmp_path: Path) -> None:
    """Each is within its bounds, but all together are far larger than the file."""
    wide = torch.zeros(1).expand(240_000_000)
    with pytest.raises(MalformedCheckpoint, match="expand to tensors"):
        ckptcore.open(str(saved(tmp_path, {"a": wide, "b": wide})))


def test_a_distributed_tensor_is_refused(tmp_path: Path) -> None:
    """One rank's file under another name."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        value = DTensor.from_local(torch.ones(3), mesh, [Replicate()])
        path = saved(tmp_path, {"w": value})
    finally:
        torch.distributed.destroy_process_group()
    with pytest.raises(UnsupportedFormat, match="must be a plain full state dict"):
        ckptcore.open(str(path))


def test_a_value_that_is_a_tensor_is_written_once(tmp_path: Path) -> None:
    """A Lightning file's top-level tensor is an object there, and a plain tensor here."""
    full = {**VERSION, "state_dict": {"w": torch.ones(2)}, "seed": torch.tensor([7, 8])}
    source = saved(tmp_path, full, "full.ckpt")
    ckptcore.convert(str(source), str(tmp_path / "out.pt"), to="torch_save")
    found = torch.load(tmp_path / "out.pt")
    assert torch.equal(found["seed"], torch.tensor([7, 8]))
    assert torch.equal(found["state_dict.w"], torch.ones(2))


def test_a_tensor_and_a_value_of_one_name(tmp_path: Path) -> None:
    source = saved(tmp_path, {"w": torch.ones(2), "step": 3})
    with pytest.raises(NameMismatch, match="step"):
        ckptcore.convert(str(source), str(tmp_path / "out.pt"), to="torch_save", rename=[("w", "step")])


def test_one_ranks_file_alone_is_a_finding(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.ones(2)}, "model_rank_3.pt")
    assert [f.code for f in ckptcore.open(str(path)).findings] == ["missing-file"]
    assert [f.severity for f in ckptcore.open(str(path), allow_incomplete=True).findings] == ["warning"]


def test_values_of_every_kind_come_back(tmp_path: Path) -> None:
    values = {
        "text": "x",
        "list": [1, [2.5, None]],
        "pair": (True, (b"raw", 1 - 2j)),
        "set": {1, 2},
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 1),
        "size": torch.Size([2, 3]),
    }
    manifest = ckptcore.open(str(saved(tmp_path, {"w": torch.ones(1), "values": values})))
    assert manifest.findings == ()
    (blob,) = manifest.blobs
    assert blob.key == "values"
    assert set(decode(blob.tree)) == set(values)


def test_a_flipped_byte_in_the_pickle(tmp_path: Path) -> None:
    path = saved(tmp_path, {"weight": torch.ones(2)})
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"weight")] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DamagedCheckpoint):
        ckptcore.open(str(path))


@pytest.mark.parametrize("nbytes", [20, 1000])  # of a tensor: a file that is read entirely, and a larger one
def test_a_file_of_many_records(tmp_path: Path, nbytes: int) -> None:
    """Of a large file its head and its tail are read, and then what is asked for."""
    tensors = {f"w.{n}": torch.arange(nbytes) + n for n in range(150)}
    torch.save(tensors, tmp_path / "model.pt")
    assert ((tmp_path / "model.pt").stat().st_size > reader._SMALL_FILE) == (nbytes == 1000)
    manifest = ckptcore.open(str(tmp_path / "model.pt"))
    assert [t.fqn for t in manifest.tensors] == list(tensors)
    assert all(torch.equal(ckptcore.read(manifest, name), tensor) for name, tensor in tensors.items())


def test_a_mask_that_expands_one_element(tmp_path: Path) -> None:
    """A mask that was saved as an expanded view is read, below a bound; the rest converts in any case."""
    row = torch.arange(4200.0)
    path = saved(tmp_path, {"w": torch.ones(4), "mask": row.expand(4200, 4200)})
    ckptcore.convert(str(path), str(tmp_path / "both"), catalog=False)
    assert torch.equal(load_file(tmp_path / "both" / "model.safetensors")["mask"], row.expand(4200, 4200))
    mask = torch.ones(1, 1).expand(1 << 15, 1 << 15)
    path = saved(tmp_path, {"w": torch.ones(4), "mask": mask})
    manifest = ckptcore.open(str(path))
    assert [t.fqn for t in manifest.tensors] == ["w"]
    assert f"expands 4 stored bytes to {4 << 30}" in manifest.unread["mask"].describe()
    ckptcore.convert(str(path), str(tmp_path / "out"), exclude=["mask"], catalog=False)
    assert [t.fqn for t in ckptcore.open(str(tmp_path / "out")).tensors] == ["w"]
    # Beside a model the bound is relative to what the file stores.
    path = saved(tmp_path, {"w": torch.ones(1 << 20), "mask": mask})
    assert [t.fqn for t in ckptcore.open(str(path)).tensors] == ["w", "mask"]
    part = ckptcore.read(ckptcore.open(str(path)), "mask", Box((1 << 14, 0), (2, 9)))
    assert torch.equal(part, torch.ones(2, 9))
