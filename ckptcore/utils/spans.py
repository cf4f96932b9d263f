"""Report the stages of a conversion as OpenTelemetry spans, where its SDK is installed and configured.

Spans are made if the program has set up OpenTelemetry itself, or if the environment names an exporter
(``OTEL_EXPORTER_OTLP_ENDPOINT``, or ``OTEL_TRACES_EXPORTER=otlp``). Otherwise `span` imports nothing and does
nothing. Attributes have no credentials, and errors appear by their code, not by their message.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from ckptcore.errors import ended_by
from ckptcore.redaction import redacted
from ckptcore.utils.extras import install

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_log = logging.getLogger("ckptcore")


@contextmanager
def span(name: str, **attributes: Any) -> Iterator[None]:
    """Report a block as a span; its name begins with ``ckptcore``. Attributes that are None are left out.

    An error ends the span with status ERROR, and ``error.type`` is its code.
    """
    tracer = _tracer()
    if tracer is None:
        yield
        return
    from opentelemetry.trace import Status, StatusCode

    span_attributes = {f"ckptcore.{k}": _value(v) for k, v in attributes.items() if v is not None}
    # Messages and tracebacks may have the credentials of URLs, so nothing is recorded automatically.
    with tracer.start_as_current_span(
        f"ckptcore.{name}", attributes=span_attributes, record_exception=False, set_status_on_exception=False
    ) as current:
        try:
            yield
        except BaseException as error:
            code = ended_by(error).code
            current.set_attribute("error.type", code)
            current.set_status(Status(StatusCode.ERROR, code))
            raise


def _value(value: Any) -> Any:
    return value if isinstance(value, bool | int | float) else redacted(str(value))


def _tracer() -> Tracer | None:
    if not _configured() and "opentelemetry.sdk.trace" not in sys.modules:
        return None
    if _configured():
        _start()
    try:
        from opentelemetry.trace import get_tracer
    except ImportError:
        return None
    return get_tracer("ckptcore")


def _configured() -> bool:
    env = os.environ
    if env.get("OTEL_SDK_DISABLED", "").lower() == "true" or env.get("OTEL_TRACES_EXPORTER") == "none":
        return False
    return env.get("OTEL_TRACES_EXPORTER") == "otlp" or any(env.get(name) for name in ENDPOINTS)


@cache
def _start() -> None:
    """Set up the SDK once, unless the program has; the exporter reads its settings from the environment."""
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        _log.warning("no spans are exported: OpenTelemetry is not installed; %s", install("otel"))
        return
    # OpenTelemetry refuses a second provider, and the program's own decides where spans go.
    if isinstance(trace.get_tracer_provider(), TracerProvider):
        return
    name = os.environ.get("OTEL_SERVICE_NAME") or "ckptcore"
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))  # flushed when the process exits
    trace.set_tracer_provider(provider)
