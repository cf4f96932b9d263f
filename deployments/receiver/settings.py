"""Read the receiver's TOML file: the sources, their secrets and roots, and the runs that they start.

Secrets are environment variables, and the file contains their names. A file with any error is refused at
start. Of URIs and roots only the text is compared: the receiver need not see the file system. The flow checks
again, with links resolved, on the machine that has the files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from ckptcore.errors import UsageError
from ckptcore.operations.export_target import stem
from ckptcore.page.http_errors import RequestRefused
from ckptcore.page.settings import PageTable, access_of
from ckptcore.utils.foreign_text import InvalidText, load_toml
from ckptcore.utils.near_names import did_you_mean
from ckptcore.utils.text import short_repr
from deployments.parameters import misfits_of
from deployments.receiver.senders import DIALECTS, Dialect
from deployments.receiver.verify import key_of

PREFECT = "prefect/events"  # the endpoint of the outbox for events to Prefect
MIN_SECRET = 16  # characters: shorter secrets could be guessed
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
FIELDS = re.compile(r"\{([^{}]*)\}")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
# Letters and digits of any script, and the usual characters in names of runs and steps. Excluded: what a URL
# would decode (%), cut off (? #), expand (* [ {) or chain (two colons, below).
_PLAIN = re.compile(r"[\w ./~+=@,:()!-]+")
_PART = re.compile(r"[\w+=@,:()!~.-]+")
_FIELD = re.compile(r"\{(\w+)\}")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SourceSettings(_Strict):
    """A source of events. Its name in the file is the last part of its URL, ``/hooks/NAME``.

    Attributes:
        kind: the kind of sender, a key of `DIALECTS`.
        secrets: names of environment variables. All secrets are valid: to change one, add the new one, change
            the sender, then remove the old one.
        header: the header with the token, if it is not the kind's own.
        roots: the allowed roots of this source, instead of the general ones.
        uri: a template for senders whose events name no URI.
        events: the types that announce a checkpoint, instead of the kind's own.
        max_body: instead of the general one, in bytes.
        destination: instead of the general one.
        deployment: instead of the general one.
        parameters: added to the general ones; they take precedence.
    """

    kind: str
    secrets: list[str] = Field(min_length=1)
    header: str | None = None
    roots: list[str] | None = None
    uri: str | None = None
    events: list[str] | None = None
    max_body: int | None = Field(default=None, gt=0)
    destination: str | None = None
    deployment: str | None = None
    parameters: dict[str, Any] = {}


class NotifyTarget(_Strict):
    """A receiver of notifications.

    Attributes:
        url: its address.
        secret: the environment variable with its secret, ``whsec_...``.
        events: the types of messages that it gets.
    """

    url: str = Field(pattern="^https?://")
    secret: str
    events: list[Literal["conversion.succeeded", "conversion.failed", "alias.moved", "alias.removed"]] = [
        "conversion.succeeded",
        "conversion.failed",
    ]


class ReceiverSettings(_Strict):
    """The configuration file.

    Attributes:
        roots: events may name these URIs and everything below them.
        watched_roots: whether the catalog's watched roots are allowed too.
        destination: a template with ``{path}`` (relative to the root), ``{run}`` and ``{step}``.
        deployment: the Prefect deployment to run.
        parameters: further parameters of the flow.
        max_body: the largest body of a request, in bytes.
        catalog: its URL; by default that of `ckptcore.catalog.default_url`.
        sources: the sources of events, by name.
        notify: the receivers of notifications, by name.
        page: where the catalog page is, and who may open it. Without this table there is no page.
    """

    roots: list[str] = []
    watched_roots: bool = False
    destination: str
    deployment: str = "arrived/arrived"
    parameters: dict[str, Any] = {}
    max_body: int = Field(default=256 << 10, gt=0)
    catalog: str | None = None
    sources: dict[str, SourceSettings] = Field(min_length=1)
    notify: dict[str, NotifyTarget] = {}
    page: PageTable | None = None


KEYS = [
    name
    for model in (ReceiverSettings, SourceSettings, NotifyTarget, PageTable)
    for name in model.model_fields
]


class Sender:
    """A configured source, with the values that every request needs."""

    def __init__(
        self, name: str, source: SourceSettings, settings: ReceiverSettings, env: Mapping[str, str]
    ) -> None:
        self.name, self.source = name, source
        self.dialect: Dialect = DIALECTS[source.kind]
        self.header = source.header.lower() if source.header else self.dialect.proof
        self.secrets = [key_of(env[variable], self.dialect.key) for variable in source.secrets]
        self._roots = source.roots or settings.roots
        self.watches = settings.watched_roots and not source.roots
        self.watched: tuple[str, ...] = ()
        self.accepts = None if source.events is None else frozenset(source.events)
        self.max_body = source.max_body or settings.max_body
        self.destination = source.destination or settings.destination
        self.deployment = source.deployment or settings.deployment
        self.parameters = settings.parameters | source.parameters

    @property
    def roots(self) -> list[str]:
        """The roots that its events may name."""
        return [*self._roots, *self.watched]


@dataclass(frozen=True, slots=True)
class FlowRunRequest:
    """A run to start.

    uri: of the checkpoint. deployment: ``flow/name`` of Prefect. parameters: of the flow.
    """

    uri: str
    deployment: str
    parameters: Mapping[str, Any]


def flow_run_for(
    sender: Sender, uri: str, run: str, step: int | None, meta: Mapping[str, Any] | None = None
) -> FlowRunRequest:
    """Return the run to start for an event. Raises `RequestRefused`.

    It is asked for twice: when the event arrives, so that its sender gets the error, and when the run is
    started. A root that was removed from the configuration in between is then no longer allowed.

    Args:
        sender: the configured source.
        uri: the URI in the event. If it is "", the source's template gives one.
        run: the name of the training run, or "".
        step: the training step, or None.
        meta: facts about the training; they are no parameter if there are none.
    """
    uri = uri or filled(sender.source.uri or "", run=run, step=step)
    if not uri:
        raise RequestRefused("not-understood", f"the event names no URI ({', '.join(sender.dialect.uri)})")
    place = place_of(uri, sender.roots)
    parameters = sender.parameters | {
        "source": place.uri,
        "destination": filled(sender.destination, run=run, step=step, path=stem(place.path)),
        "root": place.root,
        "run": run,
        "step": step,
        **({"meta": dict(meta)} if meta else {}),
    }
    return FlowRunRequest(place.uri, sender.deployment, parameters)


def load(path: Path, env: Mapping[str, str] = os.environ) -> tuple[ReceiverSettings, dict[str, Sender]]:
    """Return the settings, and the senders by name. Raises `UsageError` with all errors in the file."""
    try:
        settings = ReceiverSettings.model_validate(load_toml(path.read_bytes()))
    except (OSError, InvalidText, ValidationError) as error:
        raise UsageError(
            f"cannot use {path}: {_cause(error)}",
            hint="see deployments/receiver/example.toml for a complete file",
        ) from error
    wrong = [*problems(settings, env)]
    if wrong:
        raise UsageError(
            f"cannot use {path}: " + "; ".join(wrong), hint="correct the file, or set the variables"
        )
    return settings, {name: Sender(name, source, settings, env) for name, source in settings.sources.items()}


def _cause(error: OSError | InvalidText | ValidationError) -> str:
    """Return why the file cannot be used: by keys, as a value may be a secret in the wrong place."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, ValidationError):
        return "; ".join(map(_misfit, error.errors(include_url=False, include_input=False)))
    return str(error)


