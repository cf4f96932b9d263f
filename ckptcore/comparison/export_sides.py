"""Open both sides of the comparison of an export: the export, and its source under the export's names.

`ckptcore.planning.compose.map_export` alone decides how names map.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace

from ckptcore.checking.examine import inspect
from ckptcore.core.manifest import Manifest
from ckptcore.core.used_files import placed
from ckptcore.errors import NameMismatch, UsageError
from ckptcore.naming.rename import without_tensors
from ckptcore.planning.compose import MappedExport, map_export
from ckptcore.planning.config_folder import UNSAVED, ConfigFolder, check_names
from ckptcore.planning.export_source import ExportSource
from ckptcore.planning.hub_files import ADAPTER, CARD, CONFIG, NONE
from ckptcore.planning.model_card import tied_by_card
from ckptcore.planning.request import Request
from ckptcore.store import join_url, local_path, open_store
from ckptcore.store.place import identify

_MAX_SMALL = 64 << 20  # bytes of a config.json or a model card


@dataclass(frozen=True)
class OpenExport:
    """The folder that is verified.

    Attributes:
        url: Its path or URL.
        stored: Its tensors as they are stored.
        values: Its tensors with quantised weights as values.
        config: Its config.json, or None.
        adapter: Its adapter_config.json, or None.
        card: Its README, empty if there is none.
    """

    url: str
    stored: Manifest
    values: Manifest
    config: ConfigFolder | None
    adapter: bytes | None
    card: str

    @classmethod
    def open(cls, url: str) -> OpenExport:
        """Read its metadata and its small files."""
        values = inspect(url)
        stored = inspect(url, keep_quantized=True) if values.derived else values
        if stored.origin.get("file"):
            return cls(url, stored, values, None, None, "")
        with closing(open_store(stored.root)) as store:
            small = {}
            for name in (CONFIG, ADAPTER, CARD):
                size = store.size(name)
                if size is not None and size <= _MAX_SMALL:
                    small[name] = store.read(name, 0, size)
        config = ConfigFolder(url, small) if CONFIG in small else None
        card = small.get(CARD, b"").decode(errors="replace")
        return cls(url, stored, values, config, small.get(ADAPTER), card)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of the stored tensors."""
        return {t.fqn: t.shape for t in self.stored.tensors}


@dataclass(frozen=True)
class MappedSource:
    """A source and its mapped tensors."""

    source: ExportSource
    manifest: Manifest
    export: MappedExport


@dataclass(frozen=True)
class UnmappedSource:
    """The reason why there is nothing to compare an export with."""

    reason: str


def stated_ties(export: Manifest) -> tuple[tuple[str, str], ...]:
    """Return the ties that the card of an export states: (name that is not stored, name that is)."""
    if export.origin.get("file"):
        return ()
    with closing(open_store(export.root)) as store:
        size = store.size(CARD)
        card = store.read(CARD, 0, size) if size is not None and size <= _MAX_SMALL else b""
    return tied_by_card(card.decode(errors="replace"))


def map_source(source: ExportSource, export: OpenExport) -> MappedSource | UnmappedSource:
    """Read a source, and map its tensors as the export has them; or return why that cannot be done."""
    request = source.request
    if not source.exact and export.values.derived:  # quantised weights were copied as they are stored
        request = replace(request, keep_quantized=True)
    if export.config is not None or export.adapter is not None:
        # The folders of the request may no longer exist.
        request = replace(request, config=export.url, tokenizer=NONE)
    manifest = inspect(request.source, request.recover, request.keep_quantized, request.weights)
    if source.digest is not None and manifest.digest != source.digest and not source.asked:
        return UnmappedSource(
            f"{request.source} is another checkpoint now: its manifest digest is {manifest.digest[:16]}, "
            f"{source.by} records {source.digest[:16]}"
        )
    if _shares_files(manifest, export.stored):
        if source.asked:
            raise UsageError(
                f"cannot compare {export.url} with {request.source}: they are the same files",
                hint="name the checkpoint that was exported: --against SRC",
            )
        return UnmappedSource(f"{source.by} names the export itself as its source")
    mapped = map_export(request, manifest, export.stored.index.keys())
    return MappedSource(source, manifest, _as_saved(request, manifest, mapped, export))


def _shares_files(source: Manifest, export: Manifest) -> bool:
    """Return whether both have a file with tensors in common: comparing a file with itself proves nothing."""
    return not _files(source).isdisjoint(_files(export))


def _files(manifest: Manifest) -> set[object]:
    """Return the identity of each file with tensors; several links may lead to one file."""
    identities: set[object] = set()
    for name in placed(manifest):
        url = join_url(manifest.root, name)
        path = local_path(url)
        if path is None:
            place = identify(url)
            identities.add((place.family, place.spots))
            continue
        with suppress(OSError):  # it is missing: the check of elements reports it
            status = os.stat(path)
            identities.add((status.st_dev, status.st_ino))
    return identities


def _as_saved(request: Request, manifest: Manifest, mapped: MappedExport, export: OpenExport) -> MappedExport:
    """Add the ties that the export records, for tensors that it lacks; their equality is checked.

    What its model computes itself, and is saved without, may be lacking, too.
    """
    export_rows, specs = export.stored.index, {t.fqn: t for t in mapped.mapped.manifest.tensors}
    lacking = {name for name in specs if name not in export_rows}
    if not lacking:
        return mapped

    def useful(ties: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        """Return the ties between tensors that can be equal."""
        return tuple(
            (a, b)
            for a, b in ties
            if a in lacking
            and b in export_rows
            and b in specs
            and (specs[a].shape, specs[a].dtype) == (specs[b].shape, specs[b].dtype)
        )

    ties, unsaved = useful(tied_by_card(export.card)), set[str]()
    if {a for a, _ in ties} != lacking and export.config is not None:
        with suppress(NameMismatch, UsageError):  # the check of names reports it
            expected = check_names(export.config, {n: t.shape for n, t in specs.items()})
            ties = tuple(dict(useful(expected.ties) + ties).items())
            unsaved = lacking.intersection(expected.unsaved)
    if ties:
        mapped = map_export(replace(request, tie=(*request.tie, *ties)), manifest, export_rows.keys())
    return replace(mapped, mapped=without_tensors(mapped.mapped, unsaved, UNSAVED))
