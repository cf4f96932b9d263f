"""The output of `ckptcore catalog`: lines that fit a terminal, and JSON."""

import json
from datetime import UTC, datetime

import pytest
from typer.testing import CliRunner

from ckptcore.catalog import ConversionFacts, audit, default_url, open_catalog
from ckptcore.catalog.database import HEAD
from ckptcore.catalog.queues import NewEvent, inbox, outbox
from ckptcore.cli.catalog import app
from ckptcore.errors import CatalogError, Conflict, SourceUnreadable, UsageError, finding

LONG = "/data/" + "very-long-folder-name/" * 6


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("CKPTCORE_CATALOG_URL", str(tmp_path / "catalog.sqlite"))
    return default_url()


@pytest.fixture
def ask(path):
    """Return a function that runs a command and returns its stdout, whose lines must fit a terminal."""

    def run(*arguments, stderr=""):
        runner = CliRunner(env={"COLUMNS": "100"})
        result = runner.invoke(app, [*arguments], catch_exceptions=False, standalone_mode=False)
        assert result.stderr == stderr
        if "json" not in arguments:
            assert max(map(len, result.stdout.splitlines()), default=0) <= 100
        return result.stdout

    return run


@pytest.fixture
def filled(path, facts):
    """One successful conversion and one failed; (conversion, derived, failed)."""
    source = facts(LONG + "step-1000", step=1000, run="llama", origin={"ranks": 8})
    derived = facts(
        LONG + "model",
        content="c1",
        num_tensors=30,
        verified="bytes",
        files=[(f"model-{i:05}-of-00025.safetensors", 10**10, f"{i:064x}") for i in range(1, 26)],
    )
    with open_catalog(path) as catalog:
        conversion = catalog.begin(
            {"dtype": "bfloat16"},
            source_uri=source.uri,
            destination_uri=derived.uri,
            verb="export",
            tool_version="0.1.0",
        )
        public = catalog.succeed(
            conversion,
            ConversionFacts("p" * 64, 196, 196, 10**9, {"write": 1.25}),
            source=source,
            derived=derived,
        )
        failed = catalog.begin(
            {},
            source_uri=source.uri,
            destination_uri=LONG + "again",
            verb="consolidate",
            tool_version="0.1.0",
        )
        message = "rows of a tensor " + "are missing " * 12
        holes = [
            finding("hole", "coverage", message, fqn=f"model.layers.{i}.mlp.experts.weight")
            for i in range(25)
        ]
        catalog.fail(failed, code="damaged", message="25 findings", findings=holes, source=source)
    return conversion, public, failed


def test_upgrade(ask, path):
    assert ask("upgrade") == f"the catalog went from schema none to {HEAD}\n"
    assert ask("upgrade") == f"the catalog is up to date (schema {HEAD})\n"
    result = json.loads(ask("upgrade", "--output", "json"))
    assert result == {"from": HEAD, "to": HEAD, "changed": False}
    with open_catalog(path, create=False) as catalog:
        assert catalog.list() == ()


def test_list(ask, filled):
    lines = ask("list").splitlines()
    assert lines[0].split() == ["id", "kind", "format", "step", "tensors", "size", "state", "uri"]
    assert lines[1].split()[:4] == [filled[1][:8], "derived", "safetensors", "1000"]
    assert lines[2].split()[-2] == "damaged"
    assert lines[2].split()[-1].endswith("/step-1000")
    assert ask("list", "--state", "replaced") == "nothing found\n"
    [row] = json.loads(ask("list", "--kind", "source", "--run", "llama", "--output", "json"))
    assert (row["uri"], row["step"], row["run"]) == (LONG + "step-1000", 1000, "llama")
    assert row["origin"] == {"ranks": 8}
    assert json.loads(ask("list", "--limit", "1", "--output", "json"))[0]["id"] == filled[1]


