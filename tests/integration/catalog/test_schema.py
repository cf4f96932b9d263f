"""The migrations, the models and the constant `HEAD` have the same schema."""

import hashlib
import shutil
import sqlite3
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import ScriptDirectory
from paths import ROOT

from ckptcore.catalog import browse, open_catalog, upgrade
from ckptcore.catalog.database import HEAD, REVISIONS, UNRENAMED
from ckptcore.catalog.database import revision as stored_revision
from ckptcore.catalog.migrate import configuration, migrate, migrating
from ckptcore.catalog.models import Base
from ckptcore.catalog.views import VIEWS, create_statements
from ckptcore.errors import CatalogError


def schema(path):
    """name -> the sorted lines of every CREATE statement: the order of clauses is free, and so are quotes."""
    with sqlite3.connect(path) as connection:
        rows = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL")
        found = {
            name: sorted(line.strip().rstrip(",").replace('"', "") for line in sql.splitlines())
            for name, sql in rows
        }
    connection.close()
    return found


def test_revisions_are_the_scripts():
    scripts = ScriptDirectory.from_config(configuration())
    found = tuple(reversed([s.revision for s in scripts.walk_revisions()]))
    assert found == REVISIONS, "name the new revision in REVISIONS, ckptcore/catalog/database.py"
    assert scripts.get_heads() == [HEAD]


def test_a_fresh_catalog_equals_a_migrated_one(tmp_path):
    open_catalog(str(tmp_path / "made.sqlite")).close()
    assert upgrade(str(tmp_path / "migrated.sqlite")) == (None, HEAD)
    made, migrated = schema(tmp_path / "made.sqlite"), schema(tmp_path / "migrated.sqlite")
    # Alembic's own table, written on one line in the one and on several in the other.
    assert made.pop("alembic_version")
    assert migrated.pop("alembic_version")
    indexes = [index for table in Base.metadata.tables.values() for index in table.indexes]
    assert len(made) == len(Base.metadata.tables) + len(indexes) + len(VIEWS)
    differing = [name for name in made.keys() | migrated.keys() if made.get(name) != migrated.get(name)]
    assert differing == [], "their last revision needs `recreate=_recreate()`, or another type or default"


def test_models_need_no_new_migration(bare, monkeypatch):
    monkeypatch.setenv("CKPTCORE_CATALOG_URL", bare)
    upgrade(bare)
    command.check(configuration())  # raises when the models and the database differ


def test_a_difference_of_schemas_is_detected(bare, monkeypatch):
    monkeypatch.setenv("CKPTCORE_CATALOG_URL", bare)
    upgrade(bare)
    with migrating(bare) as connection:
        connection.exec_driver_sql("ALTER TABLE checkpoint DROP COLUMN num_files")
    with pytest.raises(Exception, match="New upgrade operations detected"):
        command.check(configuration())


@pytest.mark.soak  # `make check` does the same
def test_alembic_finds_its_scripts_from_the_checkout(tmp_path, python, finish):
    script = "import sys; from alembic.config import main; main(sys.argv[1:])"
    where = {"CKPTCORE_CATALOG_URL": str(tmp_path / "catalog.sqlite")}
    finish(python(script, "upgrade", "head", **where))
    finish(python(script, "check", **where))
    [current] = finish(python(script, "current", **where))
    assert current.strip() == f"{HEAD} (head)"


def test_downgrade_to_nothing_and_upgrade(tmp_path, monkeypatch):
    path = tmp_path / "catalog.sqlite"
    monkeypatch.setenv("CKPTCORE_CATALOG_URL", str(path))
    upgrade(str(path))
    before = schema(path)
    command.downgrade(configuration(), "base")
    assert set(schema(path)) == {"alembic_version"}
    assert upgrade(str(path)) == (None, HEAD)
    assert schema(path) == before


