"""Restore the rows of a lost catalog from the data itself.

Every checkpoint below a folder is read by its format, checked by its metadata, and recorded as by a
validation. The source in an export's model card becomes lineage if that source is known. Other outputs have
no record of their source: the caller names the folders with outputs, and their source is the checkpoint with
equal fingerprints, if those are computed. Rows are only added: a second run changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ckptcore.catalog import CheckpointDetail, Kind
from ckptcore.checking.examine import validate
from ckptcore.comparison.fingerprint import fingerprint
from ckptcore.conversion.file_fingerprints import matching
from ckptcore.conversion.registration import Published, StoredFingerprints, facts, with_fingerprints
from ckptcore.core.manifest import Manifest
from ckptcore.core.used_files import used
from ckptcore.custody.upkeep import read_records
from ckptcore.errors import CatalogError, CkptError
from ckptcore.formats import Source, detect, open_source, read_manifest
from ckptcore.formats.step_roots import located
from ckptcore.operations.discover import discover
from ckptcore.planning.model_card import provenance
from ckptcore.planning.request import Settings
from ckptcore.reading.file_digests import digest_of
from ckptcore.store import is_s3, open_store
from ckptcore.store.objects.part_plan import plan_parts
from ckptcore.utils import host
from ckptcore.utils.isolation import error_of
from ckptcore.utils.part_digest import PartHasher, hasher_like

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog

_CARD = "README.md"
_MAX_CARD = 1 << 20
NO_FINGERPRINTS: StoredFingerprints = (None, {})
OnPlace = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A checkpoint that was recorded. made_from: its source, or None if none was found."""

    id: str
    uri: str
    format: str
    state: str
    made_from: str | None


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The result. left_out: (place, error code, message) of checkpoints that could not be read."""

    recorded: tuple[Recorded, ...]
    left_out: tuple[tuple[str, str, str], ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        names = ("id", "uri", "format", "state", "made_from")
        return {
            "recorded": [{name: getattr(r, name) for name in names} for r in self.recorded],
            "left_out": [dict(zip(("uri", "code", "message"), row, strict=True)) for row in self.left_out],
        }


def rebuild(
    catalog: Catalog,
    roots: Sequence[str],
    *,
    output_roots: Sequence[str] = (),
    digests: bool = False,
    fingerprint_settings: Settings | None = None,
    on_place: OnPlace = lambda line: None,
) -> Rebuilt:
    """Record the checkpoints at or below ``roots`` and ``output_roots``.

    Damage of a checkpoint is recorded, or the checkpoint is left out; both are reported.

    Args:
        catalog: The catalog.
        roots: Folders of checkpoints, or checkpoints.
        output_roots: Folders of outputs of conversions, or outputs.
        digests: Read every byte, and record the BLAKE3 digest of every file, also of config and tokenizer.
        fingerprint_settings: Memory and threads for computing fingerprints, which find the sources of
            outputs; None for no fingerprints.
        on_place: Called with a line of text for each place.

    Returns:
        The recorded checkpoints, and those that were left out.

    Raises:
        SourceUnreadable: A root does not exist.
        CatalogError: The catalog cannot be used.
    """
    # A file that is written later may differ from what is read.
    began = datetime.fromtimestamp(host.now(), UTC)
    places_by_id: dict[str, tuple[str, str]] = {}  # id -> place and format
    left_out = []
    kinds: dict[str, Kind] = {}
    for kind, places in ((Kind.SOURCE, roots), (Kind.DERIVED, output_roots)):
        for root in places:
            try:
                kinds |= dict.fromkeys(_checkpoints_at(root), kind)
            except CkptError:
                raise
            except Exception as error:
                left_out.append(_left_out(root, error, on_place))
    for uri, kind in kinds.items():
        try:
            manifest = read_manifest(open_source(uri))
            report = validate(manifest)
            files = _digests(catalog, uri, manifest) if digests else []
            prints = (
                _prints(manifest, fingerprint_settings, on_place)
                if fingerprint_settings is not None and report.ok
                else NO_FINGERPRINTS
            )
            checkpoint_facts = facts(
                manifest,
                uri,
                {path: digest for path, _, digest in files},
                verified="coverage" if report.ok else None,
                published=files,
                training=kind is Kind.SOURCE,
            )
            checkpoint_facts = with_fingerprints(checkpoint_facts, prints)
            public = catalog.record_validation(checkpoint_facts, report.findings, level="coverage", kind=kind)
        except CatalogError:
            raise
        except Exception as error:
            left_out.append(_left_out(uri, error, on_place))
            continue
        places_by_id[public] = uri, manifest.format
        on_place(f"{'recorded' if report.ok else 'damaged '}  {uri} ({manifest.format})")
    count, unread = read_records(catalog, [*roots, *output_roots, *kinds])
    if count:
        on_place(f"recorded  {count} obligations, from records beside their copies")
    for message in unread:
        on_place(f"left out  {message}")
    # After all of them: a source may be found later than its output.
    recorded = []
    for public, (uri, form) in places_by_id.items():
        try:
            origin = _adopted(catalog, began, public, uri)
            if kinds[uri] is Kind.DERIVED and origin is None:
                origin = _of_equal_numbers(catalog, began, public)
            detail = catalog.show(public, tensors=False)
            assert isinstance(detail, CheckpointDetail)
            recorded.append(Recorded(public, uri, form, detail.checkpoint.state, origin))
        except CatalogError:
            raise
        except Exception as error:
            left_out.append(_left_out(uri, error, on_place))
    return Rebuilt(tuple(recorded), tuple(left_out))


def _left_out(uri: str, error: Exception, on_place: OnPlace) -> tuple[str, str, str]:
    """Report a place that ended with an exception, and return its row."""
    ended = error_of(error)
    on_place(f"left out  {uri}: {ended.message}")
    return uri, ended.code, ended.message


def _checkpoints_at(root: str) -> Iterator[str]:
    """Yield the root itself if it is a checkpoint, else the checkpoints below it."""
    source = open_source(root)
    if _is_one(source):
        yield root
    else:
        below = [candidate.uri for candidate in discover(root)] if source.name is None else []
        yield from below or [root]  # reading the root gives the error to report


def _is_one(source: Source) -> bool:
    """Return whether a source is a checkpoint, and not a folder that points to the newest of several."""
    try:
        if located(source)[1]:
            return False
        detect(source)
    except CkptError:
        return False
    return True


def _prints(manifest: Manifest, fingerprint_settings: Settings, on_place: OnPlace) -> StoredFingerprints:
    try:
        summed = fingerprint(manifest, fingerprint_settings)
    except CkptError as error:  # it is recorded anyway; scrub will report the damage
        on_place(f"no fingerprint of {manifest.root}: {error.message}")
        return NO_FINGERPRINTS
    return matching(manifest, summed.tensors, dict(summed.renamed))


def _digests(catalog: Catalog, uri: str, manifest: Manifest) -> list[Published]:
    """Return (path, size, digest) of every file of a checkpoint.

    Digests are of the kind that the catalog has: with others, the same bytes would be another content.
    """
    recorded = catalog.at(uri)
    digest_of_file = (
        {(f.path, f.nbytes): f.digest for f in recorded[1] if f.digest} if recorded is not None else {}
    )
    data = used(manifest).data
    with closing(open_store(manifest.root)) as store:
        alone = manifest.origin.get("file")
        sizes = store.list() if alone is None else {alone: store.size(alone)}
        published: list[Published] = []
        for path, size in sizes.items():
            if size is None:
                continue
            if (path, size) in digest_of_file:
                hasher = hasher_like(digest_of_file[path, size])
            elif path in data and is_s3(uri):  # as its writer digests them
                hasher = PartHasher(plan_parts(size, path).part)
            else:
                hasher = hasher_like("")
            published.append((path, size, digest_of(store, path, size, hasher=hasher)))
        return published


def _adopted(catalog: Catalog, began: datetime, public: str, uri: str) -> str | None:
    """Record the source in an export's model card as its source, if the catalog has it; return it or None."""
    from ckptcore.catalog.conversions import adopt

    with closing(open_source(uri).store) as store:
        size = store.size(_CARD)
        card = store.read(_CARD, 0, min(size, _MAX_CARD)) if size else b""
    origin = provenance(card.decode(errors="replace"), uri)
    if origin is None:
        return None
    names = {"source_uri": origin.place or origin.name, "source_digest": origin.digest}
    with catalog.writing() as conn:
        return adopt(conn, began, public, **names, tool_version=origin.version)


def _of_equal_numbers(catalog: Catalog, began: datetime, public: str) -> str | None:
    from ckptcore.catalog.conversions import adopt_equal
    from ckptcore.utils.version import __version__

    with catalog.writing() as conn:
        return adopt_equal(conn, began, public, tool_version=__version__)
