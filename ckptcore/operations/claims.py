"""Claim a conversion, so that only one process does it.

Sweeps and webhooks' flows find the same checkpoint at the same time. The process that takes the claim
converts; the others see its state. A thread renews the claim while the conversion runs, however long.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from blake3 import blake3

from ckptcore.catalog import claims
from ckptcore.catalog.claims import ClaimRow, Key
from ckptcore.catalog.database import clock
from ckptcore.catalog.normalize import same_places
from ckptcore.catalog.types import ConversionRow
from ckptcore.checking.source_stamps import stamp_files
from ckptcore.core.manifest import Manifest
from ckptcore.errors import UsageError, ended_by
from ckptcore.operations.export_target import options_digest
from ckptcore.planning.request import Request
from ckptcore.store import open_store
from ckptcore.utils.isolation import attempt

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog

_log = logging.getLogger("ckptcore")


def source_digest(manifest: Manifest) -> str:
    """Return a digest of a source's current content: its manifest, and the stamps of its files.

    The manifest alone is not enough: two steps of one run have equal ones. Second copies do not count.
    """
    manifest = manifest.without_copies()
    with closing(open_store(manifest.root)) as store:
        stamps = stamp_files(manifest, store)
    hasher = blake3(manifest.digest.encode())
    for path, stamp in sorted(stamps.items()):
        hasher.update(f"{path}\0{stamp}\n".encode("utf-8", "surrogateescape"))
    return hasher.hexdigest()


def key_of(request: Request, digest: str) -> Key:
    """Return the key of a request's claim. digest: `source_digest` of the request's source."""
    return Key(digest, request.destination, options_digest(request))


def owner() -> str:
    """Return a unique name for this worker."""
    return f"{socket.gethostname()} {os.getpid()} {uuid.uuid4().hex[:8]}"


def made_by(catalog: Catalog, request: Request, digest: str) -> bool:
    """Return whether a destination is what the request makes of its source, by the catalog.

    A conversion whose options nobody recorded, as after a rebuild of the catalog, counts.

    Args:
        catalog: The catalog.
        request: What is asked for.
        digest: Of the source's manifest.
    """
    return made_from(catalog, request.destination, request.source, digest, options_digest(request))


def made_from(
    catalog: Catalog, destination: str, source: str, digest: str, options: str | None = None
) -> bool:
    """Return whether the catalog records that a destination was made from this source.

    Args:
        catalog: The catalog.
        destination: Path or URL of the output.
        source: Path or URL of the source.
        digest: Of the source's manifest.
        options: `options_digest` of the request; None for any.
    """
    try:
        origins = catalog.which(destination)
    except UsageError:  # the catalog does not know it
        return False
    source_uris = same_places(source)
    return any(
        row.uri in source_uris and row.manifest_digest == digest and _has_options(origin.conversion, options)
        for origin in origins
        for row in origin.sources
    )


def _has_options(conversion: ConversionRow | None, options: str | None) -> bool:
    if options is None or conversion is None or "verb" not in conversion.request:
        return True
    recorded = attempt(Request.from_dict, conversion.request)
    return isinstance(recorded, Request) and options_digest(recorded) == options


def rewritten(catalog: Catalog, key: Key, source: str) -> bool:
    """Return whether the key's destination was made from an earlier content of this source."""
    with catalog.reading() as conn:
        recorded_claims = claims.of_destination(conn, key.destination)
    return any(
        c.state == claims.DONE
        and c.source in same_places(source)
        and c.key.source_digest != key.source_digest
        for c in recorded_claims
    )


@contextmanager
def claimed(catalog: Catalog, key: Key, source: str, who: str, *, redo: bool = False) -> Iterator[ClaimRow]:
    """Take a claim, if it is free, and renew it while the block runs.

    At the end of the block the claim is done; after an error it is failed.

    Args:
        catalog: The catalog.
        key: The source's content, the destination and the options.
        source: Path or URL of the source.
        who: The worker; it takes its own claim again at once.
        redo: Take a claim that is done, too.

    Yields:
        The claim; `mine` says whether this worker has it.
    """
    with claimed_each(catalog, [(key, source)], who, redo=redo) as taken:
        yield taken.rows[0]


@dataclass(frozen=True, slots=True)
class Claimed:
    """Several claims. failures: position -> error of work that failed, while the block goes on."""

    rows: tuple[ClaimRow, ...]
    failures: dict[int, BaseException] = field(default_factory=dict)


@contextmanager
def claimed_each(
    catalog: Catalog, keys_and_sources: Sequence[tuple[Key, str]], who: str, *, redo: bool = False
) -> Iterator[Claimed]:
    """Take several claims in one transaction, and end them in another one; see `claimed`.

    Args:
        catalog: The catalog.
        keys_and_sources: Key and source of each claim.
        who: The worker; it takes its own claims again at once.
        redo: Take claims that are done, too.

    Yields:
        The claims. The block adds the errors of work that failed to ``failures``; an error of the block
        itself is that of all claims.
    """
    with catalog.writing() as conn:
        now = clock(conn)
        rows = tuple(claims.take(conn, now, key, source, who, retry=redo) for key, source in keys_and_sources)
    taken, mine = Claimed(rows), [claim for claim in rows if claim.mine]
    if not mine:
        yield taken
        return
    stop = threading.Event()
    keeper = threading.Thread(target=_keep, args=(catalog, mine, stop), name="claim", daemon=True)
    keeper.start()
    try:
        yield taken
    except BaseException as error:
        stop.set()
        keeper.join()
        try:
            with catalog.writing() as conn:
                for n, claim in enumerate(rows):
                    if claim.mine:
                        claims.end(conn, clock(conn), claim, _failure(taken.failures.get(n, error)))
        except Exception as second:  # must not hide the first error; the lease expires
            _log.warning("cannot end the claim: %s", ended_by(second).message)
        raise
    stop.set()
    keeper.join()
    with catalog.writing() as conn:
        for n, claim in enumerate(rows):
            failure = _failure(taken.failures.get(n))
            if claim.mine and not claims.end(conn, clock(conn), claim, failure):
                _log.warning("another worker took the claim on %s meanwhile", claim.key.destination)


def _failure(error: BaseException | None) -> tuple[str, str] | None:
    """Return the code and the message of an error."""
    if error is None:
        return None
    ended = ended_by(error)
    return ended.code, ended.message


def _keep(catalog: Catalog, taken: Sequence[ClaimRow], stop: threading.Event) -> None:
    renewed = list(taken)
    while renewed and not stop.wait(claims.LEASE.total_seconds() / 3):
        try:
            with catalog.writing() as conn:
                renewed = [claim for claim in renewed if claims.renew(conn, clock(conn), claim)]
        except Exception as error:  # two more tries fit into the lease
            _log.warning(
                "cannot renew the claim on %s: %s", renewed[0].key.destination, ended_by(error).message
            )
