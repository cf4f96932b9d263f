"""Find what a flow run made, with its proofs: what a notification about its end contains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from ckptcore.catalog.models import Checkpoint, Conversion
from ckptcore.catalog.normalize import same_places
from ckptcore.catalog.query import conversion_row, conversions_of, current_first, loadable, rows_of
from ckptcore.catalog.types import ConversionRow, Direction, Outcome

if TYPE_CHECKING:
    from sqlalchemy import Connection


def outputs_of_run(conn: Connection, flow_run_id: str | None) -> list[dict[str, Any]]:
    """Return the last conversion of a flow run to each destination, in the order in which they began."""
    if flow_run_id is None:
        return []
    mine = select(Conversion).where(Conversion.flow_run_id == flow_run_id).order_by(Conversion.id)
    last = {row.destination_uri: row for row in conn.execute(mine)}  # a resumed run has begun several times
    return [_output(conn, conversion_row(row)) for row in last.values()]


def output_at(conn: Connection, destination: str, source: str) -> list[dict[str, Any]]:
    """Return the current checkpoint at a place as such an output, if it was made from this source."""
    rows = select(Checkpoint.id).where(Checkpoint.uri.in_(same_places(destination)))
    row = conn.execute(rows.order_by(*current_first())).first()
    if row is None:
        return []
    source_uris = same_places(source)
    # Several conversions may have written one output: only those of this source count.
    for conversion in conversions_of(conn, row.id, Direction.OUT):
        if conversion.state == Outcome.SUCCEEDED.value and conversion.source_uri in source_uris:
            return [_output(conn, conversion)]
    return []


def export_of(conn: Connection, checkpoint: int) -> dict[str, Any]:
    """Return the verdict and the checks of the last verified export to a checkpoint (its row id).

    ``loadable`` is ``yes``, ``no`` or ``unproven`` for an export, otherwise None.
    """
    export = next((m for m in conversions_of(conn, checkpoint, Direction.OUT) if m.export_verdict), None)
    return {**_verdicts(export), "loadable": loadable(conn, [checkpoint]).get(checkpoint)}


def _output(conn: Connection, conversion: ConversionRow) -> dict[str, Any]:
    written = conn.execute(rows_of(conversion.id, Direction.OUT)).first()
    return {
        "verb": conversion.verb,
        "state": conversion.state,
        "destination": conversion.destination_uri,
        "conversion": conversion.id,
        "checkpoint": written.uuid if written else None,
        "bytes": written.total_bytes if written else None,
        "fingerprint": written.fingerprint if written else None,
        "verified_level": written.verified_level if written else None,
        "error_code": conversion.error_code,
        "loadable": loadable(conn, [written.id]).get(written.id) if written else None,
        **_verdicts(conversion),
    }


def _verdicts(conversion: ConversionRow | None) -> dict[str, Any]:
    if conversion is None:
        return {"export_verdict": None, "export_checks": {}}
    checks = {name: check["verdict"] for name, check in conversion.export_checks.items()}
    return {"export_verdict": conversion.export_verdict, "export_checks": checks}
