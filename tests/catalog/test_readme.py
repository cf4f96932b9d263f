"""Do the SQL questions of the catalog's README run, and do they find what is there?"""

import re
import sqlite3
from pathlib import Path

import pytest

import ckptcore.catalog
from ckptcore.catalog import open_catalog
from ckptcore.catalog.models import Base
from ckptcore.errors import finding

README = (Path(ckptcore.catalog.__file__).parent / "README.md").read_text()
QUESTIONS = dict(re.findall(r"\n([^\n]+[?:])\n\n```sql\n(.*?)```", README, re.DOTALL))

# question -> the rows it must give on the example below, as far as they do not hold ids and times
ANSWERS = {
    "The newest proven export of every training run:": [("llama", 20, "/out/20")],
    "Which checkpoint, conversion and source does a file with this digest come from?": [
        ("/copies/10", "model.safetensors", "export", "/out/10"),
        ("/out/10", "model.safetensors", "export", "/runs/llama/10"),
    ],
    "Everything that was made, at any remove, from one checkpoint:": [
        ("dcp", "present", "/runs/llama/10"),
        ("safetensors", "present", "/out/10"),
        ("safetensors", "present", "/copies/10"),
    ],
    "Which sources were never converted successfully?": [
        ("/runs/llama/30", "dcp", 30, "damaged"),
    ],
    "What is damaged or incomplete, and why?": [
        ("/runs/llama/30", "damaged", "hole", "rows 0..4", "w"),
    ],
    "What failed, how often, and when last?": [("export", "damaged", 1)],
    "What has not been proven to the level of bytes in the last 30 days?": [
        ("/runs/llama/10", "source", None),
        ("/copies/10", "derived", None),
        ("/runs/llama/20", "source", None),
        ("/runs/llama/30", "source", None),
    ],
    "How many bytes does each training run hold, as sources and as what was made from them?": [
        ("llama", "derived", 3, 588),
        ("llama", "source", 3, 588),
    ],
    "Which checkpoints are the same bytes in several places?": [(2, "/out/10 /copies/10")],
    "How fast are conversions, and which stage takes the time?": [
        ("write", 2.0), ("plan", 0.25), ("write", 2.0), ("plan", 0.25), ("write", 2.0),
        ("plan", 0.25),
    ],
    "Which checkpoints hold a tensor of this name, in which shape and dtype?": [
        (uri, "[4, 8]", "bfloat16", 64)
        for uri in ("/runs/llama/10", "/out/10", "/copies/10", "/runs/llama/20", "/out/20",
                    "/runs/llama/30")
    ],
    "Which export did best at an evaluation that was put on as a tag?": [
        ("/out/20", "llama", 20, 71.3),
        ("/out/10", "llama", 10, 9.5),
    ],
}  # fmt: skip

GIVEN = {
    "digest": b"c10".hex().ljust(64, "0"),
    "uri": "/runs/llama/10",
    "fqn": "layers.0.weight",
    "tag": "eval.mmlu",
}
ID = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}|[0-9a-f]{64}")
TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d.*")


@pytest.fixture
def rows(tmp_path, facts, monkeypatch):
    """Asks the example catalog in SQL: (sql) -> rows without ids, times and rates."""
    path = str(tmp_path / "catalog.sqlite")
    source = {n: facts(f"/runs/llama/{n}", manifest=f"s{n}", step=n, run="llama")
              for n in (10, 20, 30)}  # fmt: skip
    export = {n: facts(f"/out/{n}", manifest="e", content=f"c{n}", verified="bytes")
              for n in (10, 20)}  # fmt: skip
    copy = facts("/copies/10", manifest="e", content="c10")
    with open_catalog(path) as catalog:

        def convert(read, written):
            conversion = catalog.begin({}, source_uri=read.uri, destination_uri=written.uri,
                                       verb="export", tool_version="1")  # fmt: skip
            return catalog.succeed(
                conversion, source=read, derived=written, plan_digest="p", bytes_in=196,
                bytes_out=196, peak_memory=None, timings={"plan": 0.25, "write": 2.0},
            )  # fmt: skip

        catalog.tag(convert(source[10], export[10]), "eval.mmlu", "9.5")
        convert(export[10], copy)
        catalog.tag(convert(source[20], export[20]), "eval.mmlu", "71.3")
        failed = catalog.begin({}, source_uri=source[30].uri, destination_uri="/out/30",
                               verb="export", tool_version="1")  # fmt: skip
        catalog.fail(failed, code="damaged", message="1 finding", source=source[30],
                     findings=[finding("hole", "cover", "rows 0..4", fqn="w")])  # fmt: skip
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)

    def ask(sql):
        used = {name: value for name, value in GIVEN.items() if f":{name}" in sql}
        answer = connection.execute(sql, used)
        names = [column[0] for column in answer.description]
        return [
            tuple(
                value
                for name, value in zip(names, row, strict=True)
                if name != "gb_per_second" and not ID.fullmatch(str(value))
                and not TIME.fullmatch(str(value)) and name != "verified_at"
            )
            for row in answer
        ]  # fmt: skip

    yield ask
    connection.close()


def test_every_question_has_an_answer_here():
    assert list(QUESTIONS) == list(ANSWERS)


@pytest.mark.parametrize("question", ANSWERS)
def test_the_question_finds_what_is_there(rows, question):
    found = rows(QUESTIONS[question])
    if "ORDER BY" not in QUESTIONS[question]:
        found, wanted = sorted(found), sorted(ANSWERS[question])
    else:
        wanted = ANSWERS[question]
    assert found == wanted


def test_the_picture_shows_every_table():
    picture = README.split("```mermaid")[1].split("```")[0]
    named = set(re.findall(r"^    (\w+) +[|}][|o]--[|o][|{] (\w+)", picture, re.MULTILINE))
    alone = set(re.findall(r"^    (\w+) \{", picture, re.MULTILINE))
    assert {name for pair in named for name in pair} | alone == set(Base.metadata.tables)
