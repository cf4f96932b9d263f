"""Lightning and Fabric: every layout is read, and the one file is what Lightning's consolidation makes."""

from __future__ import annotations

import sys
import types
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import samples
import torch
from lightning_cases import VERSION, differences, fabric, metadata, module, official, optimizer, save, trainer

import ckptcore
from ckptcore.errors import (
    CkptError,
    DamagedCheckpoint,
    NameMismatch,
    NotComplete,
    UnsupportedFormat,
    UsageError,
)
from ckptcore.naming.model_part import find_model
from ckptcore.planning.request import Request


@pytest.fixture
def point(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A class of a user's code."""
    code = types.ModuleType("users_code")
    made = namedtuple("Point", "x y")
    made.__module__ = "users_code"
    code.Point = made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "users_code", code)
    return made


def consolidated(source: Path, target: Path, **options: Any) -> dict[str, Any]:
    ckptcore.convert(str(source), str(target), to="lightning", **options)
    assert target.is_file()
    return dict(torch.load(target, weights_only=False))


@pytest.mark.parametrize("model_key", ["model", "state_dict"], ids=["FSDP", "ModelParallel"])
def test_a_trainers_folder_equals_lightnings_consolidation(tmp_path: Path, model_key: str) -> None:
    source = trainer(tmp_path / "step=1.ckpt", model_key)
    found = consolidated(source, tmp_path / "step=1.ckpt.consolidated")
    assert differences(official(source), found) == []
    assert found["hyper_parameters"]["root"] == Path("/data/run.1")


def test_real_folders_equal_lightnings_consolidation(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folders = {
        s.name: f
        for s in request.config.stash[samples.SAMPLES]
        for f in s.dcp_folders
        if (f / "meta.pt").exists() and (f / ".metadata").exists()
    }
    assert len(folders) >= 5
    for name, folder in folders.items():
        assert differences(official(folder), consolidated(folder, tmp_path / name)) == [], name


def test_fabrics_folder_keeps_the_users_structure(tmp_path: Path) -> None:
    source = fabric(tmp_path / "ckpt")
    assert ckptcore.open(str(source)).origin["lightning"] == {"by": "fabric"}
    found = consolidated(source, tmp_path / "out.ckpt")
    assert differences(official(source), found) == []
    assert list(found) == ["net", "optim.sgd", "list", "iter", "hparams"]


def test_the_written_file_reads_back_as_itself(tmp_path: Path) -> None:
    source = trainer(tmp_path / "ckpt", "model")
    first = consolidated(source, tmp_path / "a.ckpt")
    manifest = ckptcore.open(str(tmp_path / "a.ckpt"))
    assert manifest.format == "lightning"
    assert manifest.origin["lightning"] | {"full": True} == {
        "by": "trainer",
        "version": "2.6.6",
        "epoch": 3,
        "global_step": 12,
        "full": True,
    }
    assert differences(first, consolidated(tmp_path / "a.ckpt", tmp_path / "b.ckpt")) == []


def test_ids_of_an_optimizer_stay_ids(tmp_path: Path) -> None:
    """A full checkpoint as a Trainer writes it: its optimizer counts the parameters."""
    model = module()
    states = [
        {
            "state": {0: {"step": torch.tensor(1.0)}, 1: {"step": torch.tensor(2.0)}},
            "param_groups": [{"lr": 0.1, "params": [0, 1]}],
        }
    ]
    full = {**metadata(), "state_dict": model, "optimizer_states": states}
    torch.save(full, tmp_path / "full.ckpt")
    found = consolidated(tmp_path / "full.ckpt", tmp_path / "again.ckpt")
    assert differences(full, found) == []


def numbered(shapes: list[tuple[int, ...]]) -> dict[str, Any]:
    """An optimizer with torch's numbers of its parameters."""
    return {
        "state": {n: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(s)} for n, s in enumerate(shapes)},
        "param_groups": [{"lr": 0.1, "params": list(range(len(shapes)))}],
    }


def test_numbers_of_an_optimizer_are_named_where_only_one_order_fits(tmp_path: Path) -> None:
    model = {
        "a.w": torch.ones(2, 3),
        "a.buffer": torch.ones(5),
        "b.w": torch.ones(2, 3),
        "b.bias": torch.ones(2),
    }
    states = [numbered([(2, 3), (2, 3), (2,)]), numbered([(2, 3)]), numbered([(2,), (2, 3)])]
    torch.save({**VERSION, "state_dict": model, "optimizer_states": states}, tmp_path / "full.ckpt")
    facts = ckptcore.open(str(tmp_path / "full.ckpt")).origin["lightning"]
    assert facts["parameters"] == {"0": {"0": "a.w", "1": "b.w", "2": "b.bias"}}, (
        "not the second (two fit) nor the third (none)"
    )


