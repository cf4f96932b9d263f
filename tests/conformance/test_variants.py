"""Test that variants of other torch versions, Pythons and machines are read.

Each variant edits the bytes of a sample to what another writer would have written. Reading it must give the
sample's truth.
"""

from __future__ import annotations

import pickle
import pickletools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from damaging import Folder, Place, rebuild_zip, records, rewrite, with_payload
from samples import FIXTURES, differences, expected_tensors, read_safetensors, value

if TYPE_CHECKING:
    from driver import Cli

SAMPLE = FIXTURES / "torch" / "dcp_file_per_item_2r"
NESTED = FIXTURES / "torch" / "dcp_nested_2r"
Variant = Callable[[Folder], None]


def read(cli: Cli, source: Path, truth: Path, dst: Path) -> None:
    """Read a variant; it must be valid and equal the truth."""
    checked = cli("validate", source, "--level", "bytes", "--output", "json")
    assert checked.code == 0, checked
    done = cli("consolidate", source, dst)
    assert done.code == 0, done
    assert not differences(expected_tensors(truth), read_safetensors(dst))


def rename_globals(data: bytes, names: dict[tuple[str, str], tuple[str, str]]) -> bytes:
    """Return a pickle of protocol 4 with other class names, without frames and with a correct memo.

    Every name is pushed as two fresh strings, so that memo references to the old ones stay right.
    """
    out = bytearray()
    ops = list(pickletools.genops(data))
    ends = [pos for _, _, pos in ops[1:]] + [len(data)]
    strings: list[str] = []
    memo: dict[int, str] = {}
    for (op, arg, start), end in zip(ops, ends, strict=True):
        assert start is not None
        if op.name == "FRAME":
            continue
        if op.name in {"SHORT_BINUNICODE", "BINUNICODE"}:
            strings.append(arg)
        elif op.name == "MEMOIZE":
            memo[len(memo)] = strings[-1] if strings else ""
        elif op.name in {"BINGET", "LONG_BINGET"}:
            strings.append(memo[arg])
        elif op.name == "STACK_GLOBAL":
            module, name = names.get((strings[-2], strings[-1]), (strings[-2], strings[-1]))
            fresh = b"".join(b"\x8c" + bytes([len(t)]) + t.encode() for t in (module, name))
            out += b"00" + fresh  # the old two are popped
            strings.append("")
        elif op.name not in {"PROTO", "STOP"}:
            strings.append("")
        out += data[start:end]
    return bytes(out)


def spell(folder: Folder, names: dict[tuple[str, str], tuple[str, str]]) -> None:
    old = folder.meta.read_bytes()
    new = rename_globals(old, names)
    assert new != old
    folder.meta.write_bytes(new)


METADATA = "torch.distributed.checkpoint.metadata"
OLD = "torch.distributed._shard.sharded_tensor.metadata"


def torch_2_1(folder: Folder) -> None:
    """Three fields in Metadata, other homes of two classes, no codec field, no version."""
    meta = folder.load()
    for gone in ("storage_meta", "version"):
        meta.__dict__.pop(gone, None)
    folder.dump(meta)
    names = {
        (METADATA, "TensorProperties"): (OLD, "TensorProperties"),
        (METADATA, "_MEM_FORMAT_ENCODING"): (OLD, "MEM_FORMAT_ENCODING"),
    }
    spell(folder, names)


def python_3_13(folder: Folder) -> None:
    spell(folder, {("pathlib", "PosixPath"): ("pathlib._local", "PosixPath")})


def windows(folder: Folder) -> None:
    spell(folder, {("pathlib", "PosixPath"): ("pathlib", "WindowsPath")})


def fsspec_writer(folder: Folder) -> None:
    meta = folder.load()
    meta.storage_meta.checkpoint_id = "s3://bucket/run/step-100"
    folder.dump(meta)


def newer_version_with_more_properties(folder: Folder) -> None:
    """A sixth value in the state of TensorProperties, as proposed upstream; only the first counts."""
    meta = folder.load()

    class Longer:
        def __init__(self, old: Any) -> None:
            self.state = (*old.__getstate__(), (1, 2, 3))

        def __reduce__(self) -> tuple[Any, ...]:
            from torch.distributed.checkpoint.metadata import TensorProperties

            return TensorProperties, (), self.state

    for spec in meta.state_dict_metadata.values():
        if hasattr(spec, "chunks"):
            spec.properties = Longer(spec.properties)
    folder.dump(meta)


