"""A model card's last line: the fingerprint of the tensors, which is known when all of them were moved.

A card is planned before any byte is read, and its digest is part of the plan. What is published is the card
that was planned, and this one line more: whoever knows the line can tell the planned card by its digest.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

from blake3 import blake3

from ckptcore.conversion.publication_record import noted
from ckptcore.conversion.staging import Staging
from ckptcore.planning.hub_files import CARD
from ckptcore.planning.model_card import fingerprint_line
from ckptcore.planning.plan import Plan
from ckptcore.store import Readable, open_store


def with_fingerprint(staging: Staging, plan: Plan, fingerprint: str, *, published: bool, begun: bool) -> Plan:
    """The plan with the card as it is published: with its last line, which is added where it is staged.

    published: the output is at the destination already, and nothing is written. begun: a killed run has begun
    to copy it to an object store: the card stays the one that it recorded. A card that is neither the planned
    one nor that with its line leaves the plan as it is: whoever holds the card against it will see.
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
    whole = data + line
    if data.endswith(line) and _blake3(data.removesuffix(line)) == planned:
        whole = data
    elif published or _blake3(data) != planned:
        return plan
    if begun:
        record = noted(staging)
        if record is None or record.puts.get(CARD) != (len(whole), _blake3(whole)):
            return plan
    if whole != data:
        staging.files.put(CARD, whole)
    extra = tuple((path, _blake3(whole) if path == CARD else digest) for path, digest in plan.extra)
    return replace(plan, extra=extra)


def _card(store: Readable) -> bytes | None:
    size = store.size(CARD)
    return None if size is None else store.read(CARD, 0, size)


def _blake3(data: bytes) -> str:
    return blake3(data).hexdigest()
