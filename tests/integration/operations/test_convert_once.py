"""Test that ``--wait`` waits and converts once, without Prefect, like an announcement."""

from __future__ import annotations

import json
import threading
import time
from datetime import UTC, datetime

import pytest
from checkpoints import save
from safetensors.torch import load_file

from ckptcore.catalog import claims
from ckptcore.cli.main import run
from ckptcore.conversion.pipeline import inspect
from ckptcore.errors import Busy, NotComplete
from ckptcore.operations.automation import convert_once as once
from ckptcore.operations.automation import wait as waiting
from ckptcore.operations.claims import key_of, source_digest
from ckptcore.planning.request import Request, Settings


@pytest.fixture
def wait(url, tmp_path, capsys, monkeypatch):
    """Return ``ckptcore consolidate --wait`` of a source: (exit code, answer, text). Looks are short."""
    monkeypatch.setattr(waiting, "STEPS", (0.1,))
    monkeypatch.setattr(waiting, "QUIET", 0.2)

    def consolidate(source, seconds="2s", *more):
        command = ["consolidate", str(source), str(tmp_path / "out"), "--wait", seconds, "--catalog", url]
        code = run([*command, "--output", "json", *more])
        captured = capsys.readouterr()
        return code, json.loads(captured.out), captured.err

    return consolidate


def test_an_incomplete_checkpoint_is_waited_for(runs, wait, tmp_path):
    source = save(runs / "llama" / "step-1")
    late = (source / ".metadata").rename(tmp_path / "late")
    writer = threading.Timer(0.5, lambda: late.rename(source / ".metadata"))
    writer.start()
    code, answer, text = wait(source, "30s")
    writer.join()
    assert (code, answer["destination"]) == (0, str(tmp_path / "out"))
    assert "checking again in 0.1" in text
    assert load_file(tmp_path / "out" / "model.safetensors")


def test_it_waits_no_longer_than_given(runs, wait, tmp_path):
    source = save(runs / "llama" / "step-1")
    (source / ".metadata").unlink()
    code, answer, _ = wait(source, "1s")
    assert code == NotComplete.exit_code
    assert answer["error"]["code"] == "not-complete"
    assert not (tmp_path / "out").exists()


def test_a_permanent_error_is_not_waited_for(runs, wait):
    source = save(runs / "llama" / "step-1")
    meta = source / ".metadata"
    meta.write_bytes(meta.read_bytes()[:-10])
    began = time.monotonic()
    assert wait(source, "10m")[0] == 1
    assert time.monotonic() - began < 300  # far from the ten minutes that it may wait


def test_an_output_is_not_remade(runs, wait, tmp_path, catalog):
    source = save(runs / "llama" / "step-1")
    assert wait(source)[0] == 0
    assert wait(source)[:2] == (0, {"destination": str(tmp_path / "out"), "already": True})
    assert len(catalog.conversions()) == 1


def test_another_process_that_converts_is_waited_for(runs, wait, catalog, tmp_path):
    source = save(runs / "llama" / "step-1")
    key = key_of(Request(str(source), str(tmp_path / "out")), source_digest(inspect(str(source))))
    with catalog.writing() as conn:
        claim = claims.take(conn, datetime.now(UTC), key, str(source), "another")
    code, answer, _ = wait(source, "0.2s")
    assert (code, answer["error"]["code"]) == (Busy.exit_code, "busy")
    assert "another is converting" in answer["error"]["message"]
    assert not (tmp_path / "out").exists()
    with catalog.writing() as conn:
        claims.failed(conn, datetime.now(UTC), claim, "interrupted", "gone")
    assert wait(source)[0] == 0


def test_two_at_once_make_it_once(runs, wait, tmp_path, catalog, url, monkeypatch):
    source = save(runs / "llama" / "step-1")
    gate, found = threading.Barrier(2), []
    real = once.wait_until_complete

    def together(*given):
        manifest = real(*given)
        gate.wait(300)
        return manifest

    monkeypatch.setattr(once, "wait_until_complete", together)

    def convert():
        request = Request(str(source), str(tmp_path / "out"))
        found.append(
            once.convert_once(request, Settings(32 << 20, 1), None, url, wait_s=300, on_wait=lambda *_: None)
        )

    threads = [threading.Thread(target=convert) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(result is None for result in found) == [False, True]
    assert len(catalog.conversions()) == 1
