"""Findings, state and verification of a checkpoint follow from the results of checks."""

import pytest
from sqlalchemy import func, select

from ckptcore.catalog.models import FindingRecord
from ckptcore.errors import UsageError, finding


def begin(catalog, destination="/out/model", **more):
    given = {"source_uri": "/runs/step-1", "verb": "export", "tool_version": "0.1.0"}
    return catalog.begin({}, destination_uri=destination, **(given | more))


def count(catalog, table):
    with catalog.reading() as conn:
        return conn.execute(select(func.count()).select_from(table)).scalar_one()


HOLE = finding("hole", "coverage", "rows 4..8 are in no file", fqn="w")
TORN = finding("crc-mismatch", "bytes", "stored CRC differs", file="__0_0.distcp")
STRAY = finding("stray-file", "files", "left over", file="old.distcp")


def test_findings_stay_open_until_a_check_as_deep_omits_them(catalog, facts):
    here = facts("/runs/step-1")
    public = catalog.record_validation(here, [HOLE, TORN, STRAY], level="bytes")
    assert set(catalog.show(public).findings) == {HOLE, TORN, STRAY}

    catalog.record_validation(
        here, [STRAY], level="coverage"
    )  # the hole is repaired, the CRC was not checked
    assert set(catalog.show(public).findings) == {TORN, STRAY}
    assert catalog.show(public).checkpoint.state == "damaged"
    assert catalog.show(public).checkpoint.verified_at is None

    catalog.record_validation(here, [], level="bytes")
    detail = catalog.show(public)
    assert detail.findings == ()
    assert (detail.checkpoint.state, detail.checkpoint.verified_level) == ("present", "bytes")
    assert count(catalog, FindingRecord) == 3  # closed, not deleted


def test_a_repeated_finding_is_one_row(catalog, facts):
    for _ in range(3):
        catalog.record_validation(facts("/runs/step-1"), [HOLE, STRAY])
    assert count(catalog, FindingRecord) == 2


def test_a_conversion_has_rows_of_its_own(catalog, facts):
    public = catalog.record_validation(facts("/runs/step-1"), [HOLE])
    for _ in range(2):
        conversion = begin(catalog)
        catalog.fail(
            conversion, code="damaged", message="hole", findings=[HOLE], source=facts("/runs/step-1")
        )
        assert catalog.show(conversion).findings == (HOLE,)
    assert catalog.show(public).findings == (HOLE,)
    catalog.record_validation(facts("/runs/step-1"), [], level="coverage")
    assert catalog.show(public).findings == ()
    assert catalog.show(conversion).findings == (HOLE,)


def test_a_shallow_check_does_not_revoke_a_deep_one(catalog, facts):
    public = catalog.record_validation(facts("/runs/step-1"), level="bytes")
    proven = catalog.show(public).checkpoint.verified_at
    catalog.record_validation(facts("/runs/step-1"), level="files")
    row = catalog.show(public).checkpoint
    assert (row.verified_level, row.verified_at) == ("bytes", proven)


def test_unfinished_is_not_damaged(catalog, facts):
    unfinished = finding("not-complete", "files", "only .metadata.tmp")
    public = catalog.record_validation(facts("/runs/step-1"), [unfinished], level="files")
    assert catalog.show(public).checkpoint.state == "incomplete"
    catalog.record_validation(facts("/runs/step-1"), [], level="files")
    assert catalog.show(public).checkpoint.state == "present"


def test_unknown_levels(catalog, facts):
    with pytest.raises(UsageError, match=r"level must be .*'deep'"):
        catalog.record_validation(facts("/runs/step-1"), level="deep")
    with pytest.raises(ValueError, match=r"one of files, coverage, bytes, values \(got 'deep'\)"):
        facts("/runs/step-1", verified="deep")
