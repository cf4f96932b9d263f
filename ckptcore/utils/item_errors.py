"""Turn the exception of one item into its finding, so that the others go on.

Every loop over items (checkpoints of a sweep, rows of the catalog) ends an item with `error_of`. An item is
expected to end with a `CkptError`; any other exception is a defect, and still that of one item.
"""

from __future__ import annotations

import os

from ckptcore.errors import CkptError, Interrupted, ended_by
from ckptcore.utils import terminal


def error_of(error: Exception) -> CkptError:
    """Return the error with a code that an item ended with. ``CKPTCORE_TRACEBACK=1`` shows where a defect is.

    Raises:
        Interrupted: The user stopped the command: no further item begins.
    """
    if isinstance(error, Interrupted):
        raise error
    if not isinstance(error, CkptError) and os.environ.get("CKPTCORE_TRACEBACK"):
        terminal.report(error)
    return ended_by(error)
