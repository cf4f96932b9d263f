"""Pages that start with what there is: best, retire and compare; metrics over steps; names of exports."""

from __future__ import annotations

import html
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest
from catalog_page import Facts, browser, text_of
from paths import ROOT

import ckptcore
from ckptcore.catalog import open_catalog
from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.catalog import Catalog
from ckptcore.catalog.training import ANNOUNCED, read_facts
from ckptcore.page import pictures

EVIL = "<script>alert(1)</script>\x1b[31m\u202egnp"


def record(catalog: Catalog, facts: Facts, run: str, steps: dict[int, dict[str, float]]) -> None:
    for step, metrics in steps.items():
        training, _ = read_facts({"metrics": metrics})
        source = facts(f"/r/{run}/step-{step}", run=run, step=step, training=((ANNOUNCED, training),))
        catalog.record_validation(source)


def test_forms_offer_what_the_catalog_has(either: Catalog, facts: Facts) -> None:
    client = browser(either)
    for path, says in (
        ("/best", "No metric is recorded"),
        ("/retire", "No root"),
        ("/compare", "No run has two"),
    ):
        assert says in client.get(path).text, path
    record(either, facts, "llama", {10: {"loss": 3.0}, 20: {"loss": 2.0, EVIL: 1.0}, 30: {"loss": 1.0}})
    record(either, facts, EVIL, {1: {}, 2: {}})
    with either.writing() as conn:
        roots.add(conn, datetime.now(UTC), "all", "/r", retention={"keep_last": 7})
    best = client.get("/best").text
    assert '<option value="loss">' in best
    lowest = client.get("/best?metric=loss&goal=min&run=llama")
    assert 'href="/best?metric=loss&amp;goal=max"' in best
    assert '<option value="loss" selected>' in lowest.text
    retire = client.get("/retire").text
    assert "keep_last" in text_of(retire)
    for scope in ("all", "llama"):
        assert f'href="/retire?scope={scope}"' in retire
    page = client.get("/compare").text
    link = re.search(r'href="(/compare\?left=[^"]+)" aria-label="compare llama"', page)
    assert link is not None
    compared = text_of(client.get(html.unescape(link[1])).text)
    assert "/r/llama/step-20" in compared
    assert "/r/llama/step-30" in compared
    assert "/r/llama/step-10" not in compared
    run = client.get("/runs/llama").text
    assert "Compare the two newest steps, 20 and 30" in run
    one_side = client.get("/compare?left=/r/llama/step-20").text
    assert "the step before" in one_side
    for text in (best, retire, page, run, one_side):
        assert "<script>alert" not in text


def test_metrics_are_drawn_over_steps(either: Catalog, facts: Facts) -> None:
    record(either, facts, "a", {step: {"loss": 10.0 / step, "acc": step / 10} for step in (30, 10, 20)})
    record(either, facts, "b", {1: {"loss": float("nan")}, 2: {"loss": 5.0}})
    client = browser(either)
    page = client.get("/runs/a").text
    charts = re.findall(r'<svg class="chart".*?</svg>', page, re.DOTALL)
    assert len(charts) == 2
    assert "loss over steps 10 to 30: from 0.333333 to 1" in charts[1]
    assert charts[1].count("<circle") == 3
    assert "style=" not in charts[1]
    assert 'class="chart"' not in client.get("/runs/b").text  # one finite value is no line
    answer = client.get("/api/v1/metrics?run=a&name=loss").json()
    assert answer == {"series": {"loss": [[10, 1.0], [20, 0.5], [30, 10.0 / 30]]}}
    assert client.get("/api/v1/metrics?run=b").json() == {"series": {"loss": [[1, None], [2, 5.0]]}}
    assert client.get("/api/v1/metrics?run=%00").json() == {"series": {}}


@pytest.mark.parametrize(
    ("values", "lines"),
    [
        ([1.0, None, 2.0, 3.0], 2),
        ([1.7e308, -1.7e308], 1),
        ([5.0, 5.0], 1),
        ([float("inf"), 1.0, float("nan"), 2.0], 2),
        ([1.0], 0),
        ([], 0),
    ],
)
def test_a_chart_has_no_number_that_is_none(values: list[float | None], lines: int) -> None:
    drawn = str(pictures.chart(EVIL, [(7 * n, value) for n, value in enumerate(values)]))
    assert drawn.count("<polyline") == lines
    points = " ".join(re.findall(r'points="([^"]*)"', drawn))
    assert not re.search("nan|inf", points)
    assert "<script>" not in drawn
    assert all(0 <= float(y) <= 150 for y in re.findall(r",([\d.-]+)", points))


