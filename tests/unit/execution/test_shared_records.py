"""Records that several files share: what a stopped run left open is proven before anything is published."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pieces import numbered, write_dcp

from ckptcore import Box, convert
from ckptcore.conversion.pipeline import execute, finish, prepare
from ckptcore.conversion.staging.open_staging import staging_of_plan
from ckptcore.errors import DamagedCheckpoint, UsageError
from ckptcore.execution.receipts import read_receipt, write_receipt
from ckptcore.planning.request import Request


def source(folder: Path) -> Path:
    """One record of 64 rows, which two ranks share."""
    write_dcp(folder / "ckpt", {"model.w": (numbered((64, 64)), [Box((0, 0), (64, 64))])}, files=1)
    return folder / "ckpt"


def request(folder: Path) -> Request:
    return Request(str(folder / "ckpt"), str(folder / "out"), "reshard", mesh="fsdp=2")


def test_what_was_left_open_is_proven_when_the_run_goes_on(tmp_path: Path) -> None:
    source(tmp_path)
    prepared = prepare(request(tmp_path))
    written = execute(prepared.plan_uri)
    assert [r.pending for r in written] == [(), (), ()]
    staging = staging_of_plan(prepared.plan_uri)
    # The state after a run is killed when the file exists and its record is incomplete.
    write_receipt(staging.receipts, prepared.plan_digest, replace(written[0], pending=(0,)))
    with pytest.raises(UsageError, match=r"__0_0\.distcp .*source records"):
        finish(prepared.plan_uri)
    repeated = execute(prepared.plan_uri)
    assert (repeated[0].reused, repeated[0].pending) == (True, ())
    kept = read_receipt(staging.receipts, prepared.plan_digest, 0)
    assert kept is not None
    assert kept.pending == ()
    finish(prepared.plan_uri)
    assert (tmp_path / "out" / ".metadata").is_file()


def test_damage_in_another_files_part_is_seen_when_a_file_is_kept(tmp_path: Path) -> None:
    folder = source(tmp_path)
    data = folder / "__0_0.distcp"
    raw = bytearray(data.read_bytes())
    at = raw.index(numbered((64, 64))[63].numpy().tobytes())  # the last row: the second rank's
    raw[at] ^= 1
    data.write_bytes(raw)
    prepared = prepare(request(tmp_path))
    for _ in range(2):  # the second time with what the first has left
        with pytest.raises(DamagedCheckpoint, match="CRC-32"):
            execute(prepared.plan_uri, [0])
    with pytest.raises(UsageError):
        finish(prepared.plan_uri)
    with pytest.raises(DamagedCheckpoint):
        convert(str(folder), str(tmp_path / "out"), verb="reshard", mesh="fsdp=2")
    assert not (tmp_path / "out").exists()
