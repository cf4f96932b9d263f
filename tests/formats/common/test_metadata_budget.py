"""Hold metadata to its memory budget: files that expand far are refused or cheap, honest ones are read."""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import ckptcore
from ckptcore.core.metadata_budget import DEFAULT, VARIABLE, budget, metered
from ckptcore.core.object_tree import decode
from ckptcore.errors import CkptError, MetadataTooLarge, UsageError

if TYPE_CHECKING:
    from driver import Cli

MIB = 1 << 20
_INDEX = "model.safetensors.index.json"
_W = (
    b"X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
    b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x02tQK\x00K\x02\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR"
)


def _long(i: int) -> bytes:
    return b"\x8a\x10" + struct.pack("<QQ", i, 1)


def _listed(one: bytes, size: int) -> bytes:
    return b"](" + one * (size // len(one)) + b"e"


def _deep_names(size: int) -> bytes:
    key = b"X" + struct.pack("<I", size // 8) + b"k" * (size // 8) + b"\x94"
    return b"}" + key + b"}h\x00" * 120 + _listed(b"]", size // 2) + b"s" * 121


# name -> the pickle of a value, of about so many bytes.
PICKLES: dict[str, Callable[[int], bytes]] = {
    "sets": lambda n: _listed(b"\x8f", n),
    "sets of one": lambda n: _listed(b"\x8f(K\x01\x90", n),
    "frozen sets": lambda n: _listed(b"(\x91", n),
    "lists": lambda n: _listed(b"]", n),
    "dicts": lambda n: _listed(b"}", n),
    "dicts of lists": lambda n: _listed(b"}(K\x00]u", n),
    "tuples": lambda n: _listed(b")", n),
    "tuples of one": lambda n: _listed(b")\x85", n),
    "a tuple shared": lambda n: b"](K\x01K\x02\x86\x94" + b"h\x00" * (n // 2) + b"e",
    "keys of one hash": lambda n: (
        b"}("
        + b"".join(b"\x8a\x0c" + (i * (2**61 - 1)).to_bytes(12, "little") + b"N" for i in range(n // 15))
        + b"u"
    ),
    "set of one hash": lambda n: (
        b"\x8f("
        + b"".join(b"\x8a\x0c" + (i * (2**61 - 1)).to_bytes(12, "little") for i in range(n // 14))
        + b"\x90"
    ),
    "long keys": lambda n: b"}(" + b"".join(_long(i) + b"N" for i in range(n // 19)) + b"u",
    "long numbers": lambda n: b"](" + b"".join(map(_long, range(n // 18))) + b"e",
    "duplicate text": lambda n: _listed(b"X\x02\x00\x00\x00ab", n),
    "empty text": lambda n: _listed(b"\x8c\x00", n),
    "empty bytes": lambda n: _listed(b"C\x00", n),
    "NaN": lambda n: _listed(b"G" + struct.pack(">d", math.nan), n),
    "batches": lambda n: b"]" + b"(e" * (n // 2),
    "put and taken": lambda n: b"N0" * (n // 2) + b"N",
    "memo": lambda n: b"N" + b"\x94" * n,
    "far memo": lambda n: b"N" + b"".join(b"r" + struct.pack("<I", 7 * i + 9) for i in range(n // 5)),
    "doubled": lambda n: b"](N" + b"2" * n + b"e",
    "namespaces": lambda n: _listed(b"cargparse\nNamespace\n)\x81", n),
    "ordered dicts": lambda n: b"](ccollections\nOrderedDict\n\x940" + b"h\x00)R" * (n // 4) + b"e",
    "refused": lambda n: _listed(b"ca\nb\n", n),
    "paths": lambda n: _listed(b"cpathlib\nPosixPath\n)R", n),
    "deep": lambda n: b"]" * 140 + b"a" * 139,
    "deep names": _deep_names,
    "tensors": lambda n: _listed(_W[6:], n),
}


# Counted by the same lines of code as others.
ALIKE = frozenset(
    {
        "a tuple shared",
        "dicts",
        "dicts of lists",
        "duplicate text",
        "empty text",
        "long numbers",
        "NaN",
        "ordered dicts",
        "put and taken",
        "tuples of one",
    }
)


def zipped(path: Path, pickled: bytes, more: int = 0) -> Path:
    """A torch zip of ``{"w": tensor, "x": value}``. more: storages without bytes."""
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x04}(" + _W + b"X\x01\x00\x00\x00x" + pickled + b"u.")
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", bytes(8))
        for n in range(more):
            archive.writestr(f"archive/data/{n + 1}", b"")
        archive.writestr("archive/version", "3\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw.getvalue())
    return path


def safetensors(path: Path, header: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    return path


def _header(entry: bytes, size: int) -> bytes:
    """A header of entries; ``%d`` is the entry's number."""
    count = size // (len(entry) + 7)
    return b"{" + b",".join(entry.replace(b"%d", b"%d" % n) for n in range(count)) + b"}"


def _index(root: Path, size: int) -> Path:
    safetensors(root / "a.safetensors", b"{}")
    rows = _header(b'"w%d":"a.safetensors"', size)
    (root / _INDEX).write_bytes(b'{"weight_map":' + rows + b"}")
    return root


def _dcp(root: Path, pickled: bytes) -> Path:
    root.mkdir(parents=True)
    (root / "__0_0.distcp").write_bytes(b"x")
    (root / ".metadata").write_bytes(b"\x80\x04" + pickled + b".")
    return root


def _state_shared(root: Path, size: int) -> Path:
    """One state for many records, and sets after them: memory of a state is returned once."""
    chunk = b"ctorch.distributed.checkpoint.metadata\nChunkStorageMetadata\n\x940}\x940"
    records = b"h\x00)\x81h\x01b0" * (size // 2)
    return _dcp(root, chunk + records + _listed(b"\x8f", size // 5))


def _tensors_without_chunks(root: Path, size: int) -> Path:
    meta = b"ctorch.distributed.checkpoint.metadata\n"
    head = meta + b"TensorStorageMetadata\n\x940" + meta + b"TensorProperties\n\x940ctorch\nfloat32\n\x940"
    head += b"".join(
        b"X" + struct.pack("<I", len(n)) + n + b"\x940" for n in (b"properties", b"size", b"chunks")
    )
    entry = b"h\x00)\x81}(h\x03h\x01)\x81(h\x02tbh\x04K\x08\x85h\x05]ub"
    rows = b"".join(b"\x8c\x07%07d" % n + entry for n in range(size // (9 + len(entry))))
    top = meta + b"Metadata\n)\x81}(X\x13\x00\x00\x00state_dict_metadata}(" + rows
    return _dcp(root, head + top + b"uX\x0c\x00\x00\x00storage_data}ub")


def _hole(root: Path, name: str, content: bytes = b"") -> Path:
    """A sparse file of 5 GB."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / name).open("wb") as file:
        file.write(content)
        file.truncate(5_000_000_000 if name != ".metadata" else 4_000_000_000)
    return root


def _metadata_json(root: Path, size: int) -> Path:
    entry = b'"w%d":{"shape":[0],"dtype":"F32","is_sharded":true,"shard_spec_per_file":{}}'
    root.mkdir()
    (root / "metadata.json").write_bytes(b'{"tensors":' + _header(entry, size) + b"}")
    (root / "rank_0.safetensors").write_bytes(b"")
    return root


EMPTY = b'"a%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
FILES: dict[str, Callable[[Path, int], Path]] = {
    "header": lambda p, n: safetensors(p / "a.safetensors", _header(EMPTY, n)),
    "header, one name": lambda p, n: safetensors(p / "a.safetensors", _header(EMPTY.replace(b"%d", b""), n)),
    "header, long names": lambda p, n: safetensors(
        p / "a.safetensors", _header(EMPTY.replace(b"a%d", b"n" * 4000 + b"%d"), n)
    ),
    "header, metadata": lambda p, n: safetensors(
        p / "a.safetensors", b'{"__metadata__":' + _header(b'"k%d":""', n) + b"}"
    ),
    "header, nested": lambda p, n: safetensors(p / "a.safetensors", b'{"a":' * (n // 5)),
    "header, lists": lambda p, n: safetensors(p / "a.safetensors", b'{"a":[' + b"[]," * (n // 3) + b"0]}"),
    "header, digits": lambda p, n: safetensors(
        p / "a.safetensors", b'{"a":[' + b",".join([b"9" * 4300] * (n // 4301)) + b"]}"
    ),
    "index": _index,
    "index, a hole": lambda p, n: _hole(safetensors(p / "a.safetensors", b"{}").parent, _INDEX),
    ".metadata, a hole": lambda p, n: _hole(_dcp(p, b"N"), ".metadata"),
    "metadata.json, a hole": lambda p, n: _hole(_metadata_json(p, 100), "metadata.json"),
    ".metadata, a state shared": _state_shared,
    ".metadata, tensors without chunks": _tensors_without_chunks,
    "metadata.json": _metadata_json,
    "zip records": lambda p, n: zipped(p / "a.pt", b"N", more=n // 100),
}


def cost_of(path: Path, limit: int | None, monkeypatch: pytest.MonkeyPatch) -> tuple[str, float, int]:
    """Return (outcome, CPU seconds, additional bytes) of reading and checking, in a fork of this process."""
    if limit is not None:
        monkeypatch.setenv(VARIABLE, str(limit))
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        outcome = "internal"
        before = _resident()
        try:
            with metered():
                manifest = ckptcore.open(str(path))
            ckptcore.check(manifest, "coverage")
            assert manifest.digest
            outcome = "read"
        except CkptError as error:
            outcome = error.code
        finally:
            os.write(write, f"{outcome} {before}".encode())
            os._exit(0)
    _, _, used = os.wait4(pid, 0)
    outcome, before = os.read(read, 200).decode().split()
    os.close(read)
    os.close(write)
    return outcome, used.ru_utime + used.ru_stime, (used.ru_maxrss << 10) - int(before)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] if name in ALIKE else []) for name in PICKLES]
)
def test_pickles_stay_within_the_budget(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth of a MiB of pickle under 32 MiB: as 8 MiB under the default."""
    path = zipped(tmp_path / "a.pt", PICKLES[name](MIB // 8))
    outcome, seconds, peak = cost_of(path, 32 * MIB, monkeypatch)
    assert outcome in ("read", "metadata-budget", "malformed"), outcome
    assert seconds < 60  # of CPU; a few where nothing else runs
    assert peak < (32 + 24) * MIB  # and what is imported on the way


@pytest.mark.parametrize("name", FILES)
def test_files_stay_within_the_budget(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1.5 MiB under 32 MiB: as 96 MiB under the default."""
    path = FILES[name](tmp_path / "c", MIB * 3 // 2)
    outcome, seconds, peak = cost_of(path, 32 * MIB, monkeypatch)
    assert outcome in ("read", "metadata-budget", "malformed", "unsupported-dtype"), outcome
    assert seconds < 60  # of CPU; a few where nothing else runs
    assert peak < (32 + 24) * MIB


@pytest.mark.soak
@pytest.mark.parametrize("name", ["sets", "header"])
def test_the_default_budget(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """12 MiB of empty sets, and a header of 90 MB: refused in seconds."""
    monkeypatch.delenv(VARIABLE, raising=False)
    sets = name == "sets"
    path = zipped(tmp_path / "a.pt", PICKLES["sets"](12 * MIB)) if sets else FILES[name](tmp_path, 90_000_000)
    outcome, seconds, peak = cost_of(path, None, monkeypatch)
    assert outcome == "metadata-budget"
    assert seconds < 60  # of CPU; a few where nothing else runs
    assert peak < DEFAULT


@pytest.mark.soak
@pytest.mark.parametrize("name", [*PICKLES, *FILES])
def test_the_default_budget_at_length(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if name in PICKLES:
        path = zipped(tmp_path / "a.pt", PICKLES[name](12 * MIB))
    else:
        path = FILES[name](tmp_path / "c", 90_000_000)
    outcome, seconds, peak = cost_of(path, None, monkeypatch)
    assert outcome in ("read", "metadata-budget", "malformed", "unsupported-dtype"), outcome
    assert peak < DEFAULT + 100 * MIB
    assert seconds < 60  # of CPU; a few where nothing else runs


def test_the_error_names_budget_and_next_step(tmp_path: Path, cli: Cli) -> None:
    """The budget, the amount, and how to raise the budget; with a larger one, the checkpoint is read."""
    path = zipped(tmp_path / "a.pt", PICKLES["lists"](20_000))
    for verb in (["inspect", path], ["validate", path], ["consolidate", path, tmp_path / "out"]):
        done = cli(*verb, "--output", "json", env={VARIABLE: "16MiB"})
        error = done.json["error"]
        assert (done.code, error["code"]) == (28, "metadata-budget"), done
        assert "16.0 MiB" in error["message"]
        assert "got" in error["message"]
        assert VARIABLE in error["hint"]
        assert error["values"]["needed"] > error["values"]["budget"] == 16 * MIB
    assert not (tmp_path / "out").exists()
    assert cli("inspect", path, env={VARIABLE: "256MiB"}).code == 0


def test_invalid_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("much", "-1", "12", "1KiB"):
        monkeypatch.setenv(VARIABLE, value)
        with pytest.raises(UsageError, match=VARIABLE):
            budget()
    monkeypatch.setenv(VARIABLE, "")
    assert budget() == DEFAULT


# --- honest values --------------------------------------------------------------------------------

HONEST: dict[str, Any] = {
    "mask": [True] * 150_000,
    "ints": list(range(200_000)),
    "wide": [1 << 60, -(1 << 60)] * 500,
    "floats": [n / 7 for n in range(100_000)],
    "odd": [math.inf, -0.0, 5e-324] * 100,
    "vocab": {f"token-{n}": n for n in range(50_000)},
    "merges": [(f"a{n}", f"b{n}") for n in range(20_000)],
    "same": [(0, 0)] * 30_000,
    "by number": {n: float(n) for n in range(20_000)},
    "nested": {"a": {"b": [{"c": [n, None, "x"]} for n in range(5_000)]}},
    "text": "spam and eggs " * 300_000,
    "bytes": bytes(range(256)) * 10_000,
    "rng": np.random.RandomState(3).get_state()[1].tolist(),
}


@pytest.mark.soak
@pytest.mark.parametrize("form", ["torch_save", "dcp"])
def test_large_plain_values_are_read_and_carried(form: str, cli: Cli, tmp_path: Path) -> None:
    source = tmp_path / "a.pt"
    torch.save({"w": torch.arange(4.0)} | {k: {"value": v} for k, v in HONEST.items()}, source)
    manifest = ckptcore.open(str(source))
    assert ckptcore.check(manifest, "bytes").ok
    assert {b.key: decode(b.tree)["value"] for b in manifest.blobs} == HONEST
    assert cli("inspect", source).code == 0
    out = tmp_path / (f"{form}.pt" if form == "torch_save" else form)
    done = cli("consolidate", source, out, "--to", form, "--output", "json")
    assert done.code == 0, done
    carried = {b.key: decode(b.tree)["value"] for b in ckptcore.open(str(out)).blobs}
    assert {k: repr(v) for k, v in carried.items()} == {k: repr(v) for k, v in HONEST.items()}
    if form == "torch_save":
        loaded = torch.load(out)
        assert all(repr(loaded[k]["value"]) == repr(v) for k, v in HONEST.items())


@pytest.mark.soak
def test_millions_of_plain_values(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1), "x": [True] * 2_000_000, "y": [0.5] * 1_000_000}, tmp_path / "a.pt")
    found = {b.key: decode(b.tree) for b in ckptcore.open(str(tmp_path / "a.pt")).blobs}
    assert found["x"] == [True] * 2_000_000
    assert found["y"] == [0.5] * 1_000_000


def test_the_budget_covers_the_complete_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files within the budget one by one, but not together."""
    for rank in range(16):
        values = {"w": torch.zeros(1), "x": [[rank, n] for n in range(3000)]}
        torch.save(values, tmp_path / f"rank{rank}.pt")
    monkeypatch.setenv(VARIABLE, "16MiB")
    with pytest.raises(MetadataTooLarge):
        ckptcore.open(str(tmp_path))
    monkeypatch.setenv(VARIABLE, "512MiB")
    assert len(ckptcore.open(str(tmp_path)).blobs) == 16
