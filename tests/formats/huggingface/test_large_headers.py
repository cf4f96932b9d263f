"""Large headers: `inspect` parses each once, and its work grows with the number of names and no faster."""

from __future__ import annotations

import base64
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptcore.cli.main import run
from ckptcore.encodings import safetensors_header

_CALLS = 130  # of functions for each name: 100,000 names take 2 s at most on one core


def _pickled(n: int) -> str:
    return base64.urlsafe_b64encode(pickle.dumps(((f"a.{n}",), False))).decode()


def _offsets(count: int) -> dict[str, str]:
    info = {f"t.{n}": {"saved_offsets": [0]} for n in range(count)}
    return {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0"}


_SHARD = "shard-00001-model-00001-of-00001.safetensors"
# How names are spelled: name of the n-th tensor, dtype, bytes of an element, metadata, name of the file.
SPELLED: dict[str, tuple[Callable[[int], str], str, int, Callable[[int], dict[str, str]], str]] = {
    "plain": (lambda n: f"model.layers.{n}.weight", "F32", 4, lambda n: {}, "model.safetensors"),
    "scales": (
        lambda n: f"l.{n // 2}.weight{'_scale_inv' * (n % 2)}",
        "F32",
        4,
        lambda n: {},
        "model.safetensors",
    ),
    "an unknown dtype": (lambda n: f"t.{n}", "F4", 4, lambda n: {}, "model.safetensors"),
    "control characters": (lambda n: f"\n\x1b{n}", "F32", 4, lambda n: {}, "model.safetensors"),
    "pickles": (_pickled, "F32", 4, lambda n: {}, "model.safetensors"),
    "metadata": (
        lambda n: f"t.{n}",
        "F32",
        4,
        lambda n: {f"k{i}": "v" for i in range(n)},
        "model.safetensors",
    ),
    "shards": (lambda n: f"t.{n}", "F32", 4, _offsets, _SHARD),
}


def written(folder: Path, spelled: str, count: int) -> Path:
    name, dtype, size, metadata, file = SPELLED[spelled]
    header: dict[str, Any] = {
        name(n): {"dtype": dtype, "shape": [1], "data_offsets": [n * size, n * size + size]}
        for n in range(count)
    }
    raw = json.dumps({"__metadata__": metadata(count), **header}).encode()
    folder.mkdir()
    (folder / file).write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(size * count))
    return folder


def calls(folder: Path, output: str) -> int:
    """Count the calls of functions of one `inspect`."""
    count = 0

    def called(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(called)
    try:
        assert run(["inspect", str(folder), "--output", output]) == 0
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.alike(2)
@pytest.mark.parametrize("output", ["text", "json"])
@pytest.mark.parametrize("spelled", SPELLED)
def test_the_work_for_a_name_does_not_depend_on_their_number(
    spelled: str, output: str, tmp_path: Path
) -> None:
    few, many, most = 200, 600, 1800
    calls(written(tmp_path / "warm", spelled, 10), output)
    counts = [calls(written(tmp_path / str(n), spelled, n), output) for n in (few, many, most)]
    first = (counts[1] - counts[0]) / (many - few)
    last = (counts[2] - counts[1]) / (most - many)
    assert last < 1.2 * first + 1
    assert last < _CALLS


@pytest.mark.parametrize("spelled", SPELLED)
def test_a_header_is_parsed_once(spelled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    parse = safetensors_header.parse_header

    def once(raw: bytes, data_length: int, what: str, more: dict[str, Any]) -> Any:
        parsed.append(what)
        return parse(raw, data_length, what, more)

    monkeypatch.setattr(safetensors_header, "parse_header", once)
    assert run(["inspect", str(written(tmp_path / "x", spelled, 20))]) == 0
    assert parsed == [SPELLED[spelled][4]]