def test_list_conversions(ask, filled):
    text = ask("list", "--conversions")
    assert [line.split()[2] for line in text.splitlines()[1:]] == ["failed", "succeeded"]
    assert "damaged" in text
    [row] = json.loads(ask("list", "--conversions", "--state", "failed", "--output", "json"))
    assert (row["id"], row["error_code"]) == (filled[2], "damaged")
    with pytest.raises(UsageError, match="select checkpoints"):
        ask("list", "--conversions", "--kind", "source")


def test_show_a_checkpoint(ask, filled):
    text = ask("show", filled[1][:8])
    for expected in (filled[1], "bytes, 2", "llama", "31 (bfloat16, float32)", "and 5 more files"):
        assert expected in text
    assert "layers.29.weight" not in text
    assert "layers.29.weight" in ask("show", filled[1], "--tensors")
    detail = json.loads(ask("show", LONG + "model", "--tensors", "--output", "json"))
    assert (len(detail["files"]), len(detail["tensors"])) == (25, 31)
    assert detail["tensors"][0]["shape"] == [4, 8]
    assert detail["checkpoint"]["created_at"].endswith("+00:00")


def test_show_a_conversion(ask, filled):
    text = ask("show", filled[2])
    for expected in ("damaged: 25 findings", "findings: 25 errors", "and 5 more", "layers.0.mlp"):
        assert expected in text
    detail = json.loads(ask("show", filled[2], "--output", "json"))
    assert len(detail["findings"]) == 25
    assert detail["conversion"]["state"] == "failed"
    assert "1.25 s" in ask("show", filled[0])


def test_lineage(ask, filled):
    up, here = ask("lineage", filled[1]).splitlines()
    assert up.startswith("^ ")
    assert "-> export" in up
    assert here.startswith(f"* {filled[1][:8]}")
    here, down = ask("lineage", LONG + "step-1000").splitlines()
    assert down.startswith(f"v {filled[1][:8]}")
    assert len(ask("lineage", filled[1], "--down").splitlines()) == 1
    found = json.loads(ask("lineage", filled[1], "--up", "--output", "json"))
    assert found["ancestors"][0]["source"]["uri"] == LONG + "step-1000"
    assert found["descendants"] == []


def test_find(ask, filled):
    text = ask("find", LONG + "model/model-00003-of-00025.safetensors")
    for expected in ("model-00003-of-00025.safetensors, 9.3 GiB", f"export {filled[0]}", f"{3:064x}"):
        assert expected in text
    [origin] = json.loads(ask("find", f"{3:064x}", "--output", "json"))
    assert origin["sources"][0]["uri"] == LONG + "step-1000"


def test_tag(ask, filled):
    assert "eval.mmlu=71.3, owner=ana" in ask("tag", filled[1], "eval.mmlu=71.3", "owner=ana")
    assert "eval.mmlu=71.3 " in ask("tag", filled[1], "owner=") + " "
    detail = json.loads(ask("show", filled[1], "--output", "json"))
    assert detail["tags"] == {"eval.mmlu": "71.3"}
    with pytest.raises(UsageError, match="KEY=VALUE"):
        ask("tag", filled[1], "oops")


def test_markup_in_names_is_only_text(ask, path, facts):
    with open_catalog(path) as catalog:
        catalog.record_validation(facts("/runs/[bold]x[/nope]", format="[red]"))
    assert "/runs/[bold]x[/nope]" in ask("list")
    assert "[red]" in ask("show", "/runs/[bold]x[/nope]")


@pytest.mark.parametrize("arguments", [["show", "x"], ["tag", "x", "a=b"], ["lineage", "x"], ["find", "x"]])
def test_no_catalog_yet(ask, path, arguments):
    with pytest.raises(CatalogError, match="there is no catalog at"):
        ask(*arguments)


