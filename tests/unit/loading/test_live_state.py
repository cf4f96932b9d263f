"""Live state: `load_into` leaves what `torch.distributed.checkpoint.load` leaves, or changes nothing."""

from __future__ import annotations

import warnings
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

import ckptcore
from ckptcore.errors import CkptError, NameMismatch, UnsupportedDtype, UsageError

Pair = namedtuple("Pair", "left right")


class App(Stateful):
    """torch's tutorial: a model and an optimizer as one object."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=seed / 100)
        self.model(torch.randn(7, 3)).sum().backward()
        self.optimizer.step()
        self.calls = 0

    def state_dict(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls += 1
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


class Counter(Stateful):
    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "last": [self.value]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"] + state_dict["last"][0]


def module(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {"model": torch.nn.Linear(4, 3), "step": seed}


def values(seed: int) -> dict[str, Any]:
    return {
        "step": seed,
        "none": None if seed % 2 else 1,
        "text": f"run {seed}",
        "rate": seed / 7,
        "flag": bool(seed % 2),
        "sizes": [seed, [seed + 1]],
        "betas": (seed, 0.5),
        "nested": {"deep": {"er": seed}},
        "empty": [],
        "big": 10**30 + seed,
        "bytes": bytes([seed]),
        "complex": complex(seed, 1),
        "infinite": float("inf"),
        "dtype": torch.float16 if seed % 2 else torch.int8,
        "shape": torch.Size([seed, 2]),
        "set": {seed},
    }


def containers(seed: int) -> dict[str, Any]:
    def t(*shape: int) -> torch.Tensor:
        return torch.full(shape, float(seed))

    return {
        "ordered": OrderedDict(b=t(1), a=t(3)),
        "list": [t(2), {"n": seed, "t": t(1)}, seed],
        "lists": [[t(2), seed], [seed]],
    }


def tensors(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def t(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator)

    shared = t(4, 4)
    return {
        "scalar": t(),
        "empty": t(0, 3),
        "turned": t(3, 5).t(),
        "view": t(6, 6)[1:4, ::2],
        "leaf": t(3).requires_grad_(),
        "parameter": torch.nn.Parameter(t(2, 2)),
        "a": shared,
        "b": shared,
        "row": shared[1],
        "conjugate": torch.complex(t(3), t(3)).conj(),
        "negative": torch.complex(t(3), t(3)).conj().imag,
        "buffer": torch.nn.Buffer(t(3)),
        "bits": torch.arange(4) + seed,
    }


CASES: dict[str, Callable[[int], Any]] = {
    "module and step": module,
    "tutorial": lambda seed: {"app": App(seed), "step": seed},
    "counter": lambda seed: {"counter": Counter(seed), "epoch": seed},
    "plain values": values,
    "containers": containers,
    "tensors": tensors,
    "numbers as keys": lambda seed: {
        "state": {0: {"exp": torch.full((2,), seed)}, 1: torch.ones(seed * 0 + 1)}
    },
    "module and optimizer": lambda seed: {"app": App(seed).model, "optim": App(seed).optimizer},
}


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Every leaf, of objects too, so that two states can be compared."""
    if isinstance(value, (Stateful, torch.nn.Module)):
        value = value.state_dict() if not isinstance(value, Counter) else {"value": value.value}
    if isinstance(value, Mapping):
        return {k: v for key, x in value.items() for k, v in flat(x, f"{path}.{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for n, x in enumerate(value) for k, v in flat(x, f"{path}.{n}").items()} or {path: value}
    return {path: value}


def same(a: Any, b: Any) -> bool:
    left, right = flat(a), flat(b)
    assert left.keys() == right.keys()
    for name, x in left.items():
        y = right[name]
        assert type(x) is type(y), name
        if isinstance(x, torch.Tensor):
            assert x.dtype == y.dtype, name
            if not torch.equal(x, y):
                return False
        elif x != y:
            return False
    return True


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[dict[str, Any]], ckptcore.Manifest]:
    def save(state: dict[str, Any]) -> ckptcore.Manifest:
        dcp.save(state, checkpoint_id=tmp_path / "ckpt")
        return ckptcore.open(str(tmp_path / "ckpt"))

    return save


@pytest.mark.parametrize("case", CASES)
def test_the_same_as_torch(case: str, saved: Any, tmp_path: Path) -> None:
    manifest = saved(CASES[case](3))
    ours, theirs, untouched = (CASES[case](8) for _ in range(3))
    assert same(ours, untouched)
    dcp.load(theirs, checkpoint_id=tmp_path / "ckpt")
    before = {n: t.data_ptr() for n, t in flat(ours).items() if isinstance(t, torch.Tensor)}
    ckptcore.load_into(manifest, ours)
    assert same(ours, theirs)
    assert not same(ours, untouched)
    assert before == {n: t.data_ptr() for n, t in flat(ours).items() if isinstance(t, torch.Tensor)}


def test_objects_get_their_state_once_and_last(saved: Any) -> None:
    manifest = saved({"app": App(3), "late": torch.ones(2)})
    app = App(8)
    ckptcore.load_into(manifest, {"app": app, "late": torch.zeros(2)})
    assert app.calls == 1
    with pytest.raises(NameMismatch):
        ckptcore.load_into(manifest, {"app": app, "late": torch.zeros(3)})
    assert app.calls == 1


def test_tuples_are_rebuilt(saved: Any) -> None:
    """Which torch replaces as a whole; here their tensors stay where they are."""
    manifest = saved({"pair": (1, torch.ones(2)), "plain": (1, 2)})
    tensor = torch.zeros(2)
    live: dict[str, Any] = {"pair": Pair(0, tensor), "plain": (0,)}
    ckptcore.load_into(manifest, live)
    assert live["pair"] == Pair(1, tensor)
    assert live["pair"].right is tensor
    assert tensor.tolist() == [1, 1]
    assert live["plain"] == (1, 2)


def test_a_value_with_tensors_inside_is_built(saved: Any) -> None:
    manifest = saved({"history": (1, torch.ones(2), {"a": torch.zeros(0)})})
    live: dict[str, Any] = {"history": None}
    assert ckptcore.load_into(manifest, live) == []
    assert live["history"][0] == 1
    assert live["history"][1].tolist() == [1, 1]
    assert live["history"][2]["a"].shape == (0,)


def test_values_of_a_file_that_keeps_complete_dicts(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "args": {"lr": 0.1, "a.b": {"c": 5}}, "step": 3}, tmp_path / "x.pt")
    live = {"w": torch.zeros(2), "args": {"lr": 0.0, "a.b": {"c": 0}}, "step": 0}
    assert ckptcore.load_into(ckptcore.open(str(tmp_path / "x.pt")), live) == []
    assert (live["w"].tolist(), live["args"], live["step"]) == ([1, 1], {"lr": 0.1, "a.b": {"c": 5}}, 3)