def mindspore(folder: Folder) -> None:
    """A state of three values."""
    meta = folder.load()

    class Shorter:
        def __init__(self, old: Any) -> None:
            self.state = (old.dtype, False, False)

        def __reduce__(self) -> tuple[Any, ...]:
            from torch.distributed.checkpoint.metadata import TensorProperties

            return TensorProperties, (), self.state

    for spec in meta.state_dict_metadata.values():
        if hasattr(spec, "chunks"):
            spec.properties = Shorter(spec.properties)
    folder.dump(meta)


def no_planner_data(folder: Folder) -> None:
    meta = folder.load()
    meta.planner_data = None
    folder.dump(meta)


def chunks_in_another_order(folder: Folder) -> None:
    meta = folder.load()
    for spec in meta.state_dict_metadata.values():
        if hasattr(spec, "chunks"):
            spec.chunks.reverse()
    meta.storage_data = dict(reversed(meta.storage_data.items()))
    folder.dump(meta)


def no_index_hints(folder: Folder) -> None:
    meta = folder.load()
    meta.storage_data = {replace(k, index=None): v for k, v in meta.storage_data.items()}
    folder.dump(meta)


def protocol_2(folder: Folder) -> None:
    folder.meta.write_bytes(pickle.dumps(folder.load(), protocol=2))


def protocol_5(folder: Folder) -> None:
    folder.meta.write_bytes(pickle.dumps(folder.load(), protocol=5))


def unused_files(folder: Folder) -> None:
    (folder.path / "__7_0.distcp").write_bytes(b"")
    (folder.path / "__8_0.distcp").write_bytes(b"leftover")
    (folder.path / "notes.txt").write_text("hello")


def names_of_another_writer(folder: Folder) -> None:
    """A custom writer's file names, plain and inside the folder."""
    meta = folder.load()
    for key, info in meta.storage_data.items():
        old = folder.path / info.relative_path
        name = info.relative_path.replace("__", "shard-").replace(".distcp", ".data")
        if old.exists():
            old.rename(folder.path / name)
        meta.storage_data[key] = replace(info, relative_path=name)
    folder.dump(meta)


def no_checksums(folder: Folder) -> None:
    """torch.serialization.set_crc32_options(False): every CRC is 0."""

    def blank(place: Place, item: bytes) -> bytes:
        out = bytearray(item)
        for record in records(item).values():
            out[record.central + 16 : record.central + 20] = bytes(4)
            after = record.data + record.size
            if out[after : after + 4] == b"PK\x07\x08":
                out[after + 4 : after + 8] = bytes(4)
        return bytes(out)

    rewrite(folder, blank)


def big_endian(folder: Folder) -> None:
    """A machine of the other byte order wrote the payloads, and recorded that."""

    def swap(place: Place, item: bytes) -> bytes | None:
        if not place.tensor or place.dtype.is_complex:
            return None
        found = records(item)
        r = found["data/0"]
        width = place.dtype.itemsize
        raw = item[r.data : r.data + r.size]
        turned = b"".join(raw[i : i + width][::-1] for i in range(0, len(raw), width))
        item = with_payload(item, turned)
        order = found["byteorder"]
        assert item[order.data : order.data + order.size] == b"little"
        return rebuild_zip(item, {"byteorder": b"big"})

    rewrite(folder, swap)


def older_items(folder: Folder) -> None:
    """Items before torch 2.1..2.7: no byteorder, format version or alignment records."""
    import io
    import zipfile

    def strip(place: Place, item: bytes) -> bytes:
        out = io.BytesIO()
        gone = ("byteorder", ".format_version", ".storage_alignment", ".data/serialization_id")
        with zipfile.ZipFile(io.BytesIO(item)) as old, zipfile.ZipFile(out, "w") as new:
            for info in old.infolist():
                if not info.filename.endswith(gone):
                    new.writestr(zipfile.ZipInfo(info.filename), old.read(info))
        return out.getvalue()

    rewrite(folder, strip)


def gaps_between_items(folder: Folder) -> None:
    """Another writer's alignment: a header, and items at multiples of 4096."""
    meta = folder.load()
    for file in {p.file for p in folder.places()}:
        data = file.read_bytes()
        out = bytearray(16)
        for place in (p for p in folder.places() if p.file == file):
            out += bytes(-len(out) % 4096)
            meta.storage_data[place.key] = replace(meta.storage_data[place.key], offset=len(out))
            out += data[place.start : place.stop]
        file.write_bytes(out)
    folder.dump(meta)


