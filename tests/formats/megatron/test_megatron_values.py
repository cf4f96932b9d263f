"""Read arguments, enums and generators in Megatron's files; refuse other classes by name."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import io
import sys
import types
from ast import Constant as Unknown
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptcore.core.object_tree import Named, Refused
from ckptcore.encodings.pickle.torch_globals import StoredView
from ckptcore.encodings.torchzip.reader import Objects
from ckptcore.errors import MalformedCheckpoint
from ckptcore.formats.megatron.pickle_globals import read_megatron
from ckptcore.store.local import LocalStore
from ckptcore.store.subfolder import FileRange

Module = Callable[[str], types.ModuleType]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    """Create a Megatron module and its parents, so that pickle finds classes in it."""

    def make(name: str) -> types.ModuleType:
        parts = name.split(".")
        for n in range(1, len(parts) + 1):
            above = ".".join(parts[:n])
            if above not in sys.modules:
                monkeypatch.setitem(sys.modules, above, types.ModuleType(above))
        return sys.modules[name]

    return make


class Reduced:
    """Pickle as a call, as any class may define in `__reduce__`."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self.reduced = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> Any:
        return self.reduced


def read(value: Any, path: Path) -> Objects:
    torch.save(value, path / "x.pt")
    data = (path / "x.pt").read_bytes()
    return read_megatron(FileRange(LocalStore(Path()), "x.pt", 0, len(data), data), "x.pt")


# --- permitted values ------------------------------------------------------------------------------


def test_arguments_and_what_they_hold(module: Module, tmp_path: Path) -> None:
    enums, config = module("megatron.core.enums"), module("megatron.core.optimizer.optimizer_config")
    kinds: Any = enum.Enum("ModelType", {"encoder_or_decoder": 1}, module=enums.__name__)
    vars(enums)["ModelType"] = kinds
    made: Any = dataclasses.make_dataclass("OptimizerConfig", [("lr", float), ("dtype", object)])
    made.__module__ = config.__name__
    vars(config)["OptimizerConfig"] = made
    one = made(1e-4, torch.bfloat16)
    args = argparse.Namespace(
        lr=1e-4, kind=Reduced(kinds, 1), config=one, repeated=one, deep=types.SimpleNamespace(a=(1, [2]))
    )
    found = read({"args": args, "iteration": 7}, tmp_path)
    record = Named(
        "record", [f"{config.__name__}.OptimizerConfig", {"lr": 1e-4, "dtype": Named("dtype", "bfloat16")}]
    )
    assert found.tree["args"] == Named(
        "namespace",
        {
            "lr": 1e-4,
            "kind": Named("enum", ["megatron.core.enums.ModelType", 1]),
            "config": record,
            "repeated": record,
            "deep": Named("namespace", {"a": (1, [2])}),
        },
    )
    assert found.refused == ()


def test_an_enum_by_name(module: Module, tmp_path: Path) -> None:
    """CPython 3.11.0 to 3.11.3 pickled members of enums as `getattr(ModelType, "name")`."""
    enums = module("megatron.core.enums")
    kinds: Any = enum.Enum("ModelType", {"encoder_or_decoder": 1}, module=enums.__name__)
    vars(enums)["ModelType"] = kinds
    found = read({"kind": Reduced(getattr, kinds, "encoder_or_decoder")}, tmp_path)
    member = Named("enummember", ["megatron.core.enums.ModelType", "encoder_or_decoder"])
    assert found.tree == {"kind": member}


def test_a_signal(tmp_path: Path) -> None:
    import signal

    found = read({"exit_signal": signal.SIGTERM}, tmp_path)
    assert found.tree == {"exit_signal": Named("enum", ["signal.Signals", 15])}


def test_a_generator_is_its_state(tmp_path: Path) -> None:
    made = torch.Generator().manual_seed(11)
    found = read({"rng": made}, tmp_path)
    generator = found.tree["rng"]
    (state,) = [v for v in generator["state"] if isinstance(v, StoredView)]
    assert generator["device"] == Named("device", ["cpu"])
    assert (state.dtype, state.shape) == ("uint8", tuple(made.get_state().shape))
    start, length, _ = found.storages[state.key]
    raw = (tmp_path / "x.pt").read_bytes()[start : start + length]
    assert raw == made.get_state().numpy().tobytes()


