"""What a sweep cannot do is said, and never "no checkpoint was found"."""

from __future__ import annotations

import os
import shutil
from datetime import UTC, datetime

import pytest
from checkpoints import save

from ckptcore.catalog import watched_roots as roots
from ckptcore.cli.main import run
from ckptcore.errors import UsageError


def test_a_name_that_is_not_utf8_is_refused_by_its_reason(runs, watch, swept, url):
    save(runs / "llama" / "step-1")
    odd = os.fsencode(str(runs / "llama")) + b"/step-2\xff"
    os.rename(save(runs / "llama" / "step-2"), odd)
    watch()
    items, made = swept()
    assert [item.standing for item in items.values()] == ["made", "refused"]
    assert "not UTF-8" in items["step-2\\udcff"].why
    assert run(["sweep", "--catalog", url, "--min-age", "0"]) == 1
    assert [os.path.basename(r.source) for r in made] == ["step-1"]


@pytest.mark.parametrize(
    "uri", ["merged://[/runs/n0,/runs/n1]", "merged://[s3://b/n0,/runs/n1]/inner", "/r\udcff"]
)
def test_a_root_that_nothing_can_watch(uri, catalog, url, capsys):
    with pytest.raises(UsageError, match="cannot watch"), catalog.writing() as conn:
        roots.add(conn, datetime.now(UTC), "r", uri)
    assert run(["catalog", "root", "add", "r", uri, "--catalog", url]) == 2
    with catalog.reading() as conn:
        assert roots.every(conn) == ()


BACK = ["{root}/{path}", "{root}/back/{path}", "{root}/../runs/{run}/{name}", "{root}/{run}/step-{step}"]


@pytest.mark.parametrize("destination", BACK)
def test_a_target_that_leads_back_to_the_sources(destination, runs, watch, swept, url, capsys):
    for step in (1, 2):
        save(runs / "llama" / f"step-{step}")
    (runs / "back").symlink_to(runs)
    watch(destination=destination)
    items, made = swept()
    assert ([item.standing for item in items.values()], made) == (["refused", "refused"], [])
    assert all("leads back" in item.why for item in items.values())
    assert run(["sweep", "--catalog", url]) == 1
    assert "no checkpoint was found" not in capsys.readouterr().out


def test_only_the_target_that_leads_back_is_refused(runs, catalog, swept, tmp_path):
    save(runs / "llama" / "step-1")
    back, other = {"destination": "{root}/{path}"}, {"destination": str(tmp_path / "out/{name}")}
    with catalog.writing() as conn:
        roots.add(conn, datetime.now(UTC), "r", str(runs), targets=[back, other])
    _, made = swept()
    assert [r.destination for r in made] == [str(tmp_path / "out/step-1")]


def test_outputs_among_the_sources_are_still_none(runs, watch, swept):
    """They are outputs of others, found before the catalog knows them: here it has forgotten."""
    save(runs / "llama" / "step-1")
    shutil.copytree(runs / "llama" / "step-1", runs / "llama-out" / "step-1")
    watch(destination="{root}/{run}-out/{name}", include=("llama/*", "llama-out/*"))
    items, _ = swept()
    assert len(items) == 1
    assert items["step-1"].source.endswith("llama/step-1")
