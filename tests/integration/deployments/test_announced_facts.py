"""Facts about the training in a webhook reach the flow's parameters, and never cost the event its run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import webhooks
from fastapi.testclient import TestClient

from ckptcore.catalog import open_catalog
from ckptcore.page.app import make_page
from ckptcore.page.settings import PageTable, access_of
from deployments.receiver.app import make_app
from deployments.receiver.dispatch import work
from deployments.receiver.inbox import EventQueues
from deployments.receiver.settings import Sender, load

META = {"metrics": {"loss": 2.5, "bad": "low"}, "commit": "3f9a", "hub_token": "secret-word"}
EXPECTED = {"metrics": {"loss": {"value": 2.5}}, "git_commit": "3f9a", "extra": {"hub_token": "..."}}
TAGS = {"ckptcore.metrics.loss": "2.5", "ckptcore.git_commit": "3f9a", "step": "7", "ckptcore.hub_token": "x"}


class _Runs:
    def __init__(self) -> None:
        self.parameters: list[Mapping[str, Any]] = []

    def start(
        self, deployment: str, parameters: Mapping[str, Any], *, key: str, name: str, tags: Sequence[str]
    ) -> str:
        self.parameters.append(parameters)
        return "run-1"

    def tell(self, event: str, uri: str, payload: Mapping[str, Any]) -> None:
        """Nobody listens."""


def with_meta(kind: str, meta: Any) -> webhooks.Hook:
    hook = webhooks.HOOKS[kind]
    event: dict[str, Any] = dict(hook.event)
    if kind == "mlflow":
        event["data"] = {**event["data"], "tags": TAGS}
    elif kind == "github":
        event["client_payload"] = {**event["client_payload"], "meta": meta}
    elif "data" in event and kind != "cloudevents-binary":
        event["data"] = {**event["data"], "meta": meta}
    else:
        event["meta"] = meta
    return hook.but(event=event)


@pytest.mark.parametrize(
    "kind",
    [
        "standard-webhooks",
        "cloudevents-structured",
        "cloudevents-binary",
        "mlflow",
        "wandb",
        "github",
        "bearer",
    ],
)
def test_facts_of_every_sender_reach_the_flow(
    kind: str, box: EventQueues, url: str, senders: dict[str, Sender]
) -> None:
    app = make_app(senders, box, clock=lambda: webhooks.NOW)
    hook = with_meta(kind, META)
    with TestClient(app) as client:
        answer = client.post(hook.path, content=hook.body, headers=hook.headers)
    assert answer.status_code == 202
    if kind != "mlflow":
        assert answer.json()["left_out"] == ["metrics.bad must be a number (got 'low')"]
    runs = _Runs()
    own = EventQueues(url)
    work(own, runs, senders, {}, datetime.now(UTC))  # type: ignore[arg-type]  # only what is called
    own.close()
    assert runs.parameters[0]["meta"] == EXPECTED


@pytest.mark.parametrize("meta", [[], "text", 7, {"metrics": []}, {"config": {"x": "y" * 3000}, "user": {}}])
def test_odd_facts_do_not_cost_the_event(
    meta: Any, box: EventQueues, url: str, senders: dict[str, Sender]
) -> None:
    app = make_app(senders, box, clock=lambda: webhooks.NOW)
    hook = with_meta("standard-webhooks", meta)
    with TestClient(app) as client:
        answer = client.post(hook.path, content=hook.body, headers=hook.headers)
    assert (answer.status_code, answer.json()["status"]) == (202, "accepted")
    assert len(answer.json()["left_out"]) == 1


def test_the_page_of_the_receiver_is_off_unless_configured(
    box: EventQueues, url: str, senders: dict[str, Sender], tmp_path: Path
) -> None:
    with TestClient(make_app(senders, box)) as client:
        assert client.get("/catalog/").status_code == 404
    text = webhooks.CONFIG + '\n[page]\nhosts = ["testserver"]\ntokens = { ada = "TOKEN" }\n'
    (tmp_path / "receiver.toml").write_text(text)
    settings, _ = load(tmp_path / "receiver.toml", webhooks.SECRETS)
    assert settings.page == PageTable(hosts=["testserver"], tokens={"ada": "TOKEN"})
    with open_catalog(url) as catalog:
        page = make_page(catalog, access_of(settings.page, webhooks.SECRETS), settings.page.path)
        app = make_app(senders, box, page=(settings.page.path, page))
        with TestClient(app, client=("127.0.0.1", 5), follow_redirects=False) as client:
            assert client.get("/catalog/").status_code == 401
            assert client.get("/catalog/api/v1/runs").json()["error"] == "refused"
            assert client.get("/healthz").headers.get("content-security-policy") is None
            began = client.post("/catalog/login", data={"token": webhooks.TOKEN})
            assert (began.status_code, began.headers["location"]) == (303, "/catalog/")
            assert 'href="/catalog/static/page.css"' in client.get("/catalog/").text
            assert client.get("/catalog/static/page.css").status_code == 200
            assert client.get("/catalog/", headers={"host": "evil.example"}).status_code == 421