CASTS = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def test_casts_are_those_of_torch(saved: Any, tmp_path: Path) -> None:
    """All pairs; what torch refuses is refused, and what it warns of it warns of."""
    source = torch.tensor([0.0, 1.0, 2.5, -3.0, 100.0])
    manifest = saved({str(d): source.to(d) for d in CASTS})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex to real: the imaginary part goes
        for there in CASTS:
            for here in CASTS:
                ours, theirs = ({str(there): torch.zeros(5).to(here)} for _ in range(2))
                dcp.load(theirs, checkpoint_id=tmp_path / "ckpt")
                ckptcore.load_into(manifest, ours)
                raw = [x[str(there)].view(torch.uint8) for x in (ours, theirs)]
                assert torch.equal(*raw), (there, here)


@dataclass
class Options:
    rate: float = 0.1


def fake() -> Any:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(4)


class Odd(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("not to be called")


REFUSED: dict[str, tuple[Callable[[], Any], type[CkptError], str]] = {
    "absent tensor": (lambda: torch.zeros(4), NameMismatch, "not in the checkpoint: x.absent"),
    "absent value": (lambda: 0, NameMismatch, "not in the checkpoint: x.absent"),
    "absent in an object": (lambda: Counter(1), NameMismatch, "x.absent.value, x.absent.last"),
    "other shape": (lambda: torch.zeros(5), NameMismatch, r"x.w: it is \[5\] here and \[4\]"),
    "a value for a tensor": (lambda: 0, NameMismatch, "x.w: it is a plain value here and a tensor"),
    "a tensor for a value": (lambda: torch.zeros(()), NameMismatch, "x.step: it is a tensor here"),
    "sparse": (lambda: torch.zeros(4).to_sparse(), UsageError, "x.w: its layout is torch.sparse_coo"),
    "quantised": (
        lambda: torch.quantize_per_tensor(torch.zeros(4), 1.0, 0, torch.qint8),
        UsageError,
        "x.w: .*qint8",
    ),
    "fake": (fake, UsageError, "x.w: it is a FakeTensor"),
    "expanded": (lambda: torch.zeros(1).expand(4), UsageError, "x.w: several of its elements"),
    "lazy": (lambda: torch.nn.UninitializedParameter(), UsageError, "x.w: its parameter has no shape"),
    "unknown kind": (
        lambda: torch.zeros(4).as_subclass(Odd),
        UsageError,
        "x.w: the memory layout of Odd is unknown",
    ),
    "refused class": (lambda: Options(), NameMismatch, "x.options .*Options"),
    "meta in a module": (
        lambda: torch.nn.Linear(2, 2, device="meta"),
        UsageError,
        r"x.linear.*meta.*|x.linear.*",
    ),
    "container that takes nothing": (
        lambda: MappingProxyType({"n": 0}),
        UsageError,
        "x.dict.n: the container",
    ),
}
PLACES = {
    "other shape": "w",
    "a value for a tensor": "w",
    "a tensor for a value": "step",
    "sparse": "w",
    "quantised": "w",
    "fake": "w",
    "expanded": "w",
    "lazy": "w",
    "unknown kind": "w",
    "refused class": "options",
    "meta in a module": "linear",
    "container that takes nothing": "dict",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_changes_nothing(case: str, tmp_path: Path) -> None:
    make, error, message = REFUSED[case]
    linear = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    state = {"w": torch.ones(4), "step": 3, "options": Options(), "linear": linear, "dict": {"n": 1}}
    dcp.save({"a": torch.ones(3), "n": 7, "x": state, "z": torch.ones(3)}, checkpoint_id=tmp_path / "ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that sparse and quantised tensors have no future
        odd = make()
    live: dict[str, Any] = {
        "a": torch.zeros(3),
        "n": 0,
        "x": {PLACES.get(case, "absent"): odd},
        "z": torch.zeros(3),
    }
    with pytest.raises(error, match=message) as caught:
        ckptcore.load_into(ckptcore.open(str(tmp_path / "ckpt")), live)
    assert "--" not in caught.value.hint
    assert (live["a"].sum().item(), live["n"], live["z"].sum().item()) == (0, 0, 0)


def test_meta_tensors_are_replaced_where_they_can_be(saved: Any) -> None:
    manifest = saved({"m": {"w": torch.ones(2, 3), "n": 4}})
    live: dict[str, Any] = {"m": {"w": torch.empty(2, 3, device="meta", dtype=torch.bfloat16), "n": 0}}
    ckptcore.load_into(manifest, live)
    assert live["m"]["w"].device.type == "cpu"
    assert live["m"]["w"].dtype == torch.bfloat16
    assert live["m"]["w"].sum().item() == 6


class Wrapper(Stateful):
    """Whose module stays on the meta device, unless it may assign."""

    def __init__(self, assign: bool) -> None:
        self.assign, self.module = assign, torch.nn.Linear(2, 2, device="meta")

    def state_dict(self) -> dict[str, Any]:
        return self.module.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.module.load_state_dict(state_dict, assign=self.assign)


@pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter")
def test_meta_tensors_that_an_object_keeps_are_noticed(saved: Any) -> None:
    manifest = saved({"m": torch.nn.Linear(2, 2)})
    good = Wrapper(assign=True)
    ckptcore.load_into(manifest, {"m": good})
    assert torch.equal(good.module.weight, ckptcore.read(manifest, "m.weight"))
    with pytest.raises(UsageError, match="still on the meta device"):
        ckptcore.load_into(manifest, {"m": Wrapper(assign=False)})


def test_missing_values_are_left_and_logged(saved: Any, caplog: pytest.LogCaptureFixture) -> None:
    manifest = saved({"w": torch.ones(2), "options": Options(), "other": torch.ones(1)})
    live = {"w": torch.zeros(2), "new": torch.full((2,), 5.0), "epoch": 9, "options": Options(0.7)}
    assert ckptcore.load_into(manifest, live, strict=False) == ["other"]
    assert live["w"].tolist() == [1, 1]
    assert (live["new"].tolist(), live["epoch"], live["options"]) == ([5, 5], 9, Options(0.7))
    assert "epoch, new, options" in caplog.text


def test_two_leaves_of_one_name(saved: Any) -> None:
    manifest = saved({"a": {"b": torch.ones(2)}})
    with pytest.raises(NameMismatch, match=r"one name: a\.b"):
        ckptcore.load_into(manifest, {"a.b": torch.zeros(2), "a": {"b": torch.zeros(2)}})


def test_unsupported_casts_name_the_leaf(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = saved({"w": torch.ones(2, dtype=torch.float8_e8m0fnu)})
    live = {"w": torch.zeros(2, dtype=torch.int16)}
    try:
        torch.zeros(1, dtype=torch.int16).copy_(torch.ones(1, dtype=torch.float8_e8m0fnu))
    except RuntimeError:
        with pytest.raises(UnsupportedDtype, match=r"cannot load w"):
            ckptcore.load_into(manifest, live)
    else:
        ckptcore.load_into(manifest, live)
        assert live["w"].tolist() == [1, 1]


def test_a_mapping_of_any_kind(saved: Any) -> None:
    """torch saves one and then does not find it; the caller's own is filled, never a copy."""

    def state(seed: int) -> UserDict[str, Any]:
        inner = UserDict({"x": seed, "w": torch.full((2,), seed)})
        return UserDict({"user": UserDict({"step": seed, "in": inner})})

    manifest, live = saved(dict(state(3))), state(8)
    inner, tensor = live["user"]["in"], live["user"]["in"]["w"]
    assert ckptcore.load_into(manifest, live) == []
    assert live["user"]["in"] is inner
    assert inner["w"] is tensor
    assert (live["user"]["step"], inner["x"], tensor.tolist()) == (3, 3, [3, 3])
