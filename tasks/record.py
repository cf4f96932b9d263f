"""Record a conversion in the catalog, and show where to find it."""

from __future__ import annotations

import shlex

from prefect.artifacts import create_markdown_artifact
from prefect.tasks import MaterializingTask

from ckptcore.conversion.pipeline import remove_staging
from ckptcore.conversion.publish import Result
from ckptcore.conversion.registration import Registration, register
from ckptcore.core.manifest import Manifest
from tasks.artifacts import artifact_later, key_of
from tasks.assets import describe_output
from tasks.logs import log
from tasks.retry import STEP


def _record(registration: Registration | None, result: Result, manifest: Manifest) -> Result:
    """Return the result with its catalog id. After that, the staging folder is not needed any more."""
    registered = register(registration, result, manifest)
    remove_staging(result.plan_uri)
    describe_output(registered)
    if registered.conversion is not None:
        artifact_later(
            create_markdown_artifact,
            CATALOG_TEXT.format(id=registered.conversion, uri=shlex.quote(result.destination)),
            key=key_of("conversion-catalog", result.destination),
            description=f"conversion {registered.conversion} in the catalog",
        )
        log.info("conversion %s is in the catalog", registered.conversion)
    return registered


CATALOG_TEXT = """# In the catalog

```
ckptcore catalog show {id}
ckptcore catalog lineage {uri}
ckptcore catalog sql "SELECT * FROM conversion WHERE uuid = '{id}'"
```
"""

# With the assets of a run: `record.with_options(assets=..., asset_deps=...)`.
record = MaterializingTask(
    fn=_record, name="record", assets=[], materialized_by="ckptcore", task_run_name="register", **STEP
)