def test_an_export_is_compared_with_its_source_under_its_names(tmp_path: Path) -> None:
    source = ROOT / "tests" / "fixtures" / "torch" / "dcp_torchtitan_like_4r" / "ckpt"
    catalog = str(tmp_path / "catalog.sqlite")
    settings = ckptcore.Settings(fingerprint=True)
    ckptcore.convert(
        source, tmp_path / "out", verb="export", rename={"w": "layers.w"}, catalog=catalog, settings=settings
    )
    with open_catalog(catalog) as opened:
        client = browser(opened)
        sides = {"left": str(source), "right": str(tmp_path / "out")}
        for pair in (sides, {"left": sides["right"], "right": sides["left"]}):
            answer = client.get("/api/v1/compare", params=pair).json()
            assert (answer["unmapped"], answer["named_by"]) == ("", "mapping")
            assert answer["equal"] > 0
            assert answer["renamed"] > 0
            assert {"added", "removed"}.isdisjoint(answer["counts"])
            page = text_of(client.get("/compare", params=pair).text)
            assert "matched by the mapping of the export" in page
            assert "left out by the export" in page


@pytest.mark.usefixtures("asked_here")
def test_a_config_named_in_another_folder_is_the_copy_in_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request has the path as it was typed, the page runs elsewhere, or the config is gone."""
    sample = ROOT / "tests" / "fixtures" / "torch" / "verl_fsdp2_4r" / "ckpt/global_step_10/actor"
    shutil.copytree(sample, tmp_path / "step-1")
    shutil.copytree(tmp_path / "step-1/huggingface", tmp_path / "config")
    monkeypatch.chdir(tmp_path)
    catalog, settings = str(tmp_path / "catalog.sqlite"), ckptcore.Settings(fingerprint=True)
    for out, config in (("relative", "config"), ("absolute", str(tmp_path / "config"))):
        ckptcore.convert("step-1", out, verb="export", config=config, catalog=catalog, settings=settings)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "config").rename(tmp_path / "gone")
    with open_catalog(catalog) as opened:
        for out in ("relative", "absolute"):
            sides = {"left": str(tmp_path / "step-1"), "right": str(tmp_path / out)}
            answer = browser(opened).get("/api/v1/compare", params=sides).json()
            assert answer["unmapped"] == ""
            assert answer["equal"] > 0


def test_names_without_a_mapping_get_a_reason(catalog: Catalog, facts: Facts) -> None:
    from ckptcore.catalog import ConversionFacts

    tensors = [("model.a", "bfloat16", (4,), 8), ("model.b", "bfloat16", (4,), 8)]
    source = facts("/gone/step-1", tensors=tensors)
    export = facts("/gone/out", content="e", tensors=[("a", "bfloat16", (4,), 8), ("b", "bfloat16", (4,), 8)])
    begun = catalog.begin(
        {"verb": "export", "source": "/gone/step-1", "destination": "/gone/out"},
        source_uri=source.uri,
        destination_uri=export.uri,
        verb="export",
        tool_version="1",
    )
    catalog.succeed(begun, ConversionFacts("p" * 64, 1, 2, 3, {}), source=source, derived=export)
    client = browser(catalog)
    pair = {"left": "/gone/step-1", "right": "/gone/out"}
    page = text_of(client.get("/compare", params=pair).text)
    assert "could not be mapped" in page
    assert "does not say whether any are equal" in page
    assert "0 equal" not in page
    with catalog.writing() as conn:  # what a conversion that computes fingerprints records
        for old, new in (("model.a", "a"), ("model.b", "b")):
            for name in (old, new):
                change = f"UPDATE tensor SET fingerprint = '{new * 64}' WHERE fqn = '{name}'"
                conn.exec_driver_sql(change)
    answer = client.get("/api/v1/compare", params=pair).json()
    assert (answer["equal"], answer["renamed"], answer["named_by"]) == (2, 2, "fingerprints")
    assert "2 tensors have other names" in text_of(client.get("/compare", params=pair).text)
