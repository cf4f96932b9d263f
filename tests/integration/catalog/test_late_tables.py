"""Tables are made when they are first used, once, and with the tables that they refer to."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ckptcore.catalog import models

PROGRAM = """
import json
from threading import Barrier, Thread
from ckptcore.catalog import models

made = models.Base._metadata.tables
before = sorted(made)
start, found = Barrier(8), []

def use():
    start.wait()
    found.append(id(models.CheckpointFile.path))

threads = [Thread(target=use) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps([before, sorted(made), len(found), len(set(found)), len(models.Base.metadata.tables)]))
"""


def test_a_table_is_made_once_by_whoever_uses_it_first() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    before, made, uses, columns, tables = json.loads(done.stdout)
    assert before == []
    assert made == ["checkpoint", "checkpoint_file", "training_run"]
    assert (uses, columns) == (8, 1)
    assert tables > 15


def test_a_foreign_key_has_the_type_of_its_column() -> None:
    keys = [key for table in models.Base.metadata.tables.values() for key in table.foreign_keys]
    assert keys
    for key in keys:
        assert str(key.parent.type) == str(key.column.type) == "BIGINT"


def test_other_attributes_are_refused() -> None:
    with pytest.raises(AttributeError, match="Checkpoint has no attribute 'urn'"):
        models.Checkpoint.urn  # noqa: B018
