"""What checkpoints hold, read without ckptcore: a plain set of content ids for whatever is on a disk.

A tensor's id is of its dtype, shape and bytes; an object's of its name and value; another file's of its
bytes. Names of tensors play no part. `LocalDisk` and `BucketDisk` are the same disk for the sequences of
tests: files by path, in a folder or in a bucket of `fault_s3`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

Tree = Mapping[str, bytes]
Contents = dict[str, str]  # name -> content id
HIDDEN = re.compile(r"\.[^/]+\.ckptcore(\.gone-[0-9a-f-]+)?")
HOME = re.compile(r"\.(?P<name>[^/]+)\.retiring-[0-9a-f]{8}\.ckptcore")
_CACHE: dict[bytes, Contents | None] = {}


class Torn(Exception):
    """A checkpoint that lacks something, or cannot be read."""


def _id(*parts: Any) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def tensor_id(value: torch.Tensor) -> str:
    value = value.detach().contiguous()
    raw = value.flatten().view(torch.uint8).numpy().tobytes() if value.numel() else b""
    return _id("tensor", str(value.dtype), tuple(value.shape), raw)


def _contents(state: Mapping[str, Any]) -> Contents:
    return {
        name: tensor_id(value) if isinstance(value, torch.Tensor) else _id("object", name, value)
        for name, value in state.items()
    }


def _dcp(files: Tree, *, in_part: bool = False) -> Contents:
    """Return what a folder holds. in_part: without what cannot be read; else that is raised."""
    metadata = pickle.loads(files[".metadata"])
    state: dict[str, Any] = {}
    filled: dict[str, int] = {}
    for index, info in metadata.storage_data.items():
        data = files[info.relative_path][info.offset : info.offset + info.length]
        if len(data) != info.length:
            raise Torn(info.relative_path)
        try:
            value = torch.load(io.BytesIO(data), weights_only=False)
        except Exception:  # whatever a damaged file makes of a reader
            if in_part:
                continue
            raise
        known = metadata.state_dict_metadata[index.fqn]
        if not hasattr(known, "size"):
            state[index.fqn] = value.getvalue() if isinstance(value, io.BytesIO) else value
            continue
        full = state.setdefault(index.fqn, torch.zeros(known.size, dtype=known.properties.dtype))
        at = index.offset or torch.Size([0] * full.dim())
        full[tuple(slice(o, o + n) for o, n in zip(at, value.shape, strict=True))] = value
        filled[index.fqn] = filled.get(index.fqn, 0) + value.numel()
    for name, known in metadata.state_dict_metadata.items():
        if name not in state or (hasattr(known, "size") and filled[name] != known.size.numel()):
            if not in_part:
                raise Torn(name)
            state.pop(name, None)
    return _contents(state)


_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64, "F16": torch.float16}


def _safetensors(files: Tree) -> Contents:
    state: dict[str, Any] = {}
    for name, data in files.items():
        if not name.endswith(".safetensors"):
            continue
        length = int.from_bytes(data[:8], "little")
        head = json.loads(data[8 : 8 + length])
        objects = json.loads(head.pop("__metadata__", {}).get("ckptcore.objects", "{}"))
        state |= objects
        for fqn, each in head.items():
            start, end = each["data_offsets"]
            raw = data[8 + length + start : 8 + length + end]
            dtype = _DTYPES[each["dtype"]]
            if len(raw) != int(np.prod(each["shape"], dtype=np.int64)) * dtype.itemsize:
                raise Torn(name)
            flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0)
            state[fqn] = flat.view(dtype).reshape(each["shape"])
    index = files.get("model.safetensors.index.json")
    if index is not None:
        listed = json.loads(index)["weight_map"]
        if set(listed) - state.keys() or set(listed.values()) - files.keys():
            raise Torn("index")
    elif len([n for n in files if n.endswith(".safetensors")]) != 1:
        raise Torn("there is no index")
    return _contents(state)


def read_place(files: Tree) -> Contents | None:
    """Return what the files of one folder, or the one file "", hold; None if they are torn."""
    key = hashlib.blake2b(repr(sorted(files.items())).encode(), digest_size=16).digest()
    if key not in _CACHE:
        try:
            _CACHE[key] = _read(files)
        except Exception:  # whatever a damaged file makes of a reader
            _CACHE[key] = None
    return None if _CACHE[key] is None else dict(_CACHE[key] or {})


def read_parts(files: Tree) -> Contents:
    """Return what can be read of a folder that is torn, item by item."""
    try:
        return _dcp(files, in_part=True)
    except Exception:  # whatever a damaged file makes of a reader, and other formats
        return {}


def _read(files: Tree) -> Contents:
    if "" in files:
        return _contents(torch.load(io.BytesIO(files[""]), weights_only=True))
    named = _dcp(files) if ".metadata" in files else _safetensors(files)
    for name, data in files.items():
        if not name.endswith((".metadata", ".distcp", ".safetensors", ".index.json")):
            named[f"file {name}"] = _id("file", data)
    return named


def places(tree: Tree) -> dict[str, dict[str, bytes]]:
    """Return the files of each checkpoint by its place, hidden ones, too."""
    found: dict[str, dict[str, bytes]] = {}
    for path, data in tree.items():
        above, _, name = path.rpartition("/")
        if HIDDEN.fullmatch(above.rpartition("/")[2]) and name.endswith(".json"):
            continue  # a record of ckptcore's
        replaced = name == "replaced" and above.endswith(".pt.ckptcore")  # of a destination that is one file
        if name.endswith(".pt") or replaced:
            found[path] = {"": data}
        else:
            found.setdefault(above, {})[name] = data
    return {place: files for place, files in found.items() if place}


def is_hidden(place: str) -> bool:
    return any(map(HIDDEN.fullmatch, place.split("/")))


def ids_in(tree: Tree) -> frozenset[str]:
    """Return the ids of everything that can be read anywhere."""
    every = (read_place(files) for files in places(tree).values())
    return frozenset(each for one in every if one for each in one.values())


class LocalDisk:
    """A folder."""

    kind = "local"

    def __init__(self, root: Path) -> None:
        self.root = root

    def url(self, path: str) -> str:
        return str(self.root / path)

    def tree(self) -> dict[str, bytes]:
        found = {}
        for folder, _, names in os.walk(self.root):
            for name in names:
                path = os.path.join(folder, name)
                if os.path.islink(path):
                    continue  # it holds nothing of its own
                found[os.path.relpath(path, self.root)] = Path(path).read_bytes()
        return dict(sorted(found.items()))

    def exists(self, path: str) -> bool:
        return os.path.lexists(self.root / path)

    def put(self, path: str, data: bytes) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_bytes(data)

    def alter(self, path: str, data: bytes, *, unseen: bool) -> None:
        """Other bytes in the same file. unseen: with the time that it had."""
        seen = os.stat(self.root / path)
        with open(self.root / path, "r+b") as file:
            file.write(data)
        if unseen:
            os.utime(self.root / path, ns=(seen.st_atime_ns, seen.st_mtime_ns))

    def remove(self, path: str) -> None:
        target = self.root / path
        shutil.rmtree(target) if target.is_dir() else target.unlink()

    def move(self, old: str, new: str) -> None:
        (self.root / new).parent.mkdir(parents=True, exist_ok=True)
        os.rename(self.root / old, self.root / new)

    def copy(self, old: str, new: str) -> None:
        (self.root / new).parent.mkdir(parents=True, exist_ok=True)
        source = self.root / old
        (shutil.copytree if source.is_dir() else shutil.copy2)(source, self.root / new)

    def link(self, old: str, new: str) -> None:
        """A folder of links to the files of another one."""
        (self.root / new).mkdir(parents=True)
        for file in (self.root / old).iterdir():
            (self.root / new / file.name).symlink_to(file)


class BucketDisk:
    """A bucket of a `fault_s3.FaultyS3`."""

    kind = "bucket"

    def __init__(self, server: Any, bucket: str = "b") -> None:
        self.server, self.bucket = server, bucket

    def url(self, path: str) -> str:
        return f"s3://{self.bucket}/{path}"

    def tree(self) -> dict[str, bytes]:
        return self.server.below(f"{self.bucket}/")

    def _below(self, path: str) -> Iterator[str]:
        key = f"{self.bucket}/{path}"
        return (name for name in list(self.server.objects) if name == key or name.startswith(f"{key}/"))

    def exists(self, path: str) -> bool:
        return any(True for _ in self._below(path))

    def put(self, path: str, data: bytes) -> None:
        self.server.put(f"{self.bucket}/{path}", data)

    def alter(self, path: str, data: bytes, *, unseen: bool) -> None:
        """Other bytes in the same object. unseen: with the ETag that it had: its disk rotted."""
        old = self.server.objects[f"{self.bucket}/{path}"]
        if unseen:
            old.data = data
        else:
            self.put(path, data)

    def remove(self, path: str) -> None:
        for name in self._below(path):
            del self.server.objects[name]

    def move(self, old: str, new: str) -> None:
        self.copy(old, new)
        self.remove(old)

    def copy(self, old: str, new: str) -> None:
        key = f"{self.bucket}/{old}"
        for name in self._below(old):
            self.put(new + name[len(key) :], self.server.objects[name].data)


def logical(place: str) -> str:
    """Return the place of what is set aside, or the place itself."""
    parts = place.split("/")
    return "/".join(part for part in parts if not HOME.fullmatch(part))


def folders_above(place: str) -> list[str]:
    """Return the folders around a place, outermost first."""
    parts = place.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts))]
