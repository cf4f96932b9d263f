"""The kinds of senders: how each signs its requests, and where its events keep their values.

One row for each kind. A *place* locates a value: ``data/uri`` inside the event, ``@name`` in a header. Facts
are from the senders' own code or documentation, named at each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

JSON = "application/json"
CLOUDEVENTS_JSON = "application/cloudevents+json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The format of one kind of sender.

    Attributes:
        proof: the header with the signature, or with the token if `signed` is None.
        signed: the input of the HMAC-SHA256: ``id``, ``time``, ``body`` and the text between them.
        encoding: the encoding of a signature. Several signatures may be given, separated by blanks.
        prefix: the text before each signature.
        key: how a secret becomes a key: its text, or base64 after ``whsec_``.
        time: the header with the signed time, in seconds since 1970; None if only the body is signed.
        id: places that together identify an event; none if the sender has no ids.
        type: places that together name what happened, joined by a dot.
        accepts: the types that announce a checkpoint; None accepts all. Others are acknowledged and ignored.
        uri: places of the URI; the first one with a value counts.
        run: places of the training run, likewise.
        step: places of the step, likewise.
        meta: places of an object with facts about the training, likewise.
        meta_prefix: the beginning of their names, where the object has other entries as well.
        media: content types.
        envelope: how to assemble the event before places are looked up.
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
    meta: tuple[str, ...] = ("data/meta",)
    meta_prefix: str = ""
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
    # cloudevents/spec, http-protocol-binding.md and http-webhook.md: a bearer token, and the same source and
    # id on a repeat.
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
        meta=("data/tags",),
        meta_prefix="ckptcore.",
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
        meta=("meta",),
    ),
    # determined-ai/determined, master/internal/webhooks/shipper.go. Its events name an experiment and no
    # URI.
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
        meta=(),
    ),
    # docs.github.com, "Validating webhook deliveries"; a repository_dispatch has a free payload. Only the
    # body is signed. X-GitHub-Delivery is not: with another one, a recorded request would be a new event.
    # X-GitHub-Event is not, either; whatever it is, URI, run and step are the signed ones.
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
        meta=("client_payload/meta", "meta"),
    ),
    # docs.aws.amazon.com, SageMaker "Training job state change", sent by an API destination with an API key.
    # Its events name no checkpoint: S3OutputPath is shared by all jobs.
    "eventbridge": Dialect(
        proof="x-api-key",
        id=("id",),
        type=("detail-type", "detail/TrainingJobStatus"),
        accepts=frozenset({"SageMaker Training Job State Change.Completed"}),
        uri=(),
        run=("detail/TrainingJobName",),
        step=(),
        meta=(),
    ),
    # ckptcore's own, for scripts: an epilog, curl, a shell at the end of a job.
    "bearer": Dialect(
        proof="authorization",
        id=("@idempotency-key",),
        uri=("uri",),
        run=("run",),
        step=("step",),
        meta=("meta",),
    ),
}
