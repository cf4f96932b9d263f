"""YAML that others wrote: plain values, or one exception, in time that grows with the text."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from paths import ROOT

from ckptcore.utils.foreign_text import MAX_DEPTH, InvalidText
from ckptcore.utils.plain_yaml import MAX_YAML, load_yaml

# As people and trainers write it.
READ: dict[str, tuple[str, Any]] = {
    "nothing": ("", None),
    "a comment": ("# x\n", None),
    "integers": ("[1, -2, +3, 0]", [1, -2, 3, 0]),
    "floats": ("[1.5, 1e-5, 1.0e-05, 5e8, .5, -.5e3]", [1.5, 1e-5, 1e-5, 5e8, 0.5, -500.0]),
    "other bases": ("[0x1F, 0b101, 010, 1_000]", [31, 5, 8, 1000]),
    "not finite": ("[.inf, -.inf, .Inf]", [math.inf, -math.inf, math.inf]),
    "bools": ("[true, True, FALSE, yes, off]", [True, True, False, True, False]),
    "null": ("{a: null, b: ~, c: , d: Null}", dict.fromkeys("abcd")),
    "texts": ("[plain text, 'true', \"1\", 1.2.3]", ["plain text", "true", "1", "1.2.3"]),
    "commits": ("[3f9a, 12345e6, 1e12345, 0_x, -]", ["3f9a", "12345e6", "1e12345", "0_x", "-"]),
    "nested": ("a:\n  b:\n    - c: 1\n    - [d, {e: f}]", {"a": {"b": [{"c": 1}, ["d", {"e": "f"}]]}}),
    "blocks": ("a: |\n  x\n   y\nb: >\n  x\n  y\n", {"a": "x\n y\n", "b": "x y\n"}),
    "an anchor": ("a: &x [1]\nb: *x\nc: &y text\nd: *y", {"a": [1], "b": [1], "c": "text", "d": "text"}),
    "an anchor twice": ("- &x 1\n- *x\n- &x 2\n- *x", [1, 1, 2, 2]),
    "a merge": ("a: &x {k: 1, l: 2}\nb: {<<: *x, k: 3}", {"a": {"k": 1, "l": 2}, "b": {"k": 3, "l": 2}}),
    "merges": ("<<: [{a: 1}, {a: 2, b: 3}]", {"a": 1, "b": 3}),
    "keys": ("1: a\ntrue: b\n~: c\n'x': d\n1.0: e", {"1": "a", "true": "b", "~": "c", "x": "d", "1.0": "e"}),
    "a key twice": ("a: 1\na: 2", {"a": 2}),
    "Hydra": ("lr: ${optimizer.lr}\nname: '${a}-${b:c}'", {"lr": "${optimizer.lr}", "name": "${a}-${b:c}"}),
    "JSON": ('{"a": "\\ud83d\\ude00", "b": [1, null]}', {"a": "😀", "b": [1, None]}),
    "a document": ("---\na: 1\n...\n", {"a": 1}),
    "a byte order mark": ("\ufeffa: 1", {"a": 1}),
    # What only YAML 1.1 has, and what types are.
    "base 60": ("[1:30, 190:20:30, 1:1.5]", ["1:30", "190:20:30", "1:1.5"]),
    "times": ("[2026-11-28, 2026-11-28 08:00:00Z]", ["2026-11-28", "2026-11-28 08:00:00Z"]),
    "typed": ("a: !!bool x\nb: !!int ''\nc: !!timestamp foo\nd: 2", dict.fromkeys("abc") | {"d": 2}),
    "classes": ("a: !mine [1]\nb: !!python/name:os.system x\nc: 2", dict.fromkeys("ab") | {"c": 2}),
    "a typed key": ("!!int x: 1", {"x": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_what_is_read(name: str) -> None:
    text, want = READ[name]
    assert load_yaml(text) == want
    assert load_yaml(text.encode()) == want
    if isinstance(want, list):
        assert [type(value) for value in load_yaml(text)] == [type(value) for value in want]


def test_not_a_number() -> None:
    assert math.isnan(load_yaml(".nan"))


@pytest.mark.parametrize(
    "path", [*sorted(ROOT.glob("tests/fixtures/**/*.yaml")), ROOT / "deployments/prefect.yaml"]
)
def test_files_of_trainers_are_what_pyyaml_reads(path: Path) -> None:
    assert load_yaml(path.read_bytes()) == yaml.safe_load(path.read_bytes())


_DOUBLED = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 10)}]\n" for n in range(15)
)
_MERGED = "a: &a {x: 1}\n" + "".join(
    f"k{n}: &k{n} {{<<: {f'*k{n - 1}' if n else '*a'}, x{n}: 1}}\n" for n in range(3000)
)
REFUSED: dict[str, str | bytes] = {
    "no YAML": "[",
    "a tab": "a:\n\t- b",
    "two documents": "a: 1\n---\nb: 2",
    "an alias of nothing": "a: *b",
    "an alias of itself": "a: &a [*a]",
    "an alias of itself as a key": "&a {*a : 1}",
    "a list as a key": "? [a]\n: 1",
    "an alias as a key": "- &a x\n- {*a : 1}",
    "UTF-16": "a: 1".encode("utf-16"),
    "latin-1": b"a: \xe9",
    "a control character": "a: \x00",
    "half a pair": 'a: "\\ud800"',
    "a character beyond all": 'a: "\\U00110000"',
    "a version of many digits": "%YAML " + "1" * 10_000 + "\n---\na",
    "too long": "a" * (MAX_YAML + 1),
    "deep": "[" * (MAX_DEPTH + 1),
    "deep in blocks": "- " * (MAX_DEPTH + 1) + "a",
    "deep in keys": "? " * 1000,
    "deep by aliases": "- &a0 []\n" + "".join(f"- &a{n + 1} [*a{n}]\n" for n in range(MAX_DEPTH)),
    "aliases that double": _DOUBLED,
    "merges that double": _MERGED,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    with pytest.raises(InvalidText) as caught:
        load_yaml(REFUSED[name])
    assert len(str(caught.value)) < 300


_FULL = 1 << 16  # characters
LONG = {
    "base 60": "a: " + "1:" * (_FULL // 2) + "1",
    "digits": "a: " + "1" * _FULL,
    "underscores": "a: 1" + "_" * _FULL,
    "open lists": "[" * _FULL,
    "open keys": "[? " * (_FULL // 3),
    "dashes": "- " * (_FULL // 2),
    "keys without values": "{" + "a," * (_FULL // 2),
    "lines of keys": "a\n" * (_FULL // 2) + ":",
    "blank lines": "\n" * _FULL + "a: 1",
    "comments": "#\n" * (_FULL // 2),
    "folded lines": '"' + "\\\n" * (_FULL // 2),
    "a text": "|\n" + " x\n" * (_FULL // 3),
    "anchors": "".join(f"- &a{n} x\n" for n in range(_FULL // 12)),
    "merges of many": "".join(f"- &a{n} {{b{n}: }}\n" for n in range(5000))
    + "- {<<: ["
    + "*a1, " * 5000
    + "]}",
    "a directive": "%TAG ! " + "x" * _FULL,
}


@pytest.mark.alike(4)
@pytest.mark.parametrize("name", LONG)
def test_time_grows_with_the_text(name: str) -> None:
    """A quarter of a text takes at least an eighth of the time: CPU time, of this thread alone."""

    def took(text: str) -> float:
        began = time.thread_time()
        with suppress(InvalidText):
            load_yaml(text)
        return time.thread_time() - began

    text = LONG[name]
    took(text[:1000])
    assert took(text) < 8 * took(text[: len(text) // 4]) + 0.5
