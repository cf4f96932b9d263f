"""Content ids: equal contents have equal ids wherever they are stored, and nothing else has."""

from __future__ import annotations

import os
from collections import OrderedDict
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptcore
from ckptcore.catalog.obligations import ObligationRow
from ckptcore.core.manifest import Blob
from ckptcore.core.object_tree import Named, encode
from ckptcore.custody.holdings import objects_of, rest_of, tensors_read
from ckptcore.custody.obligation_records import (
    Obligation,
    add_obligations,
    drop_obligations,
    home_of,
    read_obligations,
)
from ckptcore.errors import SourceUnreadable, UsageError
from ckptcore.fingerprints.holdings import (
    TENSOR,
    Holding,
    ids_of,
    ids_of_tensors,
    leaf_holding,
    nth,
    numbered,
    pack,
    pack_ids,
    pack_specs,
    spec_digest,
    tensor_holdings,
    unpack,
    unpack_ids,
    unpack_specs,
)
from ckptcore.planning.request import Settings
from ckptcore.store.listing import contents

MEANS = Settings(memory=32 << 20, workers=1)
ROW = ObligationRow("an id", None, "/runs/step-1", "/out/a", b"", datetime(2026, 1, 1, tzinfo=UTC))


def ids_at(path: Path) -> frozenset[bytes]:
    manifest = ckptcore.open(str(path))
    things = contents(str(path))
    return ids_of(
        (
            *numbered(tensors_read(manifest, MEANS)),
            *objects_of(manifest),
            *rest_of(manifest, str(path), things),
        )
    )


def test_names_and_formats_do_not_matter(tmp_path: Path) -> None:
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    torch.save(state, tmp_path / "a.pt")
    save_file({f"model.{name}": value for name, value in state.items()}, tmp_path / "b.safetensors")
    assert ids_at(tmp_path / "a.pt") == ids_at(tmp_path / "b.safetensors")
    save_file({"a": state["a"].t().contiguous(), "b": state["b"]}, tmp_path / "c.safetensors")
    assert len(ids_at(tmp_path / "a.pt") & ids_at(tmp_path / "c.safetensors")) == 1


def test_each_of_equal_tensors_counts(tmp_path: Path) -> None:
    zeros = {name: torch.zeros(3) for name in "abc"}
    save_file(zeros, tmp_path / "three.safetensors")
    save_file({name: zeros[name] for name in "ab"}, tmp_path / "two.safetensors")
    three, two = ids_at(tmp_path / "three.safetensors"), ids_at(tmp_path / "two.safetensors")
    assert (len(three), len(two)) == (3, 2)
    assert two < three
    first = min(three, key=lambda each: [nth(each, n) in three for n in (2, 3)] != [True, True])
    assert {first, nth(first, 2), nth(first, 3)} == three


@pytest.mark.parametrize(
    "values",
    [
        (1, 1.0),
        (0.0, -0.0),
        ({"a": 1}, OrderedDict(a=1)),
        ([1, 2], (1, 2)),
        ({"0": 1}, [1]),
        (Named("path", "/data"), "/data"),
        ({}, []),
        ({"a": {}}, {"a": None}),
    ],
)
def test_other_values_have_other_ids(values: tuple[object, object]) -> None:
    one, other = values

    def ids(value: object) -> frozenset[bytes]:
        class Manifest:
            blobs = (Blob("x", -1, encode(value)),)

        return ids_of(objects_of(Manifest))  # type: ignore[arg-type]

    assert ids(one) == ids(one) != frozenset()
    assert ids(one) != ids(other)


def test_every_file_of_a_folder_counts(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, folder / "model.safetensors")
    before = ids_at(folder)
    (folder / "notes.txt").write_text("mine")
    assert len(ids_at(folder) - before) == 1
    os.mkfifo(folder / "pipe")
    (folder / "empty").mkdir()
    things = contents(str(folder))
    rest = list(rest_of(ckptcore.open(str(folder)), str(folder), things))
    assert {(each.kind, each.name) for each in rest if each.id is None} == {
        ("FIFO", "pipe"),
        ("empty folder", "empty/"),
    }


def test_packed_holdings_are_those_that_were_packed() -> None:
    rows = (
        Holding(TENSOR, "a\nb", bytes(range(16)), "bfloat16[4]", 8),
        leaf_holding("args", "args.lr", [0.1]),
        Holding("file", "ünï\udcff", bytes(16), "3 bytes", 3),
    )
    assert unpack(pack(rows)) == rows
    assert unpack(pack(())) == ()
    ids = ids_of(rows)
    assert unpack_ids(pack_ids(ids)) == ids
    assert pack_specs(unpack(pack(rows))) == pack_specs(rows)
    assert unpack_specs(pack_specs(rows)) >= {spec_digest(TENSOR, "bfloat16[4]")}
    for data in (b"", b"x", pack(rows)[:-1]):
        with pytest.raises((ValueError, ckptcore.errors.CkptError)):
            unpack(data)


def test_the_record_beside_a_copy(tmp_path: Path) -> None:
    place = str(tmp_path / "out")
    obligation = Obligation.of(ROW, (Holding(TENSOR, "a", bytes(16), "float32[2]", 8),))
    assert read_obligations(place) == ()
    add_obligations(place, [obligation])
    (known,) = read_obligations(place)
    assert (known.row.id, known.row.source, known.contents) == ("an id", "/runs/step-1", obligation.contents)
    drop_obligations(place, ["another"])
    assert len(read_obligations(place)) == 1
    drop_obligations(place, ["an id"])
    assert (read_obligations(place), os.listdir(tmp_path)) == ((), [])


@pytest.mark.parametrize("names", ["", "a", "abc"])
def test_ids_alone_are_those_of_holdings(names: str) -> None:
    digits = dict(zip("abc", "121", strict=True))
    sums = [(name, "float32", (2,), 64 * digits[name]) for name in names]
    assert ids_of_tensors(sums) == ids_of(numbered(tensor_holdings(sums, {})))
    assert len(ids_of_tensors(sums)) == len(names)


@pytest.mark.parametrize("data", [b"", b"{}", b"[" * 100_000, b'{"version":1,"obligations":[{}]}'])
def test_a_record_that_cannot_be_read_protects(data: bytes, tmp_path: Path) -> None:
    home = Path(home_of(str(tmp_path / "out")))
    home.mkdir()
    (home / "a.json").write_bytes(data)
    with pytest.raises(SourceUnreadable, match="must not be replaced"):
        read_obligations(str(tmp_path / "out"))


def test_no_link_redirects_a_record(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    Path(home_of(str(tmp_path / "out"))).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="cannot write"):
        add_obligations(str(tmp_path / "out"), [Obligation.of(ROW, ())])
    assert os.listdir(tmp_path / "elsewhere") == []
