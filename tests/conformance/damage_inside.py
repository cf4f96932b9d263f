"""Damage inside files: what can JSON, headers, arrays and pickles say that is not so?

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
from pathlib import Path
from typing import Any

from damage_sites import (
    Cut,
    Row,
    Rows,
    Tree,
    put,
    record_data,
    safetensors_joined,
    safetensors_parts,
    with_records,
)

TABLE = Rows()
Json = Any

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


def _edit_json(tree: Tree, rng: random.Random, what: str, edit: Callable[[Json, tuple[Any, ...]], bool],
               kinds: tuple[str, ...] = ("json", "zarray")) -> Iterator[Cut]:  # fmt: skip
    for path in tree.files(*kinds):
        form = json.loads(tree.read(path))
        places = list(_paths(form))
        top = [p for p in places if len(p) == 1]
        for place in top + rng.sample(places, min(3, len(places))):
            changed = copy.deepcopy(form)
            if edit(changed, place):
                data = json.dumps(changed).encode()
                where = f"{what} {'.'.join(map(str, place))[:80]} of {path}"
                yield Cut(where, partial(put, path=path, data=data))


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
    """A top name stands twice, with another value behind: readers take the one or the other."""
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


# --------------------------------------------------------------------------------- safetensors


def _of_headers(change: Callable[[dict[str, Any], bytes, str], bytes | None]) -> Row:
    """A row that changes what a header says of one tensor, a few tensors a file."""

    def row(tree: Tree, rng: random.Random) -> Iterator[Cut]:
        for path in tree.files("safetensors"):
            header, body = safetensors_parts(tree.read(path))
            names = [n for n in header if n != "__metadata__"]
            for name in rng.sample(names, min(3, len(names))):
                data = change(copy.deepcopy(header), body, name)
                if data is not None:
                    places = {"places"} if change is _exchanged and not tree.has_digests else set()
                    facts = _header_facts(tree, path, header, name) | places
                    yield Cut(f"{name} in {path}", partial(put, path=path, data=data), facts)

    return row


def _header_facts(tree: Tree, path: str, header: dict[str, Any], name: str) -> frozenset[str]:
    """What else tells of a tensor: nothing (``bare``), an index that names it (``listed``), perhaps without
    a total (``untotalled``), the sharding in the header (``shard``); no fact where metadata.json tells all.
    """
    folder = Path(path).parent
    if (folder / "metadata.json").as_posix() in tree.kinds:
        return frozenset()
    if "DCP_SHARDING_INFO" in header.get("__metadata__", {}):
        return frozenset({"shard"})
    index = (folder / "model.safetensors.index.json").as_posix()
    if index not in tree.kinds:
        return frozenset({"bare"})
    told = json.loads(tree.read(index)).get("metadata") or {}
    return frozenset({"listed"} if "total_size" in told else {"listed", "untotalled"})


SAME_WIDTH = {"BF16": "F16", "F16": "BF16", "F32": "I32", "I64": "F64", "F64": "I64", "I32": "F32",
              "U8": "I8", "I8": "U8", "BOOL": "U8", "F8_E4M3": "F8_E5M2"}  # fmt: skip


def _dtype(header: dict[str, Any], body: bytes, name: str) -> bytes | None:
    other = SAME_WIDTH.get(header[name]["dtype"])
    if other is None:
        return None
    header[name]["dtype"] = other
    return safetensors_joined(header, body)


def _transposed(header: dict[str, Any], body: bytes, name: str) -> bytes | None:
    shape = header[name]["shape"]
    if shape == shape[::-1]:
        return None
    header[name]["shape"] = shape[::-1]
    return safetensors_joined(header, body)


def _row_more(header: dict[str, Any], body: bytes, name: str) -> bytes | None:
    if not header[name]["shape"]:
        return None
    header[name]["shape"][0] += 1
    return safetensors_joined(header, body)


def _renamed(header: dict[str, Any], body: bytes, name: str) -> bytes:
    header[name + "x"] = header.pop(name)
    return safetensors_joined(header, body)


def _left_out(header: dict[str, Any], body: bytes, name: str) -> bytes:
    """Taken out whole: the bytes too, and every offset behind is right again."""
    start, stop = header.pop(name)["data_offsets"]
    for key, entry in header.items():
        if key != "__metadata__" and entry["data_offsets"][0] >= stop:
            entry["data_offsets"] = [n - (stop - start) for n in entry["data_offsets"]]
    return safetensors_joined(header, body[:start] + body[stop:])


def _row_less(header: dict[str, Any], body: bytes, name: str) -> bytes | None:
    """The last row is gone, with its bytes."""
    shape = header[name]["shape"]
    start, stop = header[name]["data_offsets"]
    if not shape or shape[0] < 2:
        return None
    gone = (stop - start) // shape[0]
    shape[0] -= 1
    for key, entry in header.items():
        if key != "__metadata__" and entry["data_offsets"][0] >= stop:
            entry["data_offsets"] = [n - gone for n in entry["data_offsets"]]
    header[name]["data_offsets"] = [start, stop - gone]
    return safetensors_joined(header, body[: stop - gone] + body[stop:])


def _without_metadata(header: dict[str, Any], body: bytes, name: str) -> bytes | None:
    return safetensors_joined(header, body) if header.pop("__metadata__", None) else None


def _exchanged(header: dict[str, Any], body: bytes, name: str) -> bytes | None:
    """Two tensors of one dtype and shape under each other's name."""
    mine = header[name]
    for key, entry in header.items():
        if key in ("__metadata__", name) or (entry["dtype"], entry["shape"]) != (
            mine["dtype"],
            mine["shape"],
        ):
            continue
        a, b = (body[slice(*e["data_offsets"])] for e in (mine, entry))
        if a != b:
            mine["data_offsets"], entry["data_offsets"] = entry["data_offsets"], mine["data_offsets"]
            return safetensors_joined(header, body)
    return None