def test_a_list_before_the_first_conversion_is_empty(path, tmp_path):
    result = CliRunner().invoke(app, ["list", "--output", "json"], catch_exceptions=False)
    assert (result.exit_code, json.loads(result.stdout)) == (0, [])
    assert result.stderr == f"there is no catalog at {path}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_missing_catalog_that_is_named_is_an_error(ask, tmp_path):
    with pytest.raises(CatalogError, match="there is no catalog at") as caught:
        ask("list", "--catalog", str(tmp_path / "mistyped.db"))
    assert "--catalog" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_listing_a_foreign_file_fails(ask, tmp_path):
    (tmp_path / "other.sqlite").write_text("no database" * 100)
    with pytest.raises(CatalogError, match="not a database"):
        ask("list", "--catalog", str(tmp_path / "other.sqlite"))


def test_a_catalog_named_on_the_command_line(ask, tmp_path):
    other = str(tmp_path / "other.sqlite")
    ask("upgrade", "--catalog", other)
    assert ask("list", "--catalog", other) == "nothing found\n"


def test_alias(ask, filled):
    text = ask("alias", "set", "best", filled[1], "--expect", "", "--force")
    assert text.splitlines()[1].split()[:3] == ["best", filled[1][:8], "1"]
    [row] = json.loads(
        ask("alias", "set", "best", "best", "--expect", filled[1], "--force", "--output", "json")
    )
    assert (row["name"], row["checkpoint"], row["version"]) == ("best", filled[1], 2)
    with pytest.raises(Conflict, match=r"\(expected no checkpoint\)"):
        ask("alias", "set", "best", filled[1], "--expect", "", "--force")
    assert filled[1] in ask("show", "best")
    ask("alias", "remove", "best")
    assert ask("alias", "list") == "nothing found\n"


def test_hold(ask, filled):
    [row] = json.loads(
        ask(
            "hold",
            "place",
            filled[1],
            "--reason",
            "paper",
            "--owner",
            "ana",
            "--until",
            "2999-01-01",
            "--output",
            "json",
        )
    )
    assert (row["checkpoint"], row["until"]) == (filled[1], "2999-01-01T00:00:00+00:00")
    lines = ask("hold", "list").splitlines()
    assert lines[1].split()[:2] == [row["id"][:8], filled[1][:8]]
    assert lines[1].rstrip().endswith("/model")
    assert ask("hold", "list", LONG + "step-1000") == "nothing found\n"
    ask("hold", "release", row["id"])
    assert json.loads(ask("hold", "list", "--output", "json")) == []


def test_root(ask, filled):
    ask(
        "root",
        "add",
        "llama",
        "/runs/llama",
        "--include",
        "step-*",
        "--include",
        "*/iter_*",
        "--target",
        '{"verb": "export"}',
        stderr="note: there is no folder /runs/llama on this machine yet; a sweep finds nothing there\n",
    )
    [row] = json.loads(ask("root", "list", "--output", "json"))
    assert (row["uri"], row["include"], row["target"]) == (
        "/runs/llama",
        ["step-*", "*/iter_*"],
        {"verb": "export", "destination": "{root}/../exports/{run}/{name}"},
    )
    assert ask("root", "list").splitlines()[1].split()[:2] == ["llama", "yes"]
    for target in ("[]", "{"):
        with pytest.raises(UsageError, match="--target"):
            ask("root", "add", "again", "/runs", "--target", target)
    ask("root", "remove", "llama")
    assert ask("root", "list") == "nothing found\n"


