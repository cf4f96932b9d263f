"""Read files of certificate authorities when the first TLS connection needs them.

Prefect and httpx make six clients in a run, two of them while they are imported, and each reads certifi's 150
certificates, 20 ms of CPU time, also where the server is at ``http://``. Verification itself is unchanged.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from threading import Lock
from typing import Any

_PENDING = "_ckptcore_pending"  # of a context: the files that it has not read yet
_lock = Lock()


def read_late() -> None:
    """Let every context of this process read its files late. Only a command does that, before it starts."""
    context: Any = ssl.SSLContext
    now: Callable[..., None] = context.__base__.load_verify_locations

    def load_verify_locations(
        self: ssl.SSLContext, cafile: Any = None, capath: Any = None, cadata: Any = None
    ) -> None:
        # What is not a readable file fails here, as before.
        if cafile is None or capath is not None or cadata is not None or not os.access(cafile, os.R_OK):
            now(self, cafile, capath, cadata)
            return
        with _lock:
            vars(self).setdefault(_PENDING, []).append(cafile)

    def first(method: Callable[..., Any]) -> Callable[..., Any]:
        def reading(self: ssl.SSLContext, *arguments: Any, **named: Any) -> Any:
            with _lock:
                pending = vars(self).get(_PENDING, [])
                while pending:
                    now(self, pending[0])
                    del pending[0]
            return method(self, *arguments, **named)

        return reading

    context.load_verify_locations = load_verify_locations
    for name in ("wrap_socket", "wrap_bio", "get_ca_certs", "cert_store_stats"):
        setattr(context, name, first(getattr(context, name)))
