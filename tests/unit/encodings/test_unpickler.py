"""The allow-list unpickler: plain values as Python reads them, everything else refused, in bounds."""

from __future__ import annotations

import collections
import os
import pickle
import pickletools
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.core.object_tree import Refused, decode, encode
from ckptcore.encodings.pickle.torch_globals import OBJECT_TABLE
from ckptcore.encodings.pickle.unpickler import loads
from ckptcore.errors import CkptError, MalformedCheckpoint, MetadataTooLarge, UnsafeContent
from ckptcore.formats.dcp.metadata import TABLE

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
)
keys = st.integers() | st.text() | st.tuples(st.integers(), st.text())
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(keys, inner),
    max_leaves=20,
)


@given(trees, st.sampled_from([2, 3, 4, 5]))
def test_plain_values_are_what_pickle_says(value: Any, protocol: int) -> None:
    found = loads(pickle.dumps(value, protocol), OBJECT_TABLE, label="test")
    assert found == value
    assert decode(encode(found)) == value


@pytest.mark.parametrize("protocol", [2, 4])
def test_sets_and_ordered_dicts(protocol: int) -> None:
    value = {"a": {1, 2, 3}, "b": collections.OrderedDict(x=1, y=[2])}
    assert loads(pickle.dumps(value, protocol), OBJECT_TABLE, label="test") == value


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("exit 1",)


@pytest.mark.parametrize("protocol", [2, 4])
def test_unknown_globals_are_refused(protocol: int) -> None:
    data = pickle.dumps({"x": Attack()}, protocol)
    with pytest.raises(UnsafeContent, match=r"posix\.system"):
        loads(data, TABLE, label="test")
    names: list[str] = []
    assert loads(data, OBJECT_TABLE, label="test", refused=names) == {"x": Refused("posix.system")}
    assert names == ["posix.system"]


def nested_tuples(levels: int) -> bytes:
    """A key that takes 2**levels steps to hash."""
    body = b"\x80\x04})\x94" + b"".join(
        b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86\x94" for n in range(levels)
    )
    return body + b"N" + b"s."


HOSTILE = {
    "text of 2**62 bytes": b"\x80\x04\x8d" + (1 << 62).to_bytes(8, "little") + b".",
    "bytes of 2**31": b"\x80\x04B\xff\xff\xff\x7f.",
    "an integer of 255 bytes": b"\x80\x04\x8a\xff" + b"\x01" * 255 + b".",
    "a million marks": b"\x80\x04" + b"(" * 1_000_000 + b".",
    "a stack that is empty": b"\x80\x04.",
    "a memo entry that is not there": b"\x80\x04h\x07.",
    "a next-buffer opcode": b"\x80\x05\x97.",
    "an extension code": b"\x80\x02\x82\x01.",
    "nothing": b"",
    "not a pickle": b"PK\x03\x04",
    "setting items of a list": b"\x80\x04]K\x01K\x02s.",
    "calling a string": b"\x80\x04\x8c\x01a)R.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_malformed_and_cheap(name: str) -> None:
    tracemalloc.start()
    began = time.process_time()  # of this process: others may be busy
    with pytest.raises(CkptError) as caught:
        loads(HOSTILE[name], OBJECT_TABLE, label="test")
    assert isinstance(caught.value, MalformedCheckpoint)
    assert time.process_time() - began < 10
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()


def test_a_huge_memo_number_costs_nothing() -> None:
    tracemalloc.start()
    assert loads(b"\x80\x04Nr\xff\xff\xff\x7f.", OBJECT_TABLE, label="test") is None
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_key_that_never_stops_hashing_is_refused() -> None:
    data = nested_tuples(60)
    assert pickletools.optimize(data[:2] + b"N.")  # the stdlib agrees on the framing
    began = time.process_time()
    with pytest.raises(MalformedCheckpoint):
        loads(b"\x80\x04}" + data[3:], OBJECT_TABLE, label="test")
    assert time.process_time() - began < 10  # 2**60 steps if it hashed


def test_shared_values_do_not_become_an_endless_tree() -> None:
    value: list[Any] = []
    for _ in range(40):
        value = [value, value]
    with pytest.raises(MetadataTooLarge, match="budget"):
        encode(loads(pickle.dumps(value), OBJECT_TABLE, label="test"))