def test_marked_tensors_and_parameters(tmp_path: Path) -> None:
    """Megatron's main copies have attributes; they are tensors like any other."""
    marked, parameter = torch.arange(6.0).view(2, 3), torch.nn.Parameter(torch.arange(4.0))
    for value in (marked, parameter):
        value.tensor_model_parallel = True  # type: ignore[attr-defined]
    found = read({"marked": marked, "parameter": parameter, "plain": torch.ones(1)}, tmp_path)
    assert [type(v) for v in found.tree.values()] == [StoredView] * 3
    assert [v.shape for v in found.tree.values()] == [(2, 3), (4,), (1,)]
    assert found.refused == ()


def test_bytes_io_is_its_bytes(tmp_path: Path) -> None:
    found = read({"state": io.BytesIO(b"never opened")}, tmp_path)
    assert found.tree == {"state": Named("bytesio", b"never opened")}


# --- refused values --------------------------------------------------------------------------------

TYPED, PLAIN = torch._tensor._rebuild_from_type_v2, torch._utils._rebuild_tensor_v2
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "an attribute": (lambda: Reduced(getattr, torch.Tensor, "tolist"), "getattr"),
    "an attribute of what is refused": (lambda: Reduced(getattr, Unknown, "x"), "ast.Constant"),
    "a tensor of a class": (lambda: Reduced(TYPED, PLAIN, Unknown, (), {}), "ast.Constant"),
    "a tensor of no class": (lambda: Reduced(TYPED, PLAIN, 5, (), {}), "torch._tensor._rebuild_from_type_v2"),
    "a tensor by no function": (
        lambda: Reduced(TYPED, OrderedDict, torch.Tensor, (), {}),
        "torch._tensor._rebuild_from_type_v2",
    ),
    "a function that is not called": (lambda: PLAIN, "_rebuild_tensor_v2"),
    "dates": (lambda: np.array(["2020"], "M8[D]"), "numpy.dtype"),
    "a namespace of numbers": (
        lambda: Reduced(argparse.Namespace, state=({1: 2}, None)),
        "not filled by name",
    ),
    "bytes that are none": (lambda: Reduced(io.BytesIO, state=({"a": 1}, None)), "io.BytesIO"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str, tmp_path: Path) -> None:
    make, reason = REFUSED[name]
    found = read({"odd": make(), "kept": 5}, tmp_path)
    assert found.tree["kept"] == 5
    assert type(found.tree["odd"]) is Refused
    assert any(reason in r for r in found.refused), found.refused


def test_a_config_that_is_not_filled_by_name(module: Module, tmp_path: Path) -> None:
    config = module("megatron.core.optimizer.optimizer_config")
    made: Any = type("OptimizerConfig", (), {"__module__": config.__name__})
    vars(config)["OptimizerConfig"] = made
    found = read([Reduced(made, state=[1, 2]), Reduced(made)], tmp_path)
    name = f"{config.__name__}.OptimizerConfig"
    assert found.tree == [Refused(name), Named("record", [name, {}])]
    assert found.refused == (name,)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = argparse.Namespace(x=value)
    return value


def test_deep_nesting_is_malformed(tmp_path: Path) -> None:
    assert read(nested(70), tmp_path).tree.kind == "namespace"
    with pytest.raises(MalformedCheckpoint, match="150 levels"):
        read(nested(80), tmp_path)


def test_a_cycle_is_malformed(tmp_path: Path) -> None:
    args = argparse.Namespace()
    args.x = [args]
    with pytest.raises(MalformedCheckpoint, match="levels"):
        read(args, tmp_path)


def test_an_enum_of_two_values_is_malformed(module: Module, tmp_path: Path) -> None:
    enums = module("megatron.core.enums")
    made: Any = type("ModelType", (), {"__module__": enums.__name__})
    vars(enums)["ModelType"] = made
    with pytest.raises(MalformedCheckpoint, match="something else than one value"):
        read(Reduced(made, 1, 2), tmp_path)
