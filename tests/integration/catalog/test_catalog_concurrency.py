"""Many concurrent processes lose no update, no catalog and no state."""

import time

from ckptcore.catalog import open_catalog

PROCESSES = 4

CREATE = """
import sys, time, pathlib
import ckptcore.catalog.catalog
from ckptcore.catalog import open_catalog
go = pathlib.Path(sys.argv[2])
(go.parent / f"ready{sys.argv[3]}").touch()
while not go.exists():
    time.sleep(0.001)
for round in range(int(sys.argv[4])):
    with open_catalog(f"{sys.argv[1]}{round}.sqlite") as catalog:
        catalog.begin({}, source_uri="/a", destination_uri=f"/{sys.argv[3]}", verb="export",
                      tool_version="1")
"""

COUNT = """
import sys
from sqlalchemy import select, update
from ckptcore.catalog import open_catalog
from ckptcore.catalog.models import Tag
with open_catalog(sys.argv[1]) as catalog:
    for _ in range(int(sys.argv[2])):
        with catalog.writing() as conn:
            count = int(conn.execute(select(Tag.value).where(Tag.key == "count")).scalar_one())
            conn.execute(update(Tag).where(Tag.key == "count").values(value=str(count + 1)))
"""

PUBLISH = """
import sys
from ckptcore.catalog import CheckpointFacts, ConversionFacts, open_catalog
def facts(uri, digest):
    return CheckpointFacts(uri, "safetensors", digest, 64, [("w", "bfloat16", (4, 8), 64)],
                           [("model.safetensors", 100, digest)])
with open_catalog(sys.argv[1]) as catalog:
    for turn in range(int(sys.argv[3])):
        source = facts("/runs/step-1", "a" * 64)
        derived = facts("/out/model", f"{sys.argv[2]}{turn}".ljust(64, "0"))
        conversion = catalog.begin({}, source_uri=source.uri, destination_uri=derived.uri,
                                   verb="export", tool_version="1")
        done = ConversionFacts("p", bytes_in=64, bytes_out=64, peak_memory=None, timings={})
        catalog.succeed(conversion, done, source=source, derived=derived)
"""


def test_concurrent_processes_create_one_fresh_file(forks, finish, rounds, tmp_path):
    go = tmp_path / "go"
    started = [forks(CREATE, tmp_path / "fresh", go, i, rounds) for i in range(PROCESSES)]
    while len(list(tmp_path.glob("ready*"))) < PROCESSES:
        assert all(process.poll() in (None, 0) for process in started)
        time.sleep(0.01)
    go.touch()
    finish(*started)
    for turn in range(rounds):
        with open_catalog(str(tmp_path / f"fresh{turn}.sqlite"), create=False) as catalog:
            made = sorted(row.destination_uri for row in catalog.conversions())
        assert made == [f"/{i}" for i in range(PROCESSES)]


def test_no_update_is_lost(catalog, url, facts, forks, finish, rounds):
    checkpoint = catalog.record_validation(facts("/runs/step-1"))
    catalog.tag(checkpoint, "count", "0")
    finish(*[forks(COUNT, url, rounds) for _ in range(PROCESSES)])
    assert catalog.show(checkpoint).tags == {"count": str(PROCESSES * rounds)}


def test_one_of_many_publishers_is_the_current_one(catalog, url, forks, finish, rounds):
    turns = rounds // 5
    finish(*[forks(PUBLISH, url, i, turns) for i in range(PROCESSES)])
    derived = catalog.list(limit=None, kind="derived")
    assert len(derived) == PROCESSES * turns
    assert [row.state for row in derived].count("present") == 1
    assert [row.uri for row in catalog.list(kind="source")] == ["/runs/step-1"]
    assert len(catalog.conversions(limit=None, state="succeeded")) == PROCESSES * turns
