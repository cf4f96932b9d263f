"""Check that deployments, triggers and receivers of release 0.1 start flows with the former names."""

from __future__ import annotations

from typing import Any

import pytest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import is_valid_schema, validate

from ckptcore.operations.options import SweepOptions
from deployments.parameters import misfits, misfits_of
from flows._command import parse
from flows._options import FlowOptions, flow_options
from flows.consolidate import consolidate
from flows.convert import convert
from flows.export import export
from flows.reshard import reshard
from flows.sweep import sweep

PLACES = {"source": "/runs/a", "destination": "/exports/a"}
CONVERTING = (convert, consolidate, export, reshard)
FORMER: tuple[tuple[Any, dict[str, Any], str], ...] = (
    *((flow, {**PLACES, "recover": True}, "allow_incomplete") for flow in CONVERTING),
    (sweep, {"settle": "5m"}, "min_age"),
    (sweep, {"again": True}, "retry_failed"),
)
CASES = pytest.mark.parametrize(("flow", "given", "present"), FORMER)


@CASES
def test_the_form_shows_the_present_name_only(flow: Any, given: dict[str, Any], present: str) -> None:
    schema = parameter_schema(flow).model_dump_for_openapi()
    assert present in schema["properties"]
    assert not set(schema["properties"]) & {"recover", "settle", "again"}
    assert present in flow.fn.__doc__
    is_valid_schema(schema)
    # What Prefect's server does with the parameters of a run.
    assert validate(given, schema, raise_on_error=True) == []


@CASES
def test_a_former_parameter_is_accepted(flow: Any, given: dict[str, Any], present: str) -> None:
    assert misfits(flow, given) == []
    assert misfits_of(f"{flow.name}/{flow.name}", given) == []
    [former] = given.keys() - PLACES.keys()
    taken = flow.validate_parameters(given)
    assert taken[former] == given[former]
    declaration = SweepOptions if flow is sweep else FlowOptions
    assert getattr(flow_options(declaration, taken), present) == given[former]  # type: ignore[type-var]


def test_a_former_parameter_of_another_type_is_not_accepted() -> None:
    assert misfits(convert, {**PLACES, "recover": "perhaps"})
    assert misfits(sweep, {"settle": []})


def test_the_present_name_has_precedence() -> None:
    assert flow_options(SweepOptions, {"min_age": "1s", "settle": "2m"}).min_age == "1s"
    assert flow_options(SweepOptions, {"min_age": "2m", "settle": None}).min_age == "2m"


def test_a_former_name_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    flow_options(SweepOptions, {"min_age": "2m", "settle": None, "again": False})
    assert not caplog.records
    flow_options(SweepOptions, {"min_age": "2m", "settle": "5m"})
    assert "'settle' is now 'min_age'" in caplog.text


def test_the_command_line_of_a_flow_takes_former_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert not parse(convert, ["/a", "/b"]).keys() & {"recover"}
    assert "note:" not in capsys.readouterr().err
    given = parse(convert, ["/a", "/b", "--recover"])
    assert given["recover"] is True
    assert "note: --recover is now --allow-incomplete" in capsys.readouterr().err
    assert flow_options(FlowOptions, given).allow_incomplete
