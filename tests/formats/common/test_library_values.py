"""Values of Python's libraries and numpy come back as what they were, or are named in a finding."""

from __future__ import annotations

import collections
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import library_values
import numpy as np
import old_pickles as old
import pytest
import torch
import torch.distributed.checkpoint as dcp
from library_values import same
from old_pickles import Called, Global
from paths import ROOT
from safetensors.torch import save_file

import ckptcore
from ckptcore.core.object_tree import Named, TensorRef, decode, encode
from ckptcore.encodings.pickle.torch_globals import OBJECT_TABLE
from ckptcore.encodings.pickle.unpickler import loads
from ckptcore.encodings.pickle.writer import OF_LIBRARIES, OF_TORCH, Classes, Pickled
from ckptcore.encodings.torchzip.reader import refused_in
from ckptcore.errors import MalformedCheckpoint, UnsafeContent
from ckptcore.formats.deepspeed.rank_files import TABLE as DEEPSPEED_TABLE
from ckptcore.formats.huggingface.folder import OBJECTS
from ckptcore.formats.lightning.format import TABLE as LIGHTNING_TABLE
from ckptcore.formats.megatron.pickle_globals import MEGATRON_TABLE, plain
from ckptcore.formats.olmo.local import TABLE as OLMO_TABLE
from ckptcore.formats.torch_ranks.placement import DIST_TABLE
from ckptcore.loading.plain_values import built

VALUES = library_values.values()
TABLES = {
    "plain": OBJECT_TABLE,
    "rank files": DIST_TABLE,
    "lightning": LIGHTNING_TABLE,
    "olmo": OLMO_TABLE,
    "megatron": MEGATRON_TABLE,
    "deepspeed": DEEPSPEED_TABLE,
}
CLASSES = "builtins.range", "datetime.datetime", "decimal.Decimal", "uuid.UUID"


def written(tree: Any, classes: Classes = Classes.LIBRARIES) -> bytes:
    pickled = Pickled(lambda fqn: pytest.fail(fqn), classes=classes)
    pickled.value(tree)
    return pickled.finish()


def parsed(raw: bytes, table: dict[str, Any] = OBJECT_TABLE) -> Any:
    tree = loads(raw, table, label="x")
    return plain(tree, len(raw), "x") if "torch._C.Generator" in table else tree


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("name", TABLES)
def test_every_table_keeps_every_value(name: str, protocol: int) -> None:
    """Python's own pickler writes, and its own unpickler reads what is written again, also through JSON."""
    for key, value in VALUES.items():
        tree = parsed(pickle.dumps({"x": value}, protocol), TABLES[name])
        assert not refused_in(tree), key
        if key == "simple" and "torch._C.Generator" in TABLES[name]:  # Megatron has one class for both
            continue
        assert same(pickle.loads(written(tree, Classes.TRAINERS))["x"], value), key
        form = json.loads(json.dumps(encode(tree)))
        assert encode(decode(form)) == form
        assert same(pickle.loads(written(decode(form)))["x"], value), key


def test_values_are_built_for_load_into() -> None:
    for key, value in VALUES.items():
        form = encode(parsed(pickle.dumps(value, 4)))
        assert same(built(form, lambda fqn: pytest.fail(fqn)), value), key