def _misfit(row: ErrorDetails) -> str:
    place = ".".join(map(str, row["loc"]))
    match row["type"]:
        case "missing":
            return f"{place} is missing"
        case "extra_forbidden":
            near = did_you_mean(str(row["loc"][-1]), KEYS)
            return f"{place} is no key of this file" + (f" ({near})" if near else "")
        case _:
            return f"{place}: {row['msg']}"


def problems(settings: ReceiverSettings, env: Mapping[str, str]) -> list[str]:
    """Return the errors that pydantic cannot see: names, kinds, roots, templates, missing secrets."""
    errors = []
    for name, source in settings.sources.items():
        if not NAME.fullmatch(name):
            errors.append(f"source {name!r}: the name must be lower-case letters, digits and hyphens")
        if source.kind not in DIALECTS:
            errors.append(f"source {name}: kind must be one of {', '.join(DIALECTS)} (got {source.kind!r})")
            continue
        dialect = DIALECTS[source.kind]
        errors += [f"source {name}: {text}" for text in _parameter_problems(settings, source)]
        if not dialect.uri and not source.uri:
            errors.append(f"source {name}: events of kind {source.kind} name no URI; set `uri`")
        if dialect.signed is not None and source.header:
            errors.append(f"source {name}: the header of a signature cannot be changed; remove `header`")
        errors += _secrets(f"source {name}", source.secrets, dialect.key, env)
        errors += _template(f"source {name}: uri", source.uri, {"run", "step"})
        errors += _template(f"source {name}: destination", source.destination, {"path", "run", "step"})
        errors += [
            f"source {name}: root {root!r} is not a plain path or URL"
            for root in source.roots or ()
            if not is_plain(root)
        ]
    if settings.page is not None:
        try:
            access_of(settings.page, env)
        except UsageError as error:
            errors.append(error.message)
    for name, target in settings.notify.items():
        if name == PREFECT:
            errors.append(f"notify {name!r}: the name is used for events to Prefect; choose another one")
        errors += _secrets(f"notify {name}", [target.secret], "whsec", env)
        errors += _url(f"notify {name}", target.url)
    if not settings.roots and not settings.watched_roots:
        bare = [name for name, source in settings.sources.items() if not source.roots]
        errors += [f"source {name}: there are no allowed roots; set `roots`" for name in bare]
    errors += _template("destination", settings.destination, {"path", "run", "step"})
    errors += [f"root {root!r} is not a plain path or URL" for root in settings.roots if not is_plain(root)]
    return errors


