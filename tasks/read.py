"""Read: what is stored at the source?"""

from __future__ import annotations

from prefect import task

from ckptcore.convert import inspect
from ckptcore.manifest import Manifest
from ckptcore.sizes import show_size
from tasks.logs import log
from tasks.retry import STEP
from tasks.words import count, named


@task(task_run_name=named("read"), **STEP)
def read(source: str, recover: bool = False, keep_quantized: bool = False) -> Manifest:
    """The manifest of ``source``: metadata only, no tensor byte is read."""
    found = inspect(source, recover, keep_quantized)
    told = f"{found.format}, {count(found.num_tensors, 'tensor')}, {show_size(found.nbytes)}"
    log.info("%s: %s", source, told)
    return found