# One row of every table, as SQL of the schema that added the table or its columns; NOW is a time.
AT = {
    "v1": """
        INSERT INTO training_run VALUES (1, 'llama', NOW);
        INSERT INTO checkpoint VALUES (1, 'u1', 1, 'source', 'dcp', '/a', 'present', 10, 4, 1, 1, 'float32',
                                       'm', '', '{}', NOW, NOW, 'coverage', NULL, 'f', NULL, NULL);
        INSERT INTO checkpoint_file VALUES (1, 'f', 4, NULL, 'extra');
        INSERT INTO tensor VALUES (1, 'w', 'float32', '[1]', 4, 'f');
        INSERT INTO conversion VALUES (1, 'c1', 'export', 'succeeded', '/a', '/b', '{}', 'p', '1', NULL,
                                       NOW, NOW, 4, 4, NULL, NULL, NULL, '{}', 'm', 'f', 's', 'c', 'ok', '{}',
                                       NOW);
        INSERT INTO conversion_io VALUES (1, 1, 'in');
        INSERT INTO conversion_process VALUES (1, '1 2 pid:[1] boot:mark', NOW);
        INSERT INTO finding VALUES (1, 1, 1, 'hole', 'coverage', 'error', 'rows', 'w', NULL, '', NOW, NULL);
        INSERT INTO tag VALUES (1, 'k', 'v', NOW);
        INSERT INTO aliases VALUES (1, 'best', 1, 1, NOW);
        INSERT INTO holds VALUES (1, 'h1', 1, 'paper', '', NOW, NULL, NULL);
        INSERT INTO watched_roots VALUES (1, 'r', '/r', '[]', '{}', true, NOW, NULL, NULL);
        INSERT INTO inbox VALUES (1, 'i1', 's', 'e', '', '', '', NULL, '', 'waiting', 0, NOW, NOW, NULL, NULL,
                                  NULL, 3);
        INSERT INTO outbox VALUES (1, 'o1', 's', 'k', '', '{}', 'waiting', 0, NOW, NOW, NULL, NULL, 4);
        INSERT INTO sightings VALUES (1, '/r/step-1', '/r', 1, 'whole', 's', 'd', 'm', '[]', NOW, NOW, NOW);
        INSERT INTO claims VALUES (1, 'd', '/b', 'o', '/r/step-1', 'done', 'me', 1, NOW, NOW, NOW, NULL,
                                   NULL);
        INSERT INTO training_facts VALUES (1, 'c', 'ada', 'd', 'j', 'olmo', 1.5, 10, 20, '{}', '{}', '{}',
                                           NOW);
        INSERT INTO metric VALUES (1, 'loss', 2.5, NULL, 10, 'user', NOW);
        INSERT INTO audit VALUES (1, NOW, 'ada', 'cli', 'alias.set', 'best', '{}');
        INSERT INTO retirement VALUES (1, 'u2', 'model part', 'f', 4, NOW);
        INSERT INTO given_up VALUES (1, 'optim.state.w.exp_avg', 'optimizer', 8);
        INSERT INTO holdings VALUES (1, 's', NULL);
        INSERT INTO set_aside VALUES ('/r/.step-1.retiring-0badcafe.ckptcore', 1, '/r/step-1', 4, NOW, NOW,
                                      'd', false, '7');
        INSERT INTO obligation VALUES (1, 'b1', 1, '/r/step-1', '/b', '', '', NOW, 0)""",
    "v2": "",
    "v3": """
        UPDATE training_facts SET live_fingerprint = 'f', live_model_fingerprint = 'm',
                                  live_verdict = 'equal', live_compared = 'f'""",
    "v4": """
        INSERT INTO step_statistics VALUES (1, '', 1, 2.5, 1.5, 0, 0, 3, 0.25, 'u0', NOW)""",
    "v5": "",
}

# The views of the newest schema: a change needs a revision, or existing catalogs keep the old ones.
VIEWS_OF = ("v5", "88a0956dbecd0bbd9bf05ff9704b7bec8e9bc0f1079ee7993172c4ebaf6db462")


def test_views_change_with_a_revision_only():
    statements = "\n".join(
        line for dialect in ("sqlite", "postgresql") for line in create_statements(dialect)
    )
    now = HEAD, hashlib.sha256(statements.encode()).hexdigest()
    assert now == VIEWS_OF, "a view is changed by a new revision; then VIEWS_OF is what is found here"


def rows(url):
    """table -> its rows, as columns by name."""
    with migrating(url) as connection:
        return {
            name: [dict(row) for row in connection.exec_driver_sql(f"SELECT * FROM {name}").mappings()]
            for name in sorted(sa.inspect(connection).get_table_names())
            if name != "alembic_version"
        }


def fill(url, revision):
    """Migrate a catalog up to a revision, and fill what is new there."""
    migrate(url, revision)
    with migrating(url) as connection:
        for statement in filter(None, AT[revision].split(";")):
            connection.exec_driver_sql(statement.replace("NOW", "'2026-01-01 00:00:00+00:00'"))


@pytest.mark.alike(1)
def test_data_goes_up_and_down(bare, monkeypatch):
    monkeypatch.setenv("CKPTCORE_CATALOG_URL", bare)
    assert tuple(AT) == REVISIONS, "write into AT what fills the columns of the new revision"
    filled = {}
    for revision in AT:
        fill(bare, revision)
        filled[revision] = rows(bare)
    assert all(len(found) == 1 for found in filled[HEAD].values())
    assert set(filled[HEAD]) == set(Base.metadata.tables)
    with open_catalog(bare) as catalog:
        assert catalog.show("/a").findings[0].code == "hole"
    for revision in reversed(REVISIONS[:-1]):
        command.downgrade(configuration(), revision)
        assert rows(bare) == filled[revision]
    command.downgrade(configuration(), "base")
    assert rows(bare) == {}
    assert upgrade(bare) == (None, HEAD)
    assert not any(rows(bare).values())


