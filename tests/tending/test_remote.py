"""Object stores: are roots there swept, and is what is let go deleted so that no reader sees half of it?"""

from __future__ import annotations

from datetime import UTC, datetime

import fsspec
import pytest
from checkpoints import save

from ckptcore.catalog import roots
from ckptcore.convert import convert
from ckptcore.request import Settings
from ckptcore.retention import Policy
from ckptcore.retire import retire
from ckptcore.scrub import scrub
from ckptcore.sweep import sweep


@pytest.fixture
def bucket(tmp_path):
    """A folder of two steps in memory."""
    memory = fsspec.filesystem("memory")
    for n in (1, 2):
        for file in save(tmp_path / f"s{n}", n).iterdir():
            memory.pipe_file(f"/tending/runs/llama/step-{n}/{file.name}", file.read_bytes())
    yield memory
    memory.rm("/tending", recursive=True)


def test_a_root_in_a_bucket(bucket, catalog, url, monkeypatch):
    means = Settings(memory=32 << 20, workers=1, fingerprint=True)
    with catalog.writing() as conn:
        target = {"destination": "{root}/../exports/{run}/{name}"}
        roots.add(conn, datetime.now(UTC), "r", "memory://tending/runs", target=target)

    def make(request):
        return convert(request, means, None, url)

    found = sweep(catalog, make, settle_s=0)
    assert [i.destination for i in found.items] == [
        "memory://tending/exports/llama/step-1", "memory://tending/exports/llama/step-2",
    ]  # fmt: skip
    assert found.counts == {"made": 2}
    assert sweep(catalog, make, settle_s=0).counts == {"converted": 2}
    assert scrub(catalog, share=1).counts == {"proven": 4}

    removed = []
    remove = type(bucket).rm_file
    monkeypatch.setattr(type(bucket), "rm_file", lambda fs, p: removed.append(p) or remove(fs, p))
    done = retire(catalog, Policy(1), yes=True)
    assert done.counts == {"deleted": 1, "kept": 1}, [i.why for i in done.items]
    assert removed[0].endswith("/.metadata")
    assert not bucket.exists("/tending/runs/llama/step-1")
    assert bucket.exists("/tending/runs/llama/step-2/.metadata")
