"""Metrics: what monitors read of a catalog on both databases, of the receiver and of a worker."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
import webhooks
from bigcatalog import fill
from paths import ROOT
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from ckptcore.catalog import open_catalog, upgrade
from ckptcore.catalog.figures import figures
from ckptcore.catalog.queues import NewEvent, inbox
from ckptcore.errors import CatalogUnavailable
from deployments.metrics import (
    KEEP_SECONDS,
    CatalogMetrics,
    ReceiverMetrics,
    WorkerMetrics,
    registry_of,
    serving,
)
from deployments.receiver.app import make_app
from deployments.receiver.inbox import EventQueues
from deployments.receiver.settings import Sender

DASHBOARD = ROOT / "deployments" / "monitoring" / "grafana.json"
ALERTS = ROOT / "deployments" / "monitoring" / "alerts.yaml"


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def filled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a catalog of 1,000 checkpoints."""
    if request.param == "sqlite":
        url = str(tmp_path_factory.mktemp("metrics") / "catalog.sqlite")
        open_catalog(url).close()
        fill(url, 10, 2, 990)
        yield url
        return
    with request.getfixturevalue("postgres").database() as url:
        upgrade(url)
        fill(url, 10, 2, 990)
        yield url


def asked(port: int) -> dict[tuple[str, ...], float]:
    """Return the samples: (name, label values...) -> value."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_numbers_are_those_of_the_rows(filled: str) -> None:
    with open_catalog(filled) as catalog:
        with catalog.queueing() as conn:
            long_ago = datetime.now(UTC) - timedelta(hours=2)
            inbox.accept(conn, long_ago, NewEvent("slurm", f"e-{filled}", uri="/runs/a"))
        with catalog.reading() as conn:
            rows = dict(conn.execute(sa.text("SELECT state, count(*) FROM checkpoint GROUP BY state")).all())
            unproven = conn.execute(
                sa.text("SELECT count(*) FROM checkpoint WHERE verified_at IS NULL AND state = 'damaged'")
            ).scalar_one()
    with serving(registry_of(filled), "127.0.0.1", 0) as port:
        found = asked(port)
    assert found["ckptcore_catalog_up",] == 1
    assert found["ckptcore_inbox_events", "waiting"] == 1
    assert 7200 <= found["ckptcore_inbox_oldest_seconds",] < 7300
    for state in ("present", "damaged", "replaced"):
        counted = sum(found[name] for name in found if name[0] == "ckptcore_checkpoints" and name[2] == state)
        assert counted == rows[state] > 0
    assert found["ckptcore_conversions_total", "succeeded", "export"] == 495
    assert found["ckptcore_conversions_total", "failed", "export"] == 5
    assert found["ckptcore_conversion_failures_total", "damaged"] == 5
    assert found["ckptcore_conversion_written_bytes_total", "export"] == 495 * 10**9
    assert found["ckptcore_conversion_seconds_total", "export"] == pytest.approx(495 * 30, rel=1e-6)
    assert found["ckptcore_checkpoints_unproven",] == unproven > 0
    assert found["ckptcore_oldest_unproven_seconds",] > 0
    assert found["ckptcore_open_findings", "error"] == unproven
    assert found["ckptcore_catalog_bytes",] > 1 << 16


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("checkpoint", "total_bytes", "x"),
        ("checkpoint", "total_bytes", "1e999"),
        ("checkpoint", "verified_at", "yesterday"),
        ("checkpoint", "created_at", "yesterday"),
        ("conversion", "bytes_out", "1e999"),
        ("conversion", "ended_at", "yesterday"),
        ("inbox", "received_at", "yesterday"),
        ("checkpoint", "state", b"\xff"),
        ("conversion", "verb", b"\xff"),
    ],
)
def test_an_odd_row_costs_no_number_of_others(tmp_path: Path, table: str, column: str, value: object) -> None:
    url = str(tmp_path / "catalog.sqlite")
    open_catalog(url).close()
    fill(url, 2, 2, 10)
    with open_catalog(url) as catalog:
        with catalog.queueing() as conn:
            inbox.accept(conn, datetime.now(UTC), NewEvent("slurm", "e", uri="/runs/a"))
        with catalog.writing() as conn:
            change = f"UPDATE {table} SET {column} = :v WHERE id = (SELECT max(id) FROM {table})"
            conn.execute(sa.text(change), {"v": value})
    with serving(registry_of(url), "127.0.0.1", 0) as port:
        found = asked(port)
    assert found["ckptcore_catalog_up",] == 1
    assert found["ckptcore_inbox_events", "waiting"] == 1
    assert sum(n for name, n in found.items() if name[0] == "ckptcore_checkpoints") >= 10


# Values of two rows that look alike when they are shortened, or read as text.
ALIKE = {
    "long ones": (b"\xff" * 100 + b"a", b"\xff" * 100 + b"b"),
    "long texts": ("x" * 5000 + "a", "x" * 5000 + "b"),
    "a text of bytes": (b"\xff", repr(b"\xff")),
    "none": (None, "unknown"),
}


@pytest.mark.parametrize("values", ALIKE.values(), ids=ALIKE)
def test_two_odd_values_have_two_labels(tmp_path: Path, values: tuple[Any, Any]) -> None:
    url = str(tmp_path / "catalog.sqlite")
    open_catalog(url).close()
    fill(url, 2, 2, 10)
    names = {"conversion.verb", "conversion.error_code", "checkpoint.state"}
    with open_catalog(url) as catalog, catalog.writing() as conn:
        conn.execute(sa.text("UPDATE conversion SET state = 'failed'"))
        for name in sorted(names if values[0] is not None else {"conversion.error_code"}):
            table, column = name.split(".")
            for n, value in enumerate(values, 1):
                change = f"UPDATE {table} SET {column} = :v WHERE id % 2 = {n - 1}"
                conn.execute(sa.text(change), {"v": value})
    with serving(registry_of(url), "127.0.0.1", 0) as port:
        found = asked(port)
    for metric, table in (
        ("ckptcore_checkpoints", "checkpoint"),
        ("ckptcore_conversions_total", "conversion"),
        ("ckptcore_conversion_failures_total", "conversion"),
    ):
        numbers = [n for name, n in found.items() if name[0] == metric]
        with open_catalog(url) as catalog, catalog.reading() as conn:
            rows = conn.execute(sa.text(f"SELECT count(*) FROM {table}")).scalar_one()
        assert sum(numbers) == rows, metric
    assert max(len(label) for name in found for label in name) < 200


def test_a_catalog_that_is_away_is_zero_until_it_answers() -> None:
    now, errors = [0.0], [True]

    def read() -> object:
        if errors[0]:
            raise CatalogUnavailable("connection refused by postgresql://me:secret@db/x")
        with open_catalog() as catalog, catalog.reading() as conn:
            return figures(conn, datetime.now(UTC))

    own = CollectorRegistry()
    own.register(CatalogMetrics(read, lambda: now[0]))  # type: ignore[arg-type]
    assert own.get_sample_value("ckptcore_catalog_up") == 0
    errors[0] = False
    assert own.get_sample_value("ckptcore_catalog_up") == 0  # kept
    now[0] += KEEP_SECONDS
    assert own.get_sample_value("ckptcore_catalog_up") == 1
    assert own.get_sample_value("ckptcore_inbox_oldest_seconds") == 0
    errors[0] = True
    now[0] += KEEP_SECONDS
    assert own.get_sample_value("ckptcore_catalog_up") == 0
    assert own.get_sample_value("ckptcore_inbox_oldest_seconds") is None


def test_the_receiver_counts_requests_by_their_result(box: EventQueues, senders: dict[str, Sender]) -> None:
    own, trouble = CollectorRegistry(), [""]
    counted = ReceiverMetrics(own, lambda: trouble[0])
    app = make_app(senders, box, clock=lambda: webhooks.NOW, count=counted.count)
    hook = webhooks.HOOKS["bearer"]
    with TestClient(app) as client:
        for _ in range(2):
            client.post(hook.path, content=hook.body, headers=hook.headers | {"idempotency-key": "k"})
        client.post(hook.path, content=hook.body, headers={"content-type": "application/json"})
        for name in ("a", "b"):  # names that nobody configured do not become labels
            client.post(f"/hooks/{name}", content=b"{}", headers={"content-type": "application/json"})
    total = "ckptcore_receiver_requests_total"
    found = {
        (s.labels["source"], s.labels["result"]): s.value
        for family in own.collect()
        for s in family.samples
        if s.name == total
    }
    assert found[("slurm", "accepted")] == 1
    assert found[("slurm", "duplicate")] == 1
    assert found[("unknown", "unknown-source")] == 2
    assert sum(found.values()) == 5
    assert own.get_sample_value("ckptcore_receiver_starting") == 1
    trouble[0] = "start: Away"
    assert own.get_sample_value("ckptcore_receiver_starting") == 0


def test_a_worker_reports_its_processes() -> None:
    import os

    own = CollectorRegistry()
    WorkerMetrics(own, lambda: [os.getpid(), 2**22 + 1])
    assert own.get_sample_value("ckptcore_worker_processes") == 2
    assert (own.get_sample_value("ckptcore_worker_resident_bytes") or 0) > 10 << 20


@pytest.mark.parametrize("file", [DASHBOARD, ALERTS], ids=lambda path: path.name)
def test_every_metric_of_the_files_exists(file: Path, filled: str) -> None:
    own = registry_of(filled)
    ReceiverMetrics(own, lambda: "")
    WorkerMetrics(own, list)
    with (
        open_catalog(filled) as catalog,
        catalog.writing() as conn,
    ):  # one that runs, so that each has a sample
        conn.execute(sa.text("UPDATE conversion SET state = 'running' WHERE id = 1"))
    known = {s.name for family in own.collect() for s in family.samples} | {
        f"{family.name}_total" for family in own.collect() if family.type == "counter"
    }
    used = set(re.findall(r"\bckptcore_[a-z_]+", file.read_text()))
    assert used
    assert used <= known
    if file is DASHBOARD:
        panels = json.loads(file.read_text())["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        assert {
            s.name for f in own.collect() for s in f.samples if s.name.startswith("ckptcore_")
        } - used <= {"ckptcore_receiver_requests_created", "ckptcore_catalog_read_seconds"}


@pytest.mark.parametrize(
    "accept", ["[", "\xff", "application/openmetrics-text; version=x", "text/plain;version=1e9"]
)
def test_an_odd_accept_header_gets_the_usual_format(accept: str) -> None:
    with serving(CollectorRegistry(), "127.0.0.1", 0) as port:
        headers = {"accept": accept.encode("latin-1")}
        answer = httpx.get(f"http://127.0.0.1:{port}/metrics", headers=headers)
    assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (200, "text/plain")