def stamped(url, revision):
    """A catalog of the tables of v1, a row in each, that says it is of `revision`."""
    fill(url, REVISIONS[0])
    with migrating(url) as connection:
        connection.exec_driver_sql(f"UPDATE alembic_version SET version_num = '{revision}'")


def test_a_catalog_of_the_last_development_version_is_renamed(bare):
    stamped(bare, UNRENAMED)
    before = rows(bare)
    with pytest.raises(CatalogError, match=f"schema is {UNRENAMED}, this version needs {HEAD}") as error:
        open_catalog(bare)
    assert error.value.hint == "run `ckptcore catalog upgrade`"
    assert upgrade(bare) == (UNRENAMED, HEAD)
    now = rows(bare)
    assert now.keys() - before.keys() == {"step_statistics"}  # the tables that later revisions add
    [sighting] = before["sightings"]
    sighting["state"] = "complete"  # the name that `whole` got
    for name, table in before.items():
        assert [{key: row[key] for key in old} for row, old in zip(now[name], table, strict=True)] == table
    assert upgrade(bare) == (HEAD, HEAD)
    with open_catalog(bare) as catalog, catalog.reading() as conn:
        assert set(VIEWS) <= set(sa.inspect(conn).get_view_names())
        assert catalog.show("/a").findings[0].code == "hole"


def test_a_catalog_that_only_says_so_is_not_renamed(bare):
    stamped(bare, UNRENAMED)
    with migrating(bare) as connection:
        connection.exec_driver_sql("ALTER TABLE conversion_process DROP COLUMN renewed_at")
    before = rows(bare)
    with pytest.raises(
        CatalogError, match=r"lacks 1 columns of its schema, first conversion_process\.renewed_at"
    ):
        upgrade(bare)
    assert rows(bare) == before
    with migrating(bare) as connection:
        assert stored_revision(connection) == UNRENAMED


@pytest.mark.alike(3)
@pytest.mark.parametrize("revision", ["0001", "0009", "0014"])
def test_other_development_versions_are_refused_with_the_next_step(bare, revision):
    stamped(bare, revision)
    before = rows(bare)
    for use in (open_catalog, upgrade):
        with pytest.raises(CatalogError, match=f"schema is {revision}, of a development version") as error:
            use(bare)
        assert "ckptcore catalog rebuild" in error.value.hint
    assert rows(bare) == before


def test_an_upgrade_makes_the_current_views(bare):
    migrate(bare, REVISIONS[0])
    with migrating(bare) as connection:  # as an older revision left them
        connection.exec_driver_sql("DROP VIEW IF EXISTS lineage_up")
        connection.exec_driver_sql("CREATE VIEW lineage_up AS SELECT 1 AS old")
        connection.exec_driver_sql(f"UPDATE alembic_version SET version_num = '{UNRENAMED}'")
    upgrade(bare)
    with open_catalog(bare) as catalog, catalog.reading() as conn:
        assert set(VIEWS) <= set(sa.inspect(conn).get_view_names())
        assert conn.exec_driver_sql("SELECT ancestor_uri FROM lineage_up").all() == []


def test_the_sums_of_runs_are_read_from_an_index_alone(tmp_path):
    url = str(tmp_path / "catalog.sqlite")
    asked = []

    def keep(conn, cursor, statement, parameters, context, many):
        asked.append((statement, parameters))

    with open_catalog(url) as catalog, catalog.writing() as conn:
        conn.exec_driver_sql("INSERT INTO training_run VALUES (1, 'llama', '2026-01-01 00:00:00')")
        sa.event.listen(conn, "before_cursor_execute", keep)
        assert [run.name for run in browse.runs(conn).rows] == ["llama"]
        sa.event.remove(conn, "before_cursor_execute", keep)
        statement, parameters = next(each for each in asked if "sum(" in each[0])
        steps = conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()
    index = "ix_checkpoint_run_id_state_kind_step_total_bytes_created_at"
    assert [row[3] for row in steps if "checkpoint" in row[3]] == [
        f"SEARCH checkpoint USING COVERING INDEX {index} (run_id=?)"
    ]


def test_upgrade_with_nothing_to_do(tmp_path):
    upgrade(str(tmp_path / "catalog.sqlite"))
    assert upgrade(str(tmp_path / "catalog.sqlite")) == (HEAD, HEAD)


