"""Damage the inside of files: false statements in JSON and pickles.

Checksums are right again where a file has some, so that they are not what notices it.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any

from damage_sites import Cut, Rows, Tree, put, record_data, safetensors_parts, with_records

TABLE = Rows()
Json = Any
_LONELY = "checkpoint_metadata.json"  # nanotron's counters of a run: no other file repeats them

# ---------------------------------------------------------------------------------------- JSON


def _paths(value: Json, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value that can be changed or taken out."""
    pairs: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, list):
        pairs = list(enumerate(value))
    for key, inner in pairs:
        yield (*at, key)
        yield from _paths(inner, (*at, key))


def _edit_json(
    tree: Tree,
    rng: random.Random,
    what: str,
    edit: Callable[[Json, tuple[Any, ...]], bool],
    kinds: tuple[str, ...] = ("json", "zarray"),
) -> Iterator[Cut]:
    for path in tree.files(*kinds):
        form = json.loads(tree.read(path))
        places = list(_paths(form))
        top = [p for p in places if len(p) == 1]
        for place in top + rng.sample(places, min(3, len(places))):
            changed = copy.deepcopy(form)
            if edit(changed, place):
                data = json.dumps(changed).encode()
                where = f"{what} {'.'.join(map(str, place))[:80]} of {path}"
                facts = frozenset({"one-witness"}) if path.endswith(_LONELY) else frozenset()
                yield Cut(where, partial(put, path=path, data=data), facts)


def _holder(form: Json, place: tuple[Any, ...]) -> Any:
    for key in place[:-1]:
        form = form[key]
    return form


@TABLE
def json_key_removed(tree: Tree, rng: random.Random) -> Iterator[Cut]:
    def edit(form: Json, place: tuple[Any, ...]) -> bool:
        del _holder(form, place)[place[-1]]
        return True

    return _edit_json(tree, rng, "without", edit)


@TABLE
def json_value_null(tree: Tree, rng: random.Random) -> Iterator[Cut]:
    def edit(form: Json, place: tuple[Any, ...]) -> bool:
        holder = _holder(form, place)
        was, holder[place[-1]] = holder[place[-1]], None
        return was is not None

    return _edit_json(tree, rng, "null for", edit)


@TABLE
def json_value_of_another_type(tree: Tree, rng: random.Random) -> Iterator[Cut]:
    def edit(form: Json, place: tuple[Any, ...]) -> bool:
        holder = _holder(form, place)
        was = holder[place[-1]]
        holder[place[-1]] = [7, "x"] if isinstance(was, (str, int, float, dict)) else "x"
        return True

    return _edit_json(tree, rng, "another type for", edit)


@TABLE
def json_number_one_more(tree: Tree, rng: random.Random) -> Iterator[Cut]:
    def edit(form: Json, place: tuple[Any, ...]) -> bool:
        holder = _holder(form, place)
        if type(holder[place[-1]]) is not int:
            return False
        holder[place[-1]] += 1
        return True

    return _edit_json(tree, rng, "one more for", edit)


@TABLE
def json_name_twice(tree: Tree, rng: random.Random) -> Iterator[Cut]:
    """Repeat a top name with another value: readers take either of them."""
    for path in tree.files("json", "zarray"):
        form = json.loads(tree.read(path))
        if not isinstance(form, dict):
            continue
        for name, value in form.items():
            other = {int: 2, str: "other", dict: {}, list: []}.get(type(value))
            twin = json.dumps({name: other})[1:]
            data = (json.dumps(form)[:-1] + ", " + twin).encode()
            yield Cut(f"{name} twice in {path}", partial(put, path=path, data=data))


@TABLE
def json_is_a_list(tree: Tree, rng: random.Random) -> Iterator[Cut]:
    for path in tree.files("json", "zarray"):
        data = b"[" + tree.read(path) + b"]"
        yield Cut(path, partial(put, path=path, data=data))


# --------------------------------------------------------------------------------- torch files

_STORAGES = [b"FloatStorage", b"HalfStorage", b"BFloat16Storage", b"LongStorage"]
_STEPS = (b"global_step", b"iteration", b"world_size", b"checkpoint_version")


@TABLE
def pickle_number_changed(tree: Tree, rng: random.Random) -> Iterator[Cut]:
    """The step, or the world size, that a torch file tells: as if it were of another save."""
    for path in tree.files("zip"):
        data = tree.read(path)
        inside = record_data(data).get("data.pkl", b"")
        for word in _STEPS:
            # A text, its memo entry, and a one-byte integer behind it.
            m = re.search(re.escape(word) + rb"(?:q.|r....|\x94)K(.)", inside, re.DOTALL)
            if m:
                changed = inside[: m.start(1)] + bytes([(m[1][0] + 1) % 256]) + inside[m.end(1) :]
                edited = with_records(data, {"data.pkl": changed})
                facts = _lonely(tree, path, word.decode())
                yield Cut(f"{word.decode()} in {path}", partial(put, path=path, data=edited), facts)


def _lonely(tree: Tree, path: str, word: str) -> frozenset[str]:
    """``one-witness``: no other file of the checkpoint tells this number."""
    others = [p for p in tree.files("zip") if p != path and word.encode() in tree.read(p)]
    return frozenset() if others or tree.has_digests else frozenset({"one-witness"})


@TABLE
def pickle_dtype_changed(tree: Tree, rng: random.Random) -> Iterator[Cut]:
    """One storage class called another of its width: float32 becomes int32."""
    for path in tree.files("zip"):
        data = tree.read(path)
        inside = record_data(data).get("data.pkl", b"")
        at = inside.find(b"torch\nLongStorage\n")
        if at >= 0:  # of equal length, and of another width
            changed = inside[:at] + b"torch\nHalfStorage\n" + inside[at + 18 :]
            yield Cut(path, partial(put, path=path, data=with_records(data, {"data.pkl": changed})))


@TABLE
def pickle_name_changed(tree: Tree, rng: random.Random) -> Iterator[Cut]:
    """A letter of a parameter's name, in one torch file of several."""
    for path in tree.files("zip"):
        data = tree.read(path)
        inside = record_data(data).get("data.pkl", b"")
        m = re.search(rb"\.(?:weight|bias)", inside)
        if m:
            changed = inside[: m.start() + 1] + b"W" + inside[m.start() + 2 :]
            yield Cut(
                path,
                partial(put, path=path, data=with_records(data, {"data.pkl": changed})),
                frozenset({"text"}),
            )


@TABLE
def values_of_another_save(tree: Tree, rng: random.Random) -> Iterator[Cut]:
    """Other values of the same tensors, in a file of the same layout, with right checksums."""
    for path in tree.files("zip", "safetensors", "zchunk"):
        data = tree.read(path)
        kind = tree.kinds[path]
        if kind == "zip":
            records = {k: v for k, v in record_data(data).items() if k.startswith("data/") and v}
            if not records:
                continue
            key = max(records, key=lambda k: len(records[k]))
            edited = with_records(data, {key: _trained(records[key])})
        elif kind == "safetensors":
            header, body = safetensors_parts(data)
            if (
                not body
                or prod(max((e["shape"] for k, e in header.items() if k != "__metadata__"), key=prod)) < 8
            ):
                continue
            edited = data[: -len(body)] + _trained(body)
        else:
            edited = _trained(data)
        yield Cut(path, partial(put, path=path, data=edited), frozenset({"values"}))


def _trained(raw: bytes) -> bytes:
    out = bytearray(raw)
    out[::7] = bytes(v ^ 1 for v in out[::7])
    return bytes(out)
