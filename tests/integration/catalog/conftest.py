"""A fresh catalog per test, on every database, and checkpoints to put into it."""

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import warm
from paths import ROOT

from ckptcore.catalog import CheckpointFacts, ConversionFacts, open_catalog

DATABASES = ("sqlite", "postgresql")


@pytest.fixture(params=DATABASES)
def url(request, tmp_path):
    """The URL of an empty catalog."""
    if request.param == "sqlite":
        path = str(tmp_path / "catalog.sqlite")
        open_catalog(path).close()
        yield path
        return
    template = request.getfixturevalue("upgraded")
    with request.getfixturevalue("postgres").database(template) as made:
        yield made


@pytest.fixture(params=DATABASES)
def bare(request, tmp_path):
    """The URL of a database without tables."""
    if request.param == "sqlite":
        yield str(tmp_path / "bare.sqlite")
        return
    with request.getfixturevalue("postgres").database() as made:
        yield made


@pytest.fixture
def catalog(url):
    with open_catalog(url) as opened:
        yield opened


@pytest.fixture
def facts():
    """Return a function that creates `CheckpointFacts`; `content` identifies the bytes of its one file."""

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
    """Return a function that records one complete conversion and returns (conversion id, derived id)."""

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
        done = ConversionFacts(**(given | more))
        return conversion, catalog.succeed(conversion, done, source=source, derived=derived)

    return make


@pytest.fixture
def python():
    """Return a function that starts a Python script: (script, *argv, **environment) -> Popen."""
    with starting([sys.executable]) as start:
        yield start


@pytest.fixture
def forks():
    """The same, for processes that meet in a catalog: they are to begin together, and import nothing."""
    with starting(warm.python()) as start:
        yield start


@contextmanager
def starting(python):
    started = []

    def start(script, *argv, **environment):
        process = subprocess.Popen(
            [*python, "-c", script, *map(str, argv)],
            cwd=ROOT,
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


@pytest.fixture(params=[10, pytest.param(100, marks=pytest.mark.soak)])
def rounds(request):
    """How often each of several processes does the same."""
    return request.param


@pytest.fixture
def finish():
    """Return a function that waits for processes and returns their stdouts. It raises if one failed."""

    def wait(*processes):
        answers = [process.communicate(timeout=120) for process in processes]
        for process, (_, err) in zip(processes, answers, strict=True):
            assert process.returncode == 0, err
        return [out for out, _ in answers]

    return wait
