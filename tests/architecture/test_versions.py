"""Check that dependencies have lower bounds, and that CI runs the Pythons that the classifiers promise."""

from __future__ import annotations

import importlib.util
import operator
import re
import tomllib
from functools import reduce

import pytest
from packaging.requirements import Requirement
from paths import ROOT

TEXT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PROJECT = tomllib.loads(TEXT)["project"]
WITH_FLOWS = [
    Requirement(text)
    for group in (
        PROJECT["dependencies"],
        *(PROJECT["optional-dependencies"][n] for n in ("flows", "page", "hf")),
    )
    for text in group
]
# What `pip install 'ckptcore[flows,hf]'` may bring, by name.
PERMITTED = {
    name: reduce(operator.and_, (one.specifier for one in WITH_FLOWS if one.name == name))
    for name in {one.name for one in WITH_FLOWS} - {"ckptcore"}
}


def test_every_dependency_has_a_lower_bound() -> None:
    """`make versions VERSIONS=lowest` pins all of them."""
    spec = importlib.util.spec_from_file_location("versions_run", ROOT / "tests" / "versions" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pins = module.lower_bounds(TEXT)
    names = [pin.partition("==")[0] for pin in pins]
    assert sorted(names) == sorted(PERMITTED)
    assert {"torch==2.7", "sqlalchemy==2.0.36", "prefect==3.7.5", "fastapi==0.133"} <= set(pins)


@pytest.mark.parametrize(
    "pair",
    [
        ("prefect==3.6.20", "fastapi==0.150.0"),  # its server answers every request with 500
        ("prefect==3.7.4", "fastapi==0.137.0"),
        ("prefect==3.8.8", "fastapi==0.151.0"),  # its server does not start
    ],
)
def test_versions_that_fail_together_are_not_permitted(pair: tuple[str, ...]) -> None:
    given = [Requirement(text) for text in pair]
    versions = [next(iter(one.specifier)).version for one in given]
    assert not all(v in PERMITTED[one.name] for one, v in zip(given, versions, strict=True))
    for text in ("prefect==3.7.5", "prefect==3.8.8", "prefect==3.9.1", "fastapi==0.133", "fastapi==0.150"):
        one = Requirement(text)
        assert next(iter(one.specifier)).version in PERMITTED[one.name], text  # these were tried


def test_ci_runs_the_pythons_that_are_promised() -> None:
    promised = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c]
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    matrix = re.search(r"python: \[(.*)\]", workflow)
    assert matrix is not None
    assert re.findall(r"[\d.]+", matrix[1]) == promised
    assert promised[0] == PROJECT["requires-python"].removeprefix(">=")
