"""Verify a published export against its source."""

from __future__ import annotations

from prefect import task
from prefect.artifacts import create_markdown_artifact

from ckptcore.checking.export_proof import CHECKS, OK, ExportProof
from ckptcore.planning.export_source import ExportSource
from ckptcore.planning.request import Request, Settings
from ckptcore.utils.markdown import code, prose
from tasks.artifacts import artifact_later, key_of, table
from tasks.logs import log
from tasks.retry import STEP


@task(task_run_name="verify export", **STEP)
def verify_export(request: Request, manifest_digest: str, settings: Settings) -> ExportProof:
    """Verify a published export; each check and its verdict are an artifact.

    manifest_digest: of the source at the time of the export.
    """
    # A late import: every flow imports this module, and most verify no export.
    from ckptcore.comparison.verify_export import Wanted
    from ckptcore.comparison.verify_export import verify_export as verify

    source = ExportSource(request, "the request", exact=True, digest=manifest_digest)
    proof = verify(request.destination, source, Wanted(), settings)
    rows = [(c.name, CHECKS[c.name], f"**{c.verdict}**", prose(c.summary)) for c in proof.checks]
    wrong = [(c.name, code(p.name), prose(p.what)) for c in proof.failures for p in c.problems]
    parts = [f"# {proof.verdict}", table(("check", "asks", "verdict", "what"), rows)]
    if wrong:
        parts.append(table(("check", "where", "what"), wrong))
    artifact_later(
        create_markdown_artifact,
        "\n\n".join(parts),
        key=key_of("export-verification", request.destination),
        description=f"{code(proof.export)}: {proof.verdict}",
    )
    for check in proof.checks:
        tell = log.info if check.verdict == OK else log.warning
        tell("%s: %s: %s", check.name, check.verdict, check.summary)
    return proof
