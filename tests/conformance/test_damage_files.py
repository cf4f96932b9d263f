"""Test that no damaged safetensors or torch file is silently converted.

The files are written by the formats' own libraries. The rules are those of `test_damage`.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from attacks import attack_payloads
from damaging import rebuild_zip, records
from outcomes import LIMITS, codes_of, well_behaved
from samples import differences, read_safetensors, read_torch, tensors_of, tree_digest

if TYPE_CHECKING:
    from driver import Cli

Change = Callable[[bytes, Path], bytes]


def tensors() -> dict[str, Any]:
    import torch

    maker = torch.Generator().manual_seed(11)
    return {
        "big": torch.randn(64, 33, generator=maker),
        "half": torch.randn(7, 5, generator=maker).to(torch.bfloat16),
        "count": torch.arange(40),
        "scalar": torch.tensor(2.5),
    }


# ------------------------------------------------------------------------------ safetensors


def parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def joined(header: Any, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def row(name: str, **changes: Any) -> Change:
    """Other statements about one tensor."""

    def change(data: bytes, sentinel: Path) -> bytes:
        header, body = parts(data)
        header[name] |= changes
        return joined(header, body)

    return change


def header(make: Callable[[dict[str, Any], bytes], Any]) -> Change:
    def change(data: bytes, sentinel: Path) -> bytes:
        return joined(make(*parts(data)), parts(data)[1])

    return change


def without(d: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in d.items() if k != key}


SAFETENSORS: dict[str, Change] = {
    "empty": lambda data, _: b"",
    "seven-bytes": lambda data, _: data[:7],
    "header-cut": lambda data, _: data[:50],
    "one-byte-short": lambda data, _: data[:-1],
    "half": lambda data, _: data[: len(data) // 2],
    "one-byte-long": lambda data, _: data + b"\x00",
    "tail": lambda data, _: data + b"\xff" * 5000,
    "header-of-2^63-bytes": lambda data, _: struct.pack("<Q", 1 << 63) + data[8:],
    "header-of-100-MB": lambda data, _: struct.pack("<Q", 100_000_001) + data[8:],
    "header-one-byte-longer": lambda data, _: struct.pack("<Q", data[0] + 256 * data[1] + 1) + data[8:],
    "header-of-no-bytes": lambda data, _: bytes(8) + data[8:],
    "not-json": header(lambda h, b: b"{" * 40),
    "not-utf8": header(lambda h, b: b'{"\xff\xfe": 1}'),
    "a-list": header(lambda h, b: [1, 2, 3]),
    "deep": header(lambda h, b: b"[" * 400_000),
    "deep-metadata": header(lambda h, b: b'{"__metadata__": ' + b"[" * 400_000),
    "no-tensors": header(lambda h, b: {}),
    "tensor-left-out": header(lambda h, b: without(h, "count")),
    "last-tensor-left-out": header(lambda h, b: without(h, max(h, key=lambda k: h[k]["data_offsets"]))),
    "same-key-twice": header(
        lambda h, b: b"{" + json.dumps(h)[1:-1].encode() + b"," + json.dumps({"big": h["half"]})[1:].encode()
    ),
    "dtype-of-the-same-width": row("big", dtype="I64"),
    "dtype-unknown": row("big", dtype="F31"),
    "dtype-a-number": row("big", dtype=4),
    "shape-transposed-too-far": row("big", shape=[64, 34]),
    "shape-negative": row("big", shape=[-64, -33]),
    "shape-wraps": row("big", shape=[1 << 32, 1 << 32, 64 * 33]),
    "shape-huge": row("big", shape=[10**15]),
    "shape-fractions": row("big", shape=[64.0, 33.5]),
    "shape-texts": row("big", shape=["64", "33"]),
    "shape-a-number": row("big", shape=2112),
    "shape-of-rank-100000": row("big", shape=[1] * 100_000),
    "offsets-behind-the-end": row("big", data_offsets=[1 << 40, (1 << 40) + 64 * 33 * 4]),
    "offsets-turned": row("big", data_offsets=[64 * 33 * 4, 0]),
    "offsets-negative": row("big", data_offsets=[-8, 64 * 33 * 4 - 8]),
    "offsets-of-three": row("big", data_offsets=[0, 1, 2]),
    "offsets-true": row("scalar", data_offsets=[False, True]),
    "offsets-overlap": header(lambda h, b: h | {"twin": h["big"]}),
    "offsets-missing": header(lambda h, b: h | {"big": without(h["big"], "data_offsets")}),
    "metadata-not-text": header(lambda h, b: h | {"__metadata__": {"format": 5}}),
    "million-names": header(lambda h, b: {f"n{i}": h["scalar"] for i in range(50_000)}),
}

# The format has no checksum and nothing that repeats a name, a shape of equal volume or a value.
SAFETENSORS_SILENT: dict[str, Change] = {
    "flip-payload": lambda data, _: data[:-9] + bytes([data[-9] ^ 8]) + data[-8:],
    "name-changed": header(lambda h, b: {("bag" if k == "big" else k): v for k, v in h.items()}),
    "shape-transposed": row("big", shape=[33, 64]),
    "dtype-of-equal-width": row("half", dtype="F16"),
}


@pytest.fixture(scope="module")
def good_safetensors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from safetensors.torch import save_file

    path = tmp_path_factory.mktemp("good") / "model.safetensors"
    save_file(tensors(), path)
    return path


@pytest.mark.parametrize("name", SAFETENSORS)
def test_damaged_safetensors(name: str, good_safetensors: Path, cli: Cli, tmp_path: Path) -> None:
    data = good_safetensors.read_bytes()
    source = tmp_path / "model.safetensors"
    source.write_bytes(SAFETENSORS[name](data, tmp_path / "sentinel"))
    refused_or_right(source, tensors_of(tensors()), cli, tmp_path)


@pytest.mark.parametrize("name", SAFETENSORS_SILENT)
def test_undetectable_in_safetensors(name: str, good_safetensors: Path, cli: Cli, tmp_path: Path) -> None:
    """Damage that the format cannot show; the safetensors library reads these files, too."""
    source = tmp_path / "model.safetensors"
    source.write_bytes(SAFETENSORS_SILENT[name](good_safetensors.read_bytes(), tmp_path))
    done = cli("consolidate", source, tmp_path / "out.pt", "--output", "json", **LIMITS)
    assert done.code == 0, f"noticed now: move {name} to SAFETENSORS\n{done}"
    checked = cli("validate", source, "--level", "bytes", "--output", "json", **LIMITS)
    assert "no-checksum" in codes_of(checked), checked
    found = tensors_of(read_torch(tmp_path / "out.pt"))
    assert found == read_safetensors(source)


INDEX: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "file-missing": lambda index, folder: (folder / "model-00002-of-00002.safetensors").unlink(),
    "name-in-the-wrong-file": lambda index, folder: index["weight_map"].update(
        big=index["weight_map"]["scalar"]
    ),
    "name-too-many": lambda index, folder: index["weight_map"].update(
        ghost="model-00001-of-00002.safetensors"
    ),
    "name-too-few": lambda index, folder: index["weight_map"].pop("big"),
    "file-upwards": lambda index, folder: index["weight_map"].update(big="../../etc/passwd"),
    "file-absolute": lambda index, folder: index["weight_map"].update(big="/etc/passwd"),
    "file-a-number": lambda index, folder: index["weight_map"].update(big=7),
    "map-a-list": lambda index, folder: index.update(weight_map=[1, 2]),
    "map-missing": lambda index, folder: index.pop("weight_map"),
    "map-empty": lambda index, folder: index.update(weight_map={}),
}


@pytest.mark.parametrize("name", INDEX)
def test_damaged_index(name: str, cli: Cli, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = tmp_path / "model"
    folder.mkdir()
    state = tensors()
    names = [["big", "half"], ["count", "scalar"]]
    files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for group, file in zip(names, files, strict=True):
        save_file({n: state[n] for n in group}, folder / file)
    index = {"metadata": {}, "weight_map": {n: f for g, f in zip(names, files, strict=True) for n in g}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    INDEX[name](index, folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused_or_right(folder, tensors_of(state), cli, tmp_path)


# ------------------------------------------------------------------------------- torch files


def flipped(record: str, share: float) -> Change:
    def change(data: bytes, sentinel: Path) -> bytes:
        r = records(data)[record]
        at = r.data + int(r.size * share)
        return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]

    return change


TORCH: dict[str, Change] = {
    "empty": lambda data, _: b"",
    "half": lambda data, _: data[: len(data) // 2],
    "one-byte-short": lambda data, _: data[:-1],
    "one-byte-long": lambda data, _: data + b"\x00",
    "cut-in-front": lambda data, _: data[100:],
    "head-zeroed": lambda data, _: bytes(200) + data[200:],
    "flip-payload": flipped("data/0", 0.5),
    "flip-first-byte": flipped("data/0", 0.0),
    "flip-pickle-start": flipped("data.pkl", 0.1),
    "flip-pickle-middle": flipped("data.pkl", 0.5),
    "flip-pickle-end": flipped("data.pkl", 0.9),
    "flip-byteorder": flipped("byteorder", 0.5),
    "pickle-of-a-number": lambda data, _: rebuild_zip(data, {"data.pkl": pickle.dumps(5, protocol=2)}),
    "pickle-empty": lambda data, _: rebuild_zip(data, {"data.pkl": b""}),
    "payload-short": lambda data, _: rebuild_zip(data, {"data/0": b"\x00" * 12}),
    "legacy": lambda data, _: pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2) + data,
    **{
        f"attack-{name}": lambda data, sentinel, name=name: rebuild_zip(
            data, {"data.pkl": attack_payloads(sentinel)[name]}
        )
        for name in attack_payloads(Path())
    },
}


@pytest.fixture(scope="module")
def good_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    path = tmp_path_factory.mktemp("good") / "model.pt"
    torch.save({"model": tensors(), "step": 7, "names": ["a", "b"]}, path)
    return path


@pytest.mark.parametrize("name", TORCH)
def test_damaged_torch_file(name: str, good_torch: Path, cli: Cli, tmp_path: Path) -> None:
    source = tmp_path / "model.pt"
    source.write_bytes(TORCH[name](good_torch.read_bytes(), tmp_path / "sentinel"))
    truth = tensors_of(read_torch(good_torch))
    refused_or_right(source, truth, cli, tmp_path)


def refused_or_right(source: Path, truth: Any, cli: Cli, tmp_path: Path) -> None:
    """The rule of the damage suite, for a source and its content before the damage."""
    before = tree_digest(source)
    checked = cli("validate", source, "--level", "bytes", "--output", "json", **LIMITS)
    dst = tmp_path / "results" / "out.pt"
    done = cli(
        "consolidate", source, dst, "--workers", "1", "--memory", "256MiB", "--output", "json", **LIMITS
    )
    assert not (tmp_path / "sentinel").exists(), "code from the file was executed"
    assert tree_digest(source) == before
    for outcome in (checked, done):
        well_behaved(outcome)
    if done.code == 0:
        found = tensors_of(read_torch(dst))
        assert sorted(found) == sorted(truth), f"{done}\n{checked}"
        assert not differences(truth, found), f"{done}\n{checked}"
    else:
        assert checked.code != 0, f"refused, yet validated\n{done}\n{checked}"
        assert not dst.exists()
