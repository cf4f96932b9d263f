"""An odd row of the catalog is one odd row of a page: it is shown with its finding, beside the others."""

from __future__ import annotations

import html
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from catalog_page import TOKEN, Facts, browser, text_of
from fastapi.testclient import TestClient
from postgres import Server
from sqlalchemy import text

from ckptcore.catalog import ConversionFacts, open_catalog, sightings
from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.catalog import Catalog
from ckptcore.catalog.queues import NewEvent, Queue, inbox, outbox
from ckptcore.catalog.sightings import SightingRow
from ckptcore.catalog.training import ANNOUNCED, read_facts
from ckptcore.page import changes

NOW = datetime(2026, 3, 1, tzinfo=UTC)
LOGIN = {"authorization": f"Bearer {TOKEN}"}
# (table, column, value): by default the first of each table, all at once.
ODD = [
    ("checkpoint", "total_bytes", "x"),
    ("checkpoint", "origin", "{"),
    ("checkpoint", "origin", "[]"),
    ("checkpoint", "created_at", "x"),
    ("checkpoint", "verified_at", "yesterday"),
    ("checkpoint", "step", "later"),
    ("checkpoint", "dtypes", b"\xff"),
    ("conversion", "request", "{"),
    ("conversion", "timings", '{"write": 1e999}'),
    ("conversion", "export_checks", '{"names": {"verdict": 3}}'),
    ("conversion", "started_at", "infinity"),
    ("conversion", "bytes_out", "x"),
    ("tensor", "shape", "[1e999]"),
    ("tensor", "shape", "5"),
    ("tensor", "shape", '["x"]'),
    ("tensor", "nbytes", "x"),
    ("checkpoint_file", "nbytes", "x"),
    ("inbox", "received_at", "x"),
    ("inbox", "step", "x"),
    ("inbox", "attempts", "x"),
    ("audit", "detail", "{"),
    ("audit", "at", "BC"),
    ("aliases", "version", "x"),
    ("aliases", "updated_at", "x"),
    ("metric", "value", "x"),
    ("outbox", "body", "{"),
    ("outbox", "created_at", "x"),
    ("watched_roots", "target", "{"),
    ("watched_roots", "swept_at", "x"),
    ("sightings", "findings", "{"),
    ("sightings", "changed_at", "x"),
]
ODD_ON_POSTGRESQL = [
    ("checkpoint", "origin", "{"),
    ("checkpoint", "created_at", "infinity"),
    ("conversion", "started_at", "0044-03-15 BC"),
    ("inbox", "received_at", "-infinity"),
    ("audit", "detail", "{"),
]
# Table -> where its rows are listed, and what the list has of row n.
LISTS = {
    "checkpoint": (
        ["/checkpoints", "/api/v1/checkpoints", "/runs/llama", "/api/v1/steps?run=llama"],
        "/r/llama/step-{n}",
    ),
    "conversion": (["/conversions", "/api/v1/conversions"], "/out/llama/{n}"),
    "tensor": (["/checkpoints/{ref}", "/api/v1/checkpoints/{ref}/tensors"], "layers.{n}.weight"),
    "checkpoint_file": (["/api/v1/checkpoints/{ref}/files"], "file-{n}"),
    "inbox": (["/inbox", "/api/v1/inbox"], "/announced/{n}"),
    "audit": (["/audit", "/api/v1/audit"], "name-{n}"),
    "aliases": (["/aliases", "/api/v1/aliases"], "name-{n}"),
    "outbox": (["/outbox", "/api/v1/outbox"], "type-{n}"),
    "watched_roots": (["/roots", "/api/v1/roots"], "root-{n}"),
    "sightings": (["/roots/root-0", "/api/v1/roots/root-0"], "/seen/step-{n}"),
    "metric": (["/best?metric=loss", "/api/v1/best?metric=loss"], "/r/llama/step-{n}"),
}