def test_every_kind_is_tried() -> None:
    tree = parsed(pickle.dumps(VALUES, 4))
    kinds, queue = set(), [tree]
    while queue:
        value = queue.pop()
        if isinstance(value, Named):
            kinds.add(value.kind)
            queue.append(value.value)
        elif isinstance(value, dict):
            queue += [*value, *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            queue += value
    rest = {
        "windowspath",
        "qscheme",
        "storage",
        "size",
        "dtype",
        "device",
        "layout",
    }  # of torch, or not of Linux
    assert kinds | rest >= {*OF_LIBRARIES, *OF_TORCH}


# --- through files, opened by torch in a process without ckptcore -----------------------------------


OPEN = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from library_values import same, values

root, wanted = sys.argv[1], values()
def check(name, found):
    for key, value in wanted.items():
        if not same(found[key], value):
            print(name, key, repr(found[key]))
    assert torch.equal(found["w"], torch.arange(4.0))
for name in ("copy", "ranks", "back"):
    found = {}
    planner, reader = _EmptyStateDictLoadPlanner(), FileSystemReader(f"{root}/{name}")
    _load_state_dict(found, storage_reader=reader, planner=planner, no_dist=True)
    check(name, {"w": found["w"], **{k: found[k][0] for k in wanted}})
for name in ("files_rank0", "files_rank1"):
    rank = name[-1]
    found = torch.load(f"{root}/files/model_world_size_2_rank_{rank}.pt", weights_only=False)
    array = found["np array"][0]  # arrays are tensors in rank files
    assert torch.equal(array, torch.from_numpy(wanted["np array"].copy()))
    kept = {k: found[k][0] for k in wanted} | {"np array": wanted["np array"]}
    check(name, {"w": torch.arange(4.0), **kept})
full = torch.load(f"{root}/all.ckpt", weights_only=False)
check("lightning", {"w": full["state_dict"]["w"], **full["hyper_parameters"]})
safe = torch.load(f"{root}/plain.pt", weights_only=True)  # raises for any class that is not torch's own
assert (safe["range"], safe["uuid"], safe["moment"]) == (
    ((2, 10**30, 7),), (str(wanted["uuid"]),),
    (wanted["moment"].isoformat(),))
assert type(safe["bytearray"][0]) is bytearray and type(safe["counter"][0]).__name__ == "Counter"
assert safe["np.float64"] == (0.1,) and type(safe["np.float64"][0]) is float
assert not [m for m in sys.modules if m.startswith("ckptcore")]
print("done")
"""


def test_files_are_opened_by_torch(tmp_path: Path) -> None:
    """dcp, its reshards and rank files keep all classes; a plain .pt names what it restates."""
    state = {"w": torch.arange(4.0), **{key: (value,) for key, value in VALUES.items()}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    source = str(tmp_path / "dcp")
    assert ckptcore.check(ckptcore.open(source)).ok
    for name, to in (("copy", "dcp"), ("all.safetensors", "safetensors"), ("plain.pt", "torch_save")):
        done = ckptcore.convert(source, str(tmp_path / name), to=to)
        restated = [w.message for w in done.warnings if w.code == "restated-value"]
        assert len(restated) == (to == "torch_save")
    assert "bytesio.0 (bytesio)" in restated[0]
    ckptcore.convert(source, str(tmp_path / "ranks"), to="dcp", verb="reshard", mesh="fsdp=2")
    done = ckptcore.convert(source, str(tmp_path / "files"), to="torch_ranks", verb="reshard", mesh="fsdp=2")
    assert [(w.code, w.severity) for w in done.warnings] == [("needs-classes", "info")]
    ckptcore.convert(str(tmp_path / "all.safetensors"), str(tmp_path / "back"), to="dcp")
    facts = {"pytorch-lightning_version": "2.5.0", "epoch": 0, "global_step": 1, "loops": {}}
    trained = {**facts, "state_dict": {"w": torch.arange(4.0)}, "hyper_parameters": VALUES}
    torch.save(trained, tmp_path / "trained.ckpt")
    ckptcore.convert(str(tmp_path / "trained.ckpt"), str(tmp_path / "all.ckpt"))
    run = subprocess.run(
        [sys.executable, "-c", OPEN, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=ROOT / "tests/helpers",
    )
    assert run.stdout == "done\n", run.stdout + run.stderr[-2000:]
    # A plain form counts as equal to what it replaces; another value does not.
    assert ckptcore.diff(source, str(tmp_path / "plain.pt")).equal
    assert ckptcore.diff(source, str(tmp_path / "files")).equal
    torch.save({**state, "range": (range(2, 10**30, 8),), "delta": [1]}, tmp_path / "other.pt")
    difference = ckptcore.diff(source, str(tmp_path / "other.pt"))
    assert {o.name.split(".")[0] for o in difference.objects} == {"range", "delta"}


def test_containers_with_tensors_are_taken_apart_by_name(tmp_path: Path) -> None:
    """Their tensors are tensors; what was a defaultdict is a dict where names are flat, and said so."""
    state = collections.defaultdict(dict, {0: {"exp_avg": torch.ones(2), "step": 1}})
    window = collections.deque([torch.zeros(1), 5], maxlen=4)
    torch.save({"w": torch.ones(3), "state": state, "window": window}, tmp_path / "x.pt")
    manifest = ckptcore.open(str(tmp_path / "x.pt"))
    assert {t.fqn for t in manifest.tensors} == {"w", "state.0.exp_avg", "window.0"}
    assert {b.key: b.tree for b in manifest.blobs} == {"state.0.step": 1, "window.1": 5}
    found = {f.fqn: f.message for f in manifest.findings if f.code == "restated-value"}
    assert sorted(found) == ["state", "window"]
    assert "defaultdict" in found["state"]
    # One object of a DCP folder keeps the class around the tensors.
    dcp.save({"w": torch.ones(3), "box": (state, window)}, checkpoint_id=tmp_path / "d", no_dist=True)
    blob = next(b for b in ckptcore.open(str(tmp_path / "d")).blobs if b.key == "box")
    kept = decode(blob.tree)
    assert [v.kind for v in kept] == ["defaultdict", "deque"]
    assert kept[0].value["items"][0]["exp_avg"] == TensorRef("box.0.items.0.exp_avg")


def test_keys_have_the_names_of_their_plain_forms(tmp_path: Path) -> None:
    state = {np.int64(3): {"w": torch.ones(1), "at": 1}, VALUES["path"]: torch.zeros(2)}
    torch.save({"state": state}, tmp_path / "x.pt")
    manifest = ckptcore.open(str(tmp_path / "x.pt"))
    assert {t.fqn for t in manifest.tensors} == {"state.3.w", "state./data/run 1"}
    assert [b.key for b in manifest.blobs] == ["state.3.at"]


# --- what is refused ------------------------------------------------------------------------------


def call(name: str, *args: Any) -> Called:
    return Called(Global(name), args)


WRONG = {
    "a Decimal of many digits": call("decimal.Decimal", "1" * 5000),
    "a Decimal of a text": call("decimal.Decimal", "1e"),
    "a Fraction of many digits": call("fractions.Fraction", "7" * 5000),
    "a Fraction of zero": call("fractions.Fraction", 1, 0),
    "a range without a step": call("builtins.range", 0, 5, 0),
    "a range of texts": call("builtins.range", "a"),
    "a slice of lists": call("builtins.slice", [], None, None),
    "a moment in month 13": call(
        "datetime.datetime", call("_codecs.encode", "\x07\xea\x0d\x01\0\0\0\0\0\0", "latin1")
    ),
    "a moment of three bytes": call("datetime.datetime", call("_codecs.encode", "abc", "latin1")),
    "a zone of two days": call("datetime.timezone", call("datetime.timedelta", 2)),
    "a zone of a text": call("datetime.timezone", "UTC"),
    "a delta of floats": call("datetime.timedelta", 0.5),
    "a delta beyond all": call("datetime.timedelta", 10**12),
    "a UUID without a state": call("uuid.UUID"),
    "a deque of a number": call("collections.deque", 5),
    "a Counter of a list": call("collections.Counter", [1]),
    "a defaultdict of a function": call("collections.defaultdict", Global("_codecs.encode")),
    "a defaultdict of what is refused": call("collections.defaultdict", Global("os.getpid")),
    "a path of numbers": call("pathlib.PosixPath", 5),
    "a path of Windows of nothing": call("pathlib.WindowsPath"),
    "an object array's scalar": call("numpy._core.multiarray.scalar", call("numpy.dtype", "O", False, True)),
    "a class": Global("datetime.datetime"),
    "a function": Global("builtins.range"),
    "eval": call("builtins.eval", "1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_refused_alone_and_by_name(name: str, tmp_path: Path) -> None:
    old.save({"w": torch.ones(2), "odd": WRONG[name], "kept": 1}, tmp_path / "x.pt")
    manifest = ckptcore.open(str(tmp_path / "x.pt"))
    assert {b.key: b.known for b in manifest.blobs} == {"odd": False, "kept": True}
    (found,) = [f for f in manifest.findings if f.code == "refused-global"]
    assert found.fqn == "odd"
    assert "." in found.message.partition("needs ")[2]


def test_a_deque_has_no_more_than_it_may() -> None:
    raw = b"\x80\x02ccollections\ndeque\n)K\x01\x86R(K\x01K\x02e."
    with pytest.raises(MalformedCheckpoint, match="at most 1 values has more"):
        loads(raw, OBJECT_TABLE, label="x")


def test_nesting_is_bounded(tmp_path: Path) -> None:
    nested: Any = 1
    for _ in range(300):
        nested = collections.deque([nested])
    torch.save({"w": torch.ones(1), "odd": nested}, tmp_path / "x.pt")
    own: Any = collections.deque()
    own.append(own)
    torch.save({"w": torch.ones(1), "odd": own}, tmp_path / "own.pt")
    for name in ("x.pt", "own.pt"):
        with pytest.raises(MalformedCheckpoint, match="nests deeper"):
            ckptcore.open(str(tmp_path / name))


def test_a_storage_outside_of_a_tensor_is_refused(tmp_path: Path) -> None:
    """Its bytes are nobody's elements: it is a part that cannot be read, never a tuple of numbers."""
    weights = torch.arange(3.0)
    typed = torch.storage.TypedStorage(
        wrap_storage=weights.untyped_storage(), dtype=torch.float32, _internal=True
    )
    state = {"w": weights, "raw": torch.ones(5).untyped_storage(), "typed": typed, "kept": 1}
    torch.save(state, tmp_path / "x.pt")
    manifest = ckptcore.open(str(tmp_path / "x.pt"))
    assert set(manifest.unread) == {"raw", "typed"}
    assert "storage outside of a tensor" in manifest.unread["raw"].reason
    assert [b.key for b in manifest.blobs if b.known] == ["kept"]
    with pytest.raises(ckptcore.CkptError) as caught:
        ckptcore.convert(str(tmp_path / "x.pt"), str(tmp_path / "y.pt"))
    assert caught.value.code == "unreadable-part"
    ckptcore.convert(str(tmp_path / "x.pt"), str(tmp_path / "y.pt"), exclude=["raw", "typed"])
    assert torch.load(tmp_path / "y.pt", weights_only=True).keys() == {"w", "kept"}
    dcp.save(
        {"w": weights, "box": (weights.untyped_storage(), 1)}, checkpoint_id=tmp_path / "d", no_dist=True
    )
    blob = next(b for b in ckptcore.open(str(tmp_path / "d")).blobs if b.key == "box")
    assert not blob.known
    assert "UntypedStorage" in blob.refused[0]


# --- attacks: a form in a safetensors file names what it likes --------------------------------------

_RUN = "import os; os._exit(9)"
ATTACKS: dict[str, Any] = {
    "a function as an enum": {"$": "enum", "value": ["os.system", "echo owned"]},
    "a function as a record": {"$": "record", "value": ["builtins.exec", {"a": _RUN}]},
    "a call as an enum": {"$": "enum", "value": ["builtins.exec", _RUN]},
    "an attribute of a function": {"$": "enummember", "value": ["os.system", "echo"]},
    "an attribute of a class": {"$": "enummember", "value": ["megatron.core.enums.ModelType", "__init__"]},
    "an unknown class": {"$": "record", "value": ["my.Class", {}]},
    "inside": {"a": [{"$": "tuple", "items": [{"$": "enum", "value": ["os.system", "id"]}]}]},
    "in a key": {
        "$": "dict",
        "items": [[{"$": "frozenset", "items": [1]}, {"$": "enum", "value": ["a.b", 1]}]],
    },
    "an enum of a known class of a list": {
        "$": "enum",
        "value": ["megatron.core.enums.ModelType", ["os.system"]],
    },
    "opcodes in a class": {"$": "enum", "value": ["os.system\n(S'id'\ntR.", 1]},
}
NOT_FORMS: dict[str, Any] = {
    "opcodes in a dtype": {"$": "dtype", "value": "float32\nq\0cos\nsystem\n(S'id'\ntR."},
    "a module as a dtype": {"$": "dtype", "value": "hub"},
    "opcodes in a class of numpy": {"$": "npclass", "value": "float32\ncos\nsystem\n"},
    "a function of numpy": {"$": "npclass", "value": "load"},
    "a factory": {"$": "defaultdict", "value": {"factory": "eval", "items": {}}},
    "an array of objects": {
        "$": "ndarray",
        "value": {"dtype": "|O", "shape": [1], "data": {"$": "bytes", "value": ""}},
    },
    "a range of a million digits": {"$": "range", "value": [0, {"$": "int", "value": "9" * 10**6}, 1]},
    "a qscheme": {"$": "qscheme", "value": "hub"},
    "a storage": {"$": "storage", "value": "os"},
    "a size of texts": {"$": "size", "value": ["a"]},
}


def planted(form: Any, folder: Path) -> str:
    objects = json.dumps({"kept": 1, "odd": form})
    save_file({"w": torch.ones(2)}, folder / "x.safetensors", {OBJECTS: objects})
    return str(folder / "x.safetensors")


@pytest.mark.alike(3)
@pytest.mark.parametrize("name", ATTACKS)
def test_a_form_that_names_a_function_is_refused(name: str, tmp_path: Path) -> None:
    source = planted(ATTACKS[name], tmp_path)
    manifest = ckptcore.open(source)
    assert {b.key: b.known for b in manifest.blobs} == {"kept": True, "odd": False}
    assert [(f.code, f.fqn) for f in manifest.findings] == [("refused-global", "odd")]
    for to in ("dcp", "torch_save", "safetensors"):
        done = ckptcore.convert(source, str(tmp_path / to), to=to)
        assert ("odd", f"needs {manifest.blobs[1].refused[0]}") in done.dropped
        files = [f for f in (tmp_path / to, *(tmp_path / to).rglob("*")) if f.is_file()]
        assert not any(name in f.read_bytes() for f in files for name in (b"\nsystem", b"\nexec", b"\nClass"))
    # The writer itself refuses, whatever a reader let through.
    with pytest.raises((UnsafeContent, TypeError)):
        written(decode(ATTACKS[name]), Classes.TRAINERS)


@pytest.mark.parametrize("name", NOT_FORMS)
def test_a_form_that_is_none_of_its_kind_is_malformed(name: str, tmp_path: Path) -> None:
    with pytest.raises(MalformedCheckpoint, match="not an object tree"):
        ckptcore.open(planted(NOT_FORMS[name], tmp_path))
    kind, value = NOT_FORMS[name]["$"], NOT_FORMS[name]["value"]
    if "int" not in str(value):
        with pytest.raises(TypeError, match="cannot pickle"):
            written(Named(kind, value), Classes.TRAINERS)


def test_scalars_of_numpy_are_numbers_where_classes_are_not_kept() -> None:
    tree = parsed(pickle.dumps({"lr": np.float64(0.5), "n": np.int8(3), "on": np.bool_(True)}))
    assert pickle.loads(written(tree, Classes.PLAIN)) == {"lr": 0.5, "n": 3, "on": True}
