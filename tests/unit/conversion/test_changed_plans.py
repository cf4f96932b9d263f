"""Test that a plan which this version would make otherwise is refused, or begun anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ckptcore.cli.main import run
from ckptcore.conversion.pipeline import convert, execute, prepare
from ckptcore.planning.request import Request


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def answer(capsys, *argv):
    code = run([*map(str, argv), "--output", "json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture
def planned_otherwise(tmp_path, monkeypatch):
    """A source with plain values, with a saved plan and half of a conversion by a version that wrote them
    in another form."""
    source = tmp_path / "source.pt"
    torch.save({f"w{n}": torch.arange(700.0) for n in range(4)} | {"step": 7}, source)
    half = Request(str(source), str(tmp_path / "half"), max_file_size=3000)
    with monkeypatch.context() as patch:
        patch.setattr("ckptcore.formats.huggingface.safetensors.VERSION", 0)
        execute(prepare(half).plan_uri, [0, 1])
        plan = ["plan", source, tmp_path / "out", "--save", tmp_path / "saved"]
        assert run(list(map(str, plan))) == 0
    return half


def test_a_plan_that_differs_now_is_refused_with_the_next_step(planned_otherwise, tmp_path, capsys):
    capsys.readouterr()
    code, refused = answer(capsys, "apply", tmp_path / "saved")
    assert (code, refused["error"]["code"]) == (11, "source-changed")
    assert "ckptcore plan SRC DST --save DIR" in refused["error"]["hint"]
    assert not (tmp_path / "out").exists()


def test_a_half_done_conversion_that_differs_now_starts_anew(planned_otherwise, tmp_path):
    result = convert(planned_otherwise, catalog_url=False)
    assert not any(receipt.reused for receipt in result.files)
    fresh = Request(planned_otherwise.source, str(tmp_path / "fresh"), max_file_size=3000)
    convert(fresh, catalog_url=False)
    assert bytes_of(tmp_path / "half") == bytes_of(tmp_path / "fresh")
    assert not (tmp_path / ".half.ckptcore").exists()
