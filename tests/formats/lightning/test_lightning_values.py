"""Values beside a Lightning model: what users keep there is carried, and what cannot be is named."""

from __future__ import annotations

import sys
import types
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning_cases import VERSION, module, save, trainer
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import ckptcore
from ckptcore.core.object_tree import decode
from ckptcore.errors import (
    DamagedCheckpoint,
    MalformedCheckpoint,
    NameMismatch,
    UnknownFormat,
    UnreadablePart,
    UnsupportedFormat,
)
from ckptcore.formats import detect, open_source


class Made:
    """Pickles as a call of the attacker's choice."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self.made = (function, args, state) if state is not None else (function, args)

    def __reduce__(self) -> Any:
        return self.made


def read(folder: Path, meta: Any) -> ckptcore.Manifest:
    source = save(folder / "ckpt", {"model": module()}, None)
    torch.save(meta, source / "meta.pt")
    return ckptcore.open(str(source))


def values(manifest: ckptcore.Manifest) -> dict[str, Any]:
    return {b.key: decode(b.tree) for b in manifest.blobs}


@pytest.fixture
def attribute_dict(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Lightning's own class, under the name of one of its packages."""

    def made(package: str) -> Any:
        parts = package.split(".")
        for n in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:n]), types.ModuleType(".".join(parts[:n])))
        cls = type("AttributeDict", (dict,), {"__module__": package})
        sys.modules[package].AttributeDict = cls  # type: ignore[attr-defined]
        return cls

    return made


@pytest.mark.parametrize(
    "package",
    [
        "lightning.fabric.utilities.data",
        "lightning_fabric.utilities.data",
        "lightning.pytorch.utilities.parsing",
        "pytorch_lightning.utilities.parsing",
    ],
)
def test_attribute_dicts_of_every_release(
    package: str, tmp_path: Path, attribute_dict: Callable[[str], Any]
) -> None:
    parameters = attribute_dict(package)(lr=0.1, layers=(2, 3))
    manifest = read(tmp_path, {**VERSION, "hyper_parameters": parameters})
    assert values(manifest)["hyper_parameters"] == {"lr": 0.1, "layers": (2, 3)}
    assert manifest.findings == ()


@pytest.mark.parametrize(
    "value",
    [
        Made(Namespace, 1),
        Made(Namespace, state={7: "a number"}),
        Made(Namespace, state=[("a", 1)]),
        Made(torch._tensor._rebuild_from_type_v2, torch._utils._rebuild_tensor_v2, torch.Tensor, 5, {}),
        Made(set, 5),
    ],
)
def test_calls_with_unexpected_arguments(value: Any, tmp_path: Path) -> None:
    with pytest.raises(MalformedCheckpoint):
        read(tmp_path, {**VERSION, "hyper_parameters": {"x": value}})


def test_an_attribute_dict_takes_no_arguments(tmp_path: Path, attribute_dict: Callable[[str], Any]) -> None:
    cls = attribute_dict("lightning.fabric.utilities.data")
    with pytest.raises(MalformedCheckpoint, match="AttributeDict"):
        read(tmp_path, {**VERSION, "x": Made(cls, {"a": 1})})


def test_classes_and_object_arrays_are_left_out_by_name(tmp_path: Path) -> None:
    """A class is not a value, on the allow-list or not; its neighbours stay."""
    found = {
        "known": OrderedDict,
        "unknown": torch.nn.GELU,
        "in a set": {torch.nn.ReLU, 1},
        "frozen": frozenset({torch.nn.ReLU}),
        "array": np.array([Namespace(a=torch.nn.GELU)], dtype=object),
        "kept": [1, 2],
    }
    manifest = read(tmp_path, {**VERSION, "hyper_parameters": found})
    assert values(manifest)["hyper_parameters"] == {"kept": [1, 2]}
    lost = {f.fqn for f in manifest.findings if f.code == "refused-global"}
    assert lost == {f"hyper_parameters.{k}" for k in found if k != "kept"}


def test_many_refused_values_are_counted(tmp_path: Path) -> None:
    manifest = read(tmp_path, {**VERSION, "hyper_parameters": dict.fromkeys(range(130), torch.nn.GELU)})
    messages = [f.message for f in manifest.findings]
    assert len(messages) == 101
    assert messages[-1] == "30 more values of meta.pt are left out"


def test_a_meta_pt_that_is_not_a_dict(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormat, match=r"must contain a dict \(got list\)"):
        read(tmp_path, [1, 2])


def test_values_that_expand_together(tmp_path: Path) -> None:
    """Each is within its bounds, but all together are not."""
    wide = torch.zeros(1).expand(240_000_000)
    with pytest.raises(MalformedCheckpoint, match="expand to tensors"):
        read(tmp_path, {**VERSION, "a": wide, "b": wide})


