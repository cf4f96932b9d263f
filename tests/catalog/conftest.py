"""A fresh catalog per test, and checkpoints to put into it.

The behaviour tests run on SQLite. With CKPTCORE_TEST_CATALOG_SERVER set to the URL of a
PostgreSQL server on which databases can be made, they run there as well.
"""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import sqlalchemy

from ckptcore.catalog import CheckpointFacts, open_catalog, upgrade

REPO = Path(__file__).resolve().parents[2]
SERVER = os.environ.get("CKPTCORE_TEST_CATALOG_SERVER")


@pytest.fixture(params=["sqlite", *(["postgresql"] if SERVER else [])])
def url(request, tmp_path):
    """The URL of an empty catalog."""
    if request.param == "sqlite":
        path = str(tmp_path / "catalog.sqlite")
        open_catalog(path).close()
        yield path
        return
    name = f"ckptcore_{uuid.uuid4().hex}"
    admin = sqlalchemy.create_engine(SERVER, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    made = sqlalchemy.make_url(SERVER).set(database=name).render_as_string(hide_password=False)
    upgrade(made)
    yield made
    with admin.connect() as connection:
        connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")
    admin.dispose()


@pytest.fixture
def catalog(url):
    with open_catalog(url) as opened:
        yield opened


@pytest.fixture
def facts():
    """Makes `CheckpointFacts`; `content` names the bytes of its one file."""

    def make(uri, *, manifest="m1", content=None, num_tensors=3, **more):
        tensors = [(f"layers.{i}.weight", "bfloat16", (4, 8), 64) for i in range(num_tensors)]
        tensors.append(("scale", "float32", (), 4))
        digest = None if content is None else content.encode().hex().ljust(64, "0")
        given = {
            "uri": str(uri),
            "format": "dcp" if content is None else "safetensors",
            "manifest_digest": manifest.encode().hex().ljust(64, "0"),
            "nbytes": sum(tensor[3] for tensor in tensors),
            "tensors": tensors,
            "files": [("model.safetensors" if content else "__0_0.distcp", 260, digest)],
        }
        return CheckpointFacts(**(given | more))

    return make


@pytest.fixture
def convert(catalog):
    """Records one whole conversion; (conversion id, derived id)."""

    def make(source, derived, *, verb="export", **more):
        given = {
            "plan_digest": "p" * 64,
            "bytes_in": source.nbytes,
            "bytes_out": derived.nbytes,
            "peak_memory": 1 << 20,
            "timings": {"plan": 0.25, "write": 2.0},
        }
        conversion = catalog.begin(
            {"verb": verb},
            source_uri=source.uri,
            destination_uri=derived.uri,
            verb=verb,
            tool_version="0.1.0",
        )
        return conversion, catalog.succeed(conversion, source=source, derived=derived, **(given | more))

    return make


@pytest.fixture
def python():
    """Starts a Python of its own on a script: (script, *argv, **environment) -> Popen."""
    started = []

    def start(script, *argv, **environment):
        process = subprocess.Popen(
            [sys.executable, "-c", script, *map(str, argv)],
            cwd=REPO,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def finish():
    """Waits for processes; their stdouts. Fails with the stderr of one that failed."""

    def wait(*processes):
        answers = [process.communicate(timeout=120) for process in processes]
        for process, (_, err) in zip(processes, answers, strict=True):
            assert process.returncode == 0, err
        return [out for out, _ in answers]

    return wait
