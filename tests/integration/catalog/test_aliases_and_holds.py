"""Aliases, holds and watched roots: an alias moves only if it points where the caller expects."""

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

from ckptcore.catalog import aliases, holds
from ckptcore.catalog import watched_roots as roots
from ckptcore.errors import Conflict, UsageError

NOW = datetime(2026, 3, 1, tzinfo=UTC)
DAY = timedelta(days=1)

MOVE = """
import sys
from datetime import UTC, datetime
from ckptcore.catalog import aliases, open_catalog
from ckptcore.errors import Conflict
checkpoints, rounds, moved, refused = sys.argv[2:4], int(sys.argv[4]), 0, 0
with open_catalog(sys.argv[1]) as catalog:
    while moved < rounds:
        with catalog.reading() as conn:
            seen = aliases.get(conn, "best").checkpoint
        other = checkpoints[checkpoints[0] == seen]
        try:
            with catalog.writing() as conn:
                aliases.set_alias(conn, datetime.now(UTC), "best", other, expect=seen)
            moved += 1
        except Conflict:
            refused += 1
print(moved)
"""


@pytest.fixture
def two(catalog, facts):
    """The ids of two checkpoints."""
    return [catalog.record_validation(facts(f"/runs/step-{n}", manifest=f"m{n}")) for n in (1, 2)]


@pytest.fixture
def write(catalog):
    """Return a function that calls another one in its own transaction."""

    def call(function, *given, **more):
        with catalog.writing() as conn:
            return function(conn, *given, **more)

    return call


def test_an_alias_is_set_and_moved(write, two):
    first = write(aliases.set_alias, NOW, "llama/best", two[0])
    assert first == aliases.AliasRow("llama/best", two[0], "/runs/step-1", 1, NOW)
    second = write(aliases.set_alias, NOW + DAY, "llama/best", "/runs/step-2")
    assert (second.checkpoint, second.version, second.updated_at) == (two[1], 2, NOW + DAY)
    assert write(aliases.every) == (second,)
    write(aliases.remove, "llama/best")
    assert write(aliases.every) == ()
    with pytest.raises(UsageError, match="no alias llama/best"):
        write(aliases.remove, "llama/best")


def test_an_alias_moves_only_from_the_expected_checkpoint(write, two):
    write(aliases.set_alias, NOW, "best", two[0], expect=aliases.NOTHING)
    with pytest.raises(Conflict, match=rf"it points to {two[0]} .*\(expected no checkpoint\)") as caught:
        write(aliases.set_alias, NOW, "best", two[1], expect=aliases.NOTHING)
    assert caught.value.exit_code == 23
    with pytest.raises(Conflict, match=rf"it points to {two[0]}.*\(expected {two[1]}\)"):
        write(aliases.set_alias, NOW, "best", two[0], expect=two[1])
    with pytest.raises(Conflict, match=f"it does not exist \\(expected {two[1]}"):
        write(aliases.set_alias, NOW, "other", two[0], expect=two[1])
    assert [row.version for row in write(aliases.every)] == [1]
    assert write(aliases.set_alias, NOW, "best", two[1], expect=two[0][:8]).checkpoint == two[1]
    assert write(aliases.set_alias, NOW, "best", two[0], expect="best").version == 3


def test_an_alias_resolves_to_its_checkpoint(catalog, write, two):
    write(aliases.set_alias, NOW, "llama@best", two[1])
    assert catalog.show("llama@best").checkpoint.uri == "/runs/step-2"
    catalog.tag("llama@best", "eval", "1")
    assert catalog.show(two[1]).tags == {"eval": "1"}


@pytest.mark.parametrize("name", ["", "/a", "s3://b", "abcd", "0123-45", "a b", "a" * 201, "é"])
def test_names_that_mean_something_else(write, two, name):
    with pytest.raises(UsageError, match="cannot be an alias"):
        write(aliases.set_alias, NOW, name, two[0])


def test_no_move_is_lost(url, write, two, forks, finish, rounds):
    write(aliases.set_alias, NOW, "best", two[0])
    finish(*[forks(MOVE, url, *two, rounds) for _ in range(4)])
    [row] = write(aliases.every)
    # Every move saw the one before: an even number of moves from the first checkpoint ends at it.
    assert (row.version, row.checkpoint) == (4 * rounds + 1, two[0])


