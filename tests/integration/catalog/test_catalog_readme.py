"""The SQL queries in the catalog's README run on both databases, on rows of conversions and on none."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from datetime import UTC, datetime
from pathlib import Path

import pytest
import sqlalchemy as sa
from retiring import delete_now
from strict_exports import ask_here

import ckptcore.catalog
from ckptcore.catalog import aliases, audit, history, holds, open_catalog
from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.models import Base
from ckptcore.catalog.query import resolve_checkpoint
from ckptcore.catalog.queues import NewEvent, inbox
from ckptcore.catalog.training import read_facts
from ckptcore.catalog.types import StatisticsRow
from ckptcore.catalog.views import VIEWS
from ckptcore.conversion import pipeline
from ckptcore.errors import DamagedCheckpoint, finding
from ckptcore.operations.automation.sweep import SweepSettings, sweep
from ckptcore.operations.automation.verified_exports import verifying
from ckptcore.operations.retention.policy import Policy
from ckptcore.planning.request import Request, Settings

README = (Path(ckptcore.catalog.__file__).parent / "README.md").read_text()
QUESTIONS = dict(re.findall(r"\n([^\n]+\?)\n\n```sql\n(.*?);\n```", README, re.DOTALL))
NOW = datetime(2026, 3, 1, tzinfo=UTC)
W, E = 64, 96  # bytes of the two tensors
# What people record of the trainings.
TRAINED = {
    "llama/step-10": {"commit": "beef10", "metrics": {"loss": 2.5, "gradient": "nan"}},
    "llama/step-20": {"commit": "beef20", "metrics": {"loss": 2.25}, "live_fingerprint": 32 * "ab"},
    "llama/step-30": {"commit": "beef30", "user": "ana", "dataset": "wiki"},
    "mistral/step-5": {"metrics": {"loss": 3.5}},
}

# question -> what it must answer on the example below
ANSWERS = {
    "Which is the newest proven export of every training run?": [
        ("mistral", 5, "bfloat16", "/exports/bf16-5"),
        ("mistral", 5, "float32", "/exports/step-5"),
    ],
    "Which exports were verified, and which failed?": [
        # Their config.json is of no class that transformers has, so their names cannot be verified.
        ("mistral", 4, "unproven", "/exports/step-4"),
        ("mistral", 5, "unproven", "/exports/bf16-5"),
        ("mistral", 5, "unproven", "/exports/step-5"),
    ],
    "What is the newest output of each kind of one run?": [
        ("consolidate", "safetensors", "float32", 5, "/whole/5"),
        ("export", "safetensors", "bfloat16", 5, "/exports/bf16-5"),
        ("export", "safetensors", "float32", 5, "/exports/step-5"),
    ],
    "Which checkpoint, conversion and source does a file with this digest come from?": [
        ("/again/10", "model.safetensors", "consolidate", "/copies/10.pt", "present"),
        ("/out/10", "model.safetensors", "consolidate", "/llama/step-10", "present"),
    ],
    "What was made from one checkpoint, directly or indirectly?": [
        ("/llama/step-10", "dcp", "present"),
        ("/out/10", "safetensors", "present"),
        ("/copies/10.pt", "torch_save", "present"),
        ("/again/10", "safetensors", "present"),
    ],
    "What was a checkpoint made from, directly or indirectly?": [
        ("/llama/step-10", "dcp"),
        ("/out/10", "safetensors"),
    ],
    "Which sources were never converted successfully?": [("/llama/step-30", 30, "damaged")],
    # It was sent after the conversion of the step, which would have compared it.
    "Which checkpoints are what their job had in memory, and which are not?": [
        ("not compared", "llama", 20, "source", "/llama/step-20"),
        ("not compared", "llama", 20, "derived", "/out/20"),
    ],
    "What is wrong with the steps of a run?": [(5, "norm-jumped", "w", "its norm is 12")],
    "How did the weights of a run develop?": [(5, 12.5, 0.25, 3.0, 0, 0, 1)],
    "What is damaged or incomplete, and why?": [
        ("/llama/step-30", "damaged", "truncated-file", "__0_0.distcp")
    ],
    "What failed, how often, and when last?": [("consolidate", "damaged", 1, "a time")],
    "Which conversions are running, and since when?": [("export", "/llama/step-40", "/out/40", "a time")],
    "What was not verified for 30 days, or never at level bytes?": [
        ("/again/10", "coverage"),
        ("/copies/10.pt", "coverage"),
        ("/exports/bf16-5", "coverage"),
        ("/exports/step-4", "coverage"),
        ("/exports/step-5", "coverage"),
        ("/llama/step-10", "coverage"),
        ("/llama/step-20", "coverage"),
        ("/llama/step-30", None),
        ("/mistral/step-5", "coverage"),
        ("/out/10", "coverage"),
        ("/out/20", "coverage"),
        ("/whole/4", "coverage"),
        ("/whole/5", "coverage"),
    ],
    "How many bytes does each training run have, as sources and as outputs?": [
        ("llama", "derived", 4, 4 * (W + E) - (W + E) // 2),
        ("llama", "source", 3, 3 * (W + E)),
        ("mistral", "derived", 5, 6 * W + W // 2),
        ("mistral", "source", 1, 2 * W),
    ],
    "Which checkpoints hold the same values, in any format?": [
        (2, "/mistral/step-5", "dcp"),
        (2, "/whole/5", "safetensors"),
        (4, "/again/10", "safetensors"),
        (4, "/copies/10.pt", "torch_save"),
        (4, "/llama/step-10", "dcp"),
        (4, "/out/10", "safetensors"),
    ],
    "Which checkpoints are the same files in several places?": [("/out/10", "/again/10")],
    "How fast were the last conversions?": [
        ("consolidate", "/whole/5", "a number", "a number", "a number"),
        ("consolidate", "/whole/4", "a number", "a number", "a number"),
        ("export", "/exports/bf16-5", "a number", "a number", "a number"),
        ("export", "/exports/step-5", "a number", "a number", "a number"),
        ("export", "/exports/step-4", "a number", "a number", "a number"),
        ("consolidate", "/out/20", "a number", "a number", "a number"),
        ("consolidate", "/again/10", "a number", "a number", "a number"),
        ("consolidate", "/copies/10.pt", "a number", "a number", "a number"),
        ("consolidate", "/out/10", "a number", "a number", "a number"),
    ],
    "Which stage takes the time?": [
        *((stage, 9, "a number") for stage in ("inspect", "plan", "publish", "validate", "verify")),
        ("write", 9, "a number"),
    ],
    "Which checkpoints hold a tensor of this name, in which shape and dtype?": [
        ("/llama/step-10", "[4, 4]", "float32", W),
        ("/out/10", "[4, 4]", "float32", W),
        ("/copies/10.pt", "[4, 4]", "float32", W),
        ("/again/10", "[4, 4]", "float32", W),
        ("/llama/step-20", "[4, 4]", "float32", W),
        ("/out/20", "[4, 4]", "bfloat16", W // 2),
        ("/llama/step-30", "[4, 4]", "float32", W),
    ],
    "Which tensors differ between two checkpoints?": [
        ("embed.weight", "float32", "float32"),
        ("layers.0.weight", "float32", "float32"),
    ],
    "Which export has the best score in an evaluation that is recorded as a tag?": [
        ("/out/20", "llama", 20, 71.3),
        ("/out/10", "llama", 10, 9.5),
    ],
    "Which checkpoint does each alias name?": [("llama/best", "/out/20", "present", 2)],
    "Which checkpoints must not be deleted, why, and who asked for it?": [("/llama/step-20", "paper", "ana")],
    "Which sources have a verified copy of all their numbers, and neither a hold nor an alias?": [
        ("/llama/step-10", W + E, "/out/10"),
        ("/mistral/step-5", 2 * W, "/whole/5"),
    ],
    "Which sources were retired, when, and which checkpoint has their numbers now?": [
        ("/mistral/step-4", "a time", "/whole/4")
    ],
    "How far behind its training is each run's newest export?": [("llama", 30, None), ("mistral", 5, 5)],
    "Which checkpoint of each run has the lowest loss, and from which commit?": [
        ("llama", 2.25, 20, "beef20", "/llama/step-20"),
        ("mistral", 3.5, 5, None, "/mistral/step-5"),
    ],
    "Who trained each run, on which data, and how far is it?": [
        ("llama", "ana", "wiki", "beef30", 30, None, 1),
        ("mistral", None, None, None, 5, None, 0),
    ],
    "How did a metric develop in one run?": [(5, 3.5, None, "/mistral/step-5")],
    "Which checkpoints have a metric that is not finite?": [
        (place, "gradient", "nan") for place in ("/again/10", "/copies/10.pt", "/llama/step-10", "/out/10")
    ],
    "Who changed which alias or hold, and when?": [
        ("a time", "ana", "cli", "hold.place", "/llama/step-20", '{"reason":"paper"}')
    ],
    "What was given up with deleted sources, by kind?": [("/mistral/step-4", "full", None, 0, None)],
    "Which events are waiting, or failed?": [("mlflow", "created", "/llama/step-40", "waiting", 0, None)],
    "Which watched roots were swept, and with which result?": [
        ("llama", "/llama", True, "a time", "3 found"),
        ("mistral", "/mistral", True, "a time", "2 made"),
    ],
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """(root, SQLite catalog): a training run of which one step is damaged, one that is swept and retired, and
    all that was made of both."""
    root = tmp_path_factory.mktemp("example").resolve()
    catalog = tmp_path_factory.mktemp("catalogs") / "catalog.sqlite"
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr("ckptcore.planning.transformers_process.ask", ask_here)
        _save(root)
        _convert_all(root, str(catalog))
    return root, catalog


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def databases(request, tmp_path_factory):
    """Two URLs of empty catalogs: of one to fill, and of one that stays empty."""
    if request.param == "sqlite":
        folder = tmp_path_factory.mktemp("catalogs")
        yield str(folder / "catalog.sqlite"), str(folder / "empty.sqlite")
        return
    server, upgraded = request.getfixturevalue("postgres"), request.getfixturevalue("upgraded")
    with server.database(upgraded) as filled, server.database(upgraded) as empty:
        yield filled, empty


@pytest.fixture(scope="module")
def example(request, databases, ran):
    """(root, URL): what was made, and what people and a receiver add to it."""
    root, catalog = ran
    # Conversions run once, on SQLite; other tests run them on PostgreSQL.
    if databases[0].startswith("postgresql"):
        _copy_to_postgresql(catalog, databases[0])
    else:
        shutil.copyfile(catalog, databases[0])
    _add(root, databases[0])
    return root, databases[0]


def _copy_to_postgresql(path, url):
    """Copy every row of a SQLite catalog into an empty catalog of the same revision."""
    source, target = sa.create_engine(f"sqlite:///{path}"), sa.create_engine(url)
    tables = sa.MetaData()
    tables.reflect(target)
    with source.connect() as reading, target.begin() as writing:
        for table in tables.sorted_tables:
            if table.name == "alembic_version":
                continue
            rows = [dict(row._mapping) for row in reading.execute(sa.select(table))]
            if rows:
                writing.execute(table.insert(), rows)
            if "id" in table.c and rows:
                writing.exec_driver_sql(
                    f"SELECT setval(pg_get_serial_sequence('{table.name}', 'id'), "
                    f"(SELECT max(id) FROM {table.name}))"
                )
    source.dispose()
    target.dispose()


def _save(root):
    import torch
    from torch.distributed import checkpoint as dcp

    torch.manual_seed(1)
    for step in (10, 20, 30):
        state = {"embed.weight": torch.randn(6, 4), "layers.0.weight": torch.randn(4, 4)}
        dcp.save(state, checkpoint_id=root / "llama" / f"step-{step}", no_dist=True)
    with open(root / "llama" / "step-30" / "__0_0.distcp", "r+b") as file:
        file.truncate(100)
    for step in (4, 5):
        state = {"model": {"w": torch.randn(4, 4)}, "optim": {"m": torch.randn(4, 4)}}
        dcp.save(state, checkpoint_id=root / "mistral" / f"step-{step}", no_dist=True)


def _convert_all(root, url):
    settings = Settings(memory=64 << 20, workers=1, fingerprint=True)
    run = verifying(lambda request: pipeline.convert(request, settings, None, url), settings, url)

    def convert(source, destination, verb="consolidate", **options):
        run(Request(str(root / source), str(root / destination), verb, **options))

    config = {"model_type": "of-its-own", "architectures": ["OfItsOwn"]}
    (root / "mistral/config.json").write_text(json.dumps(config))
    convert("llama/step-10", "out/10")
    convert("out/10", "copies/10.pt")
    convert("copies/10.pt", "again/10")
    convert("llama/step-20", "out/20", dtype="bf16")
    with pytest.raises(DamagedCheckpoint):
        convert("llama/step-30", "out/30")
    with open_catalog(url) as catalog:
        with catalog.writing() as conn:
            target = {"verb": "export", "destination": "{root}/../exports/{name}"}
            roots.add(conn, NOW, "mistral", str(root / "mistral"), targets=[target])
        found = sweep(catalog, run, settings=SweepSettings(settle_s=0))
        assert [item.standing.value for item in found.items] == ["made", "made"]
        convert("mistral/step-5", "exports/bf16-5", "export", dtype="bf16")
        convert("mistral/step-4", "whole/4")
        convert("mistral/step-5", "whole/5")  # with the optimizer, and newer than both exports
        retired = delete_now(catalog, Policy(1), "mistral", yes=True, purging=True)
    assert sorted(item.fate.value for item in retired.items) == ["deleted", "kept"]
    assert not (root / "mistral/step-4").exists()


def _add(root, url):
    """Add the rows of users and a receiver."""
    with open_catalog(url) as catalog:
        catalog.begin(
            {},
            source_uri=str(root / "llama/step-40"),
            destination_uri=str(root / "out/40"),
            verb="export",
            tool_version="1",
        )
        with catalog.writing() as conn:
            measured = str(root / "mistral/step-5")
            numbers = StatisticsRow(b"", 2, 12.5, 3.0, 0, 0, 1, 0.25)
            history.put(conn, NOW, resolve_checkpoint(conn, measured), numbers)
            alarm = finding("norm-jumped", history.LEVEL, "its norm is 12", fqn="w")
            history.settle_alarms(conn, NOW, measured, [alarm])
        for step, score in ((10, "9.5"), (20, "71.3")):
            catalog.tag(str(root / f"out/{step}"), "eval.mmlu", score)
        for step, form in TRAINED.items():
            catalog.describe(str(root / step), read_facts(form)[0])
        with catalog.writing() as conn:
            for step in (10, 20):
                aliases.set_alias(conn, NOW, "llama/best", str(root / f"out/{step}"))
            holds.place(conn, NOW, str(root / "llama/step-20"), "paper", owner="ana")
            holds.release(conn, NOW, holds.place(conn, NOW, str(root / "out/20"), "over"))
            note = {"reason": "paper"}
            audit.note(conn, NOW, "hold.place", str(root / "llama/step-20"), note, audit.Author("ana"))
            roots.add(conn, NOW, "llama", str(root / "llama"))
            roots.swept(conn, NOW, "llama", "3 found")
        with catalog.queueing() as conn:
            inbox.accept(conn, NOW, NewEvent("mlflow", "e1", "created", str(root / "llama/step-40")))
            inbox.accept(conn, NOW, NewEvent("mlflow", "e2"))
            inbox.done(conn, NOW, next(e for e in inbox.take(conn, NOW, limit=2) if e.event_id == "e2"))
            conn.execute(sa.text("UPDATE inbox SET state = 'waiting', attempts = 0 WHERE event_id = 'e1'"))


@pytest.fixture(scope="module")
def ask(example):
    """Asks in SQL: (sql) -> rows, with URIs relative to the root, and times and rates by kind only."""
    root, url = example
    with open_catalog(url) as catalog:
        digest = next(f.digest for f in catalog.show(str(root / "out/10")).files)
        given = {
            "uri": str(root / "llama/step-10"),
            "derived": str(root / "copies/10.pt"),
            "digest": digest,
            "other": str(root / "llama/step-20"),
            "fqn": "layers.0.weight",
            "tag": "eval.mmlu",
            "run": "mistral",
        }

        def plain(name, value):
            if value is not None and name in MEASURED:
                return MEASURED[name]
            if name == "enabled":
                return bool(value)
            return value.removeprefix(str(root)) if isinstance(value, str) else value

        def run(sql):
            used = {name: value for name, value in given.items() if f":{name}" in sql}
            with catalog.reading() as conn:
                answer = conn.execute(sa.text(sql), used)
                names = list(answer.keys())
                return [tuple(map(plain, names, row)) for row in answer]

        yield run


MEASURED = {
    "at": "a time",
    "bytes_out": "a number",
    "seconds": "a number",
    "bytes_per_second": "a number",
    "last_at": "a time",
    "started_at": "a time",
    "swept_at": "a time",
    "deleted_at": "a time",
}


def test_every_query_has_an_expected_answer():
    assert list(QUESTIONS) == list(ANSWERS)
    assert len(QUESTIONS) >= 20


@pytest.mark.parametrize("question", ANSWERS)
def test_the_query_finds_the_rows(ask, question):
    found, wanted = ask(QUESTIONS[question]), ANSWERS[question]
    if "ORDER BY" not in QUESTIONS[question]:
        found, wanted = sorted(found), sorted(wanted)
    assert found == wanted


@pytest.fixture(scope="module")
def empty(databases):
    with open_catalog(databases[1]) as opened:
        yield opened


@pytest.mark.parametrize("question", ANSWERS)
def test_the_query_finds_nothing_in_an_empty_catalog(empty, question):
    with empty.reading() as conn:
        given = dict.fromkeys(re.findall(r":(\w+)", QUESTIONS[question]), "none")
        assert conn.execute(sa.text(QUESTIONS[question]), given).all() == []


def test_every_view_is_described_with_its_columns(ask, example):
    described = dict(re.findall(r"^\| `(\w+)` \|[^|]*\| ([^|]*) \|$", README, re.MULTILINE))
    assert set(described) == set(VIEWS)
    with open_catalog(example[1]) as catalog, catalog.reading() as conn:
        for name, columns in described.items():
            answer = conn.execute(sa.text(f"SELECT * FROM {name}"))
            assert ", ".join(answer.keys()) == columns
            assert answer.first() is not None, name


def test_lineage_views_agree_with_each_other_and_with_the_command(ask, example):
    root, url = example
    up = ask("SELECT uri, ancestor_uri FROM lineage_up")
    down = ask("SELECT descendant_uri, uri FROM lineage_down")
    assert sorted(up) == sorted(down)
    assert len(up) == 1 + 2 + 3 + 1 + 5
    with open_catalog(url) as catalog:
        steps = catalog.lineage(str(root / "again/10")).ancestors
    assert sorted(a for u, a in up if u == "/again/10") == sorted(
        step.source.uri.removeprefix(str(root)) for step in steps
    )


def test_the_picture_shows_every_table():
    picture = README.split("```mermaid")[1].split("```")[0]
    named = set(re.findall(r"^    (\w+) +[|}][|o]--[|o][|{] (\w+)", picture, re.MULTILINE))
    alone = set(re.findall(r"^    (\w+) \{", picture, re.MULTILINE))
    assert {name for pair in named for name in pair} | alone == set(Base.metadata.tables)
