"""Test that the target of a watched root applies to announced checkpoints below it."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from checkpoints import save

from ckptcore.catalog import watched_roots as roots
from ckptcore.errors import UsageError
from ckptcore.operations.export_target import announced_request as request_of


@pytest.fixture
def root(catalog):
    """Return a function that watches a place: (name, URI, destination, globs)."""

    def add(name, uri, destination, include=()):
        with catalog.writing() as conn:
            roots.add(
                conn, datetime.now(UTC), name, uri, include=include, targets=[{"destination": destination}]
            )

    return add


def destination(catalog, source, step=None):
    found = request_of(catalog, source, step)
    return None if found is None else (found[0].name, found[1].destination)


def test_the_innermost_root_decides(catalog, root):
    root("all", "s3://b/runs", "/all/{run}/{name}")
    root("mine", "s3://b/runs/me", "/mine/{run}/{name}", ["*/step-*"])
    assert destination(catalog, "s3://b/runs/llama/step-3/") == ("all", "/all/llama/step-3")
    assert destination(catalog, "s3://b/runs/me/x/step-3") == ("mine", "/mine/x/step-3")
    assert destination(catalog, "s3://b/runs/me/x/final") == ("all", "/all/x/final")  # not among its globs
    assert destination(catalog, "s3://b/runs-of-others/x/step-3") is None
    assert destination(catalog, "s3://b/runs") is None


def test_an_announced_step_fills_a_template_if_no_name_has_one(catalog, root):
    root("r", "s3://b/r", "/out/{run}/{step:06d}")
    assert destination(catalog, "s3://b/r/x/step-3", 7) == ("r", "/out/x/000003")
    assert destination(catalog, "s3://b/r/x/final", 7) == ("r", "/out/x/000007")
    with pytest.raises(UsageError, match=r"\{step\}: no step number in 'x/final'"):
        destination(catalog, "s3://b/r/x/final")


def test_it_is_the_request_of_a_sweep(runs, watch, swept, catalog, tmp_path):
    save(runs / "llama" / "step-1")
    save(runs / "llama" / "nested" / "step-2" / "actor")
    watch(destination="{root}/../out/{run}-{step}-{name}", dtype="bf16")
    _, made = swept()
    assert len(made) == 2
    (tmp_path / "linked").symlink_to(runs)  # another name of the same place
    for request in made:
        for source in (request.source, request.source.replace(str(runs), str(tmp_path / "linked"))):
            found = request_of(catalog, source)
            assert found is not None
            assert found[1] == request