def _parameter_problems(settings: ReceiverSettings, source: SourceSettings) -> list[str]:
    """Return why the flow does not accept the parameters of the configuration and of an event together."""
    of_event = {
        "source": "/runs/a",
        "destination": "/exports/a",
        "root": "/runs",
        "run": "a",
        "step": 1,
        "meta": {},
    }
    configured = settings.parameters | source.parameters
    taken = [
        f"the parameter {name!r} comes from the event; remove it" for name in configured if name in of_event
    ]
    return taken + misfits_of(source.deployment or settings.deployment, configured | of_event)


def _secrets(whose: str, names: list[str], kind: str, env: Mapping[str, str]) -> list[str]:
    errors = []
    for name in names:
        secret = env.get(name, "")
        if len(secret) < MIN_SECRET:
            errors.append(
                f"{whose}: {name} is {'not set' if not secret else f'shorter than {MIN_SECRET} characters'}"
            )
            continue
        try:
            key_of(secret, kind)
        except ValueError as error:
            errors.append(f"{whose}: {name}: {error}")
    return errors


def _url(whose: str, url: str) -> list[str]:
    try:
        return [] if httpx.URL(url).host else [f"{whose}: {url!r} has no host"]
    except httpx.InvalidURL as error:
        return [f"{whose}: {url!r} is not a URL: {error}"]


def _template(label: str, template: str | None, fields: set[str]) -> list[str]:
    unknown = set(FIELDS.findall(template or "")) - fields
    return [f"{label}: {{{name}}} is not one of {', '.join(sorted(fields))}" for name in sorted(unknown)]


def is_plain(root: str) -> bool:
    """Return whether a root can be compared with the URIs in events."""
    try:
        return bool(normal(root))
    except RequestRefused:
        return False


@dataclass(frozen=True, slots=True)
class AllowedPlace:
    """An allowed checkpoint. uri: normalized. root: the allowed root. path: the URI relative to the root."""

    uri: str
    root: str
    path: str


def place_of(uri: str, roots: Sequence[str]) -> AllowedPlace:
    """Return the place of a URI below one of the roots. Raises `RequestRefused`.

    >>> place_of("file:///runs/llama/step-7/", ["/runs"])
    AllowedPlace(uri='/runs/llama/step-7', root='/runs', path='llama/step-7')
    >>> place_of("/runs-of-others/x", ["/runs"])
    Traceback (most recent call last):
    ckptcore.page.http_errors.RequestRefused: '/runs-of-others/x'
    """
    plain = normal(uri)
    for root in sorted(roots, key=len, reverse=True):
        inside = normal(root).rstrip("/") + "/"
        if plain.startswith(inside):
            return AllowedPlace(plain, normal(root), plain[len(inside) :])
    raise RequestRefused("forbidden-root", short_repr(uri, 120))


def normal(uri: str) -> str:
    """Return the one spelling of a path or URL. Raises `RequestRefused`.

    >>> normal("S3://bucket/a"), normal("file://localhost/a/")
    ('s3://bucket/a', '/a')
    """
    scheme, colon, rest = uri.partition("://")
    if not colon:
        scheme, rest = "", uri
    elif scheme.lower() == "file":
        scheme, rest = "", rest.removeprefix("localhost")
    scheme = scheme.lower()
    if (scheme and not _SCHEME.fullmatch(scheme)) or not _PLAIN.fullmatch(rest) or "::" in uri:
        raise RequestRefused("forbidden-root", f"{short_repr(uri, 120)} is not a plain path or URL")
    if not scheme and not rest.startswith("/"):
        raise RequestRefused("forbidden-root", f"{short_repr(uri, 120)} is not an absolute path")
    parts = rest.rstrip("/").split("/")
    # An object store keeps empty and dotted parts, a file system resolves them.
    if any(part in ("", ".", "..") for part in parts[0 if scheme else 1 :]):
        raise RequestRefused("forbidden-root", f"{short_repr(uri, 120)} has parts that are empty or dots")
    return f"{scheme}://{'/'.join(parts)}" if scheme else "/".join(parts)


def filled(template: str, *, run: str, step: int | None, **fields: str) -> str:
    """Fill in a template with ``{run}``, ``{step}`` and `fields`.

    Raises `RequestRefused` for a run or step that is not a single part of a path.

    >>> filled("/out/{run}/{path}", run="llama", step=None, path="a/b")
    '/out/llama/a/b'
    """
    values = dict(fields)
    for name, value in (("run", run), ("step", "" if step is None else str(step))):
        if f"{{{name}}}" not in template:
            continue
        if not _PART.fullmatch(value) or value in (".", ".."):
            raise RequestRefused("not-understood", f"the {name} {short_repr(value)} cannot be part of a path")
        values[name] = value
    # In one pass: inserted values are not expanded.
    return _FIELD.sub(lambda match: values.get(match[1], match[0]), template)
