"""The dashboard and the alerts: their metrics, labels and types are those that /metrics serves."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import yaml
from bigcatalog import fill
from paths import ROOT
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ckptcore.catalog import open_catalog
from deployments.metrics import ReceiverMetrics, WorkerMetrics, registry_of

FOLDER = ROOT / "deployments" / "monitoring"
TARGET = {"instance", "job"}  # labels that Prometheus adds
OF_COUNTERS = {"rate", "increase"}
TERMS = {"by", "without", "sum", "max", "min", "count", "rate", "increase", "and", "or", "unless"}
PROMTOOL = shutil.which("promtool")


def panels() -> Iterator[tuple[str, str, str]]:
    """Yield (title, expression, legend) of the dashboard."""
    for panel in json.loads((FOLDER / "grafana.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"], target.get("legendFormat", "")


def alerts() -> Iterator[tuple[str, str, str]]:
    """Yield (name, expression, texts) of the alerts."""
    for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            texts = "\n".join(rule["annotations"].values())
            yield rule["alert"], rule["expr"], re.sub(r"\$labels\.", "", texts)


EXPRESSIONS = [*panels(), *alerts()]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a receiver and a worker in one would serve, with a sample of each metric."""
    url = str(tmp_path_factory.mktemp("metrics") / "catalog.sqlite")
    open_catalog(url).close()
    fill(url, 2, 2, 398)
    with open_catalog(url) as catalog, catalog.writing() as conn:
        conn.execute(sa.text("UPDATE conversion SET state = 'running' WHERE id = 1"))
    registry: CollectorRegistry = registry_of(url)
    ReceiverMetrics(registry, lambda: "").count("slurm", "accepted")
    WorkerMetrics(registry, list)
    return generate_latest(registry).decode()


@pytest.fixture(scope="module")
def known(served: str) -> dict[str, tuple[str, set[str]]]:
    """Name of a sample -> its type, and the labels that all of its samples have."""
    found: dict[str, tuple[str, set[str]]] = {}
    for family in text_string_to_metric_families(served):
        for sample in family.samples:
            assert found.get(sample.name, (family.type, set(sample.labels)))[1] == set(sample.labels)
            found[sample.name] = family.type, set(sample.labels)
    return found


def used(expression: str) -> list[tuple[str, set[str], str, bool]]:
    """Return each selector: (metric, labels that it names, function around it, whether it has a range)."""
    found = []
    for match in re.finditer(
        r"(?:(\w+)\s*\(\s*)?\b(ckptcore_\w+)\s*(?:\{([^}]*)\})?\s*(\[[^\]]+\])?", expression
    ):
        function, name, matchers, span = match.groups()
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers or ""))
        found.append((name, labels, function or "", span is not None))
    return found


@pytest.mark.parametrize(
    ("title", "expression", "texts"), EXPRESSIONS, ids=[title for title, _, _ in EXPRESSIONS]
)
def test_an_expression_fits_what_is_served(
    title: str, expression: str, texts: str, known: dict[str, tuple[str, set[str]]]
) -> None:
    selectors = used(expression)
    assert selectors
    plain = re.sub(r'"[^"]*"', "", expression)
    names = set(re.findall(r"[A-Za-z_]\w*", re.sub(r"\{[^}]*\}|\[[^\]]*\]|\([\w\s,]+\)", " ", plain)))
    assert {n for n in names if not n.startswith("ckptcore_")} <= TERMS, "a word that this test does not know"
    all_labels = set(TARGET)
    for name, labels, function, ranged in selectors:
        kind, served_labels = known[name]
        assert labels <= served_labels | TARGET, name
        assert ranged == (function in OF_COUNTERS), name
        assert (kind == "counter") == (function in OF_COUNTERS), f"{name} is a {kind}"
        all_labels |= served_labels
    for word, grouped in re.findall(r"\b(by|without)\s*\(([^)]*)\)", expression):
        labels = {each.strip() for each in grouped.split(",")}
        for name, *_ in selectors:
            assert labels <= known[name][1] | TARGET, (word, name)
    # A legend or a text that names a label which the aggregation drops would be empty.
    kept = _kept(expression, all_labels)
    assert set(re.findall(r"\{\{\s*(\w+)\s*\}\}", texts)) <= kept


def _kept(expression: str, labels: set[str]) -> set[str]:
    """Return the labels that are left outside of all aggregations."""
    outer = re.match(r"\s*(?:sum|max|min|count)\b\s*(?:(by|without)\s*\(([^)]*)\))?", expression)
    if outer is None:
        return labels
    word, grouped = outer.groups()
    named = {each.strip() for each in (grouped or "").split(",")} - {""}
    return labels - named if word == "without" else named


def test_conversions_of_bytes_and_seconds_have_the_same_labels(
    known: dict[str, tuple[str, set[str]]],
) -> None:
    """A division joins both sides by their labels."""
    for _, expression, _ in EXPRESSIONS:
        if "/" in expression:
            sides = [known[name][1] for name, *_ in used(expression)]
            assert all(side == sides[0] for side in sides)


def test_the_data_source_is_chosen_on_import() -> None:
    board = json.loads((FOLDER / "grafana.json").read_text())
    (variable,) = board["templating"]["list"]
    assert (variable["type"], variable["query"]) == ("datasource", "prometheus")
    for panel in board["panels"]:
        for each in (panel, *panel["targets"]):
            assert each["datasource"]["uid"] == f"${{{variable['name']}}}"
    places = [panel["gridPos"] for panel in board["panels"]]
    cells = [
        (x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert max(x for x, _ in cells) < 24


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, of Debian's package prometheus")
def test_prometheus_accepts_them(served: str, tmp_path: Path) -> None:
    def promtool(*arguments: str, given: str | None = None) -> str:
        ended = subprocess.run(
            [str(PROMTOOL), *arguments], input=given, capture_output=True, text=True, timeout=600
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout + ended.stderr

    assert "7 rules found" in promtool("check", "rules", str(FOLDER / "alerts.yaml"))
    rules: list[dict[str, Any]] = [
        {"record": f"panel:{n}", "expr": expression.replace("$__rate_interval", "5m")}
        for n, (_, expression, _) in enumerate(panels())
    ]
    file = tmp_path / "panels.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", str(file))
    promtool("check", "metrics", given=served)
    config = (FOLDER / "prometheus.yaml").read_text().replace("alerts.yaml", str(FOLDER / "alerts.yaml"))
    (tmp_path / "prometheus.yaml").write_text(config)
    promtool("check", "config", str(tmp_path / "prometheus.yaml"))
