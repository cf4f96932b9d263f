"""Facts about trainings: merged by origin, inherited by outputs, ranked by metric."""

from __future__ import annotations

import json
import math

import pytest
import sqlalchemy as sa
from paths import ROOT

from ckptcore.catalog import open_catalog
from ckptcore.catalog.models import Base
from ckptcore.catalog.training import (
    ANNOUNCED,
    MAX_JSON,
    MAX_METRICS,
    STORED,
    TrainingFacts,
    facts_of_every,
    facts_of_pairs,
    read_facts,
)
from ckptcore.catalog.views import VIEWS
from ckptcore.errors import UsageError


def of(**form):
    facts, left_out = read_facts(form)
    assert left_out == ()
    return facts


def known(catalog, ref):
    return catalog.show(str(ref), tensors=False).training


def rows(catalog, sql, **values):
    with catalog.reading() as conn:
        return [tuple(row) for row in conn.execute(sa.text(sql), values)]


@pytest.fixture
def run(facts, convert):
    """Record a step of a run with a loss, and its export; return the export's id."""

    def make(step, loss, *, run="llama"):
        reported = of(metrics={"loss": loss}, git_commit=f"c{step}", user="ada")
        source = facts(
            f"/{run}/step-{step}", run=run, step=step, training=((ANNOUNCED, reported),), verified="coverage"
        )
        return convert(source, facts(f"/out/{run}/{step}", content=f"{run}{step}", verified="coverage"))[1]

    return make


def test_facts_are_stored_in_columns_and_inherited(catalog, run):
    run(10, 2.5)
    for place in ("/llama/step-10", "/out/llama/10"):
        training = known(catalog, place)
        assert training.facts.git_commit == "c10"
        assert training.facts.metrics["loss"].value == 2.5
    assert known(catalog, "/llama/step-10").sources == {
        "git_commit": "announced",
        "user": "announced",
        "metrics.loss": "announced",
    }
    assert set(known(catalog, "/out/llama/10").sources.values()) == {"inherited"}


def test_an_origin_is_replaced_by_an_earlier_one_only(catalog, facts):
    catalog.record_validation(facts("/r/step-1", training=((STORED, of(user="file", epoch=2)),)))
    catalog.describe("/r/step-1", of(user="hook", config={"lr": 1, "bs": 8}, metrics={"loss": 3}), ANNOUNCED)
    catalog.describe("/r/step-1", of(user="ada", metrics={"loss": 2}))
    catalog.describe("/r/step-1", of(user="late", config={"lr": 2, "wd": 3}, metrics={"loss": 9}), STORED)
    found = known(catalog, "/r/step-1")
    assert (found.facts.user, found.facts.epoch) == ("ada", 2.0)
    assert found.facts.config == {"lr": 1, "bs": 8, "wd": 3}
    assert found.facts.metrics["loss"].value == 2.0
    assert found.sources["metrics.loss"] == "user"


def test_facts_that_come_later_reach_what_was_made_before(catalog, run, facts, convert):
    export = run(10, 2.5)
    convert(facts("/out/llama/10", content="llama10"), facts("/again", content="again"), verb="consolidate")
    catalog.describe("/llama/step-10", of(metrics={"mmlu": 0.7}))
    assert known(catalog, export).facts.metrics["mmlu"].value == 0.7
    assert known(catalog, "/again").facts.metrics["mmlu"].value == 0.7
    catalog.describe("/again", of(metrics={"mmlu": 0.6}))  # its own evaluation
    catalog.describe("/llama/step-10", of(metrics={"mmlu": 0.8}))
    assert known(catalog, "/again").facts.metrics["mmlu"].value == 0.6
    assert known(catalog, export).facts.metrics["mmlu"].value == 0.8


def test_the_best_by_metric(catalog, run):
    for step, loss in ((10, 2.5), (20, 1.5), (30, float("nan")), (40, 1.5)):
        run(step, loss)
    run(10, 0.5, run="other")
    assert [r.checkpoint.uri for r in catalog.best("loss", run="llama", kind="derived")] == [
        "/out/llama/20",
        "/out/llama/40",
        "/out/llama/10",
    ]
    assert [(r.checkpoint.run, r.step) for r in catalog.best("loss", limit=3)] == [
        ("other", 10),
        ("llama", 20),
        ("llama", 40),
    ]
    assert catalog.best("loss", limit=1)[0].checkpoint.run == "other"
    assert catalog.best("loss", "max", run="llama", limit=1)[0].value == 2.5
    asked = (
        "SELECT run, goal, value, step, uri FROM best_by_metric"
        " WHERE metric = 'loss' AND kind = 'derived' ORDER BY run, goal"
    )
    assert rows(catalog, asked) == [
        ("llama", "max", 2.5, 10, "/out/llama/10"),
        ("llama", "min", 1.5, 20, "/out/llama/20"),
        ("other", "max", 0.5, 10, "/out/other/10"),
        ("other", "min", 0.5, 10, "/out/other/10"),
    ]
    with pytest.raises(UsageError, match="no checkpoint has the metric 'los'") as error:
        catalog.best("los")
    assert "loss" in error.value.hint
    with pytest.raises(UsageError, match="min or max"):
        catalog.best("loss", "lowest")


