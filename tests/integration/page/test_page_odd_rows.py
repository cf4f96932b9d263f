"""An odd row of the catalog is one odd row of a page: it is shown with its finding, beside the others."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from catalog_page import Facts, text_of
from fastapi.testclient import TestClient
from sqlalchemy import text

from ckptcore.catalog import ConversionFacts, audit
from ckptcore.catalog.catalog import Catalog
from ckptcore.catalog.queues import NewEvent, inbox

NOW = datetime(2026, 11, 1, tzinfo=UTC)
ODD = [
    ("checkpoint", "total_bytes", "x"),
    ("checkpoint", "num_tensors", "x"),
    ("checkpoint", "created_at", "yesterday"),
    ("checkpoint", "verified_at", "yesterday"),
    ("checkpoint", "step", "later"),
    ("checkpoint", "origin", "{"),
    ("checkpoint", "dtypes", 3),
    ("tensor", "shape", "[1e999]"),
    ("tensor", "shape", '["x"]'),
    ("tensor", "nbytes", "x"),
    ("checkpoint_file", "nbytes", "x"),
    ("conversion", "timings", '{"write": 1e999}'),
    ("conversion", "started_at", "yesterday"),
    ("conversion", "bytes_in", "x"),
    ("conversion", "request", "3"),
    ("conversion", "export_checks", '{"names": {"verdict": 3}}'),
    ("audit", "detail", "{"),
    ("audit", "at", "yesterday"),
    ("inbox", "received_at", "yesterday"),
    ("inbox", "attempts", "x"),
]


@pytest.fixture
def filled(catalog: Catalog, facts: Facts) -> list[str]:
    """Paths of the page that show lists, and every checkpoint and conversion."""
    paths = ["/", "/checkpoints", "/conversions", "/inbox", "/audit", "/runs/r", "/retire", "/search?q=runs"]
    for step in (1, 2):
        begun = catalog.begin(
            request={},
            source_uri=f"/runs/step-{step}",
            destination_uri=f"/out/step-{step}",
            verb="export",
            tool_version="0",
        )
        catalog.succeed(
            begun,
            facts=ConversionFacts("p", 1, 1, None, {"write": 0.5}),
            source=facts(f"/runs/step-{step}", run="r", step=step),
            derived=facts(f"/out/step-{step}", content=str(step), run="r", step=step),
            findings=(),
        )
        paths.append(f"/conversions/{begun}")
    with catalog.queueing() as conn:
        inbox.accept(conn, NOW, NewEvent("s", "1"))
        audit.note(conn, NOW, "a", "b", {"n": 1})
    with catalog.reading() as conn:
        ids = conn.execute(text("SELECT uuid FROM checkpoint ORDER BY id")).scalars().all()
    paths += [f"/checkpoints/{i}{more}" for i in ids for more in ("", "/shards", "?tensors=layers")]
    paths += [f"/compare?left={ids[0]}&right={ids[1]}"]
    apis = ["runs", "steps?run=r", "checkpoints", "conversions", "inbox", "audit"]
    apis += [
        f"checkpoints/{ids[0]}{more}" for more in ("", "/tensors", "/files", "/counts", "/lineage", "/shards")
    ]
    return [*paths, *(f"/api/v1/{api}" for api in apis)]


@pytest.mark.parametrize("cases", [ODD[::5], pytest.param(ODD, marks=pytest.mark.soak)], ids=["some", "all"])
def test_every_page_shows_the_others(
    client: TestClient, catalog: Catalog, filled: list[str], cases: list[tuple[str, str, object]]
) -> None:
    before = {path: client.get(path).status_code for path in filled}
    assert {status for path, status in before.items() if "/shards" not in path} == {200}
    for table, column, value in cases:
        with catalog.writing() as conn:
            rowids = conn.execute(text(f"SELECT rowid, {column} FROM {table} LIMIT 1")).all()
            conn.execute(
                text(f"UPDATE {table} SET {column} = :v WHERE rowid = :r"), {"v": value, "r": rowids[0][0]}
            )
        for path in filled:
            answer = client.get(path)
            assert answer.status_code == before[path], (table, column, path, answer.text[:500])
        with catalog.writing() as conn:
            conn.execute(
                text(f"UPDATE {table} SET {column} = :v WHERE rowid = :r"),
                {"v": rowids[0][1], "r": rowids[0][0]},
            )


def test_the_checkpoints_page_names_the_odd_value(
    client: TestClient, catalog: Catalog, filled: list[str]
) -> None:
    with catalog.writing() as conn:
        uuid = conn.execute(text("SELECT uuid FROM checkpoint ORDER BY id")).scalars().first()
        conn.execute(text("UPDATE checkpoint SET total_bytes = 'x' WHERE uuid = :u"), {"u": uuid})
    assert "nbytes holds 'x', not an integer" in text_of(client.get(f"/checkpoints/{uuid}").text)
    (row,) = [r for r in client.get("/api/v1/checkpoints").json()["rows"] if "trouble" in str(r)]
    assert uuid in str(row)