def fill(catalog: Catalog, facts: Facts) -> str:
    """Fill a catalog with three rows in each list; return the id of a checkpoint."""
    for n in range(3):
        training, _ = read_facts({"metrics": {"loss": 1.5 + n}})
        files = [(f"file-{i}", 1, None) for i in range(3)]
        source = facts(
            f"/r/llama/step-{n}", run="llama", step=n, training=((ANNOUNCED, training),), files=files
        )
        derived = facts(f"/out/llama/{n}", content=f"e{n}", run="llama", step=n)
        conversion = catalog.begin(
            {"verb": "export"},
            source_uri=source.uri,
            destination_uri=derived.uri,
            verb="export",
            tool_version="1",
        )
        catalog.succeed(
            conversion, ConversionFacts("p" * 64, 1, 2, 3, {"write": 0.5}), source=source, derived=derived
        )
        changes.set_alias(catalog, "ada", source.uri, f"name-{n}", None, True)
        with catalog.queueing() as conn:
            inbox.accept(conn, NOW, NewEvent("s", f"e{n}", uri=f"/announced/{n}", body="{}"))
            outbox.put(conn, NOW, "team", f"filled-{n}", type=f"type-{n}", body={})
        with catalog.writing() as conn:
            roots.add(conn, NOW, f"root-{n}", f"/seen{'' if n == 0 else n}")
            seen = ("/seen", n, "writing", "s", None, None, (), NOW, NOW, NOW)
            sightings.note(conn, SightingRow(f"/seen/step-{n}", *seen))
    return catalog.show("/r/llama/step-0").checkpoint.id


@contextmanager
def odd(catalog: Catalog, table: str, column: str, value: Any) -> Iterator[None]:
    """Give the second row of a list a value that ours cannot be, while the block runs."""
    of_these = {
        "tensor": " WHERE checkpoint_id = 1",
        "checkpoint_file": " WHERE checkpoint_id = 1",
        "checkpoint": " WHERE uri LIKE '/r/llama/%'",
    }
    with catalog.writing() as conn:
        key = "rowid" if conn.dialect.name == "sqlite" else "ctid"
        rows = f"FROM {table}{of_these.get(table, '')} ORDER BY {key} LIMIT 1 OFFSET 1"
        row, before = conn.execute(text(f"SELECT {key}, {column} {rows}")).one()
        change = f"UPDATE {table} SET {column} = :value WHERE {key} = :row"
        if key == "ctid":
            change = change.replace(":row", f"(SELECT ctid {rows})").replace(":value", f"'{value}'")
        conn.execute(text(change), {"value": value, "row": row} if key == "rowid" else {})
    yield
    if key == "rowid":
        with catalog.writing() as conn:
            conn.execute(text(change), {"value": before, "row": row})


def require_others_listed(client: TestClient, table: str, column: str, ref: str) -> None:
    """Require that each list of a table shows its odd row with a finding, and the others."""
    paths, name = LISTS[table]
    for path in paths:
        answer = client.get(path.format(ref=ref), headers=LOGIN)
        assert answer.status_code == 200, (path, answer.text)
        page = html.unescape(text_of(answer.text))
        for n in (0, 2):
            assert name.format(n=n) in page, path
        assert ("trouble" if "/api/" in path else "cannot be used: ") in page, (path, column)
        assert " holds " in page, (path, column)


def pages_of(catalog: Catalog) -> list[str]:
    """Return the paths of lists, and of every checkpoint and conversion."""
    with catalog.reading() as conn:
        ids = conn.execute(text("SELECT uuid FROM checkpoint ORDER BY id")).scalars().all()
        conversions = conn.execute(text("SELECT uuid FROM conversion")).scalars().all()
    lists = [
        "/",
        "/checkpoints",
        "/conversions",
        "/inbox",
        "/audit",
        "/runs/llama",
        "/retire",
        "/aliases",
        "/outbox",
        "/roots",
    ]
    lists += ["/roots/root-0", "/aliases/name-1"]
    asked = ["/search?q=runs", "/search?q=/r/llama/step-1", "/best?metric=loss"]
    apis = ["runs", "steps?run=llama", "checkpoints", "conversions", "inbox", "audit", "aliases"]
    parts = ("", "/tensors", "/files", "/counts", "/lineage", "/shards")
    return [
        *lists,
        *asked,
        *(f"/conversions/{each}" for each in conversions),
        *(f"/checkpoints/{each}{more}" for each in ids for more in ("", "/shards", "?tensors=layers")),
        f"/compare?left={ids[0]}&right={ids[1]}",
        *(f"/api/v1/{api}" for api in apis),
        *(f"/api/v1/checkpoints/{ids[2]}{part}" for part in parts),
    ]


