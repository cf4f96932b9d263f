"""Merge several manifests, each of a subfolder or of a file, into one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ckptcore.core.manifest import Blob, Chunks, Ints, Items, Manifest, StoredFile, TensorSpec, Unread
from ckptcore.core.tree_paths import Paths
from ckptcore.errors import Finding, NameMismatch


@dataclass(frozen=True, slots=True)
class Part:
    """One of the manifests to merge.

    Attributes:
        manifest: The manifest.
        folder: Folder of its files below the common root, "" for the root itself.
        rename: Maps a name of the part to its name in the merged manifest.
    """

    manifest: Manifest
    folder: str = ""
    rename: Callable[[str], str] = str


def join(
    format: str,
    root: str,
    parts: Sequence[Part],
    origin: Mapping[str, Any] | None = None,
    findings: Sequence[Finding] = (),
) -> Manifest:
    """Merge manifests; a file that two parts name is one file.

    Args:
        format: Name of the format of the result.
        root: URL of the common root.
        parts: Manifests to merge, at least one.
        origin: Origin of the result.
        findings: Findings to add to those of the parts.

    Raises:
        NameMismatch: Two parts use the same name.
    """
    assert all(p.manifest.inputs is None for p in parts)  # no format nests computed tensors yet
    tensors: list[TensorSpec] = []
    blobs: list[Blob] = []
    merged: list[Finding] = []
    files: dict[str, int] = {}
    sizes: list[int | None] = []
    chunks: list[Chunks] = []
    items: list[Items] = []
    rank = max((p.manifest.chunks.lo.shape[1] for p in parts), default=0)
    any_view = any(p.manifest.chunks.view is not None for p in parts)
    codecs = list(dict.fromkeys(c for p in parts for c in ("", *p.manifest.items.codecs)))
    member: dict[int, str] = {}
    base = 0
    for part in parts:
        m, prefix = part.manifest, f"{part.folder}/" if part.folder else ""
        tensors += [TensorSpec(part.rename(t.fqn), t.dtype, t.shape) for t in m.tensors]
        # Each part counts its items and chunks from 0; merged, they follow those of earlier parts.
        shift = sum(len(i) for i in items)
        blobs += [
            replace(
                b,
                key=part.rename(b.key),
                item=b.item + shift if b.item >= 0 else -1,
                tree=renamed_tree(b.tree, part.rename),
                unread=_prefixed(b.unread, prefix),
            )
            for b in m.blobs
        ]
        merged += [
            replace(f, fqn=part.rename(f.fqn) if f.fqn else f.fqn, file=prefix + f.file if f.file else f.file)
            for f in m.findings
        ]
        places = np.zeros(len(m.files), np.int64)
        for n, file in enumerate(m.files):
            position = files.setdefault(prefix + file.path, len(sizes))
            if position == len(sizes):
                sizes.append(file.size)
            places[n] = position
        member |= {k + shift: v for k, v in m.items.member.items()}
        items.append(_renumber_items(m.items, places, codecs))
        chunks.append(_widened(m.chunks, rank, shift, base, any_view))
        base += len(m.chunks)
    # An object that consists of one tensor has the tensor's name.
    object_names = [b.key for b in blobs if b.tree != {"$": "tensor", "fqn": b.key}]
    _require_distinct([*(t.fqn for t in tensors), *object_names])
    return Manifest(
        format,
        root,
        tuple(tensors),
        _stack_chunks(chunks, any_view),
        _all_items(items, codecs, member),
        tuple(StoredFile(p, sizes[n]) for p, n in files.items()),
        tuple(blobs),
        dict(origin or {}),
        (*merged, *findings),
        order=tuple(part.rename(n) for part in parts for n in part.manifest.order),
    )


def joined_paths(parts: Sequence[Part]) -> Paths:
    """Return the paths that the parts record, of parts whose names stay."""
    paths = Paths()
    for part in parts:
        part_paths = Paths.of(part.manifest)
        for name in part_paths:
            paths.add(name, part_paths[name])
    return paths


def _prefixed(why: Unread | None, prefix: str) -> Unread | None:
    return replace(why, file=prefix + why.file) if why is not None and why.file else why


def _require_distinct(names: Sequence[str]) -> None:
    earlier: set[str] = set()
    for name in names:
        if name in earlier:
            raise NameMismatch(f"two parts of the checkpoint use the name {name}")
        earlier.add(name)


def renamed_tree(tree: Any, rename: Callable[[str], str]) -> Any:
    """Return an object's tree with its tensor references renamed."""
    if isinstance(tree, list):
        return [renamed_tree(v, rename) for v in tree]
    if isinstance(tree, dict):
        if tree.get("$") == "tensor":
            return {"$": "tensor", "fqn": rename(tree["fqn"])}
        return {k: renamed_tree(v, rename) for k, v in tree.items()}
    return tree


def _renumber_items(items: Items, places: Ints, codecs: list[str]) -> Items:
    kinds = np.array([codecs.index(c) for c in items.codecs], np.int8)
    return replace(items, file=places[items.file], codec=kinds[items.codec], codecs=tuple(codecs), member={})


def _widened(chunks: Chunks, rank: int, shift: int, base: int, any_view: bool) -> Chunks:
    n, ndim = chunks.lo.shape
    lo, shape = np.zeros((n, rank), np.int64), np.ones((n, rank), np.int64)
    lo[:, :ndim], shape[:, :ndim] = chunks.lo, chunks.shape
    item = np.where(chunks.item >= 0, chunks.item + shift, -1)
    view: Ints | None = None
    if any_view:
        view = np.full((n, 2 + rank), -1, np.int64)
        if chunks.view is not None:
            view[:, : 2 + ndim] = chunks.view
            # An added dim has one element, so its stride is 0; rows of -1 have no view.
            view[:, 2 + ndim :] = np.where(chunks.view[:, :1] < 0, -1, 0)
    return Chunks(chunks.first + base, lo, shape, item, view)


def _stack_chunks(chunks: Sequence[Chunks], any_view: bool) -> Chunks:
    first = np.concatenate([chunks[0].first[:1], *(c.first[1:] for c in chunks)])
    views = [c.view for c in chunks if c.view is not None]
    return Chunks(
        first,
        np.concatenate([c.lo for c in chunks]),
        np.concatenate([c.shape for c in chunks]),
        np.concatenate([c.item for c in chunks]),
        np.concatenate(views) if any_view else None,
    )


def _all_items(items: Sequence[Items], codecs: list[str], member: Mapping[int, str]) -> Items:
    columns = ("file", "start", "length", "envelope", "codec", "crc32")
    joined = {c: np.concatenate([getattr(i, c) for i in items]) for c in columns}
    return Items(**joined, codecs=tuple(codecs), member=dict(member))
