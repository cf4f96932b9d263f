"""Damage descriptions of bytes: false statements of safetensors headers and `.zarray` files."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from damage_sites import Cut, Row, Rows, Tree, put, safetensors_joined, safetensors_parts

TABLE = Rows()

# --------------------------------------------------------------------------------- safetensors


def _of_headers(change: Callable[[dict[str, Any], bytes, str], bytes | None]) -> Row:
    """Return a row that changes the header entry of one tensor, for a few tensors of each file."""

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
    """Return what else describes a tensor: nothing (``bare``), an index that names it (``listed``), perhaps
    without a total (``untotalled``), the sharding in the header (``shard``); no fact where metadata.json
    describes everything.
    """
    folder = Path(path).parent
    if (folder / "metadata.json").as_posix() in tree.kinds:
        return frozenset()
    if "DCP_SHARDING_INFO" in header.get("__metadata__", {}):
        return frozenset({"shard"})
    index = (folder / "model.safetensors.index.json").as_posix()
    if index not in tree.kinds:
        return frozenset({"bare"})
    form = json.loads(tree.read(index)).get("metadata") or {}
    return frozenset({"listed"} if "total_size" in form else {"listed", "untotalled"})


SAME_WIDTH = {
    "BF16": "F16",
    "F16": "BF16",
    "F32": "I32",
    "I64": "F64",
    "F64": "I64",
    "I32": "F32",
    "U8": "I8",
    "I8": "U8",
    "BOOL": "U8",
    "F8_E4M3": "F8_E5M2",
}


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
            form = json.loads(tree.read(path))
            if not form["shape"]:
                continue
            facts = _array_facts(path)
            if change(form):
                yield Cut(path, partial(put, path=path, data=json.dumps(form).encode()), facts)

    return row


def _array_facts(path: str) -> frozenset[str]:
    """``padded``: Megatron-Core may pad such a tensor (`allow_shape_mismatch`)."""
    padded = re.search(r"embedding|output_layer|lm_head|bucket_idx", path)
    return frozenset({"array", "padded"} if padded else {"array"})


def _in_last_chunk(form: dict[str, Any]) -> bool:
    """A shape that ends elsewhere in the last chunk; where all are full, the last one is cut."""
    for dim, (n, c) in enumerate(zip(form["shape"], form["chunks"], strict=True)):
        if c > 1:
            form["shape"][dim] = n + 1 if n % c else n - 1
            return True
    return False


def _a_chunk_more(form: dict[str, Any]) -> bool:
    form["shape"][0] += form["chunks"][0]
    return True


def _a_chunk_less(form: dict[str, Any]) -> bool:
    form["shape"][0] -= form["chunks"][0]
    return form["shape"][0] > 0


def _column_major(form: dict[str, Any]) -> bool:
    form["order"] = "F" if form["order"] == "C" else "C"
    return True


def _array_dtype(form: dict[str, Any]) -> bool:
    same = {"<f4": "<i4", "<f2": "bfloat16", "bfloat16": "<f2", "<i8": "<f8", "<i4": "<f4"}
    form["dtype"], was = same.get(form["dtype"], form["dtype"]), form["dtype"]
    return bool(form["dtype"] != was)


def _other_chunks(form: dict[str, Any]) -> bool:
    form["chunks"] = form["chunks"][::-1]
    return bool(form["chunks"] != form["chunks"][::-1])


def _compressed(form: dict[str, Any]) -> bool:
    form["compressor"] = {"id": "zlib", "level": 1}
    return True


def _big_endian(form: dict[str, Any]) -> bool:
    was, form["dtype"] = form["dtype"], form["dtype"].replace("<", ">")
    return bool(form["dtype"] != was)


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
