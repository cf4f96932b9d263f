"""The search of the page: what people remember of a checkpoint finds it."""

from __future__ import annotations

import re

import pytest
from catalog_page import Facts, browser

from ckptcore.catalog import search as searching
from ckptcore.catalog.catalog import Catalog
from ckptcore.page import changes


@pytest.fixture
def remembered(either: Catalog, facts: Facts) -> Catalog:
    """Steps of two runs, an export with an alias, and a checkpoint whose place has the signs of a pattern."""
    for step in (2, 20, 200):
        for run in ("llama-8b", "Qwen3"):
            either.record_validation(facts(f"/data/{run}/global_step{step}", run=run, step=step))
    either.record_validation(facts("/exports/final", run="llama-8b", step=20, content="e"))
    changes.set_alias(either, "ada", "/exports/final", "chat/prod", None, True)
    either.record_validation(facts("/odd/100%_sure", run="50%", step=7))
    return either


def test_any_part_of_what_is_remembered_finds_it(remembered: Catalog) -> None:
    client = browser(remembered)
    first = {
        "prod": "/exports/final",
        "CHAT": "/exports/final",
        "fina": "/exports/final",
        "qwen3 step-20": "/data/Qwen3/global_step20",
        "qwen3 step 200": "/data/Qwen3/global_step200",
        "llama data checkpoint-2": "/data/llama-8b/global_step2",
        "iter_0000020 8b exports": "/exports/final",
        "100%_": "/odd/100%_sure",
    }
    for text, place in first.items():
        rows = client.get("/api/v1/search", params={"q": text}).json()["checkpoints"]
        assert [row["row"]["uri"] for row in rows][:1] == [place], text
        page = client.get("/search", params={"q": text}).text.replace("<wbr>", "")
        assert re.findall(r'<a href="/checkpoints/[^"]+">([^<]+)</a>', page)[:1] == [place], text
    for text, steps in {
        "step-20": {20},
        "20": {20, 200},
        "%": {7},
        "p_od": set(),
        "qwen3 prod": set(),
    }.items():
        rows = client.get("/api/v1/search", params={"q": text}).json()["checkpoints"]
        assert {row["row"]["step"] for row in rows} == steps, text
    runs = client.get("/api/v1/search?q=WEN").json()["runs"]
    assert [run["name"] for run in runs] == ["Qwen3"]


def test_the_step_that_is_meant_and_what_is_current_come_first(either: Catalog, facts: Facts) -> None:
    for step in (20, 200, 201):
        either.record_validation(facts(f"/r/step-{step}", run="r", step=step))
    either.record_validation(facts("/r/step-20", run="r", step=20, manifest_digest="f" * 64))
    rows = browser(either).get("/api/v1/search?q=step-20").json()["checkpoints"]
    listed = [(row["row"]["step"], row["row"]["state"]) for row in rows]
    assert listed == [(20, "present"), (20, "replaced"), (201, "present"), (200, "present")]


def test_a_list_that_is_cut_says_so(remembered: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "MOST", 3)
    client = browser(remembered)
    answer = client.get("/api/v1/search?q=data").json()
    assert (len(answer["checkpoints"]), answer["more"]) == (3, True)
    assert "There are more than these 3" in client.get("/search?q=data").text
    assert client.get("/api/v1/search?q=fina").json()["more"] is False


def test_no_text_is_a_pattern_or_an_error(remembered: Catalog) -> None:
    client = browser(remembered)
    for text in ("' OR 1=1 --", "\\", "%" * 900, "a " * 499, "*", "\x00", "<b>", "step-" + "9" * 40):
        answer = client.get("/api/v1/search", params={"q": text})
        assert (answer.status_code, answer.json().get("checkpoints")) == (200, []), text
        page = client.get("/search", params={"q": text})
        assert page.status_code == 200
        assert "<b>" not in page.text
