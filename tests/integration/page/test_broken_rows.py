"""A broken row of the catalog is one row: each list of the page shows the others, and says what is wrong."""

from __future__ import annotations

import html
from datetime import UTC, datetime
from typing import Any

import pytest
import sqlalchemy as sa
from catalog_page import TOKEN, Facts, browser, text_of

from ckptcore.catalog import ConversionFacts, open_catalog, upgrade
from ckptcore.catalog.catalog import Catalog
from ckptcore.catalog.queues import NewEvent, Queue, inbox, outbox
from ckptcore.catalog.training import ANNOUNCED, read_facts
from deployments.page import changes

NOW = datetime(2026, 3, 1, tzinfo=UTC)
LOGIN = {"authorization": f"Bearer {TOKEN}"}
# What is broken (table, column, value), where it is listed, and what else that list shows.
BREAKS = [
    ("checkpoint", "total_bytes", "'x'"),
    ("checkpoint", "origin", "'{'"),
    ("checkpoint", "origin", "'[]'"),
    ("checkpoint", "created_at", "'x'"),
    ("checkpoint", "step", "'x'"),
    ("checkpoint", "dtypes", "x'ff'"),
    ("conversion", "request", "'{'"),
    ("conversion", "timings", "'[1]'"),
    ("conversion", "started_at", "'infinity'"),
    ("conversion", "bytes_out", "'x'"),
    ("tensor", "shape", "'[1e999]'"),
    ("tensor", "shape", "'5'"),
    ("tensor", "nbytes", "'x'"),
    ("checkpoint_file", "nbytes", "'x'"),
    ("inbox", "received_at", "'x'"),
    ("inbox", "step", "'x'"),
    ("audit", "detail", "'{'"),
    ("audit", "at", "'BC'"),
    ("aliases", "version", "'x'"),
    ("aliases", "updated_at", "'x'"),
    ("metric", "value", "'x'"),
]
LISTS = {
    "checkpoint": ["/checkpoints", "/api/v1/checkpoints", "/runs/llama", "/api/v1/steps?run=llama"],
    "conversion": ["/conversions", "/api/v1/conversions"],
    "tensor": ["/checkpoints/{ref}", "/api/v1/checkpoints/{ref}/tensors"],
    "checkpoint_file": ["/api/v1/checkpoints/{ref}/files"],
    "inbox": ["/inbox", "/api/v1/inbox"],
    "audit": ["/audit", "/api/v1/audit"],
    "aliases": ["/api/v1/aliases"],
    "metric": ["/best?metric=loss", "/api/v1/best?metric=loss"],
}
OTHERS = {
    "checkpoint": "/r/llama/step-{n}",
    "conversion": "/out/llama/{n}",
    "tensor": "layers.{n}.weight",
    "checkpoint_file": "file-{n}",
    "inbox": "/announced/{n}",
    "audit": "name-{n}",
    "aliases": "name-{n}",
    "metric": "/r/llama/step-{n}",
}


@pytest.fixture
def ref(catalog: Catalog, facts: Facts) -> str:
    return fill(catalog, facts)


def fill(catalog: Catalog, facts: Facts) -> str:
    """Fill a catalog with three rows in each list; return the id of a checkpoint."""
    for n in range(3):
        known, _ = read_facts({"metrics": {"loss": 1.5 + n}})
        files = [(f"file-{i}", 1, None) for i in range(3)]
        source = facts(f"/r/llama/step-{n}", run="llama", step=n, training=((ANNOUNCED, known),), files=files)
        derived = facts(f"/out/llama/{n}", content=f"e{n}")
        conversion = catalog.begin(
            {"verb": "export"},
            source_uri=source.uri,
            destination_uri=derived.uri,
            verb="export",
            tool_version="1",
        )
        catalog.succeed(conversion, ConversionFacts("p" * 64, 1, 2, 3, {}), source=source, derived=derived)
        changes.set_alias(catalog, "ada", source.uri, f"name-{n}", None)
        with catalog.queueing() as conn:
            inbox.accept(conn, NOW, NewEvent("s", f"e{n}", uri=f"/announced/{n}", body="{}"))
    return catalog.show("/r/llama/step-0").checkpoint.id