def test_the_view_of_runs(catalog, run):
    for step in (10, 20):
        run(step, 1.0)
    [found] = rows(
        catalog,
        "SELECT run, sources, outputs, damaged, first_step, last_step, uri, git_commit, user_name FROM runs",
    )
    assert tuple(found) == ("llama", 2, 2, 0, 10, 20, "/llama/step-20", "c20", "ada")


HOSTILE = {
    "user": "a\x00b\ud800",
    "git_commit": ["no", "text"],
    "dataset": "s3://me:secret-word@bucket/data",
    "job_url": "https://jobs.example/1?X-Amz-Signature=secret-word",
    "epoch": float("inf"),
    "samples": -1,
    "tokens": 10**400,
    "metrics": {
        "nan": float("nan"),
        "inf": float("inf"),
        "minus": float("-inf"),
        "text": "-Infinity",
        "number": "2.5e-3",
        "tiny": 5e-324,
        "api_key": "secret-word",
        "huge": 10**400,
        "flag": True,
        "none": None,
        "a\x00\ud800": 1,
        "step": {"value": 3, "step": 2**70},
    },
    "config": {
        "deep": json.loads("[" * 200 + "]" * 200),
        "big": "x" * (MAX_JSON + 1),
        "nan": float("nan"),
        "n": 2**80,
        "wide": 10**5000,
        "api_key": "secret-word",
        "nested": {"WANDB_API_KEY": "secret-word", "env": ["HF_TOKEN=secret-word"], "pad_token": "<pad>"},
        "hub_token": "secret-word",
        "\x00\udfff": "\x00\udfff",
        "url": "postgresql://u:secret-word@h/db",
    },
    "other": {"password": "secret-word", "raw": b"\x00\xff"},
}


def test_hostile_values_are_the_same_on_both_databases(catalog, facts):
    reported, left_out = read_facts(HOSTILE)
    assert left_out == (
        "git_commit must be a text (got list)",
        "epoch must be a finite number (got inf)",
        "samples must be from 0 to 2**63 - 1",
        "tokens must be a finite number (got an integer of 1329 bits)",
        (
            "metrics.api_key must be a number, metrics.huge must be a number (got an integer of 1329 bits), "
            "metrics.flag must be a number (got True) and 1 more"
        ),
        f"config: 2 of its entries, beyond {MAX_JSON >> 10} KiB",
    )
    catalog.record_validation(facts("/r/step-1", training=((ANNOUNCED, reported),)))
    found = known(catalog, "/r/step-1").facts
    assert found == reported
    assert "secret-word" not in json.dumps(found.as_form(), allow_nan=False)
    assert found.user == "a\\x00b\\ud800"
    assert found.dataset == "s3://bucket/data"
    assert {n: m.nonfinite for n, m in found.metrics.items() if m.nonfinite} == {
        "nan": "nan",
        "inf": "inf",
        "minus": "-inf",
        "text": "-inf",
    }
    assert found.metrics["tiny"].value == 5e-324
    assert found.metrics["step"].step is None
    assert found.config["nested"]["pad_token"] == "<pad>"
    assert found.config["nested"]["env"] == ["HF_TOKEN=..."]
    assert (found.config["nan"], found.config["n"]) == ("nan", str(2**80))
    assert read_facts(found.as_form())[0] == found


def test_facts_are_bounded(catalog, facts):
    many = {f"m{n:04d}": n for n in range(MAX_METRICS + 50)}
    reported, left_out = read_facts({"metrics": many, "config": {f"k{n}": "x" * 1000 for n in range(100)}})
    assert left_out[0] == f"metrics: 50 beyond the first {MAX_METRICS}"
    catalog.record_validation(facts("/r/step-1", training=((ANNOUNCED, reported),)))
    catalog.describe("/r/step-1", of(metrics={"late": 1.0}, config={"late": "y" * 1000}))
    found = known(catalog, "/r/step-1").facts
    assert len(found.metrics) == MAX_METRICS
    assert len(json.dumps(found.config)) <= MAX_JSON + 100


@pytest.mark.parametrize("form", [[], "text", 3, {"metrics": []}, {"config": "lr"}])
def test_what_is_no_object_is_left_out(form):
    facts, left_out = read_facts(form)
    assert not facts
    assert len(left_out) == 1