def test_holds(write, two):
    hold = write(holds.place, NOW, two[0], "paper, table 3", owner="ana")
    short = write(holds.place, NOW, two[1], "until the evaluation", until=NOW + DAY)
    assert [(h.id, h.checkpoint, h.reason, h.owner) for h in write(holds.active, NOW)] == [
        (hold, two[0], "paper, table 3", "ana"),
        (short, two[1], "until the evaluation", ""),
    ]
    assert [h.id for h in write(holds.active, NOW + DAY)] == [hold]
    assert [h.id for h in write(holds.active, NOW, two[1])] == [short]
    assert write(holds.release, NOW, hold[:8]) == hold
    assert write(holds.release, NOW + DAY, hold) == hold
    assert write(holds.active, NOW, "/runs/step-1") == ()
    for wrong in (
        lambda: write(holds.release, NOW, "nobody"),
        lambda: write(holds.release, NOW, ""),
        lambda: write(holds.place, NOW, two[0], " "),
        lambda: write(holds.place, NOW, two[0], "x", until=NOW),
    ):
        with pytest.raises(
            UsageError, match=r"no hold nobody|several holds|needs a reason|must be in the future"
        ):
            wrong()


def test_watched_roots(write):
    target = {"to": "hf", "dtype": "bfloat16"}
    root = write(roots.add, NOW, "llama", "s3://me:secret@b/runs/", include=["step-*"], targets=[target])
    assert root == roots.RootRow("llama", "s3://b/runs", ("step-*",), target, True, NOW, None, None)
    with pytest.raises(UsageError, match="watched root llama exists already"):
        write(roots.add, NOW, "llama", "/elsewhere")
    other = write(roots.add, NOW, "again", "/runs")
    assert write(roots.every) == (other, root)
    assert not write(roots.enable, "again", False).enabled
    assert write(roots.every, enabled=True) == (root,)
    write(roots.swept, NOW + DAY, "llama", "2 found")
    seen = write(roots.get, "llama")
    assert (seen.swept_at, seen.swept_note) == (NOW + DAY, "2 found")
    write(roots.remove, "again")
    assert write(roots.every) == (seen,)
    for function in (roots.get, roots.remove):
        with pytest.raises(UsageError, match="no watched root again"):
            write(function, "again")
    with pytest.raises(UsageError, match="needs a name"):
        write(roots.add, NOW, " ", "/runs")


CONFIG = [("README.md", 3, None), ("config.json", 3, None)]


@pytest.fixture
def export(catalog, facts, convert):
    """Return a function that records an export, and its verdict; it returns the public id."""

    def make(step, verdict=None, extra=CONFIG):
        derived = facts(f"/out/{step}", content=f"c{step}", verified="bytes", extra=extra)
        conversion, public = convert(facts(f"/runs/step-{step}", manifest=f"m{step}"), derived)
        if verdict is not None:
            catalog.record_verdict(conversion, [("names", verdict, "compared")])
        return public

    return make


def test_what_nobody_should_serve_is_no_alias(write, two, export, catalog):
    refused = {
        two[0]: "is a source",
        export(5): "nothing has proved the export",
        export(6, "failed"): "no engine opens",
        export(7, "ok", extra=[("README.md", 3, None)]): "no engine opens",
    }
    damaged = export(8, "ok")
    with catalog.writing() as conn:
        conn.execute(text("UPDATE checkpoint SET state = 'damaged' WHERE uuid = :id"), {"id": damaged})
    refused[damaged] = "is damaged"
    for ref, reason in refused.items():
        with pytest.raises(Conflict, match=reason) as caught:
            write(aliases.promote, "prod", ref)
        assert "--force" in str(caught.value.hint)
        assert write(aliases.every) == ()
    for version, (ref, reason) in enumerate(refused.items(), 1):
        assert write(aliases.promote, "prod", ref, force=True).version == version
        assert reason in write(aliases.history, "prod")[0].detail["forced"]


def test_an_alias_goes_back_to_what_it_was(write, export):
    first, second = export(1, "ok"), export(2, "ok")
    write(aliases.promote, "prod", first)
    with pytest.raises(UsageError, match="no other checkpoint"):
        write(aliases.previous, "prod")
    write(aliases.promote, "prod", second, first)
    assert write(aliases.previous, "prod") == first
    assert write(aliases.promote, "prod", first).version == 3
    assert [row.subject for row in write(aliases.history, "prod")] == [first, second, first]
    assert [row.detail["before"] for row in write(aliases.history, "prod")] == [second, first, None]
    assert write(aliases.history, "other") == ()
