"""The pages of aliases, roots and messages: what they show, what waits and why, and what they change."""

from __future__ import annotations

import html
import re
from datetime import UTC, datetime, timedelta

import pytest
from catalog_page import TOKEN, Facts, browser, text_of
from fastapi.testclient import TestClient

from ckptcore.catalog import ConversionFacts, claims, sightings
from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.catalog import Catalog
from ckptcore.catalog.claims import Key
from ckptcore.catalog.queues import NewEvent, inbox, outbox
from ckptcore.catalog.sightings import Condition, SightingRow
from ckptcore.errors import finding
from ckptcore.page import changes
from ckptcore.page.app import make_page

NOW = datetime(2026, 3, 1, tzinfo=UTC)
LOGIN = {"authorization": f"Bearer {TOKEN}"}
EVIL = "<script>alert(1)</script>\x1b[31m\u202egnp"
RUN = "0f3e2d1c-1111-2222-3333-444455556666"


def log_in(client: TestClient) -> str:
    client.post("/login", data={"token": TOKEN})
    form = re.search(r'name="csrf" value="([0-9a-f]{64})"', client.get("/").text)
    assert form is not None
    return form[1]


@pytest.fixture
def promoted(either: Catalog, facts: Facts) -> dict[str, str]:
    """Two exports under one alias, the second after the first; only the first one is proven."""
    ids = {}
    for step in (10, 20):
        source = facts(f"/r/step-{step}", run="r", step=step)
        files = [("README.md", 1, None), ("config.json", 1, None)]
        export = facts(f"/out/{step}", content=f"e{step}", files=files, run="r", step=step, verified="bytes")
        begun = either.begin(
            {"verb": "export"},
            source_uri=source.uri,
            destination_uri=export.uri,
            verb="export",
            tool_version="1",
        )
        ids[f"export {step}"] = either.succeed(
            begun, ConversionFacts("p" * 64, 1, 2, 3, {}), source=source, derived=export
        )
        ids[f"conversion {step}"] = begun
    either.record_verdict(ids["conversion 10"], [("values", "ok", "all equal")])
    changes.set_alias(either, "ada", ids["export 10"], "chat/prod", None)
    changes.set_alias(either, "bob", ids["export 20"], "chat/prod", None, True)
    return ids


def test_an_alias_has_its_history_objections_and_a_rollback(
    either: Catalog, promoted: dict[str, str]
) -> None:
    client = browser(either)
    listed = text_of(client.get("/aliases?part=PRO").text)
    assert "chat/prod" in listed
    assert "nothing has proved the export /out/20" in listed
    assert "No alias has this" in client.get("/aliases?part=p_od").text
    address = "/aliases/chat%2Fprod"
    page = text_of(client.get(address).text)
    for text in ("bob", "ada", "nothing has proved the export", "verify-export", "/out/10"):
        assert text in page, text
    answer = client.get("/api/v1/aliases/chat%2Fprod").json()
    assert (answer["alias"]["version"], answer["before"]) == (2, promoted["export 10"])
    assert "verify-export" in answer["objection"]["step"]
    assert [change["actor"] for change in answer["history"]] == ["bob", "ada"]

    form = {"name": "chat/prod", "expect": promoted["export 20"]}
    assert client.post("/aliases/rollback", data=form).status_code == 401
    form["csrf"] = log_in(client)
    assert f'value="{promoted["export 20"]}"' in client.get(address).text
    stale = client.post("/aliases/rollback", data=form | {"expect": promoted["export 10"]})
    assert stale.status_code == 409
    moved = client.post("/aliases/rollback", data=form)
    assert (moved.status_code, moved.headers["location"]) == (303, "/aliases/chat%2Fprod?done=rollback")
    assert "The alias was rolled back" in client.get(moved.headers["location"]).text
    # Back to what is not proven: refused by the gate, and done if forced.
    body = {"name": "chat/prod"}
    refused = client.post("/api/v1/aliases/rollback", json=body, headers=LOGIN)
    assert (refused.status_code, "--force" in refused.json()["hint"]) == (409, True)
    assert (
        client.post("/api/v1/aliases/rollback", json=body | {"force": True}, headers=LOGIN).status_code == 200
    )
    assert client.get("/aliases/nobody").status_code == 404
    assert client.get("/api/v1/aliases/nobody").status_code == 404


