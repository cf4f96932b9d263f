"""Tensors that are added many at a time make the manifest that tensors added one by one make."""

from __future__ import annotations

import numpy as np
import pytest

from ckptcore.core.box import Box
from ckptcore.core.manifest import Envelope, Item, TensorSpec, View
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.metadata_budget import metered
from ckptcore.errors import MetadataTooLarge

FILES = {
    "a": [("w", "float32", (2, 3)), ("s", "bfloat16", ()), ("odd", "FLOAT99", (5,)), ("e", "int64", (0, 4))],
    "b": [("odd.too", "FLOAT99", (1,))],
    "c": [],
    "d": [("v", "uint8", (1, 2, 3, 4)), ("x", "float32", (7,))],
}


def one_by_one(builder: Builder, path: str, begin: int) -> None:
    file = builder.file(path, 1 << 20)
    for n, (name, dtype, shape) in enumerate(FILES[path]):
        at = builder.tensor(TensorSpec(name, dtype, shape), path)
        item = builder.item(Item(file, begin + 100 * n, 10 + n))
        builder.chunk(at, (0,) * len(shape), shape, item, View())


def at_once(builder: Builder, path: str, begin: int) -> None:
    builder.file(path, 1 << 20)
    specs = [TensorSpec(*row) for row in FILES[path]]
    places = np.array([(begin + 100 * n, 10 + n) for n in range(len(specs))], np.int64)
    builder.raw_tensors(specs, path, places.reshape(-1, 2))


@pytest.mark.parametrize("order", ["abcd", "dcba", "b", "c", "ad"])
@pytest.mark.parametrize("single", ["", "a", "d", "bd"])
def test_raw_tensors_are_those_of_single_rows(order: str, single: str) -> None:
    one, many = Builder(), Builder()
    for n, path in enumerate(order):
        one_by_one(one, path, n << 10)
        (one_by_one if path in single else at_once)(many, path, n << 10)
    assert one.item_bytes == many.item_bytes
    wanted, found = one.build("test", "nowhere", {}), many.build("test", "nowhere", {})
    assert found.dump() == wanted.dump()
    assert found.unread == wanted.unread
    assert [list(found.chunks_of(n)) for n in range(found.num_tensors)] == [
        list(wanted.chunks_of(n)) for n in range(wanted.num_tensors)
    ]


def test_raw_tensors_count_as_much_as_single_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    for add in (one_by_one, at_once):
        with metered() as meter:
            add(Builder(), "d", 0)
            kept.append(meter.kept)
    assert kept[0] == kept[1]
    monkeypatch.setenv("CKPTCORE_METADATA_MEMORY", "1MiB")
    specs = [TensorSpec(f"w.{n}", "float32", (1,)) for n in range(3000)]
    with metered():
        builder = Builder()
    builder.file("a", 1 << 20)
    with pytest.raises(MetadataTooLarge):
        builder.raw_tensors(specs, "a", np.zeros((3000, 2), np.int64))


@pytest.mark.parametrize("order", ["one,plain,many", "many,one,many,plain", "plain,many,many,one", "many"])
def test_items_of_every_way_keep_their_numbers(order: str) -> None:
    builder = Builder()
    file, wanted = builder.file("a", 1 << 20), list[Item]()
    for n, way in enumerate(order.split(",")):
        if way == "one":
            item = Item(file, n, 10 + n, Envelope.RAW, "zstd", 0xFFFF_FFFF, "m")
            assert builder.item(item) == len(wanted)
            wanted.append(item)
        elif way == "plain":
            assert builder.plain_item(file, n, 10 + n, Envelope.TORCHZIP) == len(wanted)
            wanted.append(Item(file, n, 10 + n, Envelope.TORCHZIP))
        else:
            places, kept = np.array([(file, k, 5 + k) for k in range(4)]), np.array([True, False, True, True])
            kinds, codec = np.array([0, 1, 2, 1]), np.array([0, 1, 0, 1])
            rows = builder.items(places, kinds, codec, ("", "zstd"), {2: "in"}, kept)
            assert rows.tolist() == [len(wanted), -1, len(wanted) + 1, len(wanted) + 2]
            made = [
                Item(
                    file,
                    k,
                    5 + k,
                    Envelope(int(kinds[k])),
                    ("", "zstd")[codec[k]],
                    None,
                    "in" if k == 2 else "",
                )
                for k in (0, 2, 3)
            ]
            wanted += made
    assert [builder.item_crc32(n) for n in range(len(wanted))] == [item.crc32 for item in wanted]
    assert builder.item_bytes == sum(item.length for item in wanted)
    items = builder.build("test", "nowhere", {}).items
    assert [items[n] for n in range(len(items))] == wanted


def test_chunks_are_asked_for_between_rows_and_columns() -> None:
    builder, view = Builder(), View(5, (1, 2), 1)
    tensor = builder.tensor(TensorSpec("t", "uint8", (9, 9)))
    lo, shape = np.array([[1, 2], [3, 4]]), np.array([[5, 6], [0, 1]])
    builder.chunks(np.array([tensor, tensor]), lo, shape, np.array([2, 2]), np.array([7, 8]))
    builder.chunk(tensor, (0, 1), (2, 3), 9, view)
    builder.chunks(np.array([-1, tensor]), lo, shape, np.array([2, 2]), np.array([1, 2]))
    boxes = [Box((1, 2), (5, 6)), Box((3, 4), (0, 1)), Box((0, 1), (2, 3)), Box((3, 4), (0, 1))]
    assert builder.chunk_count == 4
    assert list(builder.chunk_boxes([3, 0, 2, 1])) == [boxes[n] for n in (3, 0, 2, 1)]
    assert [builder.chunk_item(n) for n in range(4)] == [7, 8, 9, 2]
    assert [builder.chunk_view(n) for n in range(4)] == [None, None, view, None]
