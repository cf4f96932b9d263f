"""Webhooks as their senders make them: nothing here uses the receiver's own signing."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from standardwebhooks import Webhook

NOW = 1_760_000_000.0
WHSEC = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
TEXT = "It's a Secret to Everybody"
TOKEN = "token-of-sixteen-and-more"
NEW_TOKEN = "token-that-follows-the-other"
SECRETS = {"WHSEC": WHSEC, "TEXT": TEXT, "TOKEN": TOKEN, "NEW_TOKEN": NEW_TOKEN}
URI = "/runs/llama/step-7"
CONFIG = """
roots = ["/runs", "s3://team/runs"]
destination = "/exports/{path}"
max_body = 4096

[sources.standard]
kind = "standard-webhooks"
secrets = ["WHSEC"]

[sources.cloudevents]
kind = "cloudevents"
secrets = ["TOKEN"]

[sources.mlflow]
kind = "mlflow"
secrets = ["TEXT"]

[sources.wandb]
kind = "wandb"
secrets = ["TEXT"]

[sources.determined]
kind = "determined"
secrets = ["TEXT"]
uri = "/runs/experiment-{run}"

[sources.github]
kind = "github"
secrets = ["TEXT"]

[sources.sagemaker]
kind = "eventbridge"
secrets = ["TOKEN"]
uri = "/runs/job-{run}"

