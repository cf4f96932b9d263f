"""Plan which bytes go where, and estimate the cost."""

from __future__ import annotations

from prefect import task
from prefect.artifacts import create_markdown_artifact

from ckptcore.conversion.pipeline import Prepared, prepare
from ckptcore.core.manifest import Manifest
from ckptcore.planning.request import Request, Settings
from ckptcore.utils.markdown import code, prose
from ckptcore.utils.text import count
from ckptcore.utils.units import show_size
from tasks.artifacts import artifact_later, key_of, table
from tasks.logs import log
from tasks.retry import STEP


@task(task_run_name="plan", **STEP)
def plan(
    request: Request, settings: Settings, manifest: Manifest, catalog: str | bool | None = False
) -> Prepared:
    """Save the plan beside the destination; its summary is an artifact. No tensor is written.

    catalog: the catalog that accounts for replaced files; None for the default one, False for none.
    """
    prepared = prepare(request, settings, manifest, catalog)
    facts = [
        ("source", code(request.source)),
        ("destination", code(request.destination)),
        ("model part", prepared.model or "all tensors are kept"),
        ("read", show_size(prepared.bytes_in)),
        ("write", f"{show_size(prepared.bytes_out)}, {count(len(prepared.files), 'file')}"),
        ("expected peak memory", show_size(prepared.peak_memory)),
        ("renamed", count(len(prepared.renamed), "tensor")),
        ("cast", count(len(prepared.cast), "tensor")),
        ("left out", f"{len(prepared.dropped)} tensors and objects"),
        ("plan", f"`{prepared.plan_digest}`"),
    ]
    warnings = "\n".join(f"- **{w.code}**: {prose(w.message)}" for w in prepared.warnings)
    artifact_later(
        create_markdown_artifact,
        "\n\n".join(["# Plan", table(("what", "value"), facts), warnings]),
        key=key_of("conversion-plan", request.destination),
        description=f"{request.verb} {code(request.source)} to {code(request.destination)}",
    )
    for warning in prepared.warnings:
        tell = log.info if warning.severity == "info" else log.warning
        tell("%s: %s", warning.code, warning.message)
    log.info("%s to write, %s", show_size(prepared.bytes_out), count(len(prepared.files), "file"))
    return prepared
