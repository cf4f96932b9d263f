"""The page of what `retire` would free, and its JSON form."""

from __future__ import annotations

import html
import re
from datetime import UTC, datetime

import pytest
from catalog_page import Facts, text_of
from fastapi.testclient import TestClient

from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.catalog import Catalog
from ckptcore.page import retiring


@pytest.fixture
def watched(catalog: Catalog, facts: Facts, monkeypatch: pytest.MonkeyPatch) -> Catalog:
    """Seven steps of a run below a root that keeps two, and each fourth."""
    for name in ("CPU_SECONDS", "SECONDS"):
        monkeypatch.setattr(retiring, name, 600.0)  # a slow machine ends no part
    for step in range(1, 8):
        catalog.record_validation(facts(f"/r/llama/step-{step}", run="llama", step=step))
    with catalog.writing() as conn:
        kept = {"keep_last": 2, "keep_every": 4, "rest": "weights", "accept_loss": ["note", "ema.*"]}
        roots.add(conn, datetime.now(UTC), "root of ada", "/r", retention=kept)
    return catalog


def test_retire_keeps_what_the_root_says(client: TestClient, watched: Catalog) -> None:
    page = client.get("/retire", params={"scope": "root of ada"})
    stated = text_of(page.text)
    assert "has a retention of its own" in stated
    assert "note ema.*" in stated
    rows = re.findall(r"<tr><td>([a-z ]+)</td><td class=\"n\">(\d+)</td>", page.text)
    assert {int(step): fate for fate, step in rows} == {
        **dict.fromkeys((1, 2, 3, 5), "unsafe"),
        **dict.fromkeys((4, 6, 7), "kept"),
    }
    assert "ckptcore retire 'root of ada' --yes" in stated
    # The run has the same root above it; what the form says wins, field by field.
    given = {"scope": "llama", "keep_last": "1", "keep_every": "", "rest": "", "accept_loss": "a* $(id)"}
    page = client.get("/retire", params=given)
    rows = re.findall(r"<tr><td>kept</td><td class=\"n\">(\d+)</td>", page.text)
    assert rows == ["4", "7"]
    command = "ckptcore retire llama --keep-last 1 --accept-loss 'a*' --accept-loss '$(id)' --yes"
    assert command in text_of(page.text)
    for wrong in ({"keep_last": "0"}, {"keep_last": "1e3"}, {"rest": "none"}, {"keep_every": "9" * 30}):
        assert client.get("/retire", params={"scope": "llama", **wrong}).status_code == 400, wrong


def test_the_form_of_retire_is_taken_as_a_browser_sends_it(client: TestClient, watched: Catalog) -> None:
    fields = re.findall(r'<(?:input|select) name="(\w+)"', client.get("/retire").text)
    assert fields == ["scope", "keep_last", "keep_every", "rest", "accept_loss"]
    page = client.get("/retire", params=dict.fromkeys(fields, "") | {"scope": "llama"})
    assert page.status_code == 200
    assert "7 sources" in text_of(page.text)


def test_a_plan_of_many_sources_comes_in_parts(
    client: TestClient, watched: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = client.get("/api/v1/retire", params={"scope": "llama"}).json()
    monkeypatch.setattr(retiring, "SECONDS", -1.0)  # each source takes too long
    seen, address = [], "/retire?scope=llama"
    while address:
        page = client.get(address).text
        seen += re.findall(r"step-(?:<wbr>)?(\d)</a>", page)
        found = re.search(r'rel="next" href="([^"]+)"', page)
        address = html.unescape(found[1]) if found else ""
    assert seen == list("1234567")
    parts, after = [], ""
    while True:
        part = client.get(f"/api/v1/retire?scope=llama&limit=2{after}").json()
        parts += part["rows"]
        if part["next"] is None:
            break
        after = f"&after={part['next']}"
    assert parts == full["rows"]
    assert [row["step"] for row in parts if row["fate"] == "kept"] == [4, 6, 7]
    assert client.get("/api/v1/retire?scope=llama&after=ffff").status_code == 404
    assert client.get("/api/v1/retire?scope=nobody").status_code == 404