def test_buffers_of_a_norm_are_no_parameters(tmp_path: Path) -> None:
    """Its running values have the shape of its weight."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    names = [name for name, _ in net.named_parameters()]
    states = [numbered([tuple(p.shape) for p in net.parameters()])]
    torch.save({**VERSION, "state_dict": net.state_dict(), "optimizer_states": states}, tmp_path / "a.ckpt")
    facts = ckptcore.open(str(tmp_path / "a.ckpt")).origin["lightning"]
    assert facts["parameters"] == {"0": {str(n): name for n, name in enumerate(names)}}


def test_excludes_keep_the_rest(tmp_path: Path) -> None:
    source = trainer(tmp_path / "ckpt", "model")
    found = consolidated(source, tmp_path / "a.ckpt", exclude=["optimizer_*", "callbacks*"])
    assert set(found) == set(official(source)) - {"optimizer_states", "callbacks"}
    full = consolidated(source, tmp_path / "b.ckpt")
    fewer = consolidated(tmp_path / "b.ckpt", tmp_path / "c.ckpt", exclude=["state_dict.net.embed.weight"])
    del full["state_dict"]["net.embed.weight"]
    assert differences(full, fewer) == []


def test_a_list_with_a_gap_is_refused(tmp_path: Path) -> None:
    source = trainer(tmp_path / "ckpt", "model")
    with pytest.raises(NameMismatch, match=r"optimizer_states\.0"):
        consolidated(source, tmp_path / "a.ckpt", exclude=["optimizer_0.*"])
    assert not (tmp_path / "a.ckpt").exists()


def test_renames_and_casts_reach_the_nested_file(tmp_path: Path) -> None:
    source = trainer(tmp_path / "ckpt", "model")
    found = consolidated(source, tmp_path / "a.ckpt", rename=[("model.net.", "model.body.")], dtype="bf16")
    assert set(found["state_dict"]) == {k.replace("net.", "body.") for k in module()}
    assert found["state_dict"]["body.embed.weight"].dtype == torch.bfloat16
    assert found["state_dict"]["body.steps"].dtype == torch.int64


def test_conversions_to_other_formats(tmp_path: Path) -> None:
    """A flat torch file and a DCP folder contain the values of `meta.pt`, too."""
    source = trainer(tmp_path / "ckpt", "model")
    ckptcore.convert(str(source), str(tmp_path / "a.pt"))
    flat = torch.load(tmp_path / "a.pt", weights_only=False)
    assert flat["global_step"] == 12
    assert flat["hyper_parameters.root"] == "/data/run.1"
    assert torch.equal(flat["model.net.embed.weight"], module()["net.embed.weight"])
    ckptcore.convert(str(source), str(tmp_path / "dcp"), to="dcp")
    assert ckptcore.open(str(tmp_path / "dcp")).format == "dcp"


def test_without_meta_pt_the_format_is_dcp(tmp_path: Path) -> None:
    source = save(tmp_path / "ckpt", {"model": module()}, None)
    assert ckptcore.open(str(source)).format == "dcp"
    with pytest.raises(UnsupportedFormat, match=r"meta\.pt"):
        consolidated(source, tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()


@pytest.mark.parametrize("key", ["model", "state_dict"])
def test_a_missing_meta_pt_is_a_finding(key: str, tmp_path: Path) -> None:
    """By names that only the Trainer gives. A converted folder has all of them; Fabric's can be any."""
    source = trainer(tmp_path / "ckpt", key)
    ckptcore.convert(str(source), str(tmp_path / "dcp"), to="dcp")
    assert ckptcore.open(str(tmp_path / "dcp")).findings == ()
    (source / "meta.pt").unlink()
    manifest = ckptcore.open(str(source))
    assert [(f.code, f.file, f.severity) for f in manifest.findings] == [
        ("missing-part", "meta.pt", "warning")
    ]
    assert "copy meta.pt" in manifest.findings[0].hint
    plain = {"state": {}, "param_groups": [{"lr": 0.1, "params": ["net.embed.weight"]}]}  # SGD has no tensors
    source = save(tmp_path / "sgd", {key: module(), "optimizer_0": plain}, None)
    assert [f.file for f in ckptcore.open(str(source)).findings] == ["meta.pt"]
    assert ckptcore.open(str(save(tmp_path / "weights", {key: module()}, None))).findings == ()
    source = fabric(tmp_path / "fabric")
    (source / "meta.pt").unlink()
    assert ckptcore.open(str(source)).findings == ()


