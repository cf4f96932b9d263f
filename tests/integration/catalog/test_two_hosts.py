"""Hosts whose clocks are ten minutes apart agree about leases, holds, dates: PostgreSQL's clock decides."""

from __future__ import annotations

import json
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import pytest
from paths import ROOT

from ckptcore.catalog import claims, open_catalog, queues
from ckptcore.catalog.database import clock
from ckptcore.catalog.queues import NewEvent

HELPERS = ROOT / "tests/helpers"
MINUTES = [-10, 10]


@pytest.mark.soak
def test_a_host_sees_what_another_has_just_written(postgres, upgraded, python, finish):
    with ExitStack() as stack:
        urls = [stack.enter_context(written(postgres, upgraded)) for _ in MINUTES]
        hosts = [each for minutes, url in zip(MINUTES, urls, strict=True) for each in (minutes * 60, url)]
        helpers = [str(HELPERS / f"{name}.py") for name in ("another_host", "looks_of_another_host")]
        code = f"import runpy; runpy.run_path({helpers[0]!r}, run_name='__main__')"
        (output,) = finish(python(code, helpers[1], *hosts))
    looks = [json.loads(line) for line in output.splitlines()[::2]]  # between them, what a purge did
    assert [look.pop("clock") for look in looks] == MINUTES
    for look in looks:
        assert look == {"claim": False, "ended": 0, "silent": 0, "writes": True, "holds": 0, "events": 0}


@contextmanager
def written(postgres, upgraded):
    """The URL of a catalog that has just a running conversion, a claim, and an event that is taken."""
    with postgres.database(upgraded) as url, open_catalog(url) as catalog:
        uris = {"source_uri": "/s", "destination_uri": "/out", "verb": "x", "tool_version": "0"}
        catalog.begin({}, **uris)
        with catalog.writing() as conn:
            now = clock(conn)
            key = claims.Key("manifest", "/out", "options")
            assert claims.take(conn, now, key, "/source", "one", lease=timedelta(minutes=5), retry=True).mine
            queues.inbox.accept(conn, now, NewEvent("s", "taken"))
            queues.inbox.accept(conn, now + timedelta(minutes=5), NewEvent("s", "due later"))
            assert len(queues.inbox.take(conn, now, limit=1, lease=timedelta(minutes=5))) == 1
        yield url
