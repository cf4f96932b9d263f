"""numpy values in objects: read without running them, written as numpy pickles them, else refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptcore
from ckptcore.core.named_values import number_of
from ckptcore.core.object_tree import Named, decode, encode
from ckptcore.encodings.pickle.torch_globals import OBJECT_TABLE
from ckptcore.encodings.pickle.unpickler import loads
from ckptcore.encodings.torchzip.reader import bound_tree, refused_in
from ckptcore.encodings.torchzip.writer import Pickled
from ckptcore.errors import MalformedCheckpoint

ARRAYS = {
    "numbers": np.arange(3, dtype="<i4"),
    "the other byte order": np.arange(3, dtype=">f8"),
    "Fortran order": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "no dims": np.array(5),
    "no elements": np.zeros((0, 3), np.float16),
    "bools": np.array([True, False]),
    "complex": np.array([1j, 2], np.complex64),
    "text": np.array(["ab", "ü"]),
    "bytes": np.array([b"ab", b"c"]),
}
SCALARS = [
    np.float64(2.5),
    np.float32(0.1),
    np.int64(-7),
    np.bool_(True),
    np.str_("xü"),
    np.str_(""),
    np.bytes_(b"x"),
]


def read(data: bytes) -> tuple[Any, tuple[str, ...]]:
    tree = loads(data, OBJECT_TABLE, label="test", refused=[])
    return tree, refused_in(tree)


def written(tree: Any) -> Any:
    out = Pickled(lambda fqn: pytest.fail("no tensor here"))
    out.value(decode(encode(tree)))
    return pickle.loads(out.finish())


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_survive(name: str, protocol: int) -> None:
    data = pickle.dumps({"a": ARRAYS[name], "again": ARRAYS[name]}, protocol)
    tree, refused = read(data)
    assert refused == ()
    # numpy swaps bytes to the machine's order when it reads what was not pickled out of place.
    wanted, found = pickle.loads(pickle.dumps(pickle.loads(data), 2)), written(tree)
    for key in wanted:
        a, b = wanted[key], found[key]
        assert (a.dtype, a.shape, a.tobytes(), a.flags.f_contiguous) == (
            b.dtype,
            b.shape,
            b.tobytes(),
            b.flags.f_contiguous,
        )


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("value", SCALARS, ids=repr)
def test_scalars_keep_their_class(value: Any, protocol: int) -> None:
    tree, refused = read(pickle.dumps(value, protocol))
    assert refused == ()
    data = value.tobytes() if value.dtype.itemsize else b""  # an empty text has four bytes otherwise
    assert tree == Named("npscalar", (value.dtype.str, data))
    plain = number_of(tree.value)
    assert plain == value
    assert type(plain) in (float, int, bool, str, bytes)


def test_a_random_state_survives() -> None:
    state = np.random.RandomState(7).get_state()
    tree, _ = read(pickle.dumps(state, 2))
    restored = np.random.RandomState()
    restored.set_state(written(tree))
    assert restored.get_state()[1].tolist() == state[1].tolist()


@pytest.mark.parametrize(
    "value",
    [
        np.array([object()]),
        np.array(["2020"], "M8[D]"),
        np.zeros(2, [("a", "i4")]),
        np.datetime64("2020"),
        np.zeros(2, np.longdouble),
    ],
    ids=["objects", "dates", "records", "a date", "long double"],
)
def test_what_is_more_than_numbers_is_refused_by_name(value: Any) -> None:
    tree, refused = read(pickle.dumps({"x": value, "y": 1}, 2))
    assert tree["y"] == 1
    assert refused


def test_bytes_that_do_not_fit_are_malformed() -> None:
    data = pickle.dumps(np.arange(3, dtype="<i4"), 2)
    with pytest.raises(MalformedCheckpoint):
        read(data.replace(b"K\x03\x85", b"K\x04\x85"))
    with pytest.raises(MalformedCheckpoint):
        read(pickle.dumps(np.zeros(4, np.int8), 2).replace(b"K\x04\x85", b"J\xff\xff\xff\x7f\x85"))


def test_one_array_named_often_is_bounded() -> None:
    tree, _ = read(pickle.dumps([np.zeros(1 << 20, np.int8)] * 1000, 4))
    with pytest.raises(MalformedCheckpoint, match="binary"):
        bound_tree(tree, 1 << 20, "test")


def test_paths_keep_their_root() -> None:
    for path in (Path("/data/run"), Path("a/b"), Path("/"), Path()):
        assert read(pickle.dumps(path, 2))[0] == Named("path", str(path))


@pytest.mark.parametrize("name", ARRAYS)
def test_a_plain_torch_file_has_tensors_instead(name: str, tmp_path: Path) -> None:
    """So that it opens with weights_only, which knows no numpy; text is nested lists."""
    array = ARRAYS[name]
    torch.save({"w": torch.ones(2), "state": ("key", array, 7)}, tmp_path / "in.pt")
    ckptcore.convert(str(tmp_path / "in.pt"), str(tmp_path / "out.pt"))
    key, found, number = torch.load(tmp_path / "out.pt", weights_only=True, mmap=True)["state"]
    assert (key, number) == ("key", 7)
    if array.dtype.kind in "SU":
        assert found == array.tolist()
    else:
        native = array.astype(array.dtype.newbyteorder("="))
        assert found.numpy().dtype == native.dtype
        assert found.shape == array.shape
        assert found.numpy().tobytes() == native.tobytes()
