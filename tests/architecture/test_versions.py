"""Check that dependencies have lower bounds, and that CI runs the Pythons that the classifiers promise."""

from __future__ import annotations

import importlib.util
import re
import tomllib

from paths import ROOT

TEXT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PROJECT = tomllib.loads(TEXT)["project"]


def test_every_dependency_has_a_lower_bound() -> None:
    """`make versions VERSIONS=lowest` pins all of them."""
    spec = importlib.util.spec_from_file_location("versions_run", ROOT / "tests" / "versions" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pins = module.lower_bounds(TEXT)
    assert len(pins) == len(PROJECT["dependencies"]) + len(PROJECT["optional-dependencies"]["hf"])
    assert {"torch==2.7", "sqlalchemy==2.0.36"} <= set(pins)


def test_ci_runs_the_pythons_that_are_promised() -> None:
    promised = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c]
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    matrix = re.search(r"python: \[(.*)\]", workflow)
    assert matrix is not None
    assert re.findall(r"[\d.]+", matrix[1]) == promised
    assert promised[0] == PROJECT["requires-python"].removeprefix(">=")
