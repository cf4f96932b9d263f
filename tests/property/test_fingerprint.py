"""Fingerprint sums: any partition of a tensor adds up to the same, and any change shows."""

from __future__ import annotations

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from pieces import partitions

from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME
from ckptcore.fingerprints.sums import (
    ZERO,
    add,
    box_sum,
    checkpoint_fingerprint,
    map_digest,
    tensor_fingerprint,
)

Shape = tuple[int, ...]
ROW = 4096  # words
MASK = (1 << 64) - 1
DTYPES = ["uint8", "bool", "float8_e4m3fn", "bfloat16", "float32", "int64", "complex64", "complex128"]
# Around the edges of rows: below one, a bit more, many, cut in the last dim and before it.
WEIGHT_LANES = (0x41EC0C98029479CE, 0xE67A26FF1991BCAC)
WEIGHT = "10159ddb76e8f8becee98257ccb81ee391a9e9829ab3c26058bb24d4f571d544"
CHECKPOINT = "1b79c20e81e4c210fe8dcce87d4d10b852271c195c948c8e9e8069f4052b87c2"
NOTHING_DONE = "08c842748d8473d4db67497e5515174a2884b7541186cedbad030c3372b5d4df"
SHAPES = [
    (),
    (0, 3),
    (1,),
    (7,),
    (64, 3),
    (4096,),
    (4097,),
    (40_000,),
    (3, 5461),
    (3, 16_385),
    (300, 130),
    (7, 9, 300),
    (90, 3, 33),
    (2, 3, 2, 2731),
    (5, 1, 70_000),
    (9000, 2),
    (2, 32_768, 1),
]


