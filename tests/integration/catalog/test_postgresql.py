"""PostgreSQL: driver, snapshots for readers, lock timeouts and error messages."""

import os
import shutil
import sys
import threading
import time

import postgres as postgresql
import pytest
import sqlalchemy as sa

from ckptcore.catalog import open_catalog, upgrade
from ckptcore.catalog.catalog import Catalog
from ckptcore.catalog.database import HEAD, engine_for, parse
from ckptcore.conversion.registration import start
from ckptcore.errors import CatalogError, CatalogUnavailable, Conflict, MissingDependency
from ckptcore.planning.request import Request


@pytest.fixture
def url(postgres, upgraded):
    with postgres.database(upgraded) as made:
        yield made


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_one_driver_for_all_spellings(scheme):
    assert parse(f"{scheme}://me@host/x").drivername == "postgresql+psycopg"


def test_opening_never_creates_tables_on_a_server(postgres):
    with postgres.database() as url:
        with pytest.raises(CatalogError, match="no tables yet") as caught:
            open_catalog(url)
        assert "ckptcore catalog upgrade" in caught.value.hint
        assert upgrade(url) == (None, HEAD)
        with open_catalog(url) as catalog:
            assert catalog.list() == ()


def test_a_foreign_database_is_left_alone(postgres):
    with postgres.database() as url:
        engine = sa.create_engine(url)
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE songs (id integer)")
        engine.dispose()
        for refuses in (open_catalog, upgrade):
            with pytest.raises(CatalogError, match="not a ckptcore catalog: it has the tables songs"):
                refuses(url)


def test_the_password_is_never_printed(url):
    wrong = sa.make_url(url).set(password="hunter2").render_as_string(hide_password=False)
    with pytest.raises(CatalogError, match="password authentication failed") as caught:
        open_catalog(wrong)
    assert "hunter2" not in str(caught.value.as_dict())
    with open_catalog(url) as catalog:
        assert sa.make_url(url).password not in catalog.url


def test_an_unreachable_server_is_transient():
    with pytest.raises(CatalogUnavailable, match=r"does not answer: .*onnection") as caught:
        open_catalog("postgresql://me:hunter2@127.0.0.1:1/x")
    assert caught.value.transient
    assert "hunter2" not in str(caught.value.as_dict())


def test_permanent_errors_are_not_transient(postgres, url):
    nowhere = sa.make_url(url).set(database="nowhere").render_as_string(hide_password=False)
    with pytest.raises(CatalogError, match="nowhere") as caught:
        open_catalog(nowhere)
    assert not caught.value.transient


def write_while_it_dies(catalog, server):
    with catalog.writing() as connection:
        server.kill()
        connection.exec_driver_sql("SELECT 1")


@pytest.mark.soak
def test_a_restarting_server_is_transient(facts):
    with postgresql.serving(durable=True) as server, server.database() as url:
        upgrade(url)
        with open_catalog(url) as catalog:
            catalog.record_validation(facts("/runs/step-1"))
            with pytest.raises(CatalogUnavailable, match="does not answer") as caught:
                write_while_it_dies(catalog, server)
            assert caught.value.transient
            with pytest.raises(CatalogUnavailable):
                catalog.list()
            server.start()
            assert [row.uri for row in catalog.list()] == ["/runs/step-1"]
            catalog.record_validation(facts("/runs/step-2"))
            assert len(catalog.list()) == 2


def test_a_missing_driver_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingDependency, match="psycopg") as caught:
        open_catalog("postgresql://host/x")
    assert "ckptcore[postgres]" in caught.value.hint


def test_a_reader_has_one_snapshot_and_cannot_write(url, facts):
    with open_catalog(url) as catalog, catalog.reading() as reader:
        count = "SELECT count(*) FROM checkpoint"
        assert reader.exec_driver_sql(count).scalar() == 0
        catalog.record_validation(facts("/runs/step-1"))
        assert reader.exec_driver_sql(count).scalar() == 0
        with pytest.raises(sa.exc.InternalError, match="read-only transaction"):
            reader.exec_driver_sql("DELETE FROM checkpoint")
    with open_catalog(url) as catalog:
        assert len(catalog.list()) == 1


def test_a_writer_has_a_lock_timeout(url, monkeypatch, facts):
    short = "SELECT set_config('lock_timeout', '200', true), pg_advisory_xact_lock(7163384699)"
    monkeypatch.setitem(sys.modules["ckptcore.catalog.database"].WRITER_BEGIN, "postgresql", short)
    with open_catalog(url) as catalog, catalog.writing():
        refused = []

        def late():
            with open_catalog(url) as other:
                try:
                    other.record_validation(facts("/runs/step-1"))
                except CatalogUnavailable as error:
                    refused.append(error.message)

        thread = threading.Thread(target=late)
        thread.start()
        thread.join(120)
        assert len(refused) == 1
        assert "lock timeout" in refused[0]


def test_a_lost_connection_is_replaced(url, facts):
    with open_catalog(url) as catalog:
        catalog.record_validation(facts("/runs/step-1"))
        engine = sa.create_engine(url)
        with engine.begin() as connection:
            connection.exec_driver_sql(
                "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        engine.dispose()
        assert [row.uri for row in catalog.list()] == ["/runs/step-1"]


def test_the_query_of_the_url_takes_precedence(url):
    named = sa.make_url(url).update_query_dict({"application_name": "sweep"})
    engine = engine_for(named)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SHOW application_name").scalar() == "sweep"
    engine.dispose()


def test_sqlite_needs_no_driver(tmp_path, python, finish):
    script = (
        "import sys\n"
        "from ckptcore.catalog import open_catalog\n"
        "open_catalog(sys.argv[1]).close()\n"
        "print({'psycopg', 'sqlalchemy.dialects.postgresql'} & set(sys.modules))"
    )
    assert finish(python(script, tmp_path / "catalog.sqlite")) == ["set()\n"]


def test_no_server_outlives_the_tests(postgres, python):
    script = (
        "import os, signal, sys\n"
        "sys.path.insert(0, 'tests/helpers')\n"
        "from postgres import serving\n"
        "with serving() as server:\n"
        "    print(server._process.pid, server.folder, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    pid, folder = python(script).communicate(timeout=120)[0].split()
    end = time.monotonic() + 120
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < end:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")
    shutil.rmtree(folder)


def test_a_connection_in_use_while_the_catalog_rests_comes_back(postgres, upgraded):
    """It is closed with the others, and not left to the garbage collector."""
    with postgres.database(upgraded) as url, open_catalog(url) as catalog:
        with catalog.reading():
            catalog.rest()
        assert catalog._engine.pool.checkedin() == 1
        catalog.rest()
        assert catalog._engine.pool.checkedin() == 0


def test_a_conversion_that_may_not_begin_leaves_no_connection(postgres, upgraded, monkeypatch, tmp_path):
    """A process that is refused often has no more connections than before."""

    def refused(*_given, **_options):
        raise Conflict("a retirement counts on this place")

    monkeypatch.setattr(Catalog, "begin_each", refused)
    with postgres.database(upgraded) as url:
        with pytest.raises(Conflict):
            start(Request(str(tmp_path / "a"), str(tmp_path / "b")), url)
        with open_catalog(url) as catalog, catalog.reading() as conn:
            others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            assert conn.execute(sa.text(f"{others} AND pid <> pg_backend_pid()")).scalar() == 0