[sources.slurm]
kind = "bearer"
secrets = ["TOKEN", "NEW_TOKEN"]
"""


@dataclass(frozen=True)
class Hook:
    """A request. sign: makes the headers of a body that is sent at a time, with a secret (token or key)."""

    source: str
    event: Any
    sign: Callable[[bytes, int, str], dict[str, str]]
    secret: str
    signed: bool = True  # whether the body is
    timed: bool = False
    media: str = "application/json"
    raw: bytes | None = None
    at: float = NOW

    @property
    def body(self) -> bytes:
        return json.dumps(self.event).encode() if self.raw is None else self.raw

    @property
    def path(self) -> str:
        return f"/hooks/{self.source}"

    @property
    def headers(self) -> dict[str, str]:
        return {"content-type": self.media} | self.sign(self.body, int(self.at), self.secret)

    def but(self, **changes: Any) -> Hook:
        """The same with other fields."""
        return replace(self, **changes)

    def naming(self, uri: str) -> Hook:
        """The same about another place; for those whose events name one."""
        return self.but(event=json.loads(json.dumps(self.event).replace(URI, json.dumps(uri)[1:-1])))


def b64(key: str, message: bytes) -> str:
    return base64.b64encode(hmac.new(key.encode(), message, hashlib.sha256).digest()).decode()


def hexed(key: str, message: bytes) -> str:
    return hmac.new(key.encode(), message, hashlib.sha256).hexdigest()


def standard(body: bytes, at: int, secret: str) -> dict[str, str]:
    id = "msg_p5jXN8AQM9LWM0D4loKWxJek"
    try:
        signature = Webhook(secret).sign(id, datetime.fromtimestamp(at, UTC), body.decode())
    except UnicodeDecodeError:  # the library signs text only
        key = base64.b64decode(secret.removeprefix("whsec_"))
        digest = hmac.new(key, f"{id}.{at}.".encode() + body, hashlib.sha256).digest()
        signature = "v1," + base64.b64encode(digest).decode()
    return {"webhook-id": id, "webhook-timestamp": str(at), "webhook-signature": signature}


def mlflow(body: bytes, at: int, secret: str) -> dict[str, str]:
    id = "3d6a2f0e-5c8b-4f0e-9d0a-5a3f6f1f3c11"
    signature = "v1," + b64(secret, f"{id}.{at}.".encode() + body)
    return {"X-MLflow-Delivery-Id": id, "X-MLflow-Timestamp": str(at), "X-MLflow-Signature": signature}


def wandb(body: bytes, at: int, secret: str) -> dict[str, str]:
    return {"X-Wandb-Signature": b64(secret, body), "Authorization": "Bearer of-the-team"}


def determined(body: bytes, at: int, secret: str) -> dict[str, str]:
    signature = hexed(secret, f"{at},".encode() + body)
    return {"X-Determined-AI-Signature-Timestamp": str(at), "X-Determined-AI-Signature": signature}


def github(body: bytes, at: int, secret: str) -> dict[str, str]:
    return {
        "X-GitHub-Event": "repository_dispatch",
        "X-GitHub-Delivery": "72d3162e-cc78-11e3-81ab-4c9367dc0958",
        "X-Hub-Signature-256": "sha256=" + hexed(secret, body),
    }


def bearer(body: bytes, at: int, secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def api_key(body: bytes, at: int, secret: str) -> dict[str, str]:
    return {"x-api-key": secret}


def binary_event(body: bytes, at: int, secret: str) -> dict[str, str]:
    return bearer(body, at, secret) | {
        "ce-specversion": "1.0",
        "ce-type": "com.example.checkpoint.saved",
        "ce-source": "/trainers/7",
        "ce-id": "A%20234",
    }


DATA = {"uri": URI, "run": "llama", "step": 7}
CLOUD = {"specversion": "1.0", "type": "com.example.checkpoint.saved", "source": "/trainers/7", "id": "A 234"}
HOOKS = {
    "standard-webhooks": Hook(
        "standard",
        {"type": "checkpoint.saved", "timestamp": "2025-10-09T08:53:20Z", "data": DATA},
        standard,
        WHSEC,
        timed=True,
    ),
    "cloudevents-structured": Hook(
        "cloudevents",
        CLOUD | {"data": DATA},
        bearer,
        TOKEN,
        signed=False,
        media="application/cloudevents+json; charset=utf-8",
    ),
    "cloudevents-binary": Hook("cloudevents", DATA, binary_event, TOKEN, signed=False),
    # The payload is that of mlflow/webhooks/types.py, the tag is ours.
    "mlflow": Hook(
        "mlflow",
        {
            "entity": "model_version",
            "action": "created",
            "timestamp": "2025-10-09T08:53:20+00:00",
            "data": {
                "name": "example_model",
                "version": "1",
                "source": URI,
                "run_id": "llama",
                "tags": {"step": "7"},
                "description": "An example model version",
            },
        },
        mlflow,
        TEXT,
        timed=True,
    ),
    "wandb": Hook("wandb", {"event_type": "LINK_ARTIFACT", **DATA}, wandb, TEXT),
    # From docs.determined.ai, "Notifications".
    "determined": Hook(
        "determined",
        {
            "event_id": "4cd26e62-60c6-4a8b-8d03-7629091a4ef5",
            "event_type": "EXPERIMENT_STATE_CHANGE",
            "timestamp": 1665689991,
            "condition": {"state": "COMPLETED"},
            "event_data": {"experiment": {"id": 41, "state": "COMPLETED", "name": "cifar10_pytorch_const"}},
        },
        determined,
        TEXT,
        timed=True,
    ),
    "github": Hook("github", {"action": "checkpoint", "client_payload": DATA}, github, TEXT),
    # From docs.aws.amazon.com, SageMaker "Training job state change", shortened.
    "eventbridge": Hook(
        "sagemaker",
        {
            "version": "0",
            "id": "844e2571-85d4-695f-b930-0153b71dcb42",
            "detail-type": "SageMaker Training Job State Change",
            "source": "aws.sagemaker",
            "detail": {
                "TrainingJobName": "llama",
                "TrainingJobStatus": "Completed",
                "OutputDataConfig": {"S3OutputPath": "s3://team/runs/all", "KmsKeyId": ""},
            },
        },
        api_key,
        TOKEN,
        signed=False,
    ),
    "bearer": Hook("slurm", DATA, bearer, TOKEN, signed=False),
}


class Rows:
    """The rows of the inbox, read without the receiver's code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def change(self, statement: str) -> None:
        """Change the database behind the receiver's back."""
        connection = sqlite3.connect(self.path, timeout=30)
        with connection:
            connection.execute(statement)
        connection.close()

    def clear(self) -> None:
        """Take all rows out."""
        self.change("DELETE FROM inbox")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else can write."""
        connection = sqlite3.connect(self.path, timeout=30, isolation_level=None)
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")
        connection.close()

    def __call__(
        self, columns: str = "source, event_id, type, uri, run, step, state"
    ) -> list[tuple[Any, ...]]:
        with sqlite3.connect(f"file:{self.path}?mode=ro", uri=True) as connection:
            found = connection.execute(f"SELECT {columns} FROM inbox ORDER BY id").fetchall()
        connection.close()
        return found
