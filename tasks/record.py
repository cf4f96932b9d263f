"""Record: what does the catalog keep of a conversion, and where is it found again?"""

from __future__ import annotations

import shlex

from prefect.artifacts import create_markdown_artifact
from prefect.assets import add_asset_metadata
from prefect.tasks import MaterializingTask

from ckptcore.conversion.pipeline import settle
from ckptcore.conversion.publish import Result
from ckptcore.conversion.registration import Registration, register
from ckptcore.core.manifest import Manifest
from tasks.artifacts import shown
from tasks.assets import asset_keys
from tasks.logs import log
from tasks.retry import STEP


def _record(registration: Registration | None, result: Result, manifest: Manifest) -> Result:
    """The result with its id in the catalog; then nothing needs the staging folder any more."""
    known = register(registration, result, manifest)
    settle(result.plan_uri)
    for key in asset_keys(result.destination):
        add_asset_metadata(
            key, {"format": result.format, "bytes": result.nbytes, "conversion": known.conversion}
        )
    if known.conversion is not None:
        shown(
            create_markdown_artifact,
            FOUND_AGAIN.format(id=known.conversion, uri=shlex.quote(result.destination)),
            key="conversion-catalog",
            description=f"conversion {known.conversion} in the catalog",
        )
        log.info("conversion %s is in the catalog", known.conversion)
    return known


FOUND_AGAIN = """# In the catalog

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
