"""Hooks: each kind of sender is understood, and what is wrong gets its status and leaves no row."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner
from webhooks import HOOKS, NEW_TOKEN, NOW, TOKEN, URI, Hook, Rows, binary_event, github, standard

from ckptcore.cli.catalog import app as catalog

KINDS = sorted(HOOKS)
MADE = {"determined": ("/runs/experiment-41", "41", None), "eventbridge": ("/runs/job-llama", "llama", None)}
NAMING = sorted(set(KINDS) - set(MADE))
SIGNED = sorted(kind for kind in KINDS if HOOKS[kind].signed)
TIMED = sorted(kind for kind in KINDS if HOOKS[kind].timed)
NO_EVENTS = [
    (b"not json", 400),
    (b"", 400),
    (b'{"a": NaN}', 400),
    (b'{"a": 1, "a": 2}', 400),
    (b"[" * 4000, 400),
    (b'{"run": "caf\xe9"}', 400),
    (b"\xff\xfe{\x00}\x00", 400),
    (b"[]", 422),
    (b'"text"', 422),
    (b"null", 422),
    (b"{}", 422),
    (b'{"a": ' + b"9" * 4050 + b"}", 400),
]
OUTSIDE = [
    "/elsewhere/step-7",
    "/runs",
    "/runs-of-others/step-7",
    "/runs/../etc/passwd",
    "/runs/a/../../etc",
    "/runs/./a",
    "/runs//a",
    "/runs/%2e%2e/etc",
    "/runs/a?b",
    "/runs/*",
    "/runs/[a]",
    "/runs/a\\..\\b",
    "runs/step-7",
    "file:///etc/passwd",
    "s3://other/runs/a",
    "s3://team/runs",
    "s3://team/runs/../private",
    "https://team/runs/a",
    "simplecache::s3://team/runs/a",
    "zip://a::/runs/b",
    "file://host/runs/a",
]


def send(client: TestClient, hook: Hook, **headers: str) -> Any:
    return client.post(hook.path, content=hook.body, headers=hook.headers | headers)


@pytest.mark.parametrize("kind", KINDS)
def test_an_announcement_is_accepted_once(kind: str, client: TestClient, rows: Rows) -> None:
    hook = HOOKS[kind]
    first = send(client, hook)
    assert (first.status_code, first.json()["status"]) == (202, "accepted")
    repeated = send(client, hook.but(at=NOW + 60))
    expected = {"status": "duplicate", "id": first.json()["id"], "state": "waiting"}
    assert (repeated.status_code, repeated.json()) == (202, expected)
    ((source, event_id, _, uri, run, step, state),) = rows()
    assert (source, state) == (hook.source, "waiting")
    assert (uri, run, step) == MADE.get(kind, (URI, "llama", 7))
    if hook.source == "cloudevents":
        assert event_id == "/trainers/7 A 234"
    else:
        assert (
            len(event_id) == 64
            if kind in ("wandb", "github", "bearer")
            else event_id in str(hook.headers | hook.event)
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_forged_signature_is_refused(kind: str, client: TestClient, rows: Rows) -> None:
    hook = HOOKS[kind]
    other = "whsec_" + "QUJD" * 8 if hook.secret.startswith("whsec_") else "a-secret-that-is-none"
    answers = [send(client, hook.but(secret=other))]
    bare = {name: v for name, v in hook.headers.items() if hook.secret not in v and "ignature" not in name}
    answers.append(client.post(hook.path, content=hook.body, headers=bare))
    assert {a.status_code for a in answers} == {401}
    # The message is the same for every error.
    assert len({a.text for a in answers}) == 1
    assert rows() == []


@pytest.mark.parametrize("kind", SIGNED)
def test_a_changed_body_is_refused(kind: str, client: TestClient, rows: Rows) -> None:
    hook = HOOKS[kind]
    for body in (hook.body + b" ", hook.body.replace(b"7", b"8"), b""):
        assert client.post(hook.path, content=body, headers=hook.headers).status_code == 401
    assert rows() == []


@pytest.mark.parametrize("kind", TIMED)
@pytest.mark.parametrize("seconds", [-301, 301])
def test_a_stale_signature_is_refused(kind: str, seconds: int, client: TestClient, rows: Rows) -> None:
    hook = HOOKS[kind]
    assert send(client, hook.but(at=NOW + seconds)).status_code == 401
    assert rows() == []
    assert send(client, hook.but(at=NOW + seconds // 301 * 300)).status_code == 202


@pytest.mark.parametrize("kind", TIMED)
@pytest.mark.parametrize("time", ["", "now", "1e9", "-1", "+1760000000", "1760000000.0", "9" * 400, "\xb9"])
def test_an_invalid_time_is_refused(kind: str, time: str, client: TestClient) -> None:
    hook = HOOKS[kind]
    (name,) = (name for name in hook.headers if "imestamp" in name)
    headers = hook.headers | {name: time.encode("latin-1")}
    assert client.post(hook.path, content=hook.body, headers=headers).status_code == 401


@pytest.mark.parametrize("kind", KINDS)
def test_the_body_is_bounded(kind: str, client: TestClient, rows: Rows) -> None:
    hook = HOOKS[kind].but(raw=HOOKS[kind].body + b" " * 4096)
    assert send(client, hook).status_code == 413
    pieces = (hook.body[start : start + 100] for start in range(0, len(hook.body), 100))
    assert client.post(hook.path, content=pieces, headers=hook.headers).status_code == 413  # without a length
    assert rows() == []


@pytest.mark.parametrize("kind", KINDS)
def test_requests_without_an_event_are_refused(kind: str, client: TestClient, rows: Rows) -> None:
    for body, status in NO_EVENTS:
        hook = HOOKS[kind].but(raw=body)
        assert send(client, hook).status_code == status, body[:40]
    assert rows() == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_type_must_be_one_of_the_kind(kind: str, client: TestClient, rows: Rows) -> None:
    hook = HOOKS[kind]
    for media in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "application/cloudevents-batch+json",
        "",
    ):
        assert send(client, hook.but(media=media)).status_code == 415
    assert rows() == []


@pytest.mark.parametrize("kind", NAMING)
def test_a_uri_outside_the_roots_is_refused(kind: str, client: TestClient, rows: Rows) -> None:
    for uri in OUTSIDE:
        answer = send(client, HOOKS[kind].naming(uri))
        assert (answer.status_code, answer.json()["error"]) == (403, "forbidden-root"), uri
    assert rows() == []


@pytest.mark.parametrize("uri", ["file:///runs/llama/step-7/", "file://localhost/runs/llama/step-7"])
def test_spellings_of_a_uri_are_normalized(uri: str, client: TestClient, rows: Rows) -> None:
    assert send(client, HOOKS["bearer"].naming(uri)).status_code == 202
    assert [row[3] for row in rows()] == [URI]


def test_determined_uses_the_template_of_its_source(client: TestClient) -> None:
    event: dict[str, Any] = json.loads(json.dumps(HOOKS["determined"].event))
    for id in ("../../etc", "a/b", "..", "", None):
        event["event_data"]["experiment"]["id"] = id
        assert send(client, HOOKS["determined"].but(event=event)).status_code == 422
    event["event_data"] = {"data": "test"}  # what "Test Webhook" sends
    assert send(client, HOOKS["determined"].but(event=event)).status_code == 422


def test_sagemaker_uses_the_template_of_its_source(client: TestClient, rows: Rows) -> None:
    event: dict[str, Any] = json.loads(json.dumps(HOOKS["eventbridge"].event))
    del event["detail"]["TrainingJobName"]
    assert send(client, HOOKS["eventbridge"].but(event=event)).status_code == 422
    assert rows() == []


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"uri": ""},
        {"uri": 7.5},
        {"uri": ["/runs/a"]},
        {"uri": True},
        {"uri": "/runs/" + "a" * 2050},
        {"uri": "/runs/a", "run": "a\x00b"},
        {"uri": "/runs/a", "run": "\ud800"},
        {"uri": "/runs/a", "run": "r" * 256},
        {"uri": "/runs/a", "step": "seven"},
        {"uri": "/runs/a", "step": -1},
        {"uri": "/runs/a", "step": 2**70},
        {"uri": "/runs/a", "step": "1_000"},
    ],
)
def test_events_that_are_not_understood(data: dict[str, Any], client: TestClient, rows: Rows) -> None:
    assert send(client, HOOKS["bearer"].but(event=data)).status_code == 422
    assert rows() == []


def test_other_events_are_acknowledged_and_ignored(client: TestClient, rows: Rows) -> None:
    ping = HOOKS["github"].but(sign=lambda *given: github(*given) | {"X-GitHub-Event": "ping"})
    failed = HOOKS["determined"].but(
        event=HOOKS["determined"].event | {"condition": {"state": "ERRORED"}, "event_id": "e"}
    )
    stopped = HOOKS["eventbridge"].but(
        event=json.loads(json.dumps(HOOKS["eventbridge"].event).replace("Completed", "Stopped"))
    )
    tag = HOOKS["mlflow"].but(event=HOOKS["mlflow"].event | {"entity": "model_version_tag", "action": "set"})
    for hook in (ping, failed, stopped, tag):
        answer = send(client, hook)
        assert (answer.status_code, answer.json()["status"]) == (202, "ignored")
    assert rows() == []


def test_unknown_sources_and_methods(client: TestClient) -> None:
    hook = HOOKS["bearer"]
    for path in ("/hooks/nobody", "/hooks/SLURM", "/hooks/%2e%2e", "/hooks/a%00b"):
        assert client.post(path, content=hook.body, headers=hook.headers).status_code == 404
    assert client.get(hook.path).status_code == 405
    assert client.post("/hooks/", content=hook.body, headers=hook.headers).status_code in (404, 405)


def test_all_secrets_are_valid(client: TestClient) -> None:
    hook = HOOKS["bearer"]
    for number, secret in enumerate((TOKEN, NEW_TOKEN)):
        answer = send(client, hook.but(secret=secret), **{"idempotency-key": f"k{number}"})
        assert (answer.status_code, answer.json()["status"]) == (202, "accepted")


def test_one_good_signature_among_several_is_enough(client: TestClient) -> None:
    hook = HOOKS["standard-webhooks"]
    good = hook.headers["webhook-signature"]
    for given, status in (
        (f"v1,AAAA {good}", 202),
        (f"v1a,{good[3:]} {good}", 202),
        (good[3:], 401),
        (f"v2,{good[3:]}", 401),
        (good + "=", 401),
        ("v1,A", 401),
        ("v1", 401),
        ("v1,\xe9", 401),
        (" ".join(["v1,AAAA"] * 8 + [good]), 401),
    ):
        headers = hook.headers | {"webhook-signature": given.encode("latin-1")}
        assert client.post(hook.path, content=hook.body, headers=headers).status_code == status, given


def test_an_id_cannot_be_extended_from_the_body(client: TestClient) -> None:
    # id.time.body is signed: a body with ".<time>.{...}" inside could be cut at another place.
    inner = '{"data":{"uri":"/runs/planted"}}'
    event = {"note": f"x.{int(NOW)}.", "data": {"uri": URI}}
    body = json.dumps(event).replace('."', f'.{inner}"').encode()
    headers = standard(body, int(NOW), HOOKS["standard-webhooks"].secret)
    front, time, _ = body.decode().rpartition(f".{int(NOW)}.")
    assert time
    grown = f"{headers['webhook-id']}.{int(NOW)}.{front}"
    answer = client.post(
        "/hooks/standard",
        content=body.decode().rpartition(f".{int(NOW)}.")[2].encode(),
        headers=headers | {"webhook-id": grown, "content-type": "application/json"},
    )
    assert answer.status_code == 401


def test_a_header_given_twice_is_refused(client: TestClient) -> None:
    hook = HOOKS["standard-webhooks"]
    twice = [*hook.headers.items(), ("webhook-id", "msg_other")]
    assert client.post(hook.path, content=hook.body, headers=twice).status_code == 400


def test_other_versions_and_incomplete_cloudevents_are_refused(client: TestClient) -> None:
    hook = HOOKS["cloudevents-structured"]
    for change in ({"specversion": "0.3"}, {"id": ""}, {"source": None}, {"type": ""}, {"data": "text"}):
        assert send(client, hook.but(event=hook.event | change)).status_code == 422
    bare = HOOKS["cloudevents-binary"].but(
        sign=lambda *given: {k: v for k, v in binary_event(*given).items() if k != "ce-specversion"}
    )
    assert send(client, bare).status_code == 422


def test_cloudevents_modes_are_one_event(client: TestClient) -> None:
    first = send(client, HOOKS["cloudevents-structured"]).json()
    second = send(client, HOOKS["cloudevents-binary"]).json()
    assert (second["status"], second["id"]) == ("duplicate", first["id"])


@pytest.mark.parametrize("kind", ["mlflow", "standard-webhooks"])
def test_a_repeat_of_a_failed_event_names_the_retry_command(
    kind: str, client: TestClient, rows: Rows
) -> None:
    id = send(client, HOOKS[kind]).json()["id"]
    for state, hint in (("done", ""), ("failed", f"`ckptcore catalog inbox retry {id}`")):
        rows.change(f"UPDATE inbox SET state = '{state}', ended_at = received_at")
        reply = send(client, HOOKS[kind]).json()
        assert (reply["status"], reply["id"], reply["state"]) == ("duplicate", id, state)
        assert hint in reply.get("hint", "")
        assert ("hint" in reply) == (state == "failed")
    # The command is one.
    done = CliRunner().invoke(catalog, ["inbox", "retry", id, "--catalog", str(rows.path)])
    assert done.exit_code == 0, done.output
    assert send(client, HOOKS[kind]).json()["state"] == "waiting"


@pytest.mark.parametrize("kind", ["bearer", "wandb", "github"])
def test_a_place_that_is_announced_twice_is_a_new_event_once_something_has_looked_at_it(
    kind: str, client: TestClient, rows: Rows
) -> None:
    ids = []
    for change in ("flow_run_id = 'run-1'", "state = 'done', ended_at = received_at", "state = 'failed'"):
        first, repeated = send(client, HOOKS[kind]).json(), send(client, HOOKS[kind]).json()
        assert (first["status"], repeated["status"]) == ("accepted", "duplicate")
        assert first["id"] == repeated["id"]
        ids.append(first["id"])
        # Its run has begun: files that are saved from now on are not those that it sees.
        rows.change(f"UPDATE inbox SET {change} WHERE uuid = '{first['id']}'")
    assert len(set(ids)) == 3
    assert [row[3] for row in rows()] == [URI] * 3


@pytest.mark.parametrize(
    "kind", ["bearer", "cloudevents-structured", "cloudevents-binary", "standard-webhooks"]
)
def test_an_id_for_two_places_is_refused_with_the_reason(
    kind: str, client: TestClient, rows: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    key = {"idempotency-key": "epilog"} if kind == "bearer" else {}
    assert send(client, HOOKS[kind], **key).json()["status"] == "accepted"
    for _ in range(2):
        caplog.clear()
        answer = send(client, HOOKS[kind].naming("/runs/llama/step-8"), **key)
        assert (answer.status_code, answer.json()["error"]) == (409, "id-reused")
        for text in (answer.json()["message"], caplog.text, rows("error_message")[1][0]):
            assert URI in text
            assert "/runs/llama/step-8" in text
    assert [(row[3], row[6]) for row in rows()] == [(URI, "waiting"), ("/runs/llama/step-8", "failed")]
    assert send(client, HOOKS[kind], **key).json()["status"] == "duplicate"  # the first is as it was
    other = send(client, HOOKS[kind].naming("/runs/llama/step-8"), **{"idempotency-key": "another"})
    assert other.json().get("status") == ("accepted" if kind == "bearer" else None)


def test_the_handshake_of_cloudevents(client: TestClient) -> None:
    answer = client.options("/hooks/cloudevents", headers={"WebHook-Request-Origin": "events.example"})
    assert answer.status_code == 200
    assert answer.headers["webhook-allowed-origin"] == "events.example"
    assert client.options("/hooks/slurm").status_code == 404


def test_the_same_id_of_two_sources_is_two_events(client: TestClient, rows: Rows) -> None:
    key = {"idempotency-key": HOOKS["mlflow"].headers["X-MLflow-Delivery-Id"]}
    assert send(client, HOOKS["bearer"], **key).json()["status"] == "accepted"
    assert send(client, HOOKS["mlflow"]).json()["status"] == "accepted"
    assert len({row[1] for row in rows()}) == 1
    assert len(rows()) == 2


@pytest.mark.parametrize("kind", SIGNED)
def test_a_recorded_request_is_a_repeat_under_another_id(kind: str, client: TestClient, rows: Rows) -> None:
    hook = HOOKS[kind]
    assert send(client, hook).json()["status"] == "accepted"
    for name in set(hook.headers) - {"content-type"}:
        if "ignature" not in name:  # ids, times, types: all other headers
            changed = hook.headers | {name: hook.headers[name][:-1] + "0"}
            answer = client.post(hook.path, content=hook.body, headers=changed)
            assert answer.status_code == 401 or answer.json()["status"] in ("duplicate", "ignored"), name
    assert len(rows()) == 1
