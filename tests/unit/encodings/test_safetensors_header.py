"""Headers of safetensors files: what the format forbids is refused, also where the library is silent."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch

import ckptcore
from ckptcore.core.dtype import BY_NAME
from ckptcore.encodings.safetensors_header import HeaderText
from ckptcore.errors import CkptError, MalformedCheckpoint


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
    "metadata that is none": ({"__metadata__": [1], "w": entry()}, "an object of texts"),
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


F32 = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'


def _with(entry: str, name: str = '"w"', data: bytes = bytes(8)) -> tuple[bytes, bytes]:
    return f"{{{name}:{entry}}}".encode("utf-8", "surrogatepass"), data


def _about(metadata: str) -> tuple[bytes, bytes]:
    return f'{{"__metadata__":{metadata},"w":{F32}}}'.encode(), bytes(8)


_PLAIN = _with(F32)[0]
_MORE = '{"dtype":"F32","shape":[2],"data_offsets":[0,8],"more":%s}'
_SHAPE = '{"dtype":"F32","shape":%s,"data_offsets":[0,8]}'
# Headers, with the data behind; the library itself says what it makes of them.
HOSTILE: dict[str, tuple[bytes, bytes]] = {
    "plain": (_PLAIN, bytes(8)),
    "a byte order mark": (b"\xef\xbb\xbf" + _PLAIN, bytes(8)),
    "UTF-16": (_PLAIN.decode().encode("utf-16"), bytes(8)),
    "UTF-16 without a mark": (_PLAIN.decode().encode("utf-16-le"), bytes(8)),
    "UTF-16, big end first": (_PLAIN.decode().encode("utf-16-be"), bytes(8)),
    "UTF-32": (_PLAIN.decode().encode("utf-32-le"), bytes(8)),
    "latin-1": (_PLAIN.replace(b"w", b"\xe9"), bytes(8)),
    "an overlong character": (_PLAIN.replace(b"w", b"\xc0\x80"), bytes(8)),
    "half a pair as bytes": _with(F32, '"\ud800"'),
    "half a pair, escaped": _with(F32, r'"\ud800"'),
    "the other half": _with(F32, r'"\udc00"'),
    "both halves": _with(F32, r'"\ud83d\ude00"'),
    "spaces around": (b" " + _PLAIN + b"  \n", bytes(8)),
    "zeros behind": (_PLAIN + bytes(2), bytes(8)),
    "a comma behind": (_PLAIN.replace(b"}}", b"},}"), bytes(8)),
    "single quotes": (_PLAIN.replace(b'"', b"'"), bytes(8)),
    "a comment": (_PLAIN.replace(b"{", b"{/**/", 1), bytes(8)),
    "a form feed": (_PLAIN.replace(b"{", b"{\f", 1), bytes(8)),
    "a control character": _with(F32, '"a\nb"'),
    "a control character, escaped": _with(F32, r'"a\nb"'),
    "an unknown escape": _with(F32, r'"a\x"'),
    "an empty name": _with(F32, '""'),
    "an empty header": (b"", b""),
    "null": (b"null", b""),
    "a list": (b"[]", b""),
    "metadata null": _about("null"),
    "metadata of texts": _about('{"format":"pt"}'),
    "metadata with an integer": _about('{"step":1}'),
    "metadata with a float": _about('{"loss":1.5}'),
    "metadata with a bool": _about('{"tied":true}'),
    "metadata with null": _about('{"a":null}'),
    "metadata with a list": _about('{"a":["b"]}'),
    "metadata with an object": _about('{"a":{}}'),
    "metadata with half a pair": _about(r'{"a":"\ud800"}'),
    "metadata that is a list": _about("[]"),
    "metadata that is a text": _about('""'),
    "metadata that is zero": _about("0"),
    "metadata that is false": _about("false"),
    "metadata twice": (b'{"__metadata__":{},' + _about("{}")[0][1:], bytes(8)),
    "a field twice": _with(F32.replace("{", '{"dtype":"F32",', 1)),
    "a field more": _with(_MORE % "1"),
    "NaN": _with(_MORE % "NaN"),
    "an infinite number": _with(_MORE % "-Infinity"),
    "a number beyond floats": _with(_MORE % "1e999"),
    "400 digits": _with(_MORE % ("9" * 400)),
    "5000 digits": _with(_MORE % ("9" * 5000)),
    "lists in lists, 100": _with(_MORE % ("[" * 100 + "]" * 100)),
    "lists in lists, 200": _with(_MORE % ("[" * 200 + "]" * 200)),
    "a shape of floats": _with(_SHAPE % "[2.0]"),
    "a shape with an exponent": _with(_SHAPE % "[2e0]"),
    "a shape with a leading zero": _with(_SHAPE % "[02]"),
    "a shape of minus zero": _with(F32.replace("[2]", "[-0]").replace("8]", "0]"), data=b""),
    "an offset of minus zero": _with(F32.replace("[0,", "[-0,")),
    "a shape that is a text": _with(F32.replace("[2]", '""').replace("8]", "4]"), data=bytes(4)),
    "a shape that is an object": _with(F32.replace("[2]", "{}").replace("8]", "4]"), data=bytes(4)),
    "a shape beyond 64 bits": _with(F32.replace("[2]", f"[0,{1 << 70}]").replace("8]", "0]"), data=b""),
    "offsets that are an object": _with(F32.replace("[0,8]", '{"0":0,"8":8}')),
    "a dtype in lower case": _with(F32.replace("F32", "f32")),
    "a dtype that is a list": _with(F32.replace('"F32"', '["F32"]')),
    "no shape": _with('{"dtype":"F32","data_offsets":[0,8]}'),
}


_UNREADABLE = ("a dtype in lower case",)  # the other tensors of such a file can be read


@pytest.mark.parametrize("name", HOSTILE)
def test_what_the_library_refuses_is_refused(name: str, tmp_path: Path) -> None:
    """And nothing else of this table: names that are there twice, which the library ignores, are above."""
    header, data = HOSTILE[name]
    path = written(tmp_path / "x.safetensors", header, data)
    try:
        with safetensors.safe_open(path, "pt") as file:
            opens = all(file.get_tensor(name) is not None for name in file.keys())  # noqa: SIM118
    except safetensors.SafetensorError:
        opens = False
    if not opens and name not in _UNREADABLE:
        with pytest.raises(MalformedCheckpoint):
            ckptcore.open(path)
        return
    assert ckptcore.check(ckptcore.open(path)).ok is opens


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