def cuda_storages(folder: Folder) -> None:
    """Saved from a GPU: the location in the pickle is cuda:3."""

    def move(place: Place, item: bytes) -> bytes:
        r = records(item)["data.pkl"]
        old = item[r.data : r.data + r.size]
        new = old.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:3")
        assert new != old or not place.tensor
        return rebuild_zip(item, {"data.pkl": new})

    rewrite(folder, move)


VARIANTS: dict[str, Variant] = {
    f.__name__: f
    for f in (
        torch_2_1,
        python_3_13,
        windows,
        fsspec_writer,
        newer_version_with_more_properties,
        mindspore,
        no_planner_data,
        chunks_in_another_order,
        no_index_hints,
        protocol_2,
        protocol_5,
        unused_files,
        names_of_another_writer,
        no_checksums,
        big_endian,
        older_items,
        gaps_between_items,
        cuda_storages,
    )
}


# Of the two samples, these variants go other ways through the code.
_OF_BOTH = frozenset({"mindspore", "no_checksums", "unused_files"})


@pytest.mark.parametrize(
    ("name", "original"),
    [
        pytest.param(name, original, id=f"{name}-{original.name}", marks=marks)
        for original, alike in ((SAMPLE, ()), (NESTED, pytest.mark.soak))
        for name in VARIANTS
        for marks in [() if name in _OF_BOTH else alike]
    ],
)
def test_variant(name: str, original: Path, cli: Cli, tmp_path: Path) -> None:
    shutil.copytree(original / "ckpt", tmp_path / "ckpt")
    folder = Folder(tmp_path / "ckpt", tmp_path / "sentinel")
    before = {p.name: p.read_bytes() for p in folder.path.iterdir()}
    VARIANTS[name](folder)
    assert {p.name: p.read_bytes() for p in folder.path.iterdir()} != before
    read(cli, folder.path, original / "expected.safetensors", tmp_path / "out")


def test_rank_local_metadata_of_two_saves(cli: Cli, tmp_path: Path) -> None:
    """A missing rank is reported by its number."""
    source = tmp_path / "ckpt"
    shutil.copytree(FIXTURES / "torch" / "dcp_nocollectives_2r" / "ckpt", source)
    (source / "__1.metadata").unlink()
    checked = cli("validate", source, "--level", "coverage", "--output", "json")
    assert checked.code == 1, checked
    found = " ".join(f["message"] + str(f["file"]) for f in checked.json["findings"])
    assert "rank 1" in found or "__1" in found


class Hook:
    """A class of the job's own, unknown to readers."""


@pytest.mark.parametrize("shape", ["beside", "around"])
def test_tensors_beside_an_unknown_class(shape: str, cli: Cli, tmp_path: Path) -> None:
    """The class is refused by name; tensors beside it, in plain containers, are not lost."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    weight = torch.arange(6.0).reshape(2, 3)
    hook = Hook()
    if shape == "around":
        hook.weight = weight  # type: ignore[attr-defined]
    state = {"extra": {"w": weight, "hook": hook, "lr": 0.5}, "t": torch.ones(3)}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, checkpoint_id=tmp_path / "ckpt", planner=planner, no_dist=True)
    checked = cli("validate", tmp_path / "ckpt", "--level", "bytes", "--output", "json")
    assert checked.code == 0, checked
    found = [f for f in checked.json["findings"] if f["code"] == "refused-global"]
    assert len(found) == 1
    assert "Hook" in found[0]["message"]
    done = cli("consolidate", tmp_path / "ckpt", tmp_path / "out")
    assert done.code == 0, done
    found = read_safetensors(tmp_path / "out")
    assert found["extra.w"] == value(weight)
    assert found["t"] == value(torch.ones(3))


def test_a_version_of_the_future(cli: Cli, tmp_path: Path) -> None:
    """Metadata of another version is read correctly, or refused; never misread."""
    source = tmp_path / "ckpt"
    shutil.copytree(SAMPLE / "ckpt", source)
    folder = Folder(source, tmp_path / "sentinel")
    meta = folder.load()
    meta.version = "9.0.0"
    folder.dump(meta)
    done = cli("consolidate", source, tmp_path / "out", "--output", "json")
    if done.code:
        assert done.code in {1, 5}, done
        assert "9.0.0" in done.stdout
    else:
        truth = expected_tensors(SAMPLE / "expected.safetensors")
        assert not differences(truth, read_safetensors(tmp_path / "out"))