def test_upgrade_refuses_a_newer_schema(tmp_path):
    path = tmp_path / "catalog.sqlite"
    open_catalog(str(path)).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num='9999'")
    connection.close()
    with pytest.raises(CatalogError, match="got 9999, of a newer version"):
        migrate(str(path), HEAD)


def test_a_failing_migration_changes_nothing(tmp_path, monkeypatch):
    path = tmp_path / "catalog.sqlite"
    scripts = tmp_path / "alembic"
    shutil.copytree(ROOT / "alembic", scripts, ignore=shutil.ignore_patterns("__pycache__"))
    first = scripts / "versions" / "v1_first_tables.py"
    first.write_text(first.read_text().replace("\n\ndef downgrade", "    1 / 0\n\n\ndef downgrade"))
    monkeypatch.setattr("ckptcore.catalog.migrate.scripts_folder", lambda: scripts)
    with pytest.raises(ZeroDivisionError):
        upgrade(str(path))
    assert schema(path) == {}


@pytest.fixture
def filled(tmp_path, facts):
    path = str(tmp_path / "catalog.sqlite")
    with open_catalog(path) as catalog:
        catalog.record_validation(facts(tmp_path / "step-1", num_tensors=5))
    return path


def test_rebuilding_a_parent_table_keeps_its_children(filled):
    # With foreign keys on, SQLite would refuse or cascade the DROP inside a batch operation.
    with migrating(filled) as connection:
        operations = Operations(MigrationContext.configure(connection))
        with operations.batch_alter_table("checkpoint", recreate="always") as batch:
            batch.add_column(sa.Column("extra", sa.Text()))
    with sqlite3.connect(filled) as connection:
        assert connection.execute("SELECT count(*) FROM tensor").fetchone() == (6,)
        assert connection.execute("SELECT count(extra), count(*) FROM checkpoint").fetchone() == (0, 1)
    connection.close()


def test_a_migration_that_orphans_rows_is_rolled_back(filled):
    def orphan():
        with migrating(filled) as connection:
            connection.exec_driver_sql("DELETE FROM checkpoint_file")
            connection.exec_driver_sql("DELETE FROM checkpoint")

    with pytest.raises(CatalogError, match="rows without their parent would be 6, first in table tensor"):
        orphan()
    with sqlite3.connect(filled) as connection:
        assert connection.execute("SELECT count(*) FROM checkpoint").fetchone() == (1,)
    connection.close()


def test_every_foreign_key_has_an_index():
    bare = []
    for table in Base.metadata.tables.values():
        leading = {next(iter(index.columns)).name for index in table.indexes}
        leading.add(next(iter(table.primary_key.columns)).name)
        bare += [
            f"{table.name}.{key.parent.name}" for key in table.foreign_keys if key.parent.name not in leading
        ]
    assert bare == []


def test_the_same_scripts_migrate_postgresql(python, finish):
    script = "import sys; from alembic.config import main; main(sys.argv[1:])"
    [sql] = finish(
        python(script, "upgrade", "head", "--sql", CKPTCORE_CATALOG_URL="postgresql+psycopg://h/d")
    )
    assert sql.count("CREATE TABLE ") == len(Base.metadata.tables) + 1
    assert sql.count("CREATE VIEW ") == len(VIEWS)
    assert "id BIGSERIAL NOT NULL" in sql
    assert "created_at TIMESTAMP WITH TIME ZONE NOT NULL" in sql


def test_an_installed_package_contains_the_scripts(tmp_path, python, finish):
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "ckptcore", tmp_path / "site" / "ckptcore", ignore=ignore)
    shutil.copytree(ROOT / "alembic", tmp_path / "site" / "ckptcore" / "_migrations", ignore=ignore)
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from ckptcore.catalog import upgrade\n"
        "import ckptcore.catalog.migrate as migrate\n"
        "print(migrate.scripts_folder(), upgrade(sys.argv[2]))"
    )
    [output] = finish(python(script, tmp_path / "site", tmp_path / "catalog.sqlite"))
    assert output == f"{tmp_path}/site/ckptcore/_migrations (None, '{HEAD}')\n"


def test_the_migrations_folder_does_not_hide_alembic():
    assert not (ROOT / "alembic" / "__init__.py").exists()
    assert Path(sys.modules["alembic"].__file__).parent != ROOT / "alembic"


def test_a_foreign_key_has_the_type_of_its_column() -> None:
    keys = [key for table in Base.metadata.tables.values() for key in table.foreign_keys]
    assert keys
    for key in keys:
        assert str(key.parent.type) == str(key.column.type) == "BIGINT"
