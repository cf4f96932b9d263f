"""Opening a catalog: its settings, its speed, and the errors of what cannot be opened."""

import contextlib
import shutil
import sqlite3
import threading
from pathlib import Path

import pytest
from sqlalchemy import create_engine, exc, text

from ckptcore.catalog import database, default_url, open_catalog
from ckptcore.catalog.database import HEAD, connect, engine_for, journal_mode, parse
from ckptcore.errors import CatalogError, CatalogUnavailable, MissingDependency


@pytest.fixture
def path(tmp_path):
    return tmp_path / "made" / "on the way" / "catalog.sqlite"


def stamp(path, revision):
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num=?", (revision,))
    connection.close()


def test_a_fresh_catalog_makes_its_folder(path):
    with open_catalog(str(path)) as catalog:
        assert catalog.list() == ()
        assert catalog.url == f"sqlite:///{path}"
    with open_catalog(f"sqlite:///{path}", create=False) as catalog:
        assert catalog.list() == ()


def test_default_url(monkeypatch, tmp_path):
    monkeypatch.setenv("CKPTCORE_CATALOG_URL", "sqlite:////a/b")
    assert default_url() == "sqlite:////a/b"
    monkeypatch.setenv("CKPTCORE_CATALOG_URL", "")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_url() == str(tmp_path / "ckptcore" / "catalog.sqlite")
    with open_catalog() as catalog:
        assert catalog.url == f"sqlite:///{tmp_path}/ckptcore/catalog.sqlite"


def test_in_memory():
    with open_catalog("sqlite://") as catalog:
        catalog.begin({}, source_uri="/a", destination_uri="/b", verb="export", tool_version="1")
        assert [row.destination_uri for row in catalog.conversions()] == ["/b"]


def test_a_missing_catalog_is_not_created_without_create(path):
    with pytest.raises(CatalogError, match=f"there is no catalog at {path}"):
        open_catalog(str(path), create=False)
    assert not path.parent.exists()


def test_an_empty_file_is_not_a_catalog(tmp_path):
    (tmp_path / "empty.sqlite").touch()
    with pytest.raises(CatalogError, match="no tables yet") as caught:
        open_catalog(str(tmp_path / "empty.sqlite"), create=False)
    assert "ckptcore catalog upgrade" in caught.value.hint


def test_older_schema_names_the_next_step(path, monkeypatch):
    open_catalog(str(path)).close()
    monkeypatch.setattr("ckptcore.catalog.database.REVISIONS", (HEAD, "next"))
    monkeypatch.setattr("ckptcore.catalog.database.HEAD", "next")
    with pytest.raises(CatalogError, match=f"schema is {HEAD}, this version needs next") as caught:
        open_catalog(str(path))
    assert "ckptcore catalog upgrade" in caught.value.hint
    assert caught.value.exit_code == 16


def test_newer_schema_is_left_alone(path):
    open_catalog(str(path)).close()
    stamp(path, "9999")
    with pytest.raises(CatalogError, match="got 9999, of a newer version"):
        open_catalog(str(path))


def test_a_foreign_database_is_left_alone(tmp_path):
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE songs (id INTEGER)")
    connection.close()
    with pytest.raises(CatalogError, match="not a ckptcore catalog: it has the tables songs"):
        open_catalog(str(path))
    with sqlite3.connect(path) as connection:
        names = connection.execute("SELECT name FROM sqlite_master").fetchall()
    connection.close()
    assert names == [("songs",)]


