"""Test that a claim lasts as long as its work, and that the work of a dead worker is resumed."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta

import pytest
from checkpoints import save
from safetensors.torch import save_file
from torch import arange

from ckptcore.catalog import claims, open_catalog
from ckptcore.catalog.claims import Key
from ckptcore.conversion.pipeline import convert, inspect
from ckptcore.errors import DiskFull
from ckptcore.operations.claims import claimed, key_of, source_digest
from ckptcore.planning.request import Request, Settings

KEY = Key("d", "/out", "o")
LONG_AGO = datetime.now(UTC) - timedelta(hours=1)


def test_a_claim_is_renewed_while_the_work_goes_on(catalog, url, monkeypatch):
    monkeypatch.setattr(claims, "LEASE", timedelta(seconds=0.6))
    renewed = threading.Event()
    renew = claims.renew

    def counted(conn, now, claim, **_more):
        renewed.set()
        return renew(conn, now, claim, lease=timedelta(seconds=60))

    monkeypatch.setattr(claims, "renew", counted)
    with claimed(catalog, KEY, "/s", "a") as mine:
        assert mine.mine
        assert renewed.wait(120)
        with catalog.writing() as conn:  # waits for the renewal's end
            claims.current(conn, KEY)
        with claimed(catalog, KEY, "/s", "b") as other:
            assert (other.mine, other.owner) == (False, "a")
    with catalog.reading() as conn:
        assert claims.current(conn, KEY).state == "done"


def test_its_error_is_recorded(catalog):
    with pytest.raises(DiskFull), claimed(catalog, KEY, "/s", "a"):
        raise DiskFull("no room")
    with catalog.reading() as conn:
        found = claims.current(conn, KEY)
    assert (found.state, found.error_code, found.error) == ("failed", "disk-full", "no room")
    with pytest.raises(KeyboardInterrupt), claimed(catalog, KEY, "/s", "a"):
        raise KeyboardInterrupt
    with catalog.reading() as conn:
        assert claims.current(conn, KEY).error_code == "interrupted"


def test_equal_manifests_of_other_bytes_are_other_sources(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"w": arange(4)}, path)
    before = inspect(str(path))
    noted = source_digest(before)
    assert source_digest(inspect(str(path))) == noted
    save_file({"w": arange(4) + 1}, path)
    assert inspect(str(path)).digest == before.digest
    assert source_digest(inspect(str(path))) != noted


def dead(url, item):
    """A worker that took the claim an hour ago and died."""
    with open_catalog(url) as catalog, catalog.writing() as conn:
        claims.take(conn, LONG_AGO, key_of(item.request, item.source_digest), item.source, "dead")


def test_the_work_of_a_dead_worker_is_resumed(runs, watch, swept, url):
    save(runs / "llama" / "step-1")
    watch()
    dead(url, swept(dry_run=True)[0]["step-1"])
    items, made = swept()
    assert (items["step-1"].standing, len(made)) == ("made", 1)


def test_a_dead_workers_output_is_not_remade(runs, watch, swept, url, catalog):
    save(runs / "llama" / "step-1")
    watch()
    item = swept(dry_run=True)[0]["step-1"]
    convert(item.request, Settings(memory=32 << 20, workers=1), None, url)
    dead(url, item)
    items, made = swept()
    assert (items["step-1"].standing, made) == ("converted", [])
    assert [c.state for c in catalog.conversions()] == ["succeeded"]
    assert swept()[0]["step-1"].standing == "converted"


def test_an_output_of_a_user_is_not_remade(runs, watch, swept, url, tmp_path):
    save(runs / "llama" / "step-1")
    watch(destination=str(tmp_path / "out/{name}"))
    request = Request(str(runs / "llama/step-1"), str(tmp_path / "out/step-1"))
    convert(request, Settings(memory=32 << 20, workers=1), None, url)
    items, made = swept()
    assert (items["step-1"].standing, made) == ("converted", [])


def test_another_file_at_the_destination_is_not_an_output(runs, watch, swept, tmp_path):
    save(runs / "llama" / "step-1")
    watch(destination=str(tmp_path / "out/{name}"))
    (tmp_path / "out/step-1").mkdir(parents=True)
    (tmp_path / "out/step-1/notes").write_text("mine")
    items, _ = swept()
    assert items["step-1"].standing == "failed"
    assert "destination-exists" in items["step-1"].why
