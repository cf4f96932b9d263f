"""Spans: the stages of a conversion where OpenTelemetry is set up, and nothing at all where it is not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from paths import FIXTURES, ROOT

from ckptcore.conversion.pipeline import convert
from ckptcore.errors import CkptError
from ckptcore.planning.request import Request
from ckptcore.utils.spans import span


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    """An exporter of this process's only provider."""
    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    trace.set_tracer_provider(provider)
    return kept


@pytest.fixture
def ended(exporter: InMemorySpanExporter) -> InMemorySpanExporter:
    exporter.clear()
    return exporter


def named(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {each.name.removeprefix("ckptcore."): each for each in exporter.get_finished_spans()}


def test_a_conversion_reports_its_stages(ended: InMemorySpanExporter, tmp_path: object) -> None:
    source, out = str(FIXTURES / "torch" / "dcp_dims_4r" / "ckpt"), f"{tmp_path}/out"
    convert(Request(source, out, "consolidate"), catalog_url=False)
    spans = named(ended)
    assert set(spans) == {"conversion", "inspect", "plan", "write", "publish", "register"}
    root = spans.pop("conversion")
    assert root.attributes is not None
    assert root.attributes["ckptcore.verb"] == "consolidate"
    assert root.attributes["ckptcore.destination"] == out
    assert {each.parent.span_id for each in spans.values() if each.parent} == {root.context.span_id}
    assert all(each.parent for each in spans.values())


def test_an_error_is_a_code_without_its_message(ended: InMemorySpanExporter) -> None:
    with pytest.raises(CkptError), span("inspect", source="s3://me:secret@bucket/run", step=None, bytes=7):
        raise CkptError("cannot read s3://me:secret@bucket/run")
    (found,) = ended.get_finished_spans()
    assert dict(found.attributes or {}) == {
        "ckptcore.source": "s3://bucket/run",
        "ckptcore.bytes": 7,
        "error.type": CkptError.code,
    }
    assert found.status.status_code is trace.StatusCode.ERROR
    assert "secret" not in found.to_json()


@pytest.mark.parametrize(
    ("environment", "loaded"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_nothing_is_imported_without_a_configuration(environment: dict[str, str], loaded: bool) -> None:
    program = (
        "import sys; from ckptcore.utils.spans import span\n"
        "with span('x', a=1): pass\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    own = {k: v for k, v in os.environ.items() if not k.startswith("OTEL_")} | environment
    done = subprocess.run([sys.executable, "-c", program], env=own, cwd=ROOT, check=False)
    assert done.returncode == int(loaded)
