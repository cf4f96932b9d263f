"""File digests: are whole files what the writer's own list of SHA-256 sums says?"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from ckptcore.core.manifest import Manifest
from ckptcore.errors import Finding, finding
from ckptcore.store import Store

SHA256 = "sha256"  # the key in `Manifest.origin`: file -> hex
_BLOCK = 4 << 20


def mismatches(manifest: Manifest, store: Store) -> Iterator[Finding]:
    """A finding for every file whose SHA-256 is not the one that the checkpoint tells.

    Reads each listed file once, in blocks of 4 MiB. Missing files are the reader's to report.
    """
    for path, wanted in dict(manifest.origin.get(SHA256) or {}).items():
        size = store.size(path)
        if size is None:
            continue
        total = hashlib.sha256()
        for at in range(0, size, _BLOCK):
            total.update(store.read(path, at, min(_BLOCK, size - at)))
        if total.hexdigest() != wanted:
            yield finding(
                "digest-mismatch",
                "bytes",
                f"{path} has SHA-256 {total.hexdigest()[:16]}..., the checkpoint tells {wanted[:16]}...",
                file=path,
            )
