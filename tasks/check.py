"""Check that the source is complete."""

from __future__ import annotations

from prefect import task
from prefect.artifacts import create_table_artifact

from ckptcore.checking.check import Report
from ckptcore.checking.examine import validate
from ckptcore.core.manifest import Manifest
from ckptcore.utils.text import count
from tasks.artifacts import MAX_ROWS, artifact_later, key_of
from tasks.logs import log
from tasks.retry import STEP

FINE = {"severity": "none", "finding": "-", "what": "nothing is missing, nothing overlaps"}


@task(task_run_name="check {level}", **STEP)
def check(manifest: Manifest, level: str = "coverage") -> Report:
    """Check a manifest at one level; the findings are a table artifact."""
    report = validate(manifest, level)
    rows = [
        {
            "severity": finding.severity,
            "finding": finding.code,
            "what": finding.message,
            "tensor": finding.fqn or "",
            "file": finding.file or "",
            "next": finding.hint,
        }
        for finding in report.findings[:MAX_ROWS]
    ]
    outcome = "complete" if report.ok else "damaged"
    findings = count(len(report.findings), "finding")
    summary = f"{outcome} at level {level}: {count(report.tensors, 'tensor')}, {findings}"
    artifact_later(
        create_table_artifact,
        rows or [FINE],
        key=key_of("checkpoint-validation"),
        description=f"`{manifest.root}` is {summary}",
    )
    log.info("%s", summary)
    return report
