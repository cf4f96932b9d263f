"""Verify the output against its plan, and publish it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from prefect import task
from prefect.artifacts import create_link_artifact, create_markdown_artifact

from ckptcore.conversion.pipeline import finish
from ckptcore.conversion.publish import Result
from ckptcore.errors import Finding
from ckptcore.planning.request import Settings
from ckptcore.store import local_path
from ckptcore.utils.markdown import code, prose
from ckptcore.utils.text import count
from ckptcore.utils.units import show_size
from tasks.artifacts import artifact_later, key_of, table
from tasks.logs import log
from tasks.retry import STEP


@task(task_run_name="publish", **STEP)
def publish(
    plan_uri: str,
    settings: Settings,
    catalog: str | bool | None = False,
    warnings: Sequence[Finding] = (),
    conversion: str | None = None,
) -> Result:
    """Read the output back and move it to its name; a link to it and its files are artifacts.

    warnings: those of the plan, which the result keeps. conversion: its id in the catalog.
    """
    result = finish(plan_uri, settings, catalog_url=catalog, conversion=conversion)
    result = replace(result, warnings=(*warnings, *result.warnings))
    files = [(code(f.path), show_size(f.nbytes), f"`{f.digest}`") for f in result.files]
    counts = [count(len(result.tensors), "tensor"), count(len(files), "file"), show_size(result.nbytes)]
    if result.loadable == "no":
        counts.append("nothing loads it: there is no config.json")
    summary = ", ".join(counts)
    artifact_later(
        create_markdown_artifact,
        f"# {prose(result.destination)}\n\n{result.format}: {summary}\n\n"
        + table(("file", "size", "BLAKE3"), files),
        key=key_of("conversion-result", result.destination),
        description=f"{code(result.destination)}: {summary}",
    )
    path = local_path(result.destination)
    artifact_later(
        create_link_artifact,
        path.resolve().as_uri() if path is not None else result.destination,
        link_text=result.destination,
        key=key_of("conversion-destination", result.destination),
    )
    log.info("published %s: %s", result.destination, summary)
    return result
