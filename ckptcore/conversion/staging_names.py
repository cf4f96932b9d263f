"""Name what is in a staging folder, and in the staging prefix of an object store.

A module of its own: `staging` uses the names, and `staged_uploads`, which `staging` imports late.
"""

from __future__ import annotations

PUBLISHING = "publishing.json"  # written right before the move: records the plan that is published
REPLACED = "replaced"  # the old output that a new one replaced
LOCK, PARTS = "lock", ("plan", "receipts", "files")
RECORDS = ("request.json", "replaces.json", PUBLISHING)
DRAFT = f"{PARTS[0]}/{PUBLISHING}"  # a record on its way, among what every version removes
UPLOADS, LEASE = "uploads", "lease.json"  # on object stores: the journal of uploads, and the lock
