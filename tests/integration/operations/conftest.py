"""Fixtures of sweep, scrub and retire: a catalog on either database, and a root to watch."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from retiring import Template

from ckptcore.catalog import open_catalog
from ckptcore.catalog import watched_roots as roots
from ckptcore.conversion.pipeline import convert
from ckptcore.operations.automation.sweep import SweepSettings, sweep
from ckptcore.planning.request import Settings


@pytest.fixture(params=["sqlite", "postgresql"])
def either(request, tmp_path):
    """The URL of an empty catalog, on each database."""
    if request.param == "sqlite":
        yield str(tmp_path / "catalog.sqlite")
        return
    template = request.getfixturevalue("upgraded")
    with request.getfixturevalue("postgres").database(template) as made:
        yield made


@pytest.fixture
def url(tmp_path):
    """The URL of an empty catalog, on SQLite."""
    return str(tmp_path / "catalog.sqlite")


@pytest.fixture
def catalog(url):
    with open_catalog(url) as opened:
        yield opened


@pytest.fixture
def runs(tmp_path):
    """A folder of checkpoints."""
    (tmp_path / "runs" / "llama").mkdir(parents=True)
    return tmp_path / "runs"


@pytest.fixture
def watch(catalog, runs):
    """Return a function that watches `runs`: (target fields) -> the root."""

    def add(name="r", include=(), **target):
        with catalog.writing() as conn:
            return roots.add(conn, datetime.now(UTC), name, str(runs), include=include, targets=[target])

    return add


@pytest.fixture
def swept(catalog, url):
    """Return a function that sweeps without waiting: (items by the last part of their path, conversions)."""

    def run(names=(), **settings):
        made = []

        def one(request):
            made.append(request)
            return convert(request, Settings(memory=32 << 20, workers=1), None, url)

        found = sweep(catalog, one, names, SweepSettings(**({"settle_s": 0.0} | settings)))
        return {item.source.rsplit("/", 1)[-1]: item for item in found.items}, made

    return run


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """The templates that sources are copied from."""
    return Template(tmp_path_factory.mktemp("template"))


@pytest.fixture(scope="module")
def shared(request, tmp_path_factory):
    """(catalog, its URL) on each database, for all sequences."""
    if request.param == "sqlite":
        url = str(tmp_path_factory.mktemp("catalog") / "catalog.sqlite")
        with open_catalog(url) as catalog:
            yield catalog, url
        return
    template = request.getfixturevalue("upgraded")
    with request.getfixturevalue("postgres").database(template) as url, open_catalog(url) as catalog:
        yield catalog, url
