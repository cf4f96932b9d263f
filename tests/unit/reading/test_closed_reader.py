"""A chunk that a thread opens while its reader is closed does not stay open."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard

import ckptcore
from ckptcore.core.box import Box
from ckptcore.reading import decoded_items
from ckptcore.reading.box_reader import BoxReader
from ckptcore.reading.checksums import Records
from ckptcore.reading.gather import tile_view
from ckptcore.reading.payload import Payload, StoredChunk
from ckptcore.store import open_source_store


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[BoxReader, Records]:
    monkeypatch.setattr(decoded_items, "_IN_MEMORY", 0)  # each decoded item has a descriptor
    writer = FileSystemWriter(tmp_path, _extensions=[ZStandard()])
    dcp.save({"w": torch.randn(64, 32).t()}, storage_writer=writer, no_dist=True)
    manifest = ckptcore.open(str(tmp_path))
    records = Records(open_source_store(manifest.root), len(manifest.items))
    return BoxReader(manifest, 0, records), records


@pytest.mark.parametrize("use", ["strides", "read"])
def test_a_chunk_that_is_opened_meanwhile(
    use: str, opened: tuple[BoxReader, Records], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, records = opened
    inside, go_on, payloads = threading.Event(), threading.Event(), list[Payload]()
    resolve = records.resolve

    def slowly(chunk: StoredChunk) -> Payload:
        payloads.append(resolve(chunk))
        inside.set()
        assert go_on.wait(10)
        return payloads[-1]

    monkeypatch.setattr(records, "resolve", slowly)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            if use == "strides":
                reader.strides(0)
            else:
                tile = tile_view(np.empty(4 * 64 * 32, np.uint8), (32, 64), "float32")
                reader.read(Box.full((32, 64)), tile, np.empty(1 << 16, np.uint8))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(10)
    reader.close()  # as after a second Ctrl-C, which waits for no thread
    go_on.set()
    thread.join()
    item = payloads[0].read_into
    assert isinstance(item, decoded_items.DecodedItem)
    assert item._file is not None
    assert item._file.closed
    assert bool(errors) == (use == "read")  # nothing is read of a closed reader in silence