def test_failed_rows_are_listed_and_retried(ask, path):
    ask("upgrade")
    assert ask("inbox", "list") == "nothing found\n"
    now = datetime.now(UTC)
    with open_catalog(path) as catalog, catalog.queueing() as conn:
        for n in range(3):
            inbox.accept(conn, now, NewEvent("trainer", f"e{n}", uri=LONG + f"step-{n}"))
        for event in inbox.take(conn, now, limit=2):
            inbox.failed(conn, now, event, "[red]the disk is full: " + "/very/long" * 20)
        outbox.put(conn, now, "evaluation", "k", type="conversion.succeeded", body={})
        outbox.failed(conn, now, outbox.take(conn, now)[0], "HTTP 410")
        ids = [event.id for event in inbox.listed(conn, "failed")]
    text = ask("inbox", "list")
    assert (text.count("failed"), text.count("waiting")) == (2, 1)
    assert ids[0][:8] in text
    assert "[red]the" in text
    assert "HTTP 410" in ask("outbox", "list", "--state", "failed")
    assert ask("outbox", "list", "--state", "done") == "nothing found\n"
    for wrong in (["retry"], ["retry", ids[0], "--failed"], ["list", "--state", "lost"], ["retry", "zz"]):
        with pytest.raises(UsageError):
            ask("inbox", *wrong)
    assert ask("inbox", "retry", ids[0][:8]) == "1 row due again\n"
    assert json.loads(ask("inbox", "retry", "--failed", "--output", "json")) == {"put_back": [ids[1]]}
    assert ask("inbox", "retry", "--failed") == "nothing has failed\n"
    assert {row["state"] for row in json.loads(ask("inbox", "list", "--output", "json"))} == {"waiting"}
    assert ask("outbox", "retry", "--failed") == "1 row due again\n"


