"""Fixtures: a set of each older version, and its catalog on either database."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

if "PREFECT_HOME" not in os.environ:  # flows are imported, and Prefect makes a folder for itself
    os.environ["PREFECT_HOME"] = tempfile.mkdtemp(prefix="ckptcore-test-prefect-")
    atexit.register(shutil.rmtree, os.environ["PREFECT_HOME"], ignore_errors=True)

import pytest
import upgraded

from ckptcore.catalog.migrate import migrate

SETS = sorted(p.name for p in upgraded.FIXTURES.iterdir() if p.is_dir())


@pytest.fixture(params=SETS)
def old_set(request):
    """Return the name of a set."""
    return request.param


@pytest.fixture
def old_revision(old_set):
    """The revision of its catalog."""
    return old_set.removeprefix("schema-")


@pytest.fixture
def old(old_set, tmp_path, monkeypatch):
    """The folder of a set; its catalog is the default one."""
    root = upgraded.put_down(old_set, tmp_path / "set")
    monkeypatch.setenv("CKPTCORE_CATALOG_URL", f"sqlite:///{root}/catalog.sqlite")
    return root


@pytest.fixture(params=["sqlite", "postgresql"])
def either(request, old, old_revision, monkeypatch):
    """The URL of the set's catalog, on each database, as the older version left it."""
    path = old / "catalog.sqlite"
    if request.param == "sqlite":
        yield str(path)
        return
    with request.getfixturevalue("postgres").database() as made:
        migrate(made, old_revision)
        upgraded.copy_to_postgresql(path, made)
        monkeypatch.setenv("CKPTCORE_CATALOG_URL", made)
        yield made
