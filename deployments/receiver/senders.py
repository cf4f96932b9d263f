"""Dialects: which senders are known, how does each prove itself, and how does it name things?

A row per kind of sender. A *place* says where a value stands: ``data/uri`` inside the event, ``@name`` in a
header. Facts are from the senders' own code or documentation, named at each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

JSON = "application/json"
CLOUDEVENTS_JSON = "application/cloudevents+json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What one kind of sender sends.

    proof: the header with the signature, or with the token where `signed` is None.
    signed: what the HMAC-SHA256 is over: ``id``, ``time``, ``body`` and what stands between them.
    encoding, prefix: how a signature is spelled; several may be given, separated by blanks.
    key: how a secret becomes a key: its text, or base64 behind ``whsec_``.
    time: the header with the signed time, seconds since 1970; None when nothing is signed but the body.
    id: places that together tell one event from another; none when the sender has no such thing.
    type: places that together say what happened, joined by a dot.
    accepts: the types that announce a checkpoint; None takes all. Others are acknowledged and left.
    uri, run, step: places to look at, the first that holds something counts.
    media: content types.
    envelope: what must be put together before places are looked up.
    """

    proof: str
    signed: tuple[str, ...] | None = None
    encoding: Literal["base64", "hex"] = "base64"
    prefix: str = ""
    key: Literal["text", "whsec"] = "text"
    time: str | None = None
    id: tuple[str, ...] = ()
    type: tuple[str, ...] = ("type",)
    accepts: frozenset[str] | None = None
    uri: tuple[str, ...] = ("data/uri",)
    run: tuple[str, ...] = ("data/run",)
    step: tuple[str, ...] = ("data/step",)
    media: frozenset[str] = frozenset({JSON})
    envelope: Literal["plain", "cloudevents"] = "plain"


DIALECTS: dict[str, Dialect] = {
    # standard-webhooks/standard-webhooks, spec/standard-webhooks.md: "v1" is HMAC-SHA256 with a base64
    # secret.
    "standard-webhooks": Dialect(
        proof="webhook-signature",
        signed=("id", ".", "time", ".", "body"),
        prefix="v1,",
        key="whsec",
        time="webhook-timestamp",
        id=("@webhook-id",),
    ),
    # cloudevents/spec, http-protocol-binding.md and http-webhook.md: the bearer token is the proof, a
    # repeat has the same source and id.
    "cloudevents": Dialect(
        proof="authorization",
        id=("source", "id"),
        run=("data/run", "subject"),
        media=frozenset({JSON, CLOUDEVENTS_JSON}),
        envelope="cloudevents",
    ),
    # mlflow/mlflow, mlflow/webhooks/delivery.py and types.py: like Standard Webhooks, but the secret is text.
    "mlflow": Dialect(
        proof="x-mlflow-signature",
        signed=("id", ".", "time", ".", "body"),
        prefix="v1,",
        time="x-mlflow-timestamp",
        id=("@x-mlflow-delivery-id",),
        type=("entity", "action"),
        accepts=frozenset({"model_version.created"}),
        uri=("data/tags/ckptcore.uri", "data/source"),
        run=("data/run_id", "data/name"),
        step=("data/tags/step",),
    ),
    # docs.wandb.ai, automations, "Troubleshoot your webhook": base64 of the HMAC of the body alone. The
    # body is the user's template, see senders/wandb.json.
    "wandb": Dialect(
        proof="x-wandb-signature",
        signed=("body",),
        type=("event_type",),
        uri=("uri",),
        run=("run", "artifact_collection_name"),
        step=("step",),
    ),
    # determined-ai/determined, master/internal/webhooks/shipper.go. Its events name an experiment and no
    # place.
    "determined": Dialect(
        proof="x-determined-ai-signature",
        signed=("time", ",", "body"),
        encoding="hex",
        time="x-determined-ai-signature-timestamp",
        id=("event_id",),
        type=("event_type", "condition/state"),
        accepts=frozenset({"EXPERIMENT_STATE_CHANGE.COMPLETED"}),
        uri=(),
        run=("event_data/experiment/id",),
        step=(),
    ),
    # docs.github.com, "Validating webhook deliveries"; a repository_dispatch carries values of one's own.
    # Only the body is signed. X-GitHub-Delivery is not: with another one, what was overheard would be news.
    # X-GitHub-Event is not, either; whatever it says, place, run and step are those that were signed.
    "github": Dialect(
        proof="x-hub-signature-256",
        signed=("body",),
        encoding="hex",
        prefix="sha256=",
        type=("@x-github-event",),
        accepts=frozenset({"", "repository_dispatch"}),
        uri=("client_payload/uri", "uri"),
        run=("client_payload/run", "run"),
        step=("client_payload/step", "step"),
    ),
    # docs.aws.amazon.com, SageMaker "Training job state change", sent by an API destination with an API key.
    # Its events name no checkpoint: S3OutputPath is where all jobs put theirs.
    "eventbridge": Dialect(
        proof="x-api-key",
        id=("id",),
        type=("detail-type", "detail/TrainingJobStatus"),
        accepts=frozenset({"SageMaker Training Job State Change.Completed"}),
        uri=(),
        run=("detail/TrainingJobName",),
        step=(),
    ),
    # Ours, for scripts: an epilog, curl, a shell at the end of a job.
    "bearer": Dialect(
        proof="authorization", id=("@idempotency-key",), uri=("uri",), run=("run",), step=("step",)
    ),
}
