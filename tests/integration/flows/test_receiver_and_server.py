"""From a webhook to a run and back: a receiver, a Prefect server and a notified target as processes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import live
import pytest
import webhooks
from standardwebhooks import Webhook

pytestmark = [pytest.mark.xdist_group("prefect"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture
def target() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An address, and the verified messages that arrived there. The first gets the reply 500."""
    messages: list[dict[str, Any]] = []
    tries: list[str] = []

    class Target(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            tries.append(self.headers["webhook-id"])
            if len(tries) > 1:
                messages.append(Webhook(webhooks.WHSEC).verify(body, dict(self.headers.items())))
                assert len(set(tries)) == 1
            self.send_response(500 if len(tries) == 1 else 204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Target)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/hook", messages
    server.shutdown()
    thread.join()
    server.server_close()


def until(what: Callable[[], Any], seconds: float = 240.0) -> Any:
    """The first true result of a function."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "waited for too long"
        time.sleep(0.1)
    return found


def test_an_event_survives_its_receiver_and_its_end_is_notified(
    prefect_api: str, tmp_path: Path, target: tuple[str, list[dict[str, Any]]]
) -> None:
    from prefect.client.orchestration import get_client
    from prefect.states import Completed

    from flows.arrived import arrived

    address, messages = target
    with get_client(sync_client=True) as client:
        flow = client.create_flow_from_name("arrived")
        form = arrived.parameters.model_dump()
        client.create_deployment(flow, name="webhooks", parameter_openapi_schema=form)
    target = f'\n[notify.test]\nurl = "{address}"\nsecret = "WHSEC"\n'
    config = f'deployment = "arrived/webhooks"\n{webhooks.CONFIG}{target}'
    hook = webhooks.HOOKS["bearer"]

    def post(url: str) -> dict[str, str]:
        # With an id of its own: without one it is a new event as soon as the first has a run.
        headers = hook.headers | {"idempotency-key": "job-7-step-7"}
        answer = httpx.post(url + hook.path, content=hook.body, headers=headers)
        assert answer.status_code == 202
        return dict(answer.json())

    # Prefect is down, and then the receiver is killed.
    with live.receiver(tmp_path, config=config) as running:
        first = post(running.url)
        until(lambda: running.rows("error_message")[0][0])
        running.process.kill()
    # The next receiver starts it once, however often the event is repeated.
    with live.receiver(tmp_path, config=config, api=prefect_api) as running:
        repeated = post(running.url)
        assert (repeated["status"], repeated["id"]) == ("duplicate", first["id"])
        run = until(lambda: running.rows("flow_run_id")[0][0])
        repeated = post(running.url)
        assert (repeated["status"], repeated["id"]) == ("duplicate", first["id"])
        with get_client(sync_client=True) as client:
            made = client.read_flow_run(UUID(run))
            assert made.parameters == {
                "source": webhooks.URI,
                "destination": "/exports/llama/step-7",
                "root": "/runs",
                "run": "llama",
                "step": 7,
            }
            assert set(made.tags) >= {"webhook", "source:slurm"}
            assert [r.id for r in client.read_flow_runs() if r.deployment_id == made.deployment_id] == [
                made.id
            ]
            client.set_flow_run_state(made.id, Completed(message="published"), force=True)
        (message,) = until(lambda: messages)
    with get_client(sync_client=True) as client:
        ours = {
            "filter": {
                "event": {"prefix": ["ckptcore."]},
                "any_resource": {"id_prefix": ["ckptcore.announced"]},
            }
        }

        def events() -> set[str]:
            found = client._client.post("/events/filter", json=ours).json()["events"]
            return {one["event"] for one in found if one["payload"]["flow_run_id"] == run}

        until(lambda: events() == {"ckptcore.checkpoint.announced", "ckptcore.conversion.succeeded"})
    assert running.rows("state") == [("done",)]
    assert message["type"] == "conversion.succeeded"
    data = json.loads(json.dumps(message["data"]))
    assert (data["uri"], data["flow_run_id"], data["event"]) == (webhooks.URI, run, first["id"])