def elements(dtype: str, shape: Shape, seed: int = 0) -> np.ndarray:
    """Random bits, as bytes: [*shape, itemsize]."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (*shape, BY_NAME[dtype].itemsize), np.uint8)


def part(data: np.ndarray, box: Box) -> np.ndarray:
    where = tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))
    return np.ascontiguousarray(data[where]).reshape(-1)


def full_sum(dtype: str, data: np.ndarray) -> tuple[int, int]:
    shape = data.shape[:-1]
    return box_sum(dtype, shape, Box.full(shape), data.reshape(-1))


def random(table: str, lane: int, number: int) -> int:
    stream = blake3(derive_key_context=f"ckptcore fingerprint 1 {table} {lane}")
    return int.from_bytes(stream.digest(8, seek=8 * number), "little")


def by_hand(dtype: str, data: np.ndarray) -> tuple[int, int]:
    """The sum as it is defined, word by word in Python integers."""
    shape, width = data.shape[:-1], data.shape[-1]
    if width == 16:
        shape, width = (*shape, 2), 8
    per = 8 // width
    inner, dim = 1, len(shape) - 1
    while dim > 0 and inner * shape[dim] <= ROW * per:
        inner, dim = inner * shape[dim], dim - 1
    length = shape[dim] if shape else 1
    segment = min(length, ROW * per // inner)
    if per < segment < length:
        segment -= segment % per
    lines = data.reshape(-1, length, inner * width)
    total = [0, 0]
    number = 0
    for line in lines:
        for at in range(0, length, segment):
            raw = line[at : at + segment].tobytes()
            raw += bytes(-len(raw) % 8)
            sums = [0, 0]
            for r in range(len(raw) // 8):
                word = raw[8 * r : 8 * r + 8]
                sums[0] += random("word", 0, r) * int.from_bytes(word, "little")
                sums[1] += random("word", 1, r) * int.from_bytes(word, "big")
            for lane in range(2):
                total[lane] += (random("row", lane, number) | 1) * sums[lane]
            number += 1
    return total[0] & MASK, total[1] & MASK


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_any_partition_adds_up_to_the_same(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = data.draw(st.sampled_from(SHAPES) | st.lists(st.integers(1, 40), max_size=4).map(tuple))
    boxes = data.draw(partitions(shape, 9, 1))
    room = data.draw(st.sampled_from([None, np.empty(64 << 10, np.uint8), np.empty(70_001, np.uint8)]))
    skew = data.draw(st.integers(0, 8))  # tiles may begin at any byte
    bits = elements(dtype, shape)
    total = ZERO
    for box in boxes:
        raw = part(bits, box)
        placed = np.empty(len(raw) + skew, np.uint8)[skew:]
        placed[:] = raw
        total = add(total, box_sum(dtype, shape, box, placed, room))
    assert total == full_sum(dtype, bits)


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "complex128"])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (300, 130), (3, 4099), (5, 3, 33), (2, 9001)])
def test_the_sum_is_what_is_written(dtype: str, shape: Shape) -> None:
    bits = elements(dtype, shape, 5)
    assert full_sum(dtype, bits) == by_hand(dtype, bits)


def test_the_first_construction_stays() -> None:
    """What is in catalogs and receipts must mean the same for ever."""
    bits = (np.arange(3000 * 40 * 2) * 37 % 251).astype(np.uint8).reshape(3000, 40, 2)
    total = full_sum("bfloat16", bits)
    assert total == (WEIGHT_LANES[0], WEIGHT_LANES[1])
    assert tensor_fingerprint("bfloat16", (3000, 40), total) == WEIGHT
    assert checkpoint_fingerprint([("w", "bfloat16", (3000, 40), WEIGHT)]) == CHECKPOINT
    assert map_digest([], [], []) == NOTHING_DONE


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_boxes_that_reach_over_pages_of_row_multipliers(data: st.DataObject) -> None:
    """Multipliers of rows are made for 4,096 rows (128 MiB) at a time: a box may begin and end anywhere."""
    shape, box = data.draw(
        st.sampled_from(
            [
                ((50_000, 40_000), Box((4090, 7), (40, 3))),  # two rows per index, a few columns
                ((50_000, 40_000), Box((2040, 32_760), (4200, 16))),  # both rows of an index, three pages
                ((9, 900, 40_000), Box((1, 300, 8), (3, 590, 8))),  # two dims before the cut one
                ((151_936, 1024), Box((65_528, 0), (30, 1024))),  # several indices per row
                ((151_936, 1024), Box((65_528, 100), (30, 5))),
                ((151_937, 3, 341), Box((131_060, 1, 3), (200, 2, 9))),
            ]
        )
    )
    bits = np.zeros((*box.shape, 1), np.uint8)
    expected = [0, 0]
    for _ in range(8):  # by the definition, of the few elements that are not zero
        at = tuple(data.draw(st.integers(0, n - 1)) for n in box.shape)
        if not bits[at]:
            bits[at] = value = data.draw(st.integers(1, 255))
            place = tuple(o + i for o, i in zip(box.offset, at, strict=True))
            for lane, weight in enumerate(_weights(shape, place)):
                expected[lane] += weight * value
    assert box_sum("uint8", shape, box, bits.reshape(-1)) == (expected[0] & MASK, expected[1] & MASK)


def _weights(shape: Shape, place: tuple[int, ...]) -> tuple[int, int]:
    """What one more in an element of one byte adds to both lanes: by the definition, in Python integers."""
    inner, dim = 1, len(shape) - 1
    while dim > 0 and inner * shape[dim] <= ROW * 8:
        inner, dim = inner * shape[dim], dim - 1
    segment = min(shape[dim], ROW * 8 // inner)
    if 8 < segment < shape[dim]:
        segment -= segment % 8
    before = int(np.ravel_multi_index(place[:dim], shape[:dim])) if dim else 0
    behind = int(np.ravel_multi_index((0, *place[dim + 1 :]), (1, *shape[dim + 1 :])))
    row = before * -(-shape[dim] // segment) + place[dim] // segment
    word, byte = divmod(place[dim] % segment * inner + behind, 8)
    odd = [random("row", lane, row) | 1 for lane in range(2)]
    one, two = (random("word", lane, word) * odd[lane] for lane in range(2))
    return one << 8 * byte, two << 8 * (7 - byte)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_one_bit_and_two_elements_show(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = data.draw(st.sampled_from([s for s in SHAPES if np.prod(s) > 1]))
    bits = elements(dtype, shape)
    before = full_sum(dtype, bits)
    flat = bits.reshape(-1, bits.shape[-1])
    here, there = (data.draw(st.integers(0, len(flat) - 1)) for _ in range(2))
    other = flat.copy()
    other[here, data.draw(st.integers(0, flat.shape[1] - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert full_sum(dtype, other.reshape(bits.shape)) != before
    other = flat.copy()
    other[[here, there]] = other[[there, here]]
    same = (flat[here] == flat[there]).all()
    assert (full_sum(dtype, other.reshape(bits.shape)) == before) == same


@pytest.mark.alike(2)
@pytest.mark.parametrize("shape", [(8, 8), (256, 256), (300, 300), (128, 20_000)])
@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "float64"])
def test_rows_columns_transposes_and_signs_show(dtype: str, shape: Shape) -> None:
    bits = elements(dtype, shape)
    seen = {full_sum(dtype, bits)}
    changed = []
    for dim in (0, 1):
        order = np.arange(shape[dim])
        order[[1, 5]] = order[[5, 1]]
        changed.append(np.take(bits, order, axis=dim))
        changed.append(np.roll(bits, 1, axis=dim))
        changed.append(np.flip(bits, axis=dim))
    changed.append(bits.swapaxes(0, 1).reshape(bits.shape))
    for step in (1, 2, 4, 8):  # the highest bit alone: what a sum modulo a power of two sees worst
        for row in (slice(None), slice(0, 2), slice(3, 4)):
            signs = bits.copy()
            signs[row, ::step, -1] ^= 0x80
            changed.append(signs)
    for other in changed:
        found = full_sum(dtype, np.ascontiguousarray(other))
        assert found not in seen
        seen.add(found)


def test_two_signs_do_not_cancel() -> None:
    """Any two highest bits, in words at any distance."""
    bits = elements("bfloat16", (64, 1024))
    seen = {full_sum("bfloat16", bits)}
    for n in range(10):
        for at in range(4):
            other = bits.reshape(-1, 2).copy()
            other[[at, at + (4 << n)], 1] ^= 0x80
            found = full_sum("bfloat16", other.reshape(bits.shape))
            assert found not in seen
            seen.add(found)


def test_values_are_bits() -> None:
    zeros = np.array([[0.0, -0.0]]).view(np.uint8).reshape(1, 2, 8)
    assert full_sum("float64", zeros) != full_sum("float64", zeros[:, ::-1])
    quiet, payload = (np.array([n], np.uint32).view(np.uint8).reshape(1, 4) for n in (0x7FC00000, 0x7FC00001))
    assert full_sum("float32", quiet) != full_sum("float32", payload)


def test_name_dtype_and_shape_are_part_of_it() -> None:
    total = (1, 2)
    one = tensor_fingerprint("float32", (2, 3), total)
    assert len(one) == 64
    tensors = [
        ("int32", (2, 3), total),
        ("float32", (3, 2), total),
        ("float32", (6,), total),
        ("float32", (2, 3), (2, 1)),
    ]
    others = [tensor_fingerprint(*each) for each in tensors]
    assert len({one, *others}) == 5
    a, b = ("a", "float32", (2, 3), one), ("b", "float32", (2, 3), others[3])
    assert checkpoint_fingerprint([a, b]) == checkpoint_fingerprint([b, a])
    swapped = checkpoint_fingerprint([("b", *a[1:]), ("a", *b[1:])])
    assert len({checkpoint_fingerprint(t) for t in ([a, b], [a], [b], [])} | {swapped}) == 5


def test_maps_have_different_digests() -> None:
    found = {
        map_digest(*m)
        for m in (([], [], []), ([("a", "b")], [], []), ([], ["a"], []), ([], [], [("a", "b")]))
    }
    assert len(found) == 4
    assert map_digest([("a", "b"), ("c", "d")], ["y", "x"], []) == map_digest(
        [("c", "d"), ("a", "b")], ["x", "y"], []
    )


def test_an_empty_tensor_has_a_fingerprint() -> None:
    empty = elements("float32", (0, 3))
    assert full_sum("float32", empty) == ZERO
    assert tensor_fingerprint("float32", (0, 3), ZERO) != tensor_fingerprint("float32", (3, 0), ZERO)
