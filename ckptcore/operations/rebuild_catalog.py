"""Rebuilding: which rows of a lost catalog does the data itself tell?

Every checkpoint below a folder is read by its format, checked by its metadata and recorded as a validation
would record it; what an export's model card says of its source becomes lineage where that source is known.
Other outputs tell nothing of where they come from: which folders hold them is asked of whoever calls, and
their source is the one that holds the same numbers, where fingerprints are taken.
It adds, and never takes away: a second run changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ckptcore.catalog import Kind
from ckptcore.checking.examine import validate
from ckptcore.comparison.fingerprint import fingerprint
from ckptcore.conversion.file_fingerprints import held_by
from ckptcore.conversion.registration import Prints, Published, facts
from ckptcore.core.manifest import Manifest
from ckptcore.errors import CkptError
from ckptcore.execution.receipts import digest_of
from ckptcore.formats import Source, detect, open_source, read_manifest
from ckptcore.formats.step_roots import located
from ckptcore.operations.discover import discover
from ckptcore.planning.model_card import provenance
from ckptcore.planning.request import Settings
from ckptcore.store import open_store

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog

_CARD = "README.md"
_MAX_CARD = 1 << 20
NO_PRINTS: Prints = (None, {})
OnPlace = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A checkpoint that is in the catalog now. made_from: the source that was found for it, or None."""

    id: str
    uri: str
    format: str
    state: str
    made_from: str | None


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What came of it. left_out: (place, error code, message) of what could not be read."""

    recorded: tuple[Recorded, ...]
    left_out: tuple[tuple[str, str, str], ...]

    def as_dict(self) -> dict[str, Any]:
        """The JSON face."""
        names = ("id", "uri", "format", "state", "made_from")
        return {
            "recorded": [{name: getattr(r, name) for name in names} for r in self.recorded],
            "left_out": [dict(zip(("uri", "code", "message"), row, strict=True)) for row in self.left_out],
        }


def rebuild(
    catalog: Catalog,
    roots: Sequence[str],
    *,
    made: Sequence[str] = (),
    digests: bool = False,
    take: Settings | None = None,
    on_place: OnPlace = lambda line: None,
) -> Rebuilt:
    """Records what lies at or below `roots` and `made`: folders to look through, or checkpoints.

    made: those that hold what was made here. digests: read every byte, so that each file that is there is
        known by its BLAKE3 digest again, config and tokenizer too. take: means to take fingerprints, which
        tell what an output was made from. on_place: gets a line for each place.

    What is wrong with a checkpoint is recorded or left out, and told. Raises `SourceUnreadable` for a root
    that is not there, and `CatalogError`.
    """
    began = datetime.now(UTC)  # what is written from here on may not be what is read
    found: dict[str, tuple[str, str]] = {}  # id -> place and format
    left_out = []
    kinds = {uri: Kind.SOURCE for root in roots for uri in _checkpoints_at(root)}
    kinds |= {uri: Kind.DERIVED for root in made for uri in _checkpoints_at(root)}
    for uri, kind in kinds.items():
        try:
            manifest = read_manifest(open_source(uri))
            report = validate(manifest)
            files = _digests(manifest) if digests else []
            prints = _prints(manifest, take, on_place) if take is not None and report.ok else NO_PRINTS
        except CkptError as error:
            left_out.append((uri, error.code, error.message))
            on_place(f"left out  {uri}: {error.message}")
            continue
        known = facts(
            manifest,
            uri,
            {path: digest for path, _, digest in files},
            prints=prints,
            verified="coverage" if report.ok else None,
            published=files,
        )
        public = catalog.record_validation(known, report.findings, level="coverage", kind=kind)
        found[public] = uri, manifest.format
        on_place(f"{'recorded' if report.ok else 'damaged '}  {uri} ({manifest.format})")
    # Behind all of them: a source may be found after what was made from it.
    origins = {public: _adopted(catalog, began, public, uri) for public, (uri, _) in found.items()}
    for public, (uri, _) in found.items():
        if kinds[uri] is Kind.DERIVED and origins[public] is None:
            origins[public] = _of_equal_numbers(catalog, began, public)
    recorded = [
        Recorded(
            public,
            uri,
            form,
            catalog.show(public, tensors=False).checkpoint.state,  # type: ignore[union-attr]
            origins[public],
        )
        for public, (uri, form) in found.items()
    ]
    return Rebuilt(tuple(recorded), tuple(left_out))


def _checkpoints_at(root: str) -> Iterator[str]:
    """The root itself where it is a checkpoint, else what is below it."""
    source = open_source(root)
    if _is_one(source):
        yield root
    else:
        below = [candidate.uri for candidate in discover(root)] if source.name is None else []
        yield from below or [root]  # whatever is the matter with it will be told


def _is_one(source: Source) -> bool:
    """Whether a source is a checkpoint, and not a folder that names the newest of several."""
    try:
        if located(source)[1]:
            return False
        detect(source)
    except CkptError:
        return False
    return True


def _prints(manifest: Manifest, take: Settings, on_place: OnPlace) -> Prints:
    try:
        found = fingerprint(manifest, take)
    except CkptError as error:  # it is recorded as it is; scrub will say what is wrong
        on_place(f"no fingerprint of {manifest.root}: {error.message}")
        return NO_PRINTS
    return held_by(manifest, found.tensors, dict(found.renamed))


def _digests(manifest: Manifest) -> list[Published]:
    """Every file of the place; of a checkpoint that is one file, that file."""
    with closing(open_store(manifest.root)) as store:
        alone = manifest.origin.get("file")
        there = store.list() if alone is None else {alone: store.size(alone)}
        return [
            (path, size, digest_of(store, path, size)) for path, size in there.items() if size is not None
        ]


def _adopted(catalog: Catalog, began: datetime, public: str, uri: str) -> str | None:
    """The source that the model card of an export names, once it stands in the catalog as such."""
    from ckptcore.catalog.conversions import adopt

    with closing(open_source(uri).store) as store:
        size = store.size(_CARD)
        card = store.read(_CARD, 0, min(size, _MAX_CARD)) if size else b""
    told = provenance(card.decode(errors="replace"))
    if told is None:
        return None
    source, digest, version = told
    with catalog.writing() as conn:
        return adopt(conn, began, public, source_uri=source, source_digest=digest, tool_version=version)


def _of_equal_numbers(catalog: Catalog, began: datetime, public: str) -> str | None:
    from ckptcore import __version__
    from ckptcore.catalog.conversions import adopt_equal

    with catalog.writing() as conn:
        return adopt_equal(conn, began, public, tool_version=__version__)
