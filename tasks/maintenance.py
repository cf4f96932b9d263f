"""Run scrub and retire; show their result for each checkpoint as an artifact."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

from prefect import task

from ckptcore.catalog import open_catalog
from ckptcore.catalog.retirements import totals
from ckptcore.operations.options import RetireOptions
from ckptcore.operations.retention.retire import RetireDecision, RetireReport
from ckptcore.operations.retention.retire import retire as run_retire
from ckptcore.operations.retention.root_retention import rules
from ckptcore.operations.scrub import Looked, Scrubbed
from ckptcore.operations.scrub import scrub as run_scrub
from ckptcore.operations.verify import FINE
from ckptcore.planning.request import Settings
from ckptcore.utils.text import count
from ckptcore.utils.units import parse_duration, show_size
from tasks.artifacts import MAX_ROWS, table_or_none
from tasks.logs import log
from tasks.retry import ONCE


@task(task_run_name="scrub", **ONCE)
def scrub(share: float, budget_s: float, catalog: str | None) -> Scrubbed:
    """Verify a share of the recorded checkpoints; the results are a table artifact."""

    def note(row: Looked) -> None:
        tell = log.info if row.proven.proof in FINE else log.warning
        tell("%s is %s: %s", row.checkpoint.uri, row.proven.proof.value, row.proven.message or "all of it")

    with open_catalog(catalog, create=False) as catalog_db:
        report = run_scrub(catalog_db, share, budget_s, on_look=note)
    rows = [
        {"proof": row.proven.proof.value, "checkpoint": row.checkpoint.uri, "why": row.proven.message}
        for row in report.looked
    ]
    table_or_none("scrub", rows, f"{count(len(report.looked), 'checkpoint')} of {report.known}")
    return report


@task(task_run_name="retire", **ONCE)
def retire(scope: str | None, options: RetireOptions, settings: Settings) -> RetireReport:
    """Retire the sources that the policy releases; the fate of each, with its reason, is a table artifact."""
    policy, allowed = rules(options)

    def note(decision: RetireDecision) -> None:
        log.info("%s is %s: %s", decision.source.uri, decision.fate.value, "; ".join(decision.why))
        for name, kind in decision.unproven[:MAX_ROWS]:
            log.info("unproven in %s: %s (%s)", decision.source.uri, name, kind)

    with open_catalog(options.catalog, create=False) as catalog_db:
        report = run_retire(
            catalog_db,
            policy,
            scope,
            yes=bool(options.yes),
            purging=options.purge,
            grace=timedelta(seconds=parse_duration(options.grace)),
            allowed=allowed,
            fingerprint_settings=settings if options.fingerprint else None,
            verify_settings=settings,
            on_retired=note,
            of_root=partial(rules, options),
        )
    for folder_text in report.left:
        log.warning("%s", folder_text)
    rows = [
        {
            "fate": i.fate.value,
            "step": i.source.step,
            "checkpoint": i.source.uri,
            "freed": show_size(i.freed),
            "given up": "; ".join(
                f"{n['names']} of {kind}, {show_size(n['bytes'])}" for kind, n in totals(i.given_up).items()
            ),
            "why": "; ".join(i.why),
        }
        for i in report.items
    ]
    table_or_none("retire", rows, count(len(report.items), "source"))
    return report
