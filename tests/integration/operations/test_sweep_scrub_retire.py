"""Sweep, scrub and retire one after the other, on either database."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from checkpoints import save
from retiring import delete_now as retire

from ckptcore.catalog import open_catalog, queues
from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.queues import NewEvent, inbox
from ckptcore.conversion.pipeline import convert
from ckptcore.operations.automation.sweep import SweepSettings, sweep
from ckptcore.operations.retention.policy import Policy
from ckptcore.operations.scrub import scrub
from ckptcore.planning.request import Settings

AT_ONCE = SweepSettings(settle_s=0)


@pytest.mark.alike(1)
def test_a_checkpoint_from_its_save_to_its_end(either, runs):
    means = Settings(memory=32 << 20, workers=1, fingerprint=True)
    for n in (1, 2):
        save(runs / "llama" / f"step-{n}", n)
    (save(runs / "llama" / "step-3") / ".metadata").unlink()
    with open_catalog(either) as catalog:
        with catalog.writing() as conn:
            roots.add(conn, datetime.now(UTC), "r", str(runs))
        swept = sweep(catalog, lambda request: convert(request, means, None, either), settings=AT_ONCE)
        assert swept.counts == {"made": 2, "broken": 1}
        assert sweep(catalog, lambda _: None, settings=AT_ONCE).counts == {"converted": 2, "broken": 1}
        assert scrub(catalog, share=1).counts == {"proven": 4}
        assert retire(catalog, Policy(1), yes=True).counts == {"deleted": 1, "kept": 1}
        assert scrub(catalog, share=1).counts == {"proven": 3}
        # What was retired is no new work, and its output is still known by it.
        assert sweep(catalog, lambda _: None, settings=AT_ONCE).counts == {"converted": 1, "broken": 1}
        # Events that ended long ago are forgotten on the way.
        long_ago = datetime.now(UTC) - queues.KEEP - timedelta(hours=1)
        with catalog.queueing() as conn:
            inbox.accept(conn, long_ago, NewEvent("s", "e"))
            inbox.done(conn, long_ago, inbox.take(conn, long_ago)[0])
        sweep(catalog, lambda _: None, settings=SweepSettings(settle_s=0, dry_run=True))
        with catalog.queueing() as conn:
            assert inbox.depth(conn)["done"] == 1
        sweep(catalog, lambda _: None, settings=AT_ONCE)
        with catalog.queueing() as conn:
            assert inbox.depth(conn)["done"] == 0
        # The next save is another step.
        save(runs / "llama" / "step-1", 5)
        assert sweep(catalog, lambda _: None, settings=AT_ONCE).counts["outdated"] == 1
