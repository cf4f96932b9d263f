"""Add the fingerprint of the tensors to a model card as its last line, after all of them were copied.

A card is planned before any byte is read, and its digest is part of the plan. The published card is the
planned card and this one line. Without the line, the card's digest is the planned one.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

from blake3 import blake3

from ckptcore.conversion.staging import Staging, noted
from ckptcore.planning.hub_files import CARD
from ckptcore.planning.model_card import fingerprint_line
from ckptcore.planning.plan import Plan
from ckptcore.store import Readable, open_store


def with_fingerprint(staging: Staging, plan: Plan, fingerprint: str, *, published: bool, begun: bool) -> Plan:
    """Add the last line to the staged card, and return the plan with the digest of the result.

    If the card is neither the planned one nor the planned one with its line, the plan stays as it is; the
    comparison of the card with the plan fails later.

    Args:
        staging: The staging folder.
        plan: The plan of the conversion.
        fingerprint: The fingerprint of all tensors.
        published: The output is already at the destination, and nothing is written.
        begun: A killed run began to copy the output to an object store; the card must be the recorded one.
    """
    planned = dict(plan.extra).get(CARD)
    if planned is None:
        return plan
    line = fingerprint_line(fingerprint)
    if published:
        with closing(open_store(staging.destination)) as store:
            data = _card(store)
    else:
        data = _card(staging.files)
    if data is None:
        return plan
    full = data + line
    if data.endswith(line) and _blake3(data.removesuffix(line)) == planned:
        full = data
    elif published or _blake3(data) != planned:
        return plan
    if begun:
        record = noted(staging)
        if record is None or record.puts.get(CARD) != (len(full), _blake3(full)):
            return plan
    if full != data:
        staging.files.put(CARD, full)
    extra = tuple((path, _blake3(full) if path == CARD else digest) for path, digest in plan.extra)
    return replace(plan, extra=extra)


def _card(store: Readable) -> bytes | None:
    size = store.size(CARD)
    return None if size is None else store.read(CARD, 0, size)


def _blake3(data: bytes) -> str:
    return blake3(data).hexdigest()
