"""Hosts whose clocks are ten minutes apart agree about leases, holds, dates: PostgreSQL's clock decides."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from paths import ROOT

from ckptcore.catalog import claims, open_catalog, queues
from ckptcore.catalog.database import clock
from ckptcore.catalog.queues import NewEvent

HELPERS = ROOT / "tests/helpers"


@pytest.mark.parametrize("minutes", [-10, 10])
def test_a_host_sees_what_another_has_just_written(minutes, postgres, upgraded, python, finish):
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
        look = python_script(python, minutes, url)
        (seen,) = [json.loads(output.splitlines()[0]) for output in finish(look)]
    assert seen.pop("clock") == minutes
    assert seen == {"claim": False, "ended": 0, "silent": 0, "writes": True, "holds": 0, "events": 0}


def python_script(python, minutes, *argv):
    code = (
        f"import sys, runpy; sys.argv[1:1] = ['{minutes * 60}', '{HELPERS / 'looks_of_another_host.py'}']\n"
    )
    return python(f"{code}runpy.run_path('{HELPERS / 'another_host.py'}', run_name='__main__')", *argv)
