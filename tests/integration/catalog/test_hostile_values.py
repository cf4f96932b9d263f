"""Values that no column can store are refused or escaped by every catalog command, on every database."""

from datetime import UTC, datetime

import commandline
import pytest
from commandline import argv_of, fitting

from ckptcore.catalog import aliases, holds, open_catalog
from ckptcore.catalog import watched_roots as roots
from ckptcore.cli.main import run

NOW = datetime(2026, 3, 1, tzinfo=UTC)
# PostgreSQL stores no NUL, no database a lone surrogate; a number may have more than 64 bits.
SHORT = ("a\0b", "k=\udc80")
LONG = ("\0", "a\udc80", "\ud800", "k\0=v", "s3://b/\0", "s3://b/\udc80", str(2**63), str(2**64), *SHORT)
VERBS = [verb for verb in commandline.verbs() if verb.path[0] == "catalog"]
# Refused as usage, as a dtype or as a source, or stored with an escape; never an error of the database or of
# ckptcore.
CODES = {0, 2, 8, 13, 14, 23}


@pytest.fixture
def filled(catalog, facts, url, request, tmp_path):
    """The URL of a catalog with a row of everything; on PostgreSQL for a role that `catalog sql` answers."""
    checkpoint = catalog.record_validation(facts(tmp_path / "step-1", step=1))
    with catalog.writing() as conn:
        aliases.set_alias(conn, NOW, "best", checkpoint)
        holds.place(conn, NOW, checkpoint, "because")
        roots.add(conn, NOW, "root", str(tmp_path / "runs"), targets=[{"to": "safetensors"}])
    if "://" not in url:
        return url
    every = ("ALL TABLES IN SCHEMA", "ALL SEQUENCES IN SCHEMA")
    rights = [f"GRANT ALL ON {what} public TO keeper" for what in every]
    return request.getfixturevalue("postgres").as_role(url, "keeper", *rights)


def rows(url):
    with open_catalog(url) as catalog, catalog.reading() as conn:
        names = {row.name for row in (*aliases.every(conn), *roots.every(conn))}
        return names | {row.uri for row in catalog.list()} | {row.id for row in holds.active(conn, NOW)}


@pytest.mark.parametrize("values", [SHORT, pytest.param(LONG, marks=pytest.mark.soak)], ids=["short", "long"])
def test_every_command_handles_values_that_no_column_can_store(values, filled, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before, failed, codes, calls = rows(filled), [], set(), 0
    for verb in VERBS:
        needed = {p.name: (fitting(p)[0],) for p in verb.parameters if p.required and not p.flag}
        for parameter in verb.parameters:
            if parameter.flag or parameter.choices or parameter.name == "catalog":
                continue
            for value in values:
                arguments = argv_of(verb, needed | {parameter.name: (value,), "catalog": (filled,)})
                code = run([argument.replace(commandline.BOX, str(tmp_path)) for argument in arguments])
                output = "".join(capsys.readouterr())
                codes.add(code)
                calls += 1
                if code not in CODES or "\0" in output or "\udc80" in output or "\ud800" in output:
                    failed.append((arguments, code, output[-500:]))
    assert not failed, failed[:5]
    assert codes >= {0, 2}
    assert calls > 40 * len(values), "verbs or parameters are left out"
    assert rows(filled) >= before  # nothing was deleted