def break_row(catalog: Catalog, table: str, column: str, value: str, ref: str) -> None:
    """Give the second row of a list a value that ours cannot be."""
    here = "" if table not in ("tensor", "checkpoint_file") else " WHERE checkpoint_id = 1"
    if table == "checkpoint":
        here = " WHERE uri LIKE '/r/llama/%'"
    with catalog.writing() as conn:
        row = "rowid" if conn.dialect.name == "sqlite" else "ctid"
        second = f"SELECT {row} FROM {table}{here} ORDER BY {row} LIMIT 1 OFFSET 1"
        conn.execute(sa.text(f"UPDATE {table} SET {column} = {value} WHERE {row} = ({second})"))


@pytest.mark.parametrize(("table", "column", "value"), BREAKS)
def test_a_broken_row_is_one_row_of_every_list(
    table: str, column: str, value: str, catalog: Catalog, ref: str
) -> None:
    client = browser(catalog)
    break_row(catalog, table, column, value, ref)
    for path in LISTS[table]:
        answer = client.get(path.format(ref=ref), headers=LOGIN)
        assert answer.status_code == 200, (path, answer.text)
        page = html.unescape(text_of(answer.text))
        for n in (0, 2):
            assert OTHERS[table].format(n=n) in page, path
        assert "cannot be read" in page, path
        assert table in page, path
        if "/api/" in path and (table, column) != ("metric", "value"):
            [broken] = answer.json()["broken"]
            assert (broken["table"], broken["code"]) == (table, "catalog")
            assert broken["hint"]
    # All other pages can be shown, too.
    for path in ("/", "/checkpoints", "/conversions", "/inbox", "/audit", "/best?metric=loss", "/runs/llama"):
        assert client.get(path, headers=LOGIN).status_code == 200, path
    assert client.get("/search?q=/r/llama/step-0", headers=LOGIN).status_code == 200


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("checkpoint", "origin", "'{'"),
        ("checkpoint", "created_at", "'infinity'"),
        ("conversion", "started_at", "'0044-03-15 BC'"),
        ("inbox", "received_at", "'-infinity'"),
        ("audit", "detail", "'{'"),
    ],
)
def test_a_broken_row_of_postgresql_is_one_row(
    table: str, column: str, value: str, facts: Facts, request: pytest.FixtureRequest
) -> None:
    with request.getfixturevalue("postgres").database() as url:
        upgrade(url)
        with open_catalog(url) as catalog:
            ref = fill(catalog, facts)
            test_a_broken_row_is_one_row_of_every_list(table, column, value, catalog, ref)


@pytest.mark.parametrize("queue", [inbox, outbox], ids=["inbox", "outbox"])
def test_a_broken_row_of_a_queue_fails_and_the_others_are_taken(
    queue: Queue[Any], catalog: Catalog, ref: str
) -> None:
    with catalog.queueing() as conn:
        for n in range(3):
            outbox.put(conn, NOW, "team", f"k{n}", type="t", body={"n": n})
    break_row(catalog, *(("inbox", "step", "'x'") if queue is inbox else ("outbox", "body", "'{'")), ref)
    with catalog.queueing() as conn:
        assert len(queue.take(conn, NOW, limit=9)) == 2
        assert queue.take(conn, NOW, limit=9) == []  # it is not due again and again
    with catalog.reading() as conn:
        [broken] = queue.browsed(conn, "failed").broken
        text = f"SELECT error_message FROM {broken.table} WHERE state = 'failed'"
        assert "cannot be read" in conn.execute(sa.text(text)).scalar_one()


def test_what_nobody_foresaw_ends_one_request_with_the_headers_of_every_answer(
    catalog: Catalog, ref: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = browser(catalog)
    with monkeypatch.context() as patch:
        patch.setattr("ckptcore.catalog.browse.checkpoints", lambda *_, **__: 1 / 0)
        for path in ("/checkpoints", "/api/v1/checkpoints"):
            answer = client.get(path)
            assert (answer.status_code, "ZeroDivisionError" in answer.text) == (500, False)
            assert answer.text.startswith("internal: ")
            assert answer.headers["content-security-policy"].startswith("default-src 'self'")
    assert client.get("/checkpoints").status_code == 200