def test_empty_metadata(tmp_path: Path) -> None:
    source = save(tmp_path / "ckpt", {}, {**VERSION, "x": 1})
    manifest = ckptcore.open(str(source))
    assert [f.code for f in manifest.findings if f.severity == "error"] == ["no-tensors"]
    with pytest.raises(DamagedCheckpoint):
        ckptcore.convert(str(source), str(tmp_path / "a.ckpt"), to="lightning")


def test_meta_pt_beside_another_torch_file_is_ignored(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "meta.pt")
    assert detect(open_source(str(tmp_path)))[0].name == "lightning"
    torch.save({"w": torch.ones(2)}, tmp_path / "other.pt")
    with pytest.raises(UnknownFormat, match=r"meta\.pt, other\.pt"):
        ckptcore.open(str(tmp_path))


def test_a_model_without_a_state_dict_is_a_torch_file(tmp_path: Path) -> None:
    torch.save({**VERSION, "state_dict": [torch.ones(2)]}, tmp_path / "a.ckpt")
    assert ckptcore.open(str(tmp_path / "a.ckpt")).format == "torch_save"


def test_part_of_a_tuple_cannot_be_left_out(tmp_path: Path) -> None:
    """In a full file, the tuple would have another length."""
    pair = (torch.ones(2), torch.zeros(3))
    torch.save({**VERSION, "state_dict": {"w": torch.ones(2)}, "pair": pair}, tmp_path / "a.ckpt")
    source, target = str(tmp_path / "a.ckpt"), str(tmp_path / "b.ckpt")
    with pytest.raises(NameMismatch):
        ckptcore.convert(source, target, to="lightning", exclude=["pair.1"])
    ckptcore.convert(source, target, to="lightning", exclude=["pair*"])
    assert set(torch.load(target, weights_only=True)) == {*VERSION, "state_dict"}


def test_tensors_with_attributes_are_tensors(tmp_path: Path) -> None:
    """FSDP marks the clones in full state dicts, users mark parameters: torch then pickles a typed tensor."""
    marked = torch.arange(6.0).reshape(2, 3)
    marked._has_been_cloned = True  # type: ignore[attr-defined]
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.sequence_parallel = True  # type: ignore[attr-defined]
    full = {**VERSION, "state_dict": {"net.w": marked, "net.b": parameter}}
    torch.save(full, tmp_path / "full.ckpt")
    torch.save(full["state_dict"], tmp_path / "plain.pt")
    for name, prefix in (("full.ckpt", "state_dict."), ("plain.pt", "")):
        manifest = ckptcore.open(str(tmp_path / name))
        assert manifest.findings == (), name
        assert torch.equal(ckptcore.read(manifest, f"{prefix}net.w"), marked), name
        assert torch.equal(ckptcore.read(manifest, f"{prefix}net.b"), parameter.detach()), name


def test_a_tensor_of_another_class_is_refused(tmp_path: Path) -> None:
    """Its bytes may mean something else, whatever function makes it."""

    class Quantized(torch.Tensor):
        pass

    Quantized.__module__, Quantized.__qualname__ = "users_code", "Quantized"
    code = types.ModuleType("users_code")
    code.Quantized = Quantized  # type: ignore[attr-defined]
    sys.modules["users_code"] = code
    try:
        value = torch.ones(4).as_subclass(Quantized)
        torch.save({"w": value, "v": torch.ones(2)}, tmp_path / "plain.pt")
        meta = {**VERSION, "callbacks": {"c": value}}
        plain = ckptcore.open(str(tmp_path / "plain.pt"))
        assert [t.fqn for t in plain.tensors] == ["v"]
        assert (plain.unread["w"].dtype, plain.unread["w"].shape) == ("float32", (4,))
        with pytest.raises(UnreadablePart, match=r"users_code\.Quantized"):
            ckptcore.convert(str(tmp_path / "plain.pt"), str(tmp_path / "out"))
        found = read(tmp_path, meta).findings
        assert {f.code for f in found} == {"refused-global", "refused-tensors"}
        assert any("users_code.Quantized" in f.message for f in found)
    finally:
        del sys.modules["users_code"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("model.net.steps", "model"),  # where others are
        ("model.net.steps", "epoch"),  # where a value is
    ],
)
def test_names_that_do_not_nest(old: str, new: str, tmp_path: Path) -> None:
    source = trainer(tmp_path / "ckpt", "model")
    with pytest.raises(NameMismatch):
        ckptcore.convert(str(source), str(tmp_path / "a.ckpt"), to="lightning", rename=[(old, new)])
    assert not (tmp_path / "a.ckpt").exists()


def test_metadata_without_paths(tmp_path: Path) -> None:
    """Dots in names do not prove dicts."""
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save({"model.net.w": torch.ones(3)}, checkpoint_id=tmp_path / "ckpt", planner=planner, no_dist=True)
    torch.save(dict(VERSION), tmp_path / "ckpt" / "meta.pt")
    with pytest.raises(UnsupportedFormat, match="does not record which names are nested"):
        ckptcore.convert(str(tmp_path / "ckpt"), str(tmp_path / "a.ckpt"), to="lightning")
