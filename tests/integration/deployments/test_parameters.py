"""A configuration with parameters that no run accepts is refused at start."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import webhooks
import yaml

from ckptcore.errors import UsageError
from deployments import deploy, parameters
from deployments.parameters import declared, flow_of, misfits, misfits_of
from deployments.receiver.serve import check
from deployments.receiver.settings import load

OF_EVENT = {"source": "/a", "destination": "/b", "root": "/", "run": "x", "step": 1}
WRONG: dict[str, tuple[str, str]] = {
    "a name": ('verbb = "export"', "has no parameter 'verbb' (did you mean 'verb'?)"),
    "a choice": ('verb = "exprot"', "cannot be 'exprot'"),
    "a type": ('wait_minutes = "soon"', "cannot be 'soon'"),
    "a number": ("workers = 1.5", "cannot be 1.5"),
    "a list": ('dtype = ["bf16"]', "cannot be ['bf16']"),
    "a table": ("memory = {a = 1}", "cannot be {'a': 1}"),
    "a boolean": ('fingerprint = "perhaps"', "cannot be 'perhaps'"),
    "a date": ("dtype = 2026-01-01", "not a JSON value"),
    "an event's": ('source = "/elsewhere"', "comes from the event"),
}


@pytest.mark.parametrize("where", ["parameters", "sources.slurm.parameters"])
@pytest.mark.parametrize("name", WRONG)
def test_a_receiver_does_not_start_with_invalid_parameters(
    name: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, expected = WRONG[name]
    config = tmp_path / "receiver.toml"
    config.write_text(webhooks.CONFIG + f"\n[{where}]\n{line}\n")
    with pytest.raises(UsageError) as caught:
        load(config, webhooks.SECRETS)
    assert expected in caught.value.message
    for variable, secret in webhooks.SECRETS.items():
        monkeypatch.setenv(variable, secret)
    with pytest.raises(UsageError):  # what `--check` does
        check(config)


@pytest.mark.parametrize("deployment", ["convert/convert", "export/export", "sweep/sweep", "resume/resume"])
def test_a_deployment_that_takes_no_event_is_refused(deployment: str, tmp_path: Path) -> None:
    config = tmp_path / "receiver.toml"
    config.write_text(f'deployment = "{deployment}"\n' + webhooks.CONFIG)
    with pytest.raises(UsageError, match=f"the flow {deployment.split('/')[0]} has no parameter 'root'"):
        load(config, webhooks.SECRETS)


def test_valid_parameters_are_accepted(tmp_path: Path) -> None:
    config = tmp_path / "receiver.toml"
    lines = 'verb = "consolidate"\ndtype = "bf16"\nwait_minutes = 5\nworkers = 2\nfingerprint = true\n'
    for deployment in ("arrived/arrived", "other/flow"):
        config.write_text(f'deployment = "{deployment}"\n{webhooks.CONFIG}\n[parameters]\n{lines}')
        assert load(config, webhooks.SECRETS)[1]["slurm"].parameters["workers"] == 2
    # Unknown deployments cannot be checked here; the server is asked before a run is created.
    assert misfits_of("other/flow", {"anything": 1}) == []


def unlike(kinds: dict[str, Any], known: list[Any]) -> list[str]:
    """The parameters that no other deployment has of that name and type; known: what others have, to which
    they are added."""
    found = []
    for name, kind in kinds.items():
        mine = (
            name,
            {k: v for k, v in kind.items() if k not in ("title", "description", "default", "position")},
        )
        if mine not in known:
            known.append(mine)
            found.append(name)
    return found


@pytest.mark.soak
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_the_checks_agree_with_prefect(every: bool) -> None:
    """Every parameter of every deployment; by default shared ones only once."""
    known: list[Any] = []
    for one in declared():
        kinds = flow_of(one).parameters.properties
        says_what_prefect_says(one, list(kinds) if every else unlike(kinds, known))
    assert every or len(known) > 30


def says_what_prefect_says(one: dict[str, Any], names: list[str]) -> None:
    from prefect.exceptions import ParameterTypeError, SignatureMismatchError

    flow = flow_of(one)
    needed = {"source": "/a", "destination": "/b", "mesh": "fsdp=2", "flow_run_id": "x"}
    base = {k: v for k, v in needed.items() if k in flow.parameters.required}
    for name in names:
        kind = flow.parameters.properties[name]
        for value in (None, True, 0, 1, -1, 2.5, "", "1", "true", "x", [], ["a"], [1], {}, {"a": 1}):
            given = base | {name: value}
            try:
                flow.validate_parameters(given)
                theirs = True
            except (ParameterTypeError, SignatureMismatchError):
                theirs = False
            assert (misfits(flow, given) == []) is theirs, (name, kind, value)
    assert misfits(flow, base | {"nonsense": 1})
    assert not base or misfits(flow, {})


def test_deployments_have_valid_parameters() -> None:
    deploy._require_flows_fit()


@pytest.mark.parametrize("place", ["parameters", "triggers", "types"])
def test_invalid_deployments_are_refused(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = yaml.safe_load(parameters.FILE.read_text())["deployments"]
    arrived = next(one for one in found if one["name"] == "arrived")
    if place == "parameters":
        arrived["parameters"] = {"verbb": "export"}
    elif place == "types":
        arrived["parameters"] = {"step": "first"}
    else:
        arrived["triggers"][0]["parameters"]["sourc"] = "{{ event.payload.source }}"
    monkeypatch.setattr(deploy, "declared", lambda: found)
    with pytest.raises(UsageError, match=r"deployment arrived: the .*flow arrived"):
        deploy.deploy(0.0)


def test_a_value_that_prefect_replaces_is_not_checked() -> None:
    arrived = flow_of(next(one for one in declared() if one["name"] == "arrived"))
    block = {"$ref": {"block_document_id": "x"}}
    assert (
        misfits(arrived, OF_EVENT | {"dtype": {"__prefect_kind": "jinja", "template": "x"}, "to": block})
        == []
    )
    assert misfits(arrived, OF_EVENT | {"dtype": datetime.date(2026, 1, 1)})


def test_every_automation_has_a_name_and_a_description() -> None:
    triggers = [each for one in declared() for each in one.get("triggers") or ()]
    automations = yaml.safe_load((Path(deploy.__file__).parent / "automations.yaml").read_text())[
        "automations"
    ]
    named = [*triggers, *automations]
    assert len(triggers) >= 6
    assert all(each["name"].startswith("ckptcore-") for each in named)
    assert len({each["name"] for each in named}) == len(named)
    assert all(" " in each["description"] for each in named)


@pytest.mark.parametrize("one", declared(), ids=lambda one: str(one["name"]))
def test_the_form_describes_every_parameter(one: dict[str, Any]) -> None:
    from prefect.utilities.callables import parameter_schema

    properties = parameter_schema(flow_of(one)).model_dump_for_openapi()["properties"]
    assert properties
    assert [name for name, field in properties.items() if not field.get("description")] == []
    choices = {name: field["enum"] for name, field in properties.items() if "enum" in field}
    if one["name"] in ("convert", "arrived"):
        assert choices["verb"] == ["consolidate", "export"]
    if one["name"] in ("convert", "consolidate", "export", "reshard"):
        assert choices["weights"] == ["auto", "master", "module"]