def rounds(cases: list[tuple[str, str, Any]]) -> list[list[tuple[str, str, Any]]]:
    """Return cases so that each round has one of each table: the nth of those that have so many."""
    of_table: dict[str, list[tuple[str, str, Any]]] = {}
    for case in cases:
        of_table.setdefault(case[0], []).append(case)
    most = max(map(len, of_table.values()))
    return [[of[n] for of in of_table.values() if n < len(of)] for n in range(most)]


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in range(1, 7))])
def test_every_page_shows_the_others(catalog: Catalog, facts: Facts, number: int) -> None:
    ref = fill(catalog, facts)
    client = browser(catalog)
    before = {path: client.get(path, headers=LOGIN).status_code for path in pages_of(catalog)}
    assert {status for path, status in before.items() if "/shards" not in path} == {200}
    with ExitStack() as stack:
        for table, column, value in rounds(ODD)[number]:
            stack.enter_context(odd(catalog, table, column, value))
        for table, column, _ in rounds(ODD)[number]:
            require_others_listed(client, table, column, ref)
        for path, status in before.items():
            answer = client.get(path, headers=LOGIN)
            assert answer.status_code == status, (path, answer.text[:500])


def test_every_odd_value_has_a_round() -> None:
    assert sorted(repr(case) for cases in rounds(ODD) for case in cases) == sorted(map(repr, ODD))
    assert len(rounds(ODD)) == 7


def test_every_page_of_postgresql_shows_the_others(facts: Facts, postgres: Server, upgraded: str) -> None:
    with postgres.database(upgraded) as url, open_catalog(url) as catalog:
        ref = fill(catalog, facts)
        client = browser(catalog)
        for table, column, value in ODD_ON_POSTGRESQL:
            with odd(catalog, table, column, value):
                require_others_listed(client, table, column, ref)


def test_the_page_of_a_checkpoint_names_the_odd_value(catalog: Catalog, facts: Facts) -> None:
    fill(catalog, facts)
    client = browser(catalog)
    ref = catalog.show("/r/llama/step-1").checkpoint.id
    with odd(catalog, "checkpoint", "total_bytes", "x"):
        assert "nbytes holds 'x', not an integer" in text_of(client.get(f"/checkpoints/{ref}").text)
        rows = client.get("/api/v1/checkpoints").json()["rows"]
        assert [row["checkpoint"]["id"] for row in rows if "trouble" in row["checkpoint"]] == [ref]


@pytest.mark.parametrize("queue", [inbox, outbox], ids=["inbox", "outbox"])
def test_an_odd_row_of_a_queue_fails_and_the_others_are_taken(
    queue: Queue[Any], catalog: Catalog, facts: Facts
) -> None:
    fill(catalog, facts)
    table, column, value = ("inbox", "step", "x") if queue is inbox else ("outbox", "body", "{")
    with odd(catalog, table, column, value):
        with catalog.queueing() as conn:
            assert len(queue.take(conn, NOW, limit=9)) == 2
            assert queue.take(conn, NOW, limit=9) == []  # it is not due again and again
        with catalog.reading() as conn:
            (failed,) = queue.listed(conn, "failed")
        assert f"{column} holds" in (failed.error_message or "")


def test_what_nobody_foresaw_ends_one_request_with_the_headers_of_every_answer(
    catalog: Catalog, facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(catalog, facts)
    client = browser(catalog)
    with monkeypatch.context() as patch:
        patch.setattr("ckptcore.catalog.browse.checkpoints", lambda *_, **__: 1 / 0)
        for path in ("/checkpoints", "/api/v1/checkpoints"):
            answer = client.get(path)
            assert (answer.status_code, "ZeroDivisionError" in answer.text) == (500, False)
            assert answer.text.startswith("internal: ")
            assert answer.headers["content-security-policy"].startswith("default-src 'self'")
    assert client.get("/checkpoints").status_code == 200
