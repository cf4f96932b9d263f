"""Find the source of an export, and store the verdict on the export.

The catalog has the request of every conversion; a model card names the source. Neither is needed: the user
who verifies an export can name its source.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckptcore.checking.examine import inspect
from ckptcore.checking.export_proof import ALWAYS, NOT_DONE, ExportProof
from ckptcore.errors import CkptError, UsageError
from ckptcore.planning.export_source import ExportRecord, ExportSource, KnownExport, with_own_config
from ckptcore.planning.model_card import names_by_card, provenance
from ckptcore.planning.request import Request
from ckptcore.store import join_url, local_path, open_store, split_url

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog
    from ckptcore.catalog.types import CheckpointDetail, CheckpointRow, ConversionRow

_MAX_CARD = 1 << 20  # bytes
_DTYPES = ("dtype", "dtype_for")


def find_source(
    export: str, against: str | None, options: Mapping[str, Any], catalog: str | bool | None
) -> KnownExport:
    """Find the source and the request of an export.

    Args:
        export: Its URL.
        against: The source that the caller names, or None.
        options: Fields of `Request` that override the request in the catalog.
        catalog: URL; None for the default one, False for none.

    Returns:
        The source with its request, or the reason why none is known.

    Raises:
        CatalogError: The catalog cannot be used.
        UsageError: The options make no request, or another verb wrote it.
    """
    # Asked first, as the catalog has the exact request, and a card has only its outcome.
    registered = _registered(export, catalog) if catalog is not False else None
    if registered is None:
        return _found(export, against, options, None)
    export_source = _found(export, against, options, registered)
    conversion, detail = registered.conversion, registered.export
    files = {f.path: (f.nbytes, f.digest) for f in detail.files if f.digest is not None}
    return replace(
        export_source,
        conversion=conversion.id,
        record=ExportRecord(
            conversion.ended_at,
            files,
            detail.checkpoint.fingerprint,
            conversion.export_verdict,
            conversion.export_verified_at,
        ),
    )


def _found(
    export: str, against: str | None, options: Mapping[str, Any], registered: _Registered | None
) -> KnownExport:
    """Find the source as `find_source`, without what the catalog recorded of the export itself."""
    if registered is not None and against is None and not options:
        _require_export(registered.conversion, export)
    exact = bool(options.keys() & set(_DTYPES))
    # Retired or replaced by this very export: there is nothing to compare it with, whatever its card says.
    if registered is not None and against is None and registered.source.gone:
        return KnownExport(None, registered.source.gone)
    # Options of the user change the request, so the one in the catalog is not the request any more.
    if registered is not None and not options:
        by_catalog = _by_catalog(registered, export, against)
        if by_catalog is not None:
            return KnownExport(by_catalog)
    # A card is part of the export, and any program may have edited it: it is asked after the catalog.
    card = _card(export)
    fields: Mapping[str, Any] = names_by_card(card, export)
    try:
        Request(export, export, verb="export", **fields)
    except UsageError as error:  # of a newer version, or edited
        return KnownExport(None, f"the model card says how names were mapped, and {error.message}")
    # The trainer's own code need not have loaded what is compared with its source.
    options = {"allow_untried": True, **fields, **options}
    if against is not None:
        request = Request(against, export, verb="export", **options)
        return KnownExport(ExportSource(request, "--against", exact, asked=True))
    by, place, digest = "the catalog", "", ""
    if registered is not None:
        place, digest, by = registered.source.place, registered.source.digest, registered.source.by
    elif (origin := provenance(card, export)) is not None:
        if not origin.place:
            return KnownExport(
                None, f"the model card names the source {origin.name!r}, but not its place; try --against"
            )
        by, place, digest = "the model card", origin.place, origin.digest
    if not place:
        return KnownExport(
            None, "no source is known: neither the catalog nor a model card names one; try --against"
        )
    request = Request(place, export, verb="export", **options)
    return KnownExport(ExportSource(request, by, exact, digest or None))


def _require_export(conversion: ConversionRow, place: str) -> None:
    """Raise `UsageError` for what has the names of its source: as an export, it lacks every tensor."""
    if conversion.verb in ("consolidate", "reshard"):
        raise UsageError(
            f"cannot verify {place} as an export: {conversion.verb} wrote it, under the names of its source",
            hint=f"compare it with its source: ckptcore diff {conversion.source_uri} {place}",
        )


def record_verdict(export: KnownExport, proof: ExportProof, catalog: str | bool | None) -> ExportProof:
    """Store the verdict with the conversion that wrote the export, if a catalog has one.

    Returns:
        The proof with the conversion's id.
    """
    if export.conversion is None or catalog is False:
        return proof
    from ckptcore.catalog import open_catalog

    with open_catalog(catalog if isinstance(catalog, str) else None) as opened:
        keep(opened, export.conversion, proof)
    return replace(proof, conversion=export.conversion)


def keep(catalog: Catalog, conversion: str, proof: ExportProof) -> None:
    """Store the verdict with a conversion; optional checks that were not done are left out."""
    checks = [
        (c.name, c.verdict, c.summary) for c in proof.checks if c.name in ALWAYS or c.verdict != NOT_DONE
    ]
    catalog.record_verdict(conversion, checks)


@dataclass(frozen=True, slots=True)
class _SourceNow:
    """Where the source of an export, or the copy that took its place, can be read now, and how it is known.

    gone: why it cannot be read anywhere; "" if it can.
    """

    place: str
    digest: str
    by: str = "the catalog"
    gone: str = ""


@dataclass(frozen=True, slots=True)
class _Registered:
    conversion: ConversionRow
    source: _SourceNow
    export: CheckpointDetail


def _registered(export: str, catalog: str | bool | None) -> _Registered | None:
    """Return the conversion that wrote the content of an export, and where its source is now."""
    from ckptcore.catalog import open_catalog
    from ckptcore.catalog.types import CheckpointDetail, ConversionDetail

    with open_catalog(catalog if isinstance(catalog, str) else None) as opened:
        registered = opened.at(export)
        detail = opened.show(registered[0].id, tensors=False) if registered is not None else None
        if (
            not isinstance(detail, CheckpointDetail)
            or not detail.written_by
            or not _is_recorded(export, detail)
        ):
            return None
        conversion_row = detail.written_by[0]
        conversion = opened.show(conversion_row.id)
        sources = conversion.sources if isinstance(conversion, ConversionDetail) else ()
        source = _SourceNow(conversion_row.source_uri, sources[0].manifest_digest if sources else "")
        if len(sources) == 1:
            source = _source_now(opened, sources[0], detail.checkpoint) or source
    return _Registered(conversion_row, source, detail)


def _source_now(catalog: Catalog, source: CheckpointRow, export: CheckpointRow) -> _SourceNow | None:
    """Return where a source is that was retired, or thinned; None for any other one."""
    from ckptcore.catalog import retirements, set_aside
    from ckptcore.catalog.types import CheckpointDetail, State

    if source.state == State.RETIRED:
        with catalog.reading() as conn:
            homes = [row.record for row in set_aside.every(conn) if row.checkpoint == source.id]
        if not homes or local_path(homes[0]) is None:
            return None  # on an object store it stays in its place
        place = join_url(homes[0], split_url(source.uri)[1])
        # Set aside in a folder beside its place: the name inside of it stays.
        return _SourceNow(place, source.manifest_digest, f"the catalog: {source.uri} is set aside")
    if source.state == State.REPLACED:
        return _thinned_now(catalog, source)
    if source.state != State.DELETED:
        return None
    with catalog.reading() as conn:
        retired = retirements.of(conn, source.id)
    copy = catalog.show(retired.child, tensors=False) if retired is not None else None
    if not isinstance(copy, CheckpointDetail):
        return None
    if copy.checkpoint.id == export.id:
        # The copy by which it was retired is the export itself: comparing it with itself proves nothing.
        return _SourceNow("", "", gone=f"{source.uri} was retired, and this export took its place")
    place = copy.checkpoint.uri
    by = f"the catalog: {source.uri} was retired, and {place} took its place"
    return _SourceNow(place, copy.checkpoint.manifest_digest, by)


def _thinned_now(catalog: Catalog, source: CheckpointRow) -> _SourceNow | None:
    """Return the step that is at the place of a thinned one, which has its model part; None for others."""
    from ckptcore.catalog import retirements
    from ckptcore.catalog.types import CheckpointDetail, State

    # A step may be thinned several times: the last one is what can be read.
    now = source
    while now.state == State.REPLACED:
        with catalog.reading() as conn:
            record = retirements.of(conn, now.id)
        if record is None or record.proof != retirements.THINNED:
            return None
        step = catalog.show(record.child, tensors=False)
        if not isinstance(step, CheckpointDetail):
            return None
        now = step.checkpoint
    return _SourceNow(now.uri, now.manifest_digest, f"the catalog: {source.uri} was thinned")


def _is_recorded(export: str, registered: CheckpointDetail) -> bool:
    """Return whether an export has the recorded manifest, or is damaged and cannot be opened any more."""
    try:
        digests = {inspect(export).digest, inspect(export, keep_quantized=True).digest}
    except CkptError as error:
        # Exit code 1 is damage: another content cannot be distinguished from it, and a verdict on it is what
        # is asked for.
        return error.exit_code == 1
    return registered.checkpoint.manifest_digest in digests


def _by_catalog(registered: _Registered, export: str, against: str | None) -> ExportSource | None:
    """Return the source by the request of a conversion; None if this version cannot read the request."""
    source = registered.source
    # Without a request that this version understands, the card is the next best.
    try:
        request = Request.from_dict(dict(registered.conversion.request))
    except (UsageError, TypeError, AttributeError):  # of a newer version, or of a catalog that was rebuilt
        return None
    if request.verb != "export":
        return None
    # The recorded place counts only while the source is there; else the copy that took its place.
    as_requested = source.place == registered.conversion.source_uri and _is_anywhere(request.source)
    place = against if against is not None else request.source if as_requested else source.place
    return ExportSource(
        with_own_config(replace(request, source=place, destination=export), export),
        "--against" if against is not None else source.by,
        exact=True,
        digest=source.digest or None,
        asked=against is not None,
    )


def _is_anywhere(place: str) -> bool:
    """Return whether a place is the same from every working folder."""
    path = local_path(place)
    return path is None or os.path.isabs(path)


def _card(export: str) -> str:
    """Return the export's model card; "" where it has none."""
    try:
        with closing(open_store(export)) as store:
            size = store.size("README.md")
            if size is None or size > _MAX_CARD:
                return ""
            return store.read("README.md", 0, size).decode(errors="replace")
    except CkptError as error:
        # A network that fails for a moment must not look like an export without a card.
        if error.transient:
            raise
        return ""  # one file has no card
