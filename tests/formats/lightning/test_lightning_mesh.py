"""Write Lightning and Fabric folders for the ranks of a mesh: everything is where their loaders expect it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning_cases import differences, fabric, metadata, official, trainer

import ckptcore
from ckptcore.conversion.pipeline import validate
from ckptcore.errors import UnsupportedFormat

FABRIC = {"iter": 7, "hparams": {"lr": 0.1, "root": Path("x")}}


def folder(kind: str, to: Path) -> Path:
    return fabric(to) if kind == "fabric" else trainer(to, kind)


@pytest.mark.grid
@pytest.mark.parametrize("mesh", ["fsdp=1", "fsdp=3", "dp_replicate=2,fsdp=2"])
@pytest.mark.parametrize("kind", ["model", "state_dict", "fabric"])
def test_it_is_the_same_checkpoint(kind: str, mesh: str, tmp_path: Path) -> None:
    """Compare Lightning's own consolidation of both: tensors, values and their places."""
    source, out = folder(kind, tmp_path / "in"), tmp_path / "out"
    ckptcore.convert(str(source), str(out), verb="reshard", to="lightning", mesh=mesh)
    world = {"fsdp=1": 1, "fsdp=3": 3}.get(mesh, 4)
    assert {p.name for p in out.iterdir()} == {
        ".metadata",
        "meta.pt",
        *(f"__{r}_0.distcp" for r in range(world)),
    }
    written = ckptcore.open(str(out))
    assert written.format == "lightning"
    assert written.origin["lightning"] == ckptcore.open(str(source)).origin["lightning"]
    assert validate(written, "bytes").ok
    meta = torch.load(out / "meta.pt", weights_only=False)
    assert differences(FABRIC if kind == "fabric" else metadata(), meta) == []
    there, here = official(source), official(out)
    assert there.keys() == here.keys()
    assert [d for k in there for d in differences(there[k], here[k], k) if ": keys" not in d] == []


def test_meta_comes_last(tmp_path: Path) -> None:
    plan = ckptcore.plan(
        str(trainer(tmp_path / "in", "model")),
        str(tmp_path / "out"),
        verb="reshard",
        to="lightning",
        mesh="fsdp=2",
    )
    assert [f.path for f in plan.files if f.commit] == ["meta.pt"]


def test_the_folder_may_have_a_trainers_name(tmp_path: Path) -> None:
    """``ckpt_path="last"`` looks for the suffix (Lightning: callbacks/model_checkpoint.py)."""
    source, out = trainer(tmp_path / "in", "model"), tmp_path / "step=4.ckpt"
    ckptcore.convert(str(source), str(out), verb="reshard", mesh="fsdp=2")
    assert ckptcore.open(str(out)).format == "lightning"
    assert (out / "meta.pt").is_file()


def test_a_model_of_fsdp_becomes_one_of_model_parallel(tmp_path: Path) -> None:
    """The strategies differ in one name."""
    source = trainer(tmp_path / "in", "model")
    ckptcore.convert(
        str(source),
        str(tmp_path / "out"),
        verb="reshard",
        to="lightning",
        mesh="fsdp=2",
        rename=(("model.", "state_dict."),),
    )
    written = official(tmp_path / "out")
    assert differences(official(source)["state_dict"].keys(), written["state_dict"].keys()) == []


def test_other_sources_are_refused(tmp_path: Path) -> None:
    source = trainer(tmp_path / "in", "model")
    for name, options in (("one.ckpt", {"to": "lightning"}), ("plain", {"to": "dcp"})):
        ckptcore.convert(str(source), str(tmp_path / name), **options)
        with pytest.raises(UnsupportedFormat) as caught:
            ckptcore.convert(
                str(tmp_path / name), str(tmp_path / "out"), verb="reshard", to="lightning", mesh="fsdp=2"
            )
        assert caught.value.hint
    assert not (tmp_path / "out").exists()