for _name, _change in {
    "dtype-of-the-same-width": _dtype,
    "shape-transposed": _transposed,
    "shape-a-row-more": _row_more,
    "name-changed": _renamed,
    "tensor-left-out": _left_out,
    "last-row-left-out": _row_less,
    "metadata-left-out": _without_metadata,
    "two-exchanged": _exchanged,
}.items():
    TABLE.enter(f"header-{_name}", _of_headers(_change))

# ---------------------------------------------------------------------------------------- zarr


def _of_arrays(change: Callable[[dict[str, Any]], bool]) -> Row:
    def row(tree: Tree, rng: random.Random) -> Iterator[Cut]:
        for path in tree.files("zarray"):
            told = json.loads(tree.read(path))
            if not told["shape"]:
                continue
            facts = _array_facts(path)
            if change(told):
                yield Cut(path, partial(put, path=path, data=json.dumps(told).encode()), facts)

    return row


def _array_facts(path: str) -> frozenset[str]:
    """``padded``: Megatron-Core may pad such a tensor (`allow_shape_mismatch`)."""
    padded = re.search(r"embedding|output_layer|lm_head|bucket_idx", path)
    return frozenset({"array", "padded"} if padded else {"array"})


def _in_last_chunk(told: dict[str, Any]) -> bool:
    """A shape that ends elsewhere in the last chunk; where all are full, the last one is cut."""
    for dim, (n, c) in enumerate(zip(told["shape"], told["chunks"], strict=True)):
        if c > 1:
            told["shape"][dim] = n + 1 if n % c else n - 1
            return True
    return False


def _a_chunk_more(told: dict[str, Any]) -> bool:
    told["shape"][0] += told["chunks"][0]
    return True


def _a_chunk_less(told: dict[str, Any]) -> bool:
    told["shape"][0] -= told["chunks"][0]
    return told["shape"][0] > 0


def _column_major(told: dict[str, Any]) -> bool:
    told["order"] = "F" if told["order"] == "C" else "C"
    return True


def _array_dtype(told: dict[str, Any]) -> bool:
    same = {"<f4": "<i4", "<f2": "bfloat16", "bfloat16": "<f2", "<i8": "<f8", "<i4": "<f4"}
    told["dtype"], was = same.get(told["dtype"], told["dtype"]), told["dtype"]
    return bool(told["dtype"] != was)


def _other_chunks(told: dict[str, Any]) -> bool:
    told["chunks"] = told["chunks"][::-1]
    return bool(told["chunks"] != told["chunks"][::-1])


def _compressed(told: dict[str, Any]) -> bool:
    told["compressor"] = {"id": "zlib", "level": 1}
    return True


def _big_endian(told: dict[str, Any]) -> bool:
    was, told["dtype"] = told["dtype"], told["dtype"].replace("<", ">")
    return bool(told["dtype"] != was)


for _name, _array in {
    "shape-inside-the-last-chunk": _in_last_chunk,
    "shape-a-chunk-more": _a_chunk_more,
    "shape-a-chunk-less": _a_chunk_less,
    "order": _column_major,
    "dtype": _array_dtype,
    "chunks-turned": _other_chunks,
    "compressor": _compressed,
    "byte-order": _big_endian,
}.items():
    TABLE.enter(f"array-{_name}", _of_arrays(_array))


@TABLE
def array_folder_gone(tree: Tree, rng: random.Random) -> Iterator[Cut]:
    """A tensor's whole folder: nothing is left of it."""
    for path in tree.files("zarray"):
        folder = path.rpartition("/")[0]
        gone = [p for p in tree.kinds if p.startswith((f"{folder}/", f"{folder}.sync/"))]
        yield Cut(folder, partial(_unlink, paths=tuple(gone)), frozenset({"array"}))


def _unlink(root: Path, paths: tuple[str, ...]) -> None:
    for path in paths:
        (root / path).unlink()


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
            yield Cut(path, partial(put, path=path, data=with_records(data, {"data.pkl": changed})),
                      frozenset({"text"}))  # fmt: skip


@TABLE
def values_of_another_save(tree: Tree, rng: random.Random) -> Iterator[Cut]:
    """Other values of the same tensors, in a file of the same layout, with right checksums."""
    for path in tree.files("zip", "safetensors", "zchunk"):
        data = tree.read(path)
        kind = tree.kinds[path]
        if kind == "zip":
            held = {k: v for k, v in record_data(data).items() if k.startswith("data/") and v}
            if not held:
                continue
            key = max(held, key=lambda k: len(held[k]))
            edited = with_records(data, {key: _trained(held[key])})
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