def test_the_alias_form_is_above_the_tensors_beside_the_gate_s_objection(
    either: Catalog, promoted: dict[str, str]
) -> None:
    client = browser(either)
    log_in(client)
    page = client.get(f"/checkpoints/{promoted['export 20']}").text
    assert page.index('name="force"') < page.index('id="tensors"')
    assert "prove it: ckptcore verify-export" in text_of(page)
    assert "is refused" not in client.get(f"/checkpoints/{promoted['export 10']}").text


@pytest.fixture
def watched(either: Catalog) -> Catalog:
    """A root with a converted step, a failed, an open and a broken one, and an event that waits."""
    with either.writing() as conn:
        roots.add(conn, NOW, "runs of ada", "/w", targets=[{"verb": "export"}], retention={"keep_last": 2})
        roots.swept(conn, NOW, "runs of ada", "1 broken, 1 converted")
        broken = (finding("missing-file", "files", "rank3.distcp is not there", file="rank3.distcp"),)
        for step, state in ((1, "complete"), (2, "complete"), (3, "complete"), (4, "broken"), (5, "writing")):
            digest = f"d{step}" if state == "complete" else None
            found = broken if state == "broken" else ()
            seen = SightingRow(
                f"/w/step-{step}", "/w", step, Condition(state), "s", digest, None, found, NOW, NOW, NOW
            )
            sightings.note(conn, seen)
        for step in (1, 2):
            row = claims.take(conn, NOW, Key(f"d{step}", f"/o/{step}", "o"), f"/w/step-{step}", "host 7 ab")
            if step == 1:
                claims.done(conn, NOW, row)
            else:
                claims.failed(conn, NOW, row, "out-of-space", "no space left in /o")
    with either.queueing() as conn:
        inbox.accept(conn, NOW, NewEvent("hooks", "e", uri="/w/step-6", step=6, body="{}"))
        [event] = inbox.take(conn, NOW, limit=1)
        inbox.later(conn, event, NOW + timedelta(minutes=1), "not-complete: .metadata is missing")
    return either


def test_a_root_says_what_waits_and_why(watched: Catalog) -> None:
    client = browser(watched)
    listed = text_of(client.get("/roots").text)
    assert "runs of ada" in listed
    assert "1 broken, 1 converted" in listed
    page = text_of(client.get("/roots/runs%20of%20ada").text)
    for text in (
        "rank3.distcp is not there",
        "no space left in /o",
        "the next sweep converts it",
        "2 checkpoints",
    ):
        assert text in page, text
    assert "wait until the save has finished" in page  # the next step for the event
    answer = client.get("/api/v1/roots/runs%20of%20ada").json()["status"]
    standings = {each["step"]: each["standing"] for each in answer["waiting"]}
    assert standings == {6: "announced", 5: "writing", 4: "broken", 3: "ready", 2: "failed"}
    assert (answer["newest"]["step"], answer["converted"]["step"], answer["lag"]) == (3, 1, 2)
    [row] = client.get("/api/v1/roots").json()["rows"]
    assert row["counts"] == {"places": {"broken": 1, "complete": 3, "writing": 1}, "newest_step": 5}
    assert client.get("/roots/nobody").status_code == 404
    with watched.writing() as conn:
        roots.enable(conn, "runs of ada", False)
    assert "the root is paused" in client.get("/roots/runs%20of%20ada").text


