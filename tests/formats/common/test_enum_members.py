"""Files that CPython 3.11.0 to 3.11.3 has pickled: they name the member of an enum, others its value.

Debian 12 has 3.11.2. A `.metadata` of DCP has a memory format for each tensor.
"""

from __future__ import annotations

import enum
import io
import pickle
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import old_pickles as old
import pytest
import torch
import torch.distributed.checkpoint as dcp
from deepspeed_files import deepspeed_classes

import ckptcore
from ckptcore.core.object_tree import Named, Refused
from ckptcore.encodings.pickle.library_globals import LIBRARY_TABLE
from ckptcore.encodings.pickle.trainer_classes import require_class
from ckptcore.encodings.pickle.unpickler import loads
from ckptcore.encodings.pickle.writer import Classes, Pickled
from ckptcore.errors import MalformedCheckpoint, UnsafeContent
from ckptcore.formats.dcp import metadata
from ckptcore.formats.deepspeed import rank_files
from ckptcore.formats.megatron.pickle_globals import MEGATRON_TABLE
from ckptcore.formats.torch_ranks.placement import DIST_TABLE

STATE = {"model": {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}, "step": 7}


@pytest.fixture(params=["value", "name"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Pickle members as one of the two groups of releases does (Lib/enum.py, `Enum.__reduce_ex__`)."""
    reductions: dict[str, Any] = {
        "value": lambda self, _protocol: (type(self), (self._value_,)),
        "name": lambda self, _protocol: (getattr, (type(self), self._name_)),
    }
    monkeypatch.setattr(enum.Enum, "__reduce_ex__", reductions[request.param])
    return str(request.param)


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An enum of Megatron, where pickle finds it."""
    parts = ("megatron", "megatron.core", "megatron.core.enums")
    for name in parts:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    made: Any = enum.Enum("ModelType", {"encoder_or_decoder": 1, "other": 2}, module=parts[-1])
    vars(sys.modules[parts[-1]])["ModelType"] = made
    return made


def pickled(value: Any, protocol: int = 2) -> bytes:
    return pickle.dumps(value, protocol)


def test_a_dcp_folder(by: str, tmp_path: Path) -> None:
    dcp.save(STATE, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    assert (b"getattr" in (tmp_path / "ckpt/.metadata").read_bytes()) is (by == "name")
    ckptcore.convert(tmp_path / "ckpt", tmp_path / "out", catalog=False)
    made = ckptcore.open(tmp_path / "out")
    for name, tensor in STATE["model"].items():  # type: ignore[attr-defined]
        assert torch.equal(ckptcore.read(made, f"model.{name}"), tensor)


def test_metadata_refuses_other_attributes() -> None:
    for owner, name in ((torch.Size, "__class__"), (dcp.metadata.TensorProperties, "create_from_tensor")):
        data = pickled(_Reduced(getattr, owner, name), 4)
        with pytest.raises(UnsafeContent, match=r"builtins\.getattr"):
            loads(data, metadata.TABLE, label=".metadata")


def test_the_memory_format_of_a_sharded_tensor() -> None:
    name = "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING"
    format = old.Called(old.Global("__builtin__.getattr"), (old.Global(name), "TORCH_CONTIGUOUS_FORMAT"))
    refused: list[str] = []
    assert loads(_saved(format), DIST_TABLE, label="x", refused=refused).args == ("TORCH_CONTIGUOUS_FORMAT",)
    assert refused == []


def test_the_stage_of_deepspeed(by: str) -> None:
    with deepspeed_classes() as classes:
        data = pickled({"zero_stage": classes.ZeroStageEnum.gradients})
    assert (b"getattr" in data) is (by == "name")
    refused: list[str] = []
    assert loads(data, rank_files.TABLE, label="x", refused=refused) == {"zero_stage": 2}
    assert refused == []


def test_an_enum_of_megatron_comes_out_as_the_same_member(by: str, kinds: Any) -> None:
    value = loads(pickled({"kind": kinds.other}), MEGATRON_TABLE, label="x", refused=[])
    kind, content = ("enum", 2) if by == "value" else ("enummember", "other")
    assert value == {"kind": Named(kind, ["megatron.core.enums.ModelType", content])}
    written = Pickled(lambda fqn: pytest.fail(fqn), classes=Classes.TRAINERS)
    written.value(value)
    assert pickle.loads(written.finish())["kind"] is kinds.other


@pytest.mark.parametrize("name", ["__class__", "_value2member_map_", "a b", "", 7, b"other"])
def test_only_names_of_members_are_taken(name: Any, kinds: Any) -> None:
    refused: list[str] = []
    data = pickled({"kind": _Reduced(getattr, kinds, name), "lr": 0.5}, 4)
    assert loads(data, MEGATRON_TABLE, label="x", refused=refused)["kind"] == Refused("builtins.getattr")
    assert refused == ["builtins.getattr"]
    with pytest.raises(UnsafeContent):
        require_class("enummember", ["megatron.core.enums.ModelType", name])


def test_a_member_of_an_unknown_class_is_refused_by_its_class(by: str) -> None:
    class Unknown(enum.Enum):
        A = 1

    vars(sys.modules[__name__])["Unknown"] = Unknown
    Unknown.__qualname__ = "Unknown"
    refused: list[str] = []
    value = loads(pickled({"a": Unknown.A, "b": 3}), LIBRARY_TABLE, label="x", refused=refused)
    assert value == {"a": Refused(f"{__name__}.Unknown"), "b": 3}
    assert refused == [f"{__name__}.Unknown"]


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_call_with_other_arguments_is_malformed(number: int) -> None:
    data = pickled(_Reduced(getattr, *["a"] * number), 4)
    with pytest.raises(MalformedCheckpoint):
        loads(data, LIBRARY_TABLE, label="x", refused=[])


class _Reduced:
    """Pickle as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.reduced = (function, arguments)

    def __reduce__(self) -> Any:
        return self.reduced


def _saved(value: Any) -> bytes:
    """Return the pickle of a value of `old_pickles`."""
    file = io.BytesIO()
    old.Pickler(file).dump(value)
    return file.getvalue()