@pytest.mark.parametrize("left", ["meta.pt alone", "without .metadata"])
def test_meta_pt_without_metadata_is_not_complete(tmp_path: Path, left: str) -> None:
    source = trainer(tmp_path / "ckpt", "model")
    (source / ".metadata").unlink()
    for part in source.glob("*.distcp") if left == "meta.pt alone" else ():
        part.unlink()
    with pytest.raises(NotComplete):
        ckptcore.open(str(source))


def test_a_cut_meta_pt_is_malformed(tmp_path: Path) -> None:
    source = trainer(tmp_path / "ckpt", "model")
    raw = (source / "meta.pt").read_bytes()
    (source / "meta.pt").write_bytes(raw[: len(raw) // 2])
    with pytest.raises(CkptError) as caught:
        ckptcore.open(str(source))
    assert caught.value.exit_code == 1


def test_foreign_classes_are_left_out_by_name(tmp_path: Path, point: Any) -> None:
    meta = {
        **VERSION,
        "hyper_parameters": {"p": point(1, 2), "list": [1, point(3, 4)], "kept": 5},
        "x": {"y": 6},
    }
    source = trainer(tmp_path / "ckpt", "model", meta)
    manifest = ckptcore.open(str(source))
    messages = {f.fqn: f.message for f in manifest.findings if f.code == "refused-global"}
    assert set(messages) == {"hyper_parameters.p", "hyper_parameters.list"}
    assert all("users_code.Point" in m for m in messages.values())
    found = consolidated(source, tmp_path / "a.ckpt")
    assert found["hyper_parameters"] == {"kept": 5}
    assert found["x"] == {"y": 6}


def test_tensors_in_a_foreign_class_are_reported(tmp_path: Path, point: Any) -> None:
    meta = {**VERSION, "callbacks": {"metric": point(torch.ones(5), 2)}, "kept": 5, "x": {"y": point(1, 2)}}
    source = trainer(tmp_path / "ckpt", "model", meta)
    with pytest.raises(DamagedCheckpoint) as caught:
        consolidated(source, tmp_path / "a.ckpt")
    assert {f.code for f in caught.value.values["findings"]} == {"refused-tensors"}
    with pytest.raises(DamagedCheckpoint):
        consolidated(source, tmp_path / "a.ckpt", exclude=["x"])
    assert consolidated(source, tmp_path / "a.ckpt", exclude=["callbacks", "x"])["kept"] == 5


def test_the_model_is_below_the_modules_one_attribute(tmp_path: Path) -> None:
    one = find_model(ckptcore.open(str(trainer(tmp_path / "one", "state_dict"))))
    assert one.prefix == "state_dict.net."
    assert "attribute net" in one.because
    ckptcore.convert(str(tmp_path / "one"), str(tmp_path / "hf"), verb="export")
    names = {t.fqn for t in ckptcore.open(str(tmp_path / "hf")).tensors}
    assert names == set(module(""))
    two = {**module(), **module("loss.")}
    source = save(
        tmp_path / "two", {"model": two, "optimizer_0": optimizer(["net.embed.weight"])}, metadata()
    )
    assert find_model(ckptcore.open(str(source))).prefix == "model."
    assert find_model(ckptcore.open(str(source)), "model.net").prefix == "model.net."


def test_which_destination_is_one_file() -> None:
    assert (Request("a", "b.ckpt").format, Request("a", "b.ckpt").single) == ("lightning", "b.ckpt")
    assert Request("a", "b.ckpt", to="torch_save").single == "b.ckpt"
    assert Request("a", "b.consolidated", to="lightning").single == "b.consolidated"
    assert Request("a", "b.consolidated").single is None
    with pytest.raises(UsageError, match="does not fit"):
        Request("a", "b.ckpt", to="safetensors")


def test_an_export_is_not_a_lightning_checkpoint(tmp_path: Path) -> None:
    source = trainer(tmp_path / "ckpt", "model")
    with pytest.raises(UsageError, match="export"):
        ckptcore.convert(str(source), str(tmp_path / "a.ckpt"), verb="export")


def test_damage_in_meta_pt_is_detected(tmp_path: Path) -> None:
    """Its tensors and its pickle have checksums like any other record."""
    source = trainer(tmp_path / "ckpt", "model")
    raw = bytearray((source / "meta.pt").read_bytes())
    at = raw.index(b"ModelCheckpoint")
    raw[at] ^= 1
    (source / "meta.pt").write_bytes(bytes(raw))
    with pytest.raises(DamagedCheckpoint):
        ckptcore.open(str(source))
