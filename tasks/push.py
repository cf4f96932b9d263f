"""Send a published export to the Hugging Face hub."""

from __future__ import annotations

from prefect import task
from prefect.artifacts import create_markdown_artifact

from ckptcore.catalog import open_catalog
from ckptcore.operations.publication.push import Pushed, PushRules
from ckptcore.operations.publication.push import push as send
from ckptcore.utils.markdown import code
from ckptcore.utils.text import count
from ckptcore.utils.units import show_size
from tasks.artifacts import artifact_later, key_of, table
from tasks.logs import log
from tasks.retry import STEP


@task(task_run_name="push", **STEP)
def push(folder: str, url: str, catalog: str | None) -> Pushed:
    """Send an export that the catalog knows as proven; its files and the commit are an artifact."""
    with open_catalog(catalog) as opened:
        pushed = send(opened, folder, url, PushRules())
    rows = [(code(f.path), show_size(f.nbytes), f"`{f.sha256}`", f.fate.value) for f in pushed.files]
    summary = f"{pushed.outcome.value} {pushed.url} at {pushed.commit}: {count(len(rows), 'file')}"
    artifact_later(
        create_markdown_artifact,
        f"# {code(pushed.url)}\n\ncommit `{pushed.commit}`\n\n"
        + table(("file", "size", "SHA-256", "fate"), rows),
        key=key_of("push", folder),
        description=summary,
    )
    log.info("%s", summary)
    return pushed
