"""Vectors: signatures that the senders' own code or documentation made.

Where a sender publishes no vector, its documented script was run once (`from docs`).
"""

from __future__ import annotations

import base64
import hmac
from datetime import UTC, datetime

import pytest
from standardwebhooks import Webhook

from ckptcore.page.http_errors import RequestRefused
from deployments.receiver.senders import DIALECTS
from deployments.receiver.verify import key_of, sign, verify

# kind, secret, headers, body, the signed time.
VECTORS = {
    # standardwebhooks, libraries/*/: the vector of the reference libraries' tests.
    "standard-webhooks": (
        "standard-webhooks",
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        {
            "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
            "webhook-timestamp": "1614265330",
            "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
        },
        b'{"test": 2432232314}',
        1614265330,
    ),
    # docs.github.com, "Validating webhook deliveries", "Testing the webhook payload validation".
    "github": (
        "github",
        "It's a Secret to Everybody",
        {"x-hub-signature-256": "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"},
        b"Hello, World!",
        0,
    ),
    # Made by mlflow-skinny 3.17.2, mlflow.webhooks.delivery._generate_hmac_signature, with the secret of
    # its tests.
    "mlflow": (
        "mlflow",
        "test-secret-key",
        {
            "x-mlflow-delivery-id": "3d6a2f0e-5c8b-4f0e-9d0a-5a3f6f1f3c11",
            "x-mlflow-timestamp": "1760000000",
            "x-mlflow-signature": "v1,YIysOxQoj1nb6lzzsPztXh+5ZBkIyHkkHtA2ySzZX1U=",
        },
        b'{"entity": "model_version", "action": "created"}',
        1760000000,
    ),
    # from docs: the script of docs.wandb.ai, automations, "Troubleshoot your webhook", with its own values.
    "wandb": (
        "wandb",
        "your_api_secret",
        {"x-wandb-signature": "4tKqnWHayH0Vdy0mtiM/LbZ7bOGK7h+UrHO5F40Uk8U="},
        b'{"key1": "value1", "key2": "value2"}',
        0,
    ),
    # from docs: the Python of docs.determined.ai, "Signed Payload", on the payload of "Test Webhook".
    "determined": (
        "determined",
        "signing-key",
        {
            "x-determined-ai-signature-timestamp": "1665695871",
            "x-determined-ai-signature": "e45c5bbcc910dfadc764f31b791d3f3c5b3c5f399b9733b1223e77a57cafd120",
        },
        b'{"event_id":"b8667b8a-e14d-40e5-83ee-a64e31bdc5f4","event_type":"EXPERIMENT_STATE_CHANGE"}',
        1665695871,
    ),
}


@pytest.mark.parametrize("name", VECTORS)
def test_the_senders_own_signature_is_accepted(name: str) -> None:
    kind, secret, headers, body, now = VECTORS[name]
    dialect = DIALECTS[kind]
    key = key_of(secret, dialect.key)
    verify(dialect, dialect.proof, [b"another", key], headers, body, now)
    with pytest.raises(RequestRefused):
        verify(dialect, dialect.proof, [b"another"], headers, body, now)
    with pytest.raises(RequestRefused):
        verify(dialect, dialect.proof, [key], headers, body + b" ", now)


def test_every_dialect_with_a_signature_has_a_vector() -> None:
    assert {kind for kind, dialect in DIALECTS.items() if dialect.signed} == {v[0] for v in VECTORS.values()}


def test_our_signatures_are_accepted_elsewhere() -> None:
    secret = "whsec_" + base64.b64encode(b"0123456789abcdef01234567").decode()
    time = str(int(datetime.now(UTC).timestamp()))
    body = b'{"type":"conversion.succeeded"}'
    made = sign(DIALECTS["standard-webhooks"], key_of(secret, "whsec"), body, id="m1", time=time)
    headers = {"webhook-id": "m1", "webhook-timestamp": time, "webhook-signature": made}
    Webhook(secret).verify(body, headers)


@pytest.mark.parametrize("secret", ["whsec_*", "whsec_A", "not base64"])
def test_an_invalid_secret_is_reported(secret: str) -> None:
    with pytest.raises(ValueError, match="base64"):
        key_of(secret, "whsec")


@pytest.mark.parametrize("given", ["", "x", "t" * 23, "t" * 24, "t" * 1000])
def test_no_comparison_reveals_the_length_of_a_token(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return real(one, other)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    headers = {"authorization": f"Bearer {given}"}
    secrets = [b"t" * 24, b"another-live-token"]
    if given == "t" * 24:
        verify(DIALECTS["bearer"], "authorization", secrets, headers, b"", 0)
    else:
        with pytest.raises(RequestRefused):
            verify(DIALECTS["bearer"], "authorization", secrets, headers, b"", 0)
    assert compared == [(32, 32)] * 2
