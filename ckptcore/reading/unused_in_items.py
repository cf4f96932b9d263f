"""List bytes inside of items that belong to nothing: only reading an item shows them.

The account of a reading (`ckptcore.core.byte_ledger`) takes an item as one payload. A torch zip may hold more
records than its tensor's, and a safetensors blob of a DCP file more tensors than the metadata lists.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import chain

import numpy as np

from ckptcore.core.byte_ledger import UnusedBytes
from ckptcore.core.manifest import Envelope, Manifest, view_of
from ckptcore.core.unused_bytes import unread_padding
from ckptcore.encodings.safetensors_header import FOR_TORCH, SHARDS, read_blob_header
from ckptcore.errors import CkptError
from ckptcore.reading.payload import StoredChunk, resolve
from ckptcore.reading.zero_ranges import without_padding
from ckptcore.store import Readable


def unused_in_items(manifest: Manifest, store: Readable, workers: int = 2) -> tuple[UnusedBytes, ...]:
    """List the bytes of all items that belong to nothing.

    A few KiB of each item are read, all of one with a codec, and elements of storages that no tensor has.
    Level ``bytes`` of a check finds the same. An item that cannot be read is listed as a whole.

    Args:
        manifest: The checkpoint.
        store: Its folder.
        workers: Threads that read.

    Raises:
        CkptError: An item cannot be read now, and a retry may help.
    """
    manifests = [manifest, *([manifest.inputs] if manifest.inputs is not None else [])]
    unused: list[UnusedBytes] = []
    for source in manifests:
        chunks = source.chunks
        zips = (chunks.item >= 0) & (source.items.envelope[chunks.item] == int(Envelope.TORCHZIP))
        _, first = np.unique(chunks.item[zips], return_index=True)  # several chunks may be in one item
        rows = np.flatnonzero(zips)[first].tolist()
        with ThreadPoolExecutor(max_workers=max(1, workers)) as pool:
            unused += chain.from_iterable(pool.map(lambda row, m=source: _of_chunk(m, store, row), rows))
        unused += unused_in_blobs(source, store)
    unused += unread_padding(manifest)
    return tuple(without_padding(dict.fromkeys(unused), store))


def _of_chunk(manifest: Manifest, store: Readable, row: int) -> tuple[UnusedBytes, ...]:
    chunks = manifest.chunks
    spec, index = manifest.tensors[int(chunks.tensor[row])], int(chunks.item[row])
    item, rank = manifest.items[index], len(spec.shape)
    shape, path = tuple(chunks.shape[row, :rank].tolist()), manifest.files[item.file].path
    view = view_of(chunks, row, rank)
    try:
        with closing(
            resolve(StoredChunk(index, path, item, spec.dtype, shape, view, spec.fqn), store)
        ) as payload:
            return payload.unused
    except CkptError as error:
        if error.transient:
            raise
        label = f"an item that cannot be read: {error.message}"
        return (UnusedBytes(path, item.start, item.start + item.length, label),)


def unused_in_blobs(
    manifest: Manifest, store: Readable, skip: Container[str | None] = ()
) -> Iterator[UnusedBytes]:
    """Yield what the safetensors blobs of DCP files hold that the metadata does not list.

    Args:
        manifest: The checkpoint.
        store: Its folder.
        skip: Files that are not read.
    """
    items = manifest.items
    rows = np.flatnonzero(items.envelope == int(Envelope.SAFETENSORS))
    # Members of one blob, which is the only one of its file, have one header: it is read once.
    rows = rows[np.argsort(items.file[rows], kind="stable")]
    ends = np.flatnonzero(np.diff(items.file[rows])) + 1
    for members in np.split(rows, ends) if len(rows) else ():
        file = manifest.files[int(items.file[members[0]])]
        path = file.path
        start, length = int(items.start[members[0]]), int(items.length[members[0]])
        if path in skip or (file.size or 0) < start + length:
            continue
        try:
            tensors, metadata, begin = read_blob_header(store, path, start, length)
        except CkptError:
            continue  # its chunks are reported
        listed = {items.member.get(row) for row in members.tolist()}
        for name, (_, _, first, end) in tensors.items():
            if name not in listed and end > first:
                label = f"tensor {name}, which the metadata does not list"
                yield UnusedBytes(path, start + begin + first, start + begin + end, label)
        header_keys = sorted(
            key for key, v in metadata.items() if key not in SHARDS and (key, v) != FOR_TORCH
        )
        if header_keys:
            yield UnusedBytes(path, start, start + begin, f"keys of its header: {', '.join(header_keys[:8])}")