def test_what_a_root_names_is_read_when_it_is_set(ask, filled, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    sized = ["--target", '{"max_file_size": "16KiB"}', "--destination", "out/{name}"]
    ask("root", "add", "a", "runs", "--verb", "export", "--config", "model", *sized)
    row = json.loads(ask("root", "show", "a", "--output", "json"))
    settings = {"config": f"{tmp_path}/model", "max_file_size": 16 << 10}
    assert row["target"] == {"destination": f"{tmp_path}/out/{{name}}", "verb": "export", **settings}
    with pytest.raises(UsageError, match="nosuch"):
        ask("root", "add", "b", "runs", "--verb", "export", "--config", "nosuch")
    with pytest.raises(UsageError, match="it has none"):
        ask("root", "set", "a", "--target", '{"tokenizer": "model"}')
    ask("root", "set", "a", "--dtype", "bf16", "--include", "step-*", "--retention", '{"keep_last": 2}')
    row = json.loads(ask("root", "check", "a", "--output", "json"))
    assert (row["target"]["dtype"], row["target"]["config"]) == ("bf16", settings["config"])
    assert (row["include"], row["retention"]) == (["step-*"], {"keep_last": 2})
    verdict = "a can be swept: its folder is there, and its settings can be used\n"
    assert "dtype=bf16" in "".join(ask("root", "check", "a", stderr=verdict).split())
    with pytest.raises(UsageError, match="no setting of a is named"):
        ask("root", "set", "a")
    assert "dtype=bf16" in "".join(ask("root", "show", "a").split())
    (tmp_path / "runs").rename(tmp_path / "runz")
    with pytest.raises(SourceUnreadable, match="there is no folder") as caught:
        ask("root", "check", "a")
    assert caught.value.hint == f"did you mean {tmp_path}/runz?"
    (tmp_path / "model/config.json").unlink()
    with pytest.raises(UsageError, match=r"cannot read --config"):
        ask("root", "check", "a")


def test_an_odd_root_is_not_set_to_defaults(ask, filled, path, tmp_path):
    ask("root", "add", "a", str(tmp_path), "--verb", "export", "--dtype", "bf16")
    with open_catalog(path) as catalog, catalog.writing() as conn:
        conn.exec_driver_sql("UPDATE watched_roots SET target = '{'")
    with pytest.raises(CatalogError, match="target"):
        ask("root", "set", "a", "--dtype", "fp16")
    with open_catalog(path) as catalog, catalog.reading() as conn:
        assert conn.exec_driver_sql("SELECT target FROM watched_roots").scalar() == "{"


def test_a_root_without_a_folder_is_noted(path, tmp_path):
    for folder, noted in ((tmp_path / "none", True), (tmp_path, False)):
        command = ["root", "add", f"r{noted}", str(folder), "--verb", "consolidate"]
        result = CliRunner().invoke(app, command, catch_exceptions=False, standalone_mode=False)
        assert ("there is no folder" in result.stderr) is noted


def test_facts_and_rankings(ask, filled):
    ask("meta", filled[1], "metrics.loss=2.5", "git_commit=3f9a", "config.lr=3e-4")
    text = ask("show", filled[1])
    assert "loss=2.5" in text
    assert "git_commit=3f9a" in text
    detail = json.loads(ask("show", filled[1], "--output", "json"))
    assert detail["training"]["facts"]["config"] == {"lr": 3e-4}
    assert "2.5" in ask("best", "loss")
    [best] = json.loads(ask("best", "loss", "--highest", "--kind", "derived", "--output", "json"))
    assert (best["value"], best["checkpoint"]["id"]) == (2.5, filled[1])


def test_a_fact_that_looks_like_a_metric_is_noted(ask, filled):
    note = "note: loss is recorded as a fact; a metric is metrics.loss=VALUE\n"
    assert ask("meta", filled[1], "loss=2.3", "user=ada", stderr=note) == f"{filled[1]}: 2 facts recorded\n"
    with pytest.raises(UsageError, match=r"metrics\.loss must be a number \(got 'abc'\)"):
        ask("meta", filled[1], "metrics.loss=abc")


def test_changes_of_names_and_holds_are_recorded(ask, filled, path):
    ask("alias", "set", "best", filled[1], "--force")
    ask("hold", "place", filled[1], "--reason", "paper")
    [hold] = json.loads(ask("hold", "list", "--output", "json"))
    ask("hold", "release", hold["id"])
    ask("hold", "release", hold["id"])
    ask("alias", "remove", "best")
    with open_catalog(path) as catalog, catalog.reading() as conn:
        rows = audit.listed(conn, subject=filled[1])
    assert [row.action for row in rows] == ["alias.remove", "hold.release", "hold.place", "alias.set"]
    assert {row.via for row in rows} == {"cli"}
    assert all(row.actor for row in rows)


def test_what_was_removed_is_the_answer_as_json(ask, filled):
    _, derived, _ = filled
    ask("alias", "set", "prod", derived, "--force")
    absent = "note: there is no folder /data/llama on this machine yet; a sweep finds nothing there\n"
    ask("root", "add", "llama", "/data/llama", stderr=absent)
    (hold,) = json.loads(ask("hold", "place", derived, "--reason", "evaluation", "--output", "json"))

    (alias,) = json.loads(ask("alias", "remove", "prod", "--output", "json"))
    (root,) = json.loads(ask("root", "remove", "llama", "--output", "json"))
    (released,) = json.loads(ask("hold", "release", hold["id"], "--output", "json"))

    assert (alias["name"], alias["checkpoint"]) == ("prod", derived)
    assert (root["name"], root["uri"]) == ("llama", "/data/llama")
    assert (released["id"], released["reason"]) == (hold["id"], "evaluation")
    assert json.loads(ask("hold", "release", hold["id"], "--output", "json")) == []  # it ended before


@pytest.mark.parametrize(
    ("option", "arguments"),
    [
        ("--target", ("add", "r", "/data", "--target", "{")),
        ("--also", ("add", "r", "/data", "--also", "[]")),
        ("--retention", ("add", "r", "/data", "--retention", "{")),
        ("JSON", ("retain", "r", "{")),
    ],
)
def test_a_text_that_is_no_json_object_is_refused_by_the_name_of_its_option(ask, option, arguments):
    with pytest.raises(UsageError, match=f"cannot parse {option}: not "):
        ask("root", *arguments)


def test_numbers_that_json_does_not_have_are_texts(ask, filled):
    def no_constant(name):
        raise AssertionError(f"{name} is not JSON")

    answer = ask("sql", "SELECT 1e999 AS more, -1e999 AS less, 1.5 AS number", "--output", "json")

    rows = json.loads(answer, parse_constant=no_constant)["rows"]
    assert rows == [{"more": "inf", "less": "-inf", "number": 1.5}]
