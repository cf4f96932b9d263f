"""Parts: one file, written by several, in any order, is the file that one writes."""

from __future__ import annotations

import itertools
import random
import warnings
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from ckptcore.conversion.pipeline import (
    FilePart,
    convert,
    execute,
    execute_part,
    finish,
    join,
    parts,
    prepare,
)
from ckptcore.errors import Busy, OutputMismatch, UsageError
from ckptcore.execution import join_parts
from ckptcore.planning.request import Request, Settings
from ckptcore.store import open_store
from ckptcore.utils import crc32 as crc

TENSORS: dict[str, Any] = {
    "a": torch.arange(300_000, dtype=torch.float32).reshape(3, 100_000),
    "b.empty": torch.zeros(0, 7),
    "c": torch.arange(90_000, dtype=torch.int16).reshape(300, 300),
    "d": torch.tensor(2.5, dtype=torch.float64),
    "e": torch.arange(400_000, dtype=torch.float32).reshape(500, 800).t(),
}
SETTINGS = Settings(memory=1 << 20, workers=2, fingerprint=True)
FORMS = {"safetensors": "out.safetensors", "torch_save": "out.pt"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "step-1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(TENSORS), checkpoint_id=folder, no_dist=True)
    return folder


def prepared(source: Path, destination: Path, settings: Settings = SETTINGS, **more: Any) -> str:
    return prepare(Request(str(source), str(destination), **more), settings).plan_uri


@pytest.mark.grid
@pytest.mark.parametrize("name", FORMS.values())
@pytest.mark.parametrize("nbytes", [1, 300_000, 1 << 40])
def test_parts_in_any_order_are_the_file(source: Path, tmp_path: Path, name: str, nbytes: int) -> None:
    undivided = convert(Request(str(source), str(tmp_path / name)), SETTINGS, catalog_url=False)
    plan = prepared(source, tmp_path / f"other-{name}")
    found = list(parts(plan, 0, nbytes, SETTINGS))
    size = undivided.files[0].nbytes
    assert [p.begin for p in found] == [0, *(p.end for p in found[:-1])]
    assert found[-1].end == size
    assert len(found) == 1 if nbytes > size else len(found) > 3
    random.Random(nbytes).shuffle(found)
    for part in found:
        execute_part(plan, part, SETTINGS)
    joined = join(plan, 0)
    assert join(plan, 0) == joined
    written = finish(plan)
    assert (tmp_path / f"other-{name}").read_bytes() == (tmp_path / name).read_bytes()
    assert replace(joined, path="", seconds=0) == replace(undivided.files[0], path="", seconds=0)
    assert written.fingerprint == undivided.fingerprint is not None
    assert not list((tmp_path / f".other-{name}.ckptcore" / "receipts").glob("*-*-*"))


@pytest.mark.parametrize("block", [1, 2, 3, 5, 64, join_parts._BLOCK])
def test_parts_of_several_blocks_are_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """Checksums that are filled in may cross from one block, or one part, to the next."""
    rows = 11 if block < join_parts._BLOCK else 20_000
    tensors = {f"w.{n}": torch.arange(rows * 60.0).reshape(rows, 60) + n for n in range(2)}
    save_file(tensors, tmp_path / "source.safetensors")
    request = Request(str(tmp_path / "source.safetensors"), str(tmp_path / "one.pt"))
    wanted = convert(request, SETTINGS, catalog_url=False).files[0]
    plan = prepared(tmp_path / "source.safetensors", tmp_path / "joined.pt")
    for part in parts(plan, 0, wanted.nbytes * 3 // 5, SETTINGS):
        execute_part(plan, part, SETTINGS)
    monkeypatch.setattr(join_parts, "_BLOCK", block)
    joined = join(plan, 0)
    finish(plan)
    assert (tmp_path / "joined.pt").read_bytes() == (tmp_path / "one.pt").read_bytes()
    assert joined.digest == wanted.digest == blake3((tmp_path / "one.pt").read_bytes()).hexdigest()
    found = torch.load(tmp_path / "joined.pt")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_finished_parts_are_kept_and_damaged_ones_are_not(source: Path, tmp_path: Path) -> None:
    plan = prepared(source, tmp_path / "out.pt")
    found = parts(plan, 0, 500_000, SETTINGS)
    for part in found:
        assert not execute_part(plan, part, SETTINGS).reused
    assert execute_part(plan, found[1], SETTINGS).reused
    joint = tmp_path / ".out.pt.ckptcore" / "files" / ".out.pt.joint"
    data = bytearray(joint.read_bytes())
    data[found[1].begin + 7] ^= 1
    joint.write_bytes(data)
    with pytest.raises(OutputMismatch, match=f"bytes {found[1].begin} to {found[1].end}"):
        join(plan, 0)
    assert not execute_part(plan, found[1], SETTINGS).reused
    join(plan, 0)
    finish(plan)
    assert torch.equal(torch.load(tmp_path / "out.pt")["e"], TENSORS["e"])


def test_the_log_says_which_part_of_which_file(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ckptcore")
    plan = prepared(source, tmp_path / "out.safetensors")
    found = parts(plan, 0, 500_000, SETTINGS)
    for part in found:
        execute_part(plan, part, SETTINGS)
    # A record counts once, on however many ways (Prefect's handlers, where it was set up) it came to caplog.
    records = {id(r): r.getMessage() for r in caplog.records}
    lines = [message for message in records.values() if message.startswith("wrote")]
    assert len(lines) == len(found) > 2
    for n, (line, part) in enumerate(zip(lines, found, strict=True), 1):
        what = f"part {n} of {len(found)} of out.safetensors"
        where = f"bytes {part.begin} to {part.end} of {found[-1].end}"
        assert line.startswith(f"wrote {what}: {where}, ")
    convert(Request(str(source), str(tmp_path / "whole.safetensors")), SETTINGS, catalog_url=False)
    assert f"wrote whole.safetensors: {found[-1].end} bytes, {len(TENSORS)} tensors" in caplog.text


def test_a_part_that_is_missing_is_named(source: Path, tmp_path: Path) -> None:
    plan = prepared(source, tmp_path / "out.safetensors")
    found = parts(plan, 0, 500_000, SETTINGS)
    for part in found[:1] + found[2:]:
        execute_part(plan, part, SETTINGS)
    with pytest.raises(UsageError, match=f"begins at byte {found[1].begin} "):
        join(plan, 0)
    assert not (tmp_path / "out.safetensors").exists()


def test_a_part_of_other_settings_is_refused(source: Path, tmp_path: Path) -> None:
    plan = prepared(source, tmp_path / "out.safetensors")
    found = parts(plan, 0, 1, SETTINGS)
    with pytest.raises(UsageError, match="not a part under these settings"):
        execute_part(plan, replace(found[1], end=found[1].end + 1), SETTINGS)


def test_what_is_finished_or_cannot_be_shared_has_no_parts(source: Path, tmp_path: Path) -> None:
    plan = prepared(source, tmp_path / "out.safetensors")
    execute_part(plan, parts(plan, 0, 1 << 40, SETTINGS)[0], SETTINGS)
    join(plan, 0)
    assert parts(plan, 0, 1, SETTINGS) == ()
    remote = prepare(Request(str(source), "memory://parts/out.safetensors"), SETTINGS).plan_uri
    assert parts(remote, 0, 1, SETTINGS) == ()
    with pytest.raises(UsageError, match="several processes cannot write"):
        execute_part(remote, FilePart(0, 0, 10), SETTINGS)


def test_a_killed_join_is_repeated(source: Path, tmp_path: Path, monkeypatch: Any) -> None:
    plan = prepared(source, tmp_path / "out.pt")
    found = parts(plan, 0, 500_000, SETTINGS)
    for part in found:
        execute_part(plan, part, SETTINGS)
    with monkeypatch.context() as patched:

        def die(*_: Any) -> None:
            raise KeyboardInterrupt

        patched.setattr("ckptcore.execution.join_parts.write_receipt", die)
        with pytest.raises(KeyboardInterrupt):
            join(plan, 0)
    # It had its name, and no receipt: nothing proves it any more.
    for part in parts(plan, 0, 500_000, SETTINGS):
        execute_part(plan, part, SETTINGS)
    join(plan, 0)
    finish(plan)
    assert torch.equal(torch.load(tmp_path / "out.pt")["a"], TENSORS["a"])


def test_a_writer_that_is_still_at_work_holds_the_joining_up(source: Path, tmp_path: Path) -> None:
    plan = prepared(source, tmp_path / "out.pt")
    for part in parts(plan, 0, 500_000, SETTINGS):
        execute_part(plan, part, SETTINGS)
    files = open_store(str(tmp_path / ".out.pt.ckptcore" / "files"))
    late = files.joint(".out.pt.joint", (tmp_path / ".out.pt.ckptcore/files/.out.pt.joint").stat().st_size)
    assert late is not None
    with pytest.raises(Busy, match="another process is writing"):
        join(plan, 0)
    late.abort()
    join(plan, 0)
    finish(plan)
    assert torch.equal(torch.load(tmp_path / "out.pt")["a"], TENSORS["a"])


def test_parts_that_were_never_joined_are_not_published(source: Path, tmp_path: Path) -> None:
    plan = prepared(source, tmp_path / "out")
    execute_part(plan, parts(plan, 0, 500_000, SETTINGS)[0], SETTINGS)
    execute(plan, settings=SETTINGS)
    finish(plan)
    assert not [p.name for p in (tmp_path / "out").rglob(".*")]


def test_very_many_tiles_of_one_tensor(source: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Checksums behind the data do not depend on how many pieces a tensor came in."""
    monkeypatch.setattr(crc, "_MAX_PIECES", 4)
    convert(Request(str(source), str(tmp_path / "out.pt")), SETTINGS, catalog_url=False)
    assert torch.equal(torch.load(tmp_path / "out.pt")["a"], TENSORS["a"])


@given(st.binary(max_size=60), st.data())
def test_runs_come_in_any_order(data: bytes, draw: Any) -> None:
    bounds = sorted({0, len(data), *draw.draw(st.lists(st.integers(0, len(data))))})
    pieces = [(a, b - a) for a, b in itertools.pairwise(bounds)]
    runs = crc.Runs()
    for start, length in draw.draw(st.permutations(pieces)):
        runs.add(start, length, zlib.crc32(data[start : start + length]))
    if data:
        assert list(runs) == [(0, len(data), zlib.crc32(data))]
        assert runs.total(len(data)) == zlib.crc32(data)
    assert runs.total(len(data) + 1) is None
