"""Headers of safetensors files: what the format forbids is refused, also where the library is silent."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptcore
from ckptcore.core.dtype import BY_NAME
from ckptcore.encodings import json_text
from ckptcore.encodings.safetensors_header import HeaderText
from ckptcore.errors import CkptError


def written(path: Path, header: Any, data: bytes = bytes(8)) -> str:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return str(path)


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


REFUSED: dict[str, tuple[Any, str]] = {
    "no JSON": (b"{", "not JSON"),
    "nested too deep": (b"[" * 100_000, "not JSON"),
    "a list": ([1], "not a JSON object"),
    "a name twice": (b'{"w": {}, "w": {}}', "has a name twice"),
    "metadata that is none": ({"__metadata__": [1], "w": entry()}, "not an object"),
    "no offsets": ({"w": {"dtype": "F32", "shape": [2]}}, "not a tensor"),
    "a number": ({"w": 5}, "not a tensor"),
    "three offsets": ({"w": entry(offsets=(0, 4, 8))}, "not a tensor"),
    "a dtype that is none": ({"w": entry("")}, r"an invalid dtype \(got ''\)"),
    "a dtype that is a number": ({"w": entry(5)}, r"an invalid dtype \(got 5\)"),
    "a negative extent": ({"w": entry(shape=(-2,))}, "has an invalid shape"),
    "an extent that is no number": ({"w": entry(shape=(2.0,))}, "has an invalid shape"),
    "a bool as extent": ({"w": entry(shape=(True, 2))}, "has an invalid shape"),
    "65 dims": ({"w": entry(shape=(1,) * 64 + (2,))}, "has an invalid shape"),
    "offsets backwards": ({"w": entry(offsets=(8, 0))}, "has invalid offsets"),
    "offsets that are no numbers": ({"w": entry(offsets=("0", 8))}, "has invalid offsets"),
    "fewer bytes than the shape needs": ({"w": entry(offsets=(0, 4))}, r"needs 8 bytes \(got 4\)"),
    "a hole in front": ({"w": entry(shape=(1,), offsets=(4, 8))}, r"must start at 0, .*\(got 4\)"),
    "two on one place": ({"w": entry(), "v": entry()}, r"must start at 8, .*\(got 0\)"),
    "data behind": ({"w": entry(shape=(1,), offsets=(0, 4))}, "describes 4 bytes of data, the file has 8"),
    "data that is not there": ({"w": entry(shape=(4,), offsets=(0, 16))}, "describes 16 bytes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_headers_that_the_format_forbids(name: str, tmp_path: Path) -> None:
    header, message = REFUSED[name]
    with pytest.raises(CkptError, match=message) as caught:
        ckptcore.open(written(tmp_path / "x.safetensors", header))
    assert caught.value.code in {"malformed", "unsupported-dtype"}
    assert "x.safetensors" in caught.value.message


TWICE = {
    "plain": '{"a":1,"b":2,"a":3}',
    "inside": '{"w":{"dtype":"F32","dtype":"F32"},"v":{}}',
    "a colon in a text": '{"a":1,"a":":"}',
    "a colon in a name": '{"a:":1,"a:":2}',
    "spaces before a colon": '{"a" :1,"a":2,"b":"x"}',
    "a text that looks like a name": '{"a" :1,"a":"\\":"}',
    "the same name, spelled otherwise": '{"a":1,"\\u0061":2}',
    "a dropped text": '{"a":{"x":":"},"a":"\\u003a\\u003a"}',
}


@pytest.mark.parametrize("text", TWICE.values(), ids=TWICE)
@pytest.mark.parametrize("encoding", [None, "utf-8", "utf-16-le"])
def test_names_that_are_there_twice(text: str, encoding: str | None) -> None:
    raw = text if encoding is None else text.encode(encoding)
    with pytest.raises(ValueError, match="name twice"):
        json_text.loads(raw)


def test_large_headers_are_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    header = {f"w.{n}": entry() for n in range(50)} | {"__metadata__": {"format": "pt", "note": "a: b"}}
    once: list[str] = []
    load = json.loads
    monkeypatch.setattr(
        json_text.json, "loads", lambda raw, **hooks: once.extend(hooks) or load(raw, **hooks)
    )
    for separators in ((",", ":"), (", ", ": ")):
        for about in ({}, {"__metadata__": {"objects": json.dumps({"a": {"b": 1}})}}, header):
            value = header | {"__metadata__": {"format": "pt"}} | about
            once.clear()
            raw = json.dumps(value, separators=separators).encode()
            assert json_text.loads(raw) == load(raw)
            assert len(once) == 1


def test_a_header_in_the_making_is_its_json() -> None:
    """As the `json` module spells it, byte for byte."""
    rows = [
        ("größe", "bfloat16", (2, 3)),
        ('a"b\\\n\x7f\u2028', "bfloat16", (2, 3)),
        ("s", "float32", ()),
        ("e", "int64", (0, 4)),
    ]
    for metadata in (None, {}, {"format": "pt", "o": '{"ä": "\\n"}'}):
        text, end = HeaderText(metadata), 0
        want: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
        for name, dtype, shape in rows:
            known = BY_NAME[dtype]
            stop = end + math.prod(shape) * known.itemsize
            want[name] = {"dtype": known.safetensors, "shape": list(shape), "data_offsets": [end, stop]}
            assert text.add(name, dtype, shape) == end
            end = stop
        raw = json.dumps(want, separators=(",", ":"), ensure_ascii=False).encode()
        packed = text.packed(64)
        assert text.end == end
        assert len(packed) % 64 == 0
        assert int.from_bytes(packed[:8], "little") == len(packed) - 8
        assert packed[8:].rstrip(b" ") == raw
    assert HeaderText().packed(8) == (8).to_bytes(8, "little") + b"{}      "


CUT = {
    "nothing": b"",
    "7 bytes": bytes(7),
    "a long header": (1 << 40).to_bytes(8, "little"),
    "a cut header": (3).to_bytes(8, "little") + b"{}",
}


@pytest.mark.parametrize("data", CUT.values(), ids=CUT)
def test_files_without_room_for_a_header(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(CkptError) as caught:
        ckptcore.open(str(tmp_path / "x.safetensors"))
    assert caught.value.code == "malformed"


def test_what_the_format_allows(tmp_path: Path) -> None:
    """Padding, metadata, another order than that of the bytes, 0-d and empty tensors, odd alignment."""
    header = {
        "w": entry("F32", [1], (3, 7)),
        "e": entry("F16", [0, 5], (3, 3)),
        "s": entry("U8", [], (7, 8)),
        "u": entry("U8", [3], (0, 3)),
        "__metadata__": {"format": "pt"},
    }
    raw = json.dumps(header).encode() + b"   \n"
    data = bytes([1, 2, 3]) + torch.tensor([1.5]).numpy().tobytes() + bytes([9])
    manifest = ckptcore.open(written(tmp_path / "x.safetensors", raw, data))
    want = {
        "w": torch.tensor([1.5]),
        "e": torch.zeros(0, 5, dtype=torch.float16),
        "s": torch.tensor(9, dtype=torch.uint8),
        "u": torch.arange(1, 4, dtype=torch.uint8),
    }
    assert {t.fqn for t in manifest.tensors} == want.keys()
    for name, value in want.items():
        found = ckptcore.read(manifest, name)
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        assert torch.equal(found, value), name