def test_not_a_database(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("shopping list\n" * 100)
    with pytest.raises(CatalogError, match="file is not a database"):
        open_catalog(str(path))
    assert path.read_text() == "shopping list\n" * 100


def test_a_folder_that_cannot_be_created(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CatalogError, match=r"cannot create the catalog's folder "):
        open_catalog(str(tmp_path / "file" / "catalog.sqlite"))


def test_a_folder_in_place_of_the_file(tmp_path):
    with pytest.raises(CatalogError, match="unable to open database file"):
        open_catalog(str(tmp_path))


def test_unreadable_urls_do_not_show_passwords():
    with pytest.raises(CatalogError) as caught:
        open_catalog("postgresql+psycopg://me:hunter2@host:port/x")
    assert "hunter2" not in str(caught.value.as_dict())


def test_missing_driver_is_named():
    with pytest.raises(MissingDependency, match="pg8000") as caught:
        open_catalog("postgresql+pg8000://me:hunter2@host/x")
    assert "hunter2" not in str(caught.value.as_dict())
    with pytest.raises(MissingDependency, match="nosuch"):
        open_catalog("nosuch://host/x")


def test_settings_of_every_connection(path, monkeypatch):
    monkeypatch.setattr(database, "create_engine", create_engine)  # and not that of `quick_disks`
    engine = connect(str(path), create=True)
    found = {}
    with engine.connect() as connection:
        for name in ("journal_mode", "synchronous", "busy_timeout", "foreign_keys"):
            found[name] = connection.exec_driver_sql(f"PRAGMA {name}").scalar()
    engine.dispose()
    assert found == {"journal_mode": "wal", "synchronous": 1, "busy_timeout": 30_000, "foreign_keys": 1}


def test_a_rollback_removes_created_tables(path):
    engine = connect(str(path), create=True)
    with engine.connect() as connection:
        connection.execute(text("CREATE TABLE made (x INTEGER)"))
        connection.rollback()
    with pytest.raises(exc.OperationalError, match="no such table"), engine.begin() as connection:
        connection.execute(text("SELECT * FROM made"))
    engine.dispose()


def test_readers_do_not_wait_for_a_writer(path):
    with open_catalog(str(path)) as catalog, catalog.writing():
        seen = []
        reader = threading.Thread(target=lambda: seen.append(catalog.list()), daemon=True)
        reader.start()
        reader.join(timeout=120)
        assert seen == [()]


def test_a_lock_timeout_is_transient(path, monkeypatch):
    monkeypatch.setattr("ckptcore.catalog.database.WAIT_MS", 50)
    with (
        open_catalog(str(path)) as catalog,
        open_catalog(str(path)) as other,
        catalog.writing(),
        pytest.raises(CatalogUnavailable, match="locked") as caught,
    ):
        other.begin({}, source_uri="/a", destination_uri="/b", verb="export", tool_version="1")
    assert caught.value.transient


def test_a_read_only_catalog(path):
    with open_catalog(str(path)) as catalog:
        catalog.begin({}, source_uri="/a", destination_uri="/b", verb="export", tool_version="1")
    with open_catalog(f"sqlite:///file:{path}?mode=ro&uri=true", create=False) as catalog:
        assert len(catalog.conversions()) == 1
        with pytest.raises(CatalogError, match="readonly"):
            catalog.begin({}, source_uri="/", destination_uri="/", verb="x", tool_version="1")


def test_switching_the_journal_waits_for_a_writer(path):
    # SQLite's own busy timeout does not apply to this statement.
    open_catalog(str(path)).close()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
        connection.execute("BEGIN IMMEDIATE")
        opened = []
        opener = threading.Thread(target=lambda: opened.append(open_catalog(str(path))))
        opener.start()
        opener.join(timeout=0.3)
        assert opened == []
        connection.execute("COMMIT")
        opener.join(timeout=120)
        assert opened[0].list() == ()
        opened[0].close()


MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
filer:/home /home nfs4 rw,hard 0 0
/dev/sdb1 /home/me/local\\040disk xfs rw 0 0
scratch /scratch lustre rw 0 0
sshfs /mnt/box fuse.sshfs rw 0 0
tmpfs /dev/shm tmpfs rw 0 0
broken line
"""


@pytest.mark.parametrize(
    ("path", "mode"),
    [
        ("/var/lib/catalog.sqlite", "WAL"),
        ("/home/me/.local/share/ckptcore/catalog.sqlite", "DELETE"),
        ("/home/me/local disk/catalog.sqlite", "WAL"),
        ("/homeless/catalog.sqlite", "WAL"),
        ("/scratch/catalog.sqlite", "DELETE"),
        ("/mnt/box/a/catalog.sqlite", "DELETE"),
        ("/dev/shm/catalog.sqlite", "WAL"),
    ],
)
def test_no_shared_memory_on_shared_file_systems(path, mode):
    assert journal_mode(Path(path), MOUNTS) == mode


def test_a_shared_file_system_decides_the_journal(path, monkeypatch):
    monkeypatch.setattr("ckptcore.catalog.database.journal_mode", lambda path: "DELETE")
    with open_catalog(str(path)) as catalog:
        catalog.begin({}, source_uri="/a", destination_uri="/b", verb="export", tool_version="1")
    assert [p.name for p in path.parent.iterdir()] == ["catalog.sqlite"]
    engine = engine_for(parse(str(path)))
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "delete"
    engine.dispose()


def test_opening_imports_neither_alembic_nor_torch(path, python, finish):
    script = (
        "import sys\n"
        "from ckptcore.catalog import open_catalog\n"
        "from ckptcore.cli import catalog\n"
        "early = {'sqlalchemy', 'rich.table', 'blake3'} & set(sys.modules)\n"
        "open_catalog(sys.argv[1]).close()\n"
        "open_catalog(sys.argv[1], create=False).close()\n"
        "print(early, {'alembic', 'torch', 'numpy', 'prefect'} & set(sys.modules))"
    )
    assert finish(python(script, path)) == ["set() set()\n"]


def test_a_copy_of_the_file_is_a_catalog(path, tmp_path, facts):
    with open_catalog(str(path)) as catalog:
        catalog.record_validation(facts("/a/b"))
    shutil.copy(path, tmp_path / "copy.sqlite")
    with open_catalog(str(tmp_path / "copy.sqlite"), create=False) as catalog:
        assert [row.uri for row in catalog.list()] == ["/a/b"]


def test_catalogs_of_one_file_share_their_compiled_sql(tmp_path):
    one, other = (parse(str(tmp_path / name)) for name in ("one.sqlite", "other.sqlite"))
    assert engine_for(one) is engine_for(one)
    assert engine_for(one) is not engine_for(other)
    assert engine_for(one) is not engine_for(one, foreign_keys=False)
    memory = parse("sqlite://")  # an engine is its database
    assert engine_for(memory) is not engine_for(memory)
