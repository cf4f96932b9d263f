"""Read the manifest of the source."""

from __future__ import annotations

from prefect import task

from ckptcore.checking.examine import inspect
from ckptcore.core.manifest import Manifest
from ckptcore.utils.text import count
from ckptcore.utils.units import show_size
from tasks.logs import log
from tasks.retry import STEP, named


@task(task_run_name=named("read"), **STEP)
def read(
    source: str,
    recover: bool = False,
    keep_quantized: bool = False,
    weights: str = "auto",
    observe: bool = False,
) -> Manifest:
    """Read the manifest of `source`; see `inspect`. No tensor bytes are read."""
    manifest = inspect(source, recover, keep_quantized, weights, observe=observe)
    summary = f"{manifest.format}, {count(manifest.num_tensors, 'tensor')}, {show_size(manifest.nbytes)}"
    log.info("%s: %s", source, summary)
    return manifest