def test_messages_are_listed_and_retried(either: Catalog) -> None:
    with either.queueing() as conn:
        for key in ("a", "b"):
            outbox.put(conn, NOW, "team", key, type="checkpoint.exported", body={"data": key})
        row = outbox.take(conn, NOW, limit=1)[0]
        outbox.failed(conn, NOW, row, "answered 500")
    client = browser(either)
    page = text_of(client.get("/outbox").text)
    for text in ("checkpoint.exported", "answered 500", "team", "waiting (1)"):
        assert text in page, text
    assert "answered 500" not in client.get("/outbox?state=waiting").text
    assert client.get("/outbox?state=nothing").status_code == 400
    rows = client.get("/api/v1/outbox?state=failed").json()["rows"]
    assert [each["error_message"] for each in rows] == ["answered 500"]
    csrf = log_in(client)
    assert client.post(f"/outbox/{row.id}/retry", data={"csrf": "0" * 64}).status_code == 403
    retried = client.post(f"/outbox/{row.id}/retry", data={"csrf": csrf})
    assert (retried.status_code, retried.headers["location"]) == (303, "/outbox?done=retry")
    assert client.post(f"/api/v1/outbox/{row.id}/retry", headers=LOGIN).status_code in (400, 404)
    assert "outbox.retry" in client.get("/audit").text


def test_no_name_is_markup_or_an_error(either: Catalog) -> None:
    with either.writing() as conn:
        roots.add(conn, NOW, EVIL, f"/w/{EVIL}", targets=[{EVIL: EVIL}])
        roots.swept(conn, NOW, EVIL, EVIL)
        found = (finding("missing-file", "files", EVIL, file=EVIL),)
        seen = SightingRow(f"/w/{EVIL}/1", f"/w/{EVIL}", 1, "broken", "s", None, None, found, NOW, NOW, NOW)
        sightings.note(conn, seen)
    with either.queueing() as conn:
        outbox.put(conn, NOW, EVIL, "k", type=EVIL, body={EVIL: EVIL})
    client = browser(either)
    link = re.search(r'href="(/roots/[^"]+)"', client.get("/roots").text)
    assert link is not None
    for path in ("/roots", html.unescape(link[1]), "/outbox", "/aliases", "/aliases?part=%00&after=%00"):
        answer = client.get(path)
        assert answer.status_code == 200, path
        assert "<script>alert" not in answer.text
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e]", answer.text)
    for path in (
        "/aliases/%00",
        "/roots/%00",
        "/api/v1/aliases/%00",
        "/api/v1/roots/%00",
        "/aliases/%3Cb%3E",
    ):
        answer = client.get(path)
        assert answer.status_code == 404, path
        assert "<b>" not in answer.text


def test_flow_runs_are_links_where_prefect_is_known(catalog: Catalog) -> None:
    from catalog_page import access

    for run, place in ((RUN, "/w/1"), ("javascript:alert(1)", "/w/2")):
        catalog.begin(
            {"verb": "export"},
            source_uri=place,
            destination_uri=f"{place}o",
            verb="export",
            tool_version="1",
            flow_run_id=run,
        )
    for known, linked in (("http://prefect.example/", True), ("", False)):
        client = TestClient(make_page(catalog, access(), prefect_ui=known), client=("127.0.0.1", 5000))
        page = client.get("/conversions").text
        assert (f'href="http://prefect.example/runs/flow-run/{RUN}"' in page) is linked
        assert RUN[:8] in page
        assert 'href="javascript:' not in page


def test_short_texts_of_the_catalog_are_explained(catalog: Catalog) -> None:
    ids = [
        catalog.begin(
            {"verb": "export", "recover": True, "dtype": "bf16", "resume": True},
            source_uri=f"/w/{n}",
            destination_uri=f"/o/{n}",
            verb="export",
            tool_version="1",
        )
        for n in range(2)
    ]
    catalog.fail(ids[0], code="worker-lost", message="the process was ended (SystemExit: 1)")
    client = browser(catalog)
    page = text_of(client.get(f"/conversions/{ids[0]}").text)
    for text in ("--allow-incomplete", "--dtype", "Next: check the workers' logs", "ckptcore validate /w/0"):
        assert text in page, text
    assert "--no-resume" not in page
    assert "Next: check the workers' logs" in text_of(client.get("/conversions").text)
