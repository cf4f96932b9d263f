"""Record in the catalog that an operation on a checkpoint runs, as a conversion of its own verb."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ckptcore.errors import CkptError, ended_by
from ckptcore.utils.isolation import attempt
from ckptcore.utils.version import __version__

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog

_log = logging.getLogger("ckptcore")


@contextmanager
def recorded_run(
    catalog: Catalog, verb: str, uri: str, destination: str, request: Mapping[str, Any]
) -> Iterator[str]:
    """Record that a checkpoint is read, and the failure if the work raises; yield the id.

    While the row is alive, no purge counts on the checkpoint or deletes it, and no conversion reads what is
    written there unnoticed. Who does the work records its success.

    Args:
        catalog: The catalog.
        verb: The command.
        uri: The checkpoint that is read.
        destination: Where the work writes.
        request: The options, as JSON values.
    """
    conversion = catalog.begin(
        {"verb": verb, **request},
        source_uri=uri,
        destination_uri=destination,
        verb=verb,
        tool_version=__version__,
    )
    try:
        yield conversion
    except BaseException as error:
        ended = ended_by(error)
        failed = attempt(catalog.fail, conversion, code=ended.code, message=ended.message)
        if isinstance(failed, CkptError):  # the first error matters more; the row ends with its process
            _log.warning("the failure could not be recorded: %s", failed.message)
        raise
