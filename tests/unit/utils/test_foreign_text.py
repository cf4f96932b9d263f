"""Text that others wrote: a parser returns a value that can be stored, or raises its one exception."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from ckptcore.errors import UsageError
from ckptcore.utils import foreign_text
from ckptcore.utils.foreign_text import (
    MAX_DEPTH,
    InvalidText,
    load_json,
    load_json_object,
    load_toml,
    parse_date,
    parse_float,
    parse_http_time,
    parse_integer,
    parse_time,
    parse_url,
    parsing,
)

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
@pytest.mark.parametrize("encoded", [False, True])
def test_names_that_are_there_twice(text: str, encoded: bool) -> None:
    raw = text.encode() if encoded else text
    with pytest.raises(InvalidText, match="name twice"):
        load_json(raw, unique=True)
    assert load_json(raw) == json.loads(text)


def test_large_texts_are_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    header = {f"w.{n}": {"dtype": "F32"} for n in range(50)} | {"about": {"format": "pt", "note": "a: b"}}
    hooks: list[str] = []
    load = json.loads
    monkeypatch.setattr(
        foreign_text.json, "loads", lambda raw, **used: hooks.extend(used) or load(raw, **used)
    )
    for separators in ((",", ":"), (", ", ": ")):
        for about in ({}, {"about": {"objects": json.dumps({"a": {"b": 1}})}}, header):
            value = header | {"about": {"format": "pt"}} | about
            hooks.clear()
            raw = json.dumps(value, separators=separators).encode()
            assert load_json(raw, unique=True) == value
            assert len(hooks) == 1


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


REFUSED: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "no JSON": (load_json, "{"),
    "nothing": (load_json, b""),
    "a byte order mark": (load_json, b"\xef\xbb\xbf{}"),
    "a byte order mark in a text": (load_json, "\ufeff{}"),
    "UTF-16": (load_json, "{}".encode("utf-16")),
    "UTF-16 without a mark": (load_json, "{}".encode("utf-16-le")),
    "UTF-32": (load_json, "{}".encode("utf-32")),
    "latin-1": (load_json, b'"\xe9"'),
    "half a pair": (lambda text: load_json(text, encodable=True), r'["a", {"\uD800": 1}]'),
    "half a pair as bytes": (load_json, b'"\xed\xa0\x80"'),
    "too many digits": (load_json, "1" * 309),
    "far too many digits": (load_json, "1" * 100_000),
    "deep": (load_json, nested(MAX_DEPTH + 1)),
    "deep objects": (load_json, '{"a":' * 200 + "1" + "}" * 200),
    "endlessly deep": (load_json, "[" * 1_000_000),
    "NaN": (lambda text: load_json(text, finite=True), "[NaN]"),
    "an infinite number": (lambda text: load_json(text, finite=True), "1e999"),
    "no object": (load_json_object, "[]"),
    "no TOML": (load_toml, "a = ["),
    "TOML that is deep": (load_toml, "a = " + nested(100_000)),
    "TOML with deep keys": (load_toml, "a." * 5000 + "b = 1"),
    "TOML with many digits": (load_toml, "a = " + "1" * 5000),
    "TOML with a mark": (load_toml, b"\xef\xbb\xbfa = 1"),
    "no integer": (parse_integer, "1.5"),
    "a long integer": (parse_integer, "1" * 309),
    "no number": (parse_float, "1,5"),
    "a long number": (parse_float, "1" * 10_000),
    "no time": (parse_time, "yesterday"),
    "a day too late": (parse_time, "2026-02-30"),
    "a time before all": (parse_time, "0001-01-01T00:00:00+23:59"),
    "no day": (parse_date, "2026-11"),
    "no HTTP time": (parse_http_time, "28 Nov"),
    "an HTTP time of the year 99999": (parse_http_time, "Thu, 28 Nov 99999 08:00:00 GMT"),
    "an HTTP time with a huge zone": (parse_http_time, "Thu, 28 Nov 2026 08:00:00 +999999999999999999"),
    "a URL of an open bracket": (parse_url, "http://["),
    "a URL of a large port": (parse_url, "http://a:99999"),
    "a URL of a port that is none": (parse_url, "http://a:b"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    parse, text = REFUSED[name]
    with pytest.raises(InvalidText) as caught:
        parse(text)
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


def test_what_is_read() -> None:
    assert load_json('{"a": [1, 2.5, null, true, "x"], "a\\u00e9": "\\ud83d\\ude00"}') == {
        "a": [1, 2.5, None, True, "x"],
        "aé": "😀",
    }
    assert load_json(str(10**30)) == 10**30  # model_max_length of a tokenizer without one
    assert load_json("-" + "9" * 308) == -(10**308 - 1)
    assert load_json('["' + "9" * 500 + '", 1]') == ["9" * 500, 1]
    assert math.isnan(load_json("[NaN]")[0])  # Python's own writer spells it
    assert load_json("[-0, -0.0]") == [0, 0]
    assert load_json(nested(MAX_DEPTH)) is not None
    assert load_json(rb'["\ud800"]') == ["\ud800"]  # a text that was cut, or a name of a file
    assert load_toml("a = 1\n[b]\nc = 'x'") == {"a": 1, "b": {"c": "x"}}
    assert parse_time("2026-11-28T09:00:00+01:00") == parse_http_time("Sat, 28 Nov 2026 08:00:00 GMT")
    assert parse_url("http://h:80/a").port == 80


def test_an_error_of_our_own_is_no_invalid_text() -> None:
    with pytest.raises(UsageError), parsing("anything"):
        raise UsageError("no")
