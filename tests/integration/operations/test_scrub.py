"""Test that scrub finds missing and changed checkpoints, the longest unverified first, within its time."""

from __future__ import annotations

import json
import shutil
from itertools import count

import pytest
from checkpoints import save
from torch import ones

from ckptcore.catalog import maintenance
from ckptcore.catalog.types import State
from ckptcore.cli.main import run
from ckptcore.conversion.pipeline import convert
from ckptcore.errors import UsageError
from ckptcore.operations.scrub import scrub
from ckptcore.planning.request import Request, Settings


@pytest.fixture
def made(runs, url, tmp_path):
    """Two sources and their outputs: (sources, outputs)."""
    sources = [save(runs / "llama" / f"step-{n}", n) for n in (1, 2)]
    outputs = [tmp_path / "out" / s.name for s in sources]
    for source, output in zip(sources, outputs, strict=True):
        convert(Request(str(source), str(output)), Settings(memory=32 << 20), None, url)
    return sources, outputs


def proofs(found):
    return {
        each.checkpoint.uri.rsplit("/", 2)[-2] + "/" + each.checkpoint.uri[-6:]: each.proven.proof.value
        for each in found.looked
    }


def flip(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def test_all_is_proven_and_the_time_is_noted(made, catalog):
    found = scrub(catalog, share=1)
    assert (found.counts, found.exit_code, found.due, found.known) == ({"proven": 4}, 0, 4, 4)
    assert {row.verified_level for row in catalog.list()} == {"bytes"}


def test_changes_to_source_or_output_are_found_and_recorded(made, catalog):
    (source, _), (_, output) = made
    flip(output / "model.safetensors")
    data = next(source.glob("*.distcp"))
    raw = data.read_bytes()
    at = raw.index((1.0).hex().encode()) if (1.0).hex().encode() in raw else raw.index(b"\x00\x00\x80?")
    data.write_bytes(raw[: at + 3] + b"\x41" + raw[at + 4 :])
    found = scrub(catalog, share=1)
    assert proofs(found) == {
        "llama/step-1": "damaged",
        "llama/step-2": "proven",
        "out/step-1": "proven",
        "out/step-2": "damaged",
    }
    assert found.exit_code == 1
    codes = {
        row.uri.rsplit("/", 2)[-2]: {f.code for f in catalog.show(row.id).findings}
        for row in catalog.list(state="damaged")
    }
    assert codes == {"llama": {"crc-mismatch", "digest-mismatch"}, "out": {"digest-mismatch"}}
    shutil.rmtree(output)  # remade, it is complete
    data.write_bytes(raw)
    assert proofs(scrub(catalog, share=1))["llama/step-1"] == "proven"


def test_a_missing_checkpoint_is_recorded_as_gone_until_it_exists(made, catalog, tmp_path):
    (source, _), (output, _) = made
    source.rename(tmp_path / "away")
    (output / "model.safetensors").unlink()
    found = scrub(catalog, share=1)
    assert proofs(found)["llama/step-1"] == "gone"
    assert proofs(found)["out/step-1"] == "damaged"
    row = catalog.show(str(source)).checkpoint
    assert (row.state, row.verified_at) == (State.GONE, None)
    assert len(catalog.list()) == 4
    (tmp_path / "away").rename(source)
    assert proofs(scrub(catalog, share=1))["llama/step-1"] == "proven"
    assert catalog.show(str(source)).checkpoint.state == State.PRESENT


def test_another_checkpoint_at_its_place(made, catalog):
    (source, _), _ = made
    before = catalog.show(str(source)).checkpoint.id
    shutil.rmtree(source)
    save(source, 1, extra=ones(3))
    assert proofs(scrub(catalog, share=1))["llama/step-1"] == "changed"
    now = catalog.show(str(source)).checkpoint
    assert now.id != before
    assert catalog.show(before).checkpoint.state == State.REPLACED


def test_shares_rotate_through_all_checkpoints(made, catalog):
    seen = []
    for _ in range(4):
        found = scrub(catalog, share=0.25)
        assert found.due == 1
        seen += proofs(found)
    assert len(set(seen)) == 4
    assert list(proofs(scrub(catalog, share=0.25))) == seen[:1]


def short(catalog, budget_s):
    """A scrub whose clock advances by a second with every call."""
    clock = count()
    return scrub(catalog, share=1, budget_s=budget_s, clock=lambda: float(next(clock)))


def test_it_stops_midway_and_records_nothing_for_that_checkpoint(made, catalog):
    row = catalog_uris(catalog)
    found = short(catalog, 4)
    stopped = found.looked[-1]
    assert (stopped.proven.proof, found.exit_code) == ("stopped", 0)
    assert 1 < len(found.looked) < 4
    assert catalog.show(stopped.checkpoint.id).checkpoint.verified_level != "bytes"
    # It is the first the next time, before those that were proven.
    assert catalog_uris(catalog)[0] == row[len(found.looked) - 1] == stopped.checkpoint.uri


def test_a_checkpoint_that_needs_more_than_the_budget_is_verified(made, catalog):
    row, seen = catalog_uris(catalog), []
    for _ in row:
        (only,) = short(catalog, 0).looked
        assert only.proven.proof == "proven"
        seen.append(only.checkpoint.uri)
    assert seen == row
    assert {each.verified_level for each in catalog.list()} == {"bytes"}


def catalog_uris(catalog):
    with catalog.reading() as conn:
        return [row.uri for row in maintenance.due(conn)]


def test_the_command_line(made, url, capsys):
    (_, other), (output, _) = made
    assert run(["scrub", "--share", "1", "--catalog", url]) == 0
    assert "4 proven; 4 of 4 due" in capsys.readouterr().out
    shutil.rmtree(output)
    assert run(["scrub", "--share", "1", "--catalog", url, "--output", "json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["counts"] == {"gone": 1, "proven": 3}
    assert run(["scrub", "--share", "2", "--catalog", url]) == 2
    with pytest.raises(UsageError):
        scrub(None, share=0)
    assert other.exists()
