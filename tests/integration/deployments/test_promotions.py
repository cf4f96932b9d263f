"""Alias changes: whoever makes them, each subscribed target and Prefect learn of each once."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from ckptcore.catalog import CheckpointFacts, open_catalog
from ckptcore.cli.catalog import app as cli
from ckptcore.page.app import make_page
from ckptcore.page.settings import PageAccess
from deployments.receiver.dispatch import PrefectUnavailable, announce_aliases
from deployments.receiver.inbox import EventQueues
from deployments.receiver.settings import PREFECT, NotifyTarget

TOKEN = "token-of-sixteen-and-more"
TARGETS = {
    "registry": NotifyTarget(url="https://r.example/hook", secret="WHSEC", events=["alias.moved"]),
    "both": NotifyTarget(
        url="https://b.example/hook", secret="WHSEC", events=["alias.moved", "alias.removed"]
    ),
    "ends": NotifyTarget(url="https://e.example/hook", secret="WHSEC"),
}


class Events:
    """Prefect's events; error: raised by the next call."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str, Mapping[str, Any]]] = []
        self.error: Exception | None = None

    def tell(self, event: str, uri: str, payload: Mapping[str, Any]) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.sent.append((event, uri, payload))


@pytest.fixture
def checkpoints(url: str) -> list[str]:
    with open_catalog(url) as catalog:
        return [
            catalog.record_validation(
                CheckpointFacts(
                    f"/runs/a/step-{n}", "dcp", str(n) * 64, 8, [], [("f", 8, None)], n, "a", {}, "coverage"
                )
            )
            for n in (1, 2)
        ]


def messages(url: str) -> list[tuple[str, str, dict[str, Any]]]:
    connection = sqlite3.connect(url.removeprefix("sqlite:///"))
    rows = connection.execute("SELECT endpoint, type, body FROM outbox ORDER BY id").fetchall()
    connection.close()
    return [
        (endpoint, type, json.loads(body)["data"]) for endpoint, type, body in rows if endpoint != PREFECT
    ]


def test_changes_by_command_and_page_are_announced_once(
    box: EventQueues, url: str, checkpoints: list[str]
) -> None:
    def run(*arguments: str) -> None:
        assert CliRunner().invoke(cli, [*arguments, "--catalog", url]).exit_code == 0

    first, second = checkpoints
    run("alias", "set", "best", first, "--force")
    access = PageAccess(frozenset({"testserver"}), {TOKEN: "ada"})
    with open_catalog(url) as catalog:
        page = TestClient(make_page(catalog, access), follow_redirects=False)
        headers = {"authorization": f"Bearer {TOKEN}"}
        assert (
            page.post(
                f"/checkpoints/{second}/alias", data={"name": "best", "force": "yes"}, headers=headers
            ).status_code
            == 303
        )
    run("alias", "remove", "best")
    events, other = Events(), EventQueues(url)
    announce_aliases(box, events, TARGETS)  # type: ignore[arg-type]
    for receiver in (box, other):
        assert announce_aliases(receiver, events, TARGETS) == 0  # type: ignore[arg-type]
    other.close()
    found = messages(url)
    assert sorted((endpoint, type) for endpoint, type, _ in found) == [
        ("both", "alias.moved"),
        ("both", "alias.moved"),
        ("both", "alias.removed"),
        ("registry", "alias.moved"),
        ("registry", "alias.moved"),
    ]
    moved = [data for endpoint, type, data in found if endpoint == "registry"]
    assert [(d["checkpoint"], d["before"], d["via"]) for d in moved] == [
        (first, None, "cli"),
        (second, first, "page"),
    ]
    assert moved[1] == moved[1] | {
        "alias": "best",
        "actor": "ada",
        "uri": "/runs/a/step-2",
        "run": "a",
        "step": 2,
        "verified_level": "coverage",
        "export_verdict": None,
        "loadable": None,
    }
    assert [(event, uri) for event, uri, _ in events.sent] == [
        ("ckptcore.alias.moved", "/runs/a/step-1"),
        ("ckptcore.alias.moved", "/runs/a/step-2"),
        ("ckptcore.alias.removed", "/runs/a/step-2"),
    ]


def test_prefect_gets_a_change_once_it_answers(box: EventQueues, url: str, checkpoints: list[str]) -> None:
    with open_catalog(url) as catalog:
        CliRunner().invoke(cli, ["alias", "set", "best", checkpoints[0], "--force", "--catalog", url])
        catalog.close()
    events, now = Events(), datetime.now(UTC)
    events.error = PrefectUnavailable("no answer")
    with pytest.raises(PrefectUnavailable):
        announce_aliases(box, events, TARGETS, now)  # type: ignore[arg-type]
    assert len(messages(url)) == 2  # targets do not wait for Prefect
    assert announce_aliases(box, events, TARGETS, now) == 0  # type: ignore[arg-type]  # not due yet
    assert announce_aliases(box, events, TARGETS, now + timedelta(seconds=5)) == 1  # type: ignore[arg-type]
    assert [event for event, _, _ in events.sent] == ["ckptcore.alias.moved"]


def test_a_change_of_the_day_before_yesterday_is_not_announced(
    box: EventQueues, url: str, checkpoints: list[str]
) -> None:
    CliRunner().invoke(cli, ["alias", "set", "best", checkpoints[0], "--force", "--catalog", url])
    events = Events()
    assert announce_aliases(box, events, TARGETS, datetime.now(UTC) + timedelta(days=2)) == 0  # type: ignore[arg-type]
    assert messages(url) == []
