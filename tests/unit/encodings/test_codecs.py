"""Compressed items of any number of steps unpack to what was compressed, in memory and into a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zstandard

from ckptcore.encodings import codecs
from ckptcore.errors import MalformedCheckpoint
from ckptcore.store import open_store


@pytest.mark.parametrize(
    ("step", "feed", "nbytes"),
    [
        (codecs._STEP, codecs._FEED, 100),  # fits one step
        (codecs._STEP, codecs._FEED, 5000),  # several of input
        (codecs._STEP, codecs._FEED, codecs._STEP + 9000),  # several reads of a file
        (16, 7, 5000),
    ],
)
def test_any_number_of_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, feed: int, nbytes: int
) -> None:
    monkeypatch.setattr(codecs, "_STEP", step)
    monkeypatch.setattr(codecs, "_FEED", feed)
    plain = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8).tobytes()
    packed = zstandard.ZstdCompressor().compress(plain)
    assert codecs.decode_small("zstd", packed, nbytes, "an item") == plain
    (tmp_path / "data").write_bytes(b"before" + packed + b"behind")
    given = open_store(str(tmp_path)), "data", 6, len(packed)
    file, length = codecs.decode_to_file("zstd", *given, nbytes, str(tmp_path))
    with file:
        file.seek(0)
        assert (file.read(), length) == (plain, nbytes)
    for wrong in (packed[:-1], packed + b"\0"):
        with pytest.raises(MalformedCheckpoint):
            codecs.decode_small("zstd", wrong, nbytes, "an item")
    with pytest.raises(MalformedCheckpoint, match="unpacks to more"):
        codecs.decode_small("zstd", packed, nbytes - 1, "an item")
