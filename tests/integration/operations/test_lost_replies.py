"""A commit whose reply is lost was done; one that failed is made good by one more run."""

from __future__ import annotations

import os
import sqlite3
import threading
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
import sqlalchemy
from prepared import Prepared
from retiring import MEANS, World, on_both
from sqlalchemy import text

from ckptcore.catalog import aliases, catalog, open_catalog, queues
from ckptcore.conversion.pipeline import convert
from ckptcore.custody import upkeep
from ckptcore.errors import CkptError, UsageError
from ckptcore.operations.automation.sweep import SweepSettings, sweep
from ckptcore.operations.retention.policy import Policy
from ckptcore.operations.retention.purge import purge, restore
from ckptcore.operations.retention.retire import retire
from ckptcore.operations.scrub import scrub
from ckptcore.planning.request import Request

BROKEN = {
    "sqlite": sqlite3.OperationalError("disk I/O error"),
    "postgresql": psycopg.OperationalError("gone"),
}
ACTS = {}


def act(function):
    """Add an act that commits to the table."""
    ACTS[function.__name__] = function
    return function


@act
def converts(w):
    convert(Request(str(w.source.with_name("step-2")), str(w.tmp / "out2")), MEANS, None, w.url)


@act
def sweeps(w):
    def one(request):
        return convert(request, MEANS, None, w.url)

    # Or a failed one waits for five minutes.
    sweep(w.catalog, one, settings=SweepSettings(settle_s=0, retry_failed=True))


@act
def sets_aside(w):
    retire(w.catalog, Policy(1), w.name, yes=True, fingerprint_settings=MEANS)


@act
def deletes(w):
    retire(
        w.catalog,
        Policy(1),
        w.name,
        yes=True,
        purging=True,
        grace=timedelta(0),
        fingerprint_settings=MEANS,  # copies have other times: both sides are read
    )


@act
def purges(w):
    list(purge(w.catalog, MEANS, None, due=datetime.now(UTC) + timedelta(days=30)))


@act
def restores(w):
    try:
        restore(w.catalog, str(w.source))
    except UsageError as error:  # the first run has done it
        if "nothing of the name" not in error.message:
            raise


@act
def scrubs(w):
    scrub(w.catalog)


@act
def looks_after(w):
    upkeep.look_after(w.catalog)


@act
def names(w):
    with w.catalog.writing() as conn:
        aliases.set_alias(conn, datetime.now(UTC), "best", str(w.child))


@act
def tags(w):
    w.catalog.tag(str(w.child), "quality", "good")


@act
def announces(w):
    with w.catalog.queueing() as conn:
        queues.outbox.put(conn, datetime.now(UTC), "e", "k", type="t", body={})


READS = {"scrubs", "looks_after"}  # as a rule nothing changed
BEFORE = {"purges": [sets_aside], "restores": [sets_aside]}


class Worlds:
    """One world on each database, restored for each act: a conversion makes most of it."""

    def __init__(self, template, folder, postgres):
        self.template, self.folder, self._postgres = template, folder, postgres
        self._prepared, self._databases, self._open = {}, ExitStack(), ExitStack()

    def __call__(self, kind, name):
        """Return the world as it was made, and as the acts before this one leave it."""
        self.close()
        if kind not in self._prepared:
            self._prepared[kind] = self._make(kind)
        prepared, first_url = self._prepared[kind]
        prepared.restore("made", lambda _: None)
        url = first_url if kind == "sqlite" else self._copy(first_url)
        w = World(self.template, self._opened(url), url, prepared.place, "w")
        for act_before in BEFORE.get(name, ()):
            act_before(w)
        return w

    def close(self, *, databases=False):
        self._open.close()
        if databases:
            self._databases.close()

    def _make(self, kind):
        prepared = Prepared(self.folder / kind)
        url = str(prepared.place / "catalog.sqlite")
        if kind == "postgresql":
            server, upgraded = self._postgres()
            url = self._databases.enter_context(server.database(upgraded))

        def make(place):
            World(self.template, self._opened(url), url, place, "w").make()
            self.close()

        prepared.restore("made", make)
        return prepared, url

    def _copy(self, url):
        server, _ = self._postgres()
        return self._open.enter_context(server.database(sqlalchemy.make_url(url).database))

    def _opened(self, url):
        return self._open.enter_context(open_catalog(url))


