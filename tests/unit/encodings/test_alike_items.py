"""Items that are alike are read by comparing them: whatever parsing would refuse is refused that way too."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from samples import FIXTURES

import ckptcore
from ckptcore.conversion.pipeline import validate

DIMS = FIXTURES / "torch" / "dcp_dims_4r" / "ckpt"
SIGNATURES = {
    "headers": rb"PK\x03\x04",
    "descriptors": rb"PK\x07\x08",
    "rows": rb"PK\x01\x02",
    "ends": rb"PK\x05\x06",
}


@pytest.mark.alike(1)
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.soak), 8])
@pytest.mark.parametrize("which", SIGNATURES)
def test_every_mark_of_a_zip_counts(which: str, step: int, tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    shutil.copytree(DIMS, folder)
    manifest = ckptcore.open(str(folder))  # items that are not damaged are known by now
    assert validate(manifest, "bytes").ok
    file = folder / "__0_0.distcp"
    good = file.read_bytes()
    places = [m.start() for m in re.finditer(SIGNATURES[which], good, re.DOTALL)]
    assert len(places) > 10
    for place in places[::step]:
        data = bytearray(good)
        data[place + 2] ^= 0x80
        file.write_bytes(data)
        assert not validate(ckptcore.open(str(folder)), "bytes").ok, place
    file.write_bytes(good)
    assert validate(ckptcore.open(str(folder)), "bytes").ok