def test_pairs_of_the_command_line():
    facts = facts_of_pairs(
        ["metrics.loss=2.5", "commit=12345678", "config.lr=3e-4", "config.x.y=a", "note=[1]"]
    )
    assert facts.git_commit == "12345678"
    assert math.isclose(facts.config["lr"], 3e-4)
    assert (facts.config["x.y"], facts.extra) == ("a", {"note": [1]})
    for wrong in ("loss", "=1", "metrics.=1", "metrics.loss=low", "epoch=nan"):
        with pytest.raises(UsageError, match="--meta"):
            facts_of_pairs([wrong])


@pytest.mark.parametrize(
    "text", ["loss=1", "eval_loss=2.5", "val/acc=0.7", "Loss=nan", "mmlu=0.7", "step=3", "grad_norm=1"]
)
def test_a_metric_without_its_prefix_is_no_fact_of_every_step(text: str) -> None:
    name = text.partition("=")[0]
    with pytest.raises(UsageError, match="looks like a metric") as caught:
        facts_of_every([text])
    assert f"ckptcore catalog meta ID metrics.{name}=VALUE" in str(caught.value.hint)
    facts_of_every([f"config.{text}"])
    assert facts_of_pairs([text])  # of one conversion, whatever it is


@pytest.mark.parametrize(
    "text",
    ["user=ada", "seed=7", "nodes=8", "loss=cross-entropy", "accelerator=8", "glossary=1", "score=true"],
)
def test_other_facts_hold_for_every_step(text: str) -> None:
    assert facts_of_every([text])


def test_nothing_is_no_facts():
    assert not TrainingFacts()
    assert read_facts(None) == (TrainingFacts(), ())
    assert of(user="${event_author}", metrics={"loss": "${artifact_metadata.loss}"}) == TrainingFacts()


def test_every_table_view_and_column_has_a_comment(bare, monkeypatch):
    if not bare.startswith("postgresql"):
        pytest.skip("SQLite stores no comments")
    from ckptcore.catalog import upgrade

    upgrade(bare)
    with open_catalog(bare) as catalog:
        found = rows(
            catalog,
            "SELECT c.relname, a.attname, obj_description(c.oid, 'pg_class'),"
            " col_description(c.oid, a.attnum)"
            " FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
            " JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped"
            " WHERE n.nspname = 'public' AND c.relkind IN ('r', 'v') AND c.relname <> 'alembic_version'",
        )
    assert {row[0] for row in found} == set(Base.metadata.tables) | set(VIEWS)
    assert [row[:2] for row in found if not row[2] or not row[3]] == []


def test_the_shipped_role_only_reads(bare, postgres):
    if not bare.startswith("postgresql"):
        pytest.skip("SQLite has no roles")
    from ckptcore.catalog import upgrade

    upgrade(bare)
    script = (ROOT / "deployments" / "postgres" / "catalog_reader.sql").read_text()
    statements = "\n".join(line for line in script.splitlines() if not line.startswith(("\\", "--")))
    engine = sa.create_engine(
        bare.replace("postgresql://", "postgresql+psycopg://"), isolation_level="AUTOCOMMIT"
    )
    with engine.connect() as conn:
        owner, database = conn.exec_driver_sql("SELECT current_user, current_database()").one()
        names = {
            ':"reader"': '"catalog_reader_of_a_test"',
            ':"owner"': f'"{owner}"',
            ':"database"': f'"{database}"',
        }
        for name, text in names.items():
            statements = statements.replace(name, text)
        conn.exec_driver_sql("CREATE EXTENSION dblink")
        conn.exec_driver_sql(statements)
        try:
            conn.exec_driver_sql("SET ROLE catalog_reader_of_a_test")
            assert conn.exec_driver_sql("SELECT count(*) FROM runs").scalar() == 0
            for forbidden in (
                "INSERT INTO training_run (name, created_at) VALUES ('x', now())",
                "DELETE FROM audit",
                "CREATE TABLE mine (a int)",
                "SELECT body FROM inbox",
                "SELECT body FROM outbox",
                "SELECT pg_advisory_lock(1)",
                "SELECT dblink('dbname=postgres', 'DELETE FROM audit')",
            ):
                with pytest.raises(sa.exc.ProgrammingError, match="permission denied"):
                    conn.exec_driver_sql(forbidden)
            assert conn.exec_driver_sql("SELECT count(state) FROM inbox").scalar() == 0
        finally:
            conn.exec_driver_sql("RESET ROLE")
            conn.exec_driver_sql("DROP OWNED BY catalog_reader_of_a_test")
            conn.exec_driver_sql("DROP ROLE catalog_reader_of_a_test")
    engine.dispose()