@pytest.fixture(scope="module")
def world(request, template, tmp_path_factory):
    """Return a function that makes a world on a database, after the end of the one before."""

    def postgres():
        return request.getfixturevalue("postgres"), request.getfixturevalue("upgraded")

    worlds = Worlds(template, tmp_path_factory.mktemp("worlds"), postgres)
    yield worlds
    worlds.close(databases=True)


def state(w):
    """What the catalog and the disk say."""
    tables = {
        "checkpoint": "SELECT uri, state FROM checkpoint",
        "set aside": "SELECT uri, purging FROM set_aside",
        "obligation": "SELECT source, place FROM obligation",
        "running": "SELECT id FROM conversion WHERE state = 'running'",
        "names": "SELECT name FROM aliases",
        "outbox": "SELECT key FROM outbox",
    }
    with w.catalog.reading() as conn:
        rows = {
            table: sorted(str(row).replace(str(w.tmp), "") for row in conn.execute(text(statement)))
            for table, statement in tables.items()
        }
    files = [os.path.relpath(os.path.join(at, f), w.tmp) for at, _, names in os.walk(w.tmp) for f in names]
    return rows, sorted(without_chance(files))


def without_chance(names):
    for name in names:
        if ".retiring-" in name:
            head, _, tail = name.partition(".retiring-")
            name = f"{head}.retiring{tail[8:]}"
        if ".obligations." in name:  # the id of one is of the paths
            name = f"{os.path.dirname(name)}/ID.json"
        if ".staging" not in name:
            yield name


class Broken:
    """Breaks connections at commits of writers: before they are done, or behind it.

    Those of this thread: another one renews the row of a running conversion, at no time that a test knows.
    """

    def __init__(self, monkeypatch, kind):
        self.commits, self.at, self.done = 0, None, True
        dialect = sqlalchemy.create_engine(f"{'postgresql+psycopg' if kind != 'sqlite' else kind}://").dialect
        self._commit, self._error = type(dialect).do_commit, BROKEN[kind]
        self._thread = threading.get_ident()
        monkeypatch.setattr(type(dialect), "do_commit", lambda _, connection: self._break(connection))
        original = catalog._MARKS[kind]

        def marked(connection):
            self.writer = self.writer or self._is_own()
            return original(connection)

        self.writer = False
        monkeypatch.setitem(catalog._MARKS, kind, marked)

    def _is_own(self):
        return threading.get_ident() == self._thread

    def _break(self, connection):
        if not self._is_own():
            connection.commit()
            return
        writer, self.writer = self.writer, False
        hit = writer and (self.at is None or self.commits == self.at)
        self.commits += writer
        if not hit or self.at == -1:
            connection.commit()
            return
        if self.done:
            connection.commit()
        if isinstance(connection.driver_connection, sqlite3.Connection):
            connection.rollback()
        else:
            connection.driver_connection.close()
        raise self._error


@pytest.mark.parametrize(("kind", "name"), on_both(ACTS, {"deletes"}))
def test_a_commit_whose_reply_is_lost_was_done(world, monkeypatch, kind, name):
    undisturbed = world(kind, name)
    ACTS[name](undisturbed)
    expected = state(undisturbed)
    w = world(kind, name)
    with monkeypatch.context() as patch:
        broken = Broken(patch, kind)
        ACTS[name](w)
        assert broken.commits or name in READS
    assert state(w) == expected


@pytest.mark.alike(7)
@pytest.mark.parametrize("commit", ["some", pytest.param("every", marks=pytest.mark.soak)])
@pytest.mark.parametrize(("kind", "name"), on_both(ACTS, {"converts"}))
def test_a_commit_that_failed_is_made_good_by_one_more_run(world, monkeypatch, kind, name, commit):
    expected = world(kind, name)
    with monkeypatch.context() as patch:
        counting = Broken(patch, kind)
        counting.at = -1
        ACTS[name](expected)
    wanted = state(expected)
    last = counting.commits - 1
    numbers = {0, last // 2, last} if commit == "some" else range(last + 1)
    for number in numbers if counting.commits else ():
        w = world(kind, name)
        with monkeypatch.context() as patch:
            broken = Broken(patch, kind)
            broken.at, broken.done = number, False
            with suppress(CkptError):
                ACTS[name](w)
        ACTS[name](w)
        rows, files = state(w)
        assert rows == wanted[0], number
        assert files == wanted[1], number
