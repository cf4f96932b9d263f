"""Views: the newest output of a run, per verb, format and dtypes."""

from datetime import UTC, datetime

import pytest
import sqlalchemy as sa

from ckptcore.catalog import maintenance
from ckptcore.errors import UsageError


@pytest.fixture
def made(facts, convert):
    """Return a function that records one output: (destination, step, verb, dtype, format)."""

    def make(uri, step, *, verb="export", dtype="float32", run="llama", **more):
        source = facts(f"/{run}/step-{step}", run=run, step=step, verified="coverage")
        more = {"format": "safetensors", "verified": "coverage"} | more
        tensors = [("w", dtype, (4, 8), 64)]
        derived = facts(uri, content=uri, tensors=tensors, num_tensors=0, nbytes=64, **more)
        return convert(source, derived, verb=verb)[1]

    return make


@pytest.fixture
def ask(catalog):
    def run(sql):
        with catalog.reading() as conn:
            return [tuple(row) for row in conn.execute(sa.text(sql))]

    return run


EXPORTS = "SELECT run, step, dtypes, uri FROM latest_exports ORDER BY run, dtypes"


def test_without_conversions_there_is_no_export(ask):
    assert ask(EXPORTS) == []
    assert ask("SELECT * FROM latest_outputs") == []


def test_a_consolidated_copy_does_not_hide_the_export(made, ask):
    made("/exports/10", 10)
    made("/full/10", 10, verb="consolidate")
    made("/full/20", 20, verb="consolidate")
    assert ask(EXPORTS) == [("llama", 10, "float32", "/exports/10")]
    wanted = [("consolidate", 20, "/full/20"), ("export", 10, "/exports/10")]
    assert ask("SELECT verb, step, uri FROM latest_outputs ORDER BY verb") == wanted


def test_two_exports_of_a_step_are_two(made, ask):
    made("/exports/10", 10)
    made("/exports/10-bf16", 10, dtype="bfloat16")
    made("/exports/9-bf16", 9, dtype="bfloat16")
    made("/exports/11", 11, run="mistral")
    assert ask(EXPORTS) == [
        ("llama", 10, "bfloat16", "/exports/10-bf16"),
        ("llama", 10, "float32", "/exports/10"),
        ("mistral", 11, "float32", "/exports/11"),
    ]


def test_an_export_made_twice_is_one_row(made, ask):
    made("/exports/10", 10)
    made("/exports/10", 10)
    assert len(ask("SELECT uri FROM latest_outputs")) == 1
    made("/exports/10", 10, verb="consolidate")  # the same bytes at the same place
    assert ask(EXPORTS) == [("llama", 10, "float32", "/exports/10")]
    assert len(ask("SELECT uri FROM latest_outputs")) == 2


def test_missing_or_unverified_exports_are_not_the_newest(made, ask, catalog):
    made("/exports/10", 10)
    lost = made("/exports/20", 20)
    with catalog.writing() as conn:
        maintenance.gone(conn, datetime.now(UTC), lost)
    made("/exports/30", 30, verified=None)
    assert ask(EXPORTS) == [("llama", 10, "float32", "/exports/10")]


def test_an_export_that_failed_its_verification_is_not_the_newest(made, ask, catalog):
    made("/exports/10", 10)
    newer = made("/exports/20", 20)
    conversion = catalog.show(newer).written_by[0].id
    assert (
        catalog.record_verdict(conversion, [("names", "ok", "fit"), ("finite", "failed", "w: 1 NaN")])
        == "failed"
    )
    assert ask(EXPORTS) == [("llama", 10, "float32", "/exports/10")]
    wanted = [("llama", 20, "failed", newer, "/exports/20")]
    assert ask("SELECT run, step, verdict, checkpoint, uri FROM export_verdicts") == wanted
    assert catalog.record_verdict(conversion, [("finite", "ok", "none")]) == "ok"
    assert ask(EXPORTS) == [("llama", 20, "float32", "/exports/20")]


def test_a_check_that_was_not_done_revokes_nothing(made, catalog):
    conversion = catalog.show(made("/exports/10", 10)).written_by[0].id
    assert (
        catalog.record_verdict(conversion, [("elements", "not-done", "gone"), ("names", "ok", "")])
        == "unproven"
    )
    assert catalog.record_verdict(conversion, [("elements", "ok", "all"), ("names", "not-done", "")]) == "ok"
    assert catalog.record_verdict(conversion, [("elements", "not-done", "gone")]) == "ok"
    row = catalog.show(conversion).conversion
    assert {name: each["verdict"] for name, each in row.export_checks.items()} == {
        "elements": "ok",
        "names": "ok",
    }
    assert row.export_checks["elements"]["summary"] == "all"
    assert row.export_verified_at >= row.started_at
    with pytest.raises(UsageError, match="no conversion"):
        catalog.record_verdict("nothing", [])
