"""Formats: what is at this URL, and who reads it? The whole world of formats is one tuple."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from functools import cache

from ckptcore.core.manifest import Manifest, StoredFile
from ckptcore.core.metadata_budget import metered, passing
from ckptcore.errors import AmbiguousModel, SourceUnreadable, UnknownFormat, UnsupportedFormat, finding
from ckptcore.formats.accelerate import format as accelerate
from ckptcore.formats.base import (
    Abilities,
    Arrangement,
    Evidence,
    FileLayout,
    Format,
    KnownFormat,
    Literal,
    Slot,
    Source,
)
from ckptcore.formats.common.rank_file_names import unread
from ckptcore.formats.dcp import format as dcp
from ckptcore.formats.huggingface import quantized as hf_quantized
from ckptcore.formats.huggingface import safetensors
from ckptcore.formats.huggingface import shards as hf_shards
from ckptcore.formats.lightning import format as lightning
from ckptcore.formats.megatron import dcp as megatron_dcp
from ckptcore.formats.megatron import legacy as megatron_legacy
from ckptcore.formats.megatron import torch_dist as mcore_dist
from ckptcore.formats.megatron import zarr as mcore_zarr
from ckptcore.formats.olmo import core as olmo_core
from ckptcore.formats.olmo import local as olmo_local
from ckptcore.formats.olmo import unsharded as olmo_unsharded
from ckptcore.formats.olmo import v01 as olmo_v01
from ckptcore.formats.plugins import Registry, register
from ckptcore.formats.refused import KNOWN
from ckptcore.formats.step_roots import beside_steps, located
from ckptcore.formats.torch_ranks import format as torch_ranks
from ckptcore.formats.torch_save import format as torch_save
from ckptcore.store import Stamped, Store, join_url, open_store, split_url
from ckptcore.store.subfolder import Noting

# In the order they are asked. A format is recognised by its own files, never by elimination.
FORMATS: tuple[Format, ...] = (
    dcp.FORMAT,
    mcore_dist.FORMAT,
    mcore_zarr.FORMAT,
    megatron_dcp.FSDP_DTENSOR,
    megatron_dcp.TORCH_DCP,
    megatron_legacy.FORMAT,
    olmo_core.FORMAT,
    olmo_local.FORMAT,
    olmo_unsharded.FORMAT,
    olmo_v01.FORMAT,
    hf_shards.FORMAT,
    hf_quantized.FORMAT,
    safetensors.FORMAT,
    lightning.FORMAT,
    accelerate.FORMAT,
    torch_ranks.FORMAT,
    torch_save.FORMAT,
)

__all__ = [
    "FORMATS",
    "KNOWN",
    "Abilities",
    "Arrangement",
    "Evidence",
    "FileLayout",
    "Format",
    "KnownFormat",
    "Literal",
    "Slot",
    "Source",
    "by_name",
    "detect",
    "located",
    "open_source",
    "read_manifest",
    "registry",
]


@cache
def registry() -> Registry:
    """Every format there is: this project's own, and those of installed packages."""
    return register(FORMATS)


def by_name(name: str, *, writes: bool = False) -> Format:
    """The format of a name; raises `UsageError` listing what there is."""
    return registry().find("write" if writes else "read", name)


def open_source(url: str, *, recover: bool = False, keep_quantized: bool = False) -> Source:
    """What is at a URL: a folder, or one file of a folder. Raises `SourceUnreadable`."""
    store = open_store(url)
    if store.local is not None:
        try:
            is_folder = store.local.is_dir()
        except OSError as error:  # a name too long, say
            raise SourceUnreadable(f"cannot open {url[:200]}: {error.strerror}") from error
        if is_folder:
            return _source(store, None, store.stamped(), recover, keep_quantized)
        parent, name = split_url(url)
        store = open_store(parent)
        seen = store.look(name)
        if seen is None:
            raise SourceUnreadable(f"{url} does not exist, or is no regular file")
        return _source(store, name, {name: seen}, recover, keep_quantized)
    parent, name = split_url(url)
    if "." in name:  # object stores have no folders to ask; a name with a suffix may be a file
        above = open_store(parent)
        seen = above.look(name)
        if seen is not None:
            return _source(above, name, {name: seen}, recover, keep_quantized)
    return _source(store, None, store.stamped(), recover, keep_quantized)


def _source(store: Store, name: str | None, seen: dict[str, Stamped], recover: bool, keep: bool) -> Source:
    return Source(store, name, {path: one.nbytes for path, one in seen.items()}, recover, keep, seen)


def detect(source: Source) -> tuple[Format, Evidence]:
    """The format of a source and why.

    Raises `UnsupportedFormat` for a format that is known but not read, `UnknownFormat` with what
    was found, and `AmbiguousModel` when the files of two formats lie in one folder.
    """
    for known in KNOWN:
        because = known.detect(source)
        if because:
            raise UnsupportedFormat(
                f"{_shown(source)} is {known.title}: {'; '.join(because)}", hint=known.hint, format=known.name
            )
    found = _recognised(source)
    if len(found) > 1:
        told = "; ".join(f"{f.name} ({', '.join(e.because)})" for f, e in found)
        raise AmbiguousModel(
            f"{_shown(source)} holds checkpoints of more than one format: {told}",
            hint="name the file that is meant, or move one of them away",
        )
    if found:
        return found[0]
    names = sorted(source.listing)
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    raise UnknownFormat(
        f"{_shown(source)} is no checkpoint that is known here; it holds: {shown or 'nothing'}"
    )


def read_manifest(source: Source) -> Manifest:
    """The manifest of a source, read by its format; the evidence goes into ``origin``.

    The files that the format's reader read from are noted in it (`Manifest.read`); those that were only
    opened to recognise a format are not.
    Raises `MetadataTooLarge` where its metadata takes more than `ckptcore.core.metadata_budget` allows.
    """
    with metered():
        return _read_manifest(source)


def _read_manifest(source: Source) -> Manifest:
    root = source
    source, way = located(source)
    if source is not root:
        _require_notes_only(root, source)
    found, evidence = detect(source)
    assert found.read is not None  # every entry of FORMATS reads
    names: set[str] = set()
    manifest = found.read(replace(source, store=Noting(source.store, names)))
    if source.name is None and (others := unread(source.listing, {f.path for f in manifest.files})):
        more = f" and {len(others) - 1} more" if others[1:] else ""
        message = f"{others[0]}{more} are named by rank, like another checkpoint's, and are not read"
        stray = finding("stray-file", "files", message, file=others[0])
        manifest = replace(manifest, findings=(*manifest.findings, stray))
    told = {"evidence": [*way, *evidence.because], "file": source.name}
    manifest = replace(manifest, origin={**manifest.origin, **told})
    return _as_listed(root, manifest, {join_url(source.store.url, name) for name in names})


def _as_listed(root: Source, manifest: Manifest, read: Set[str]) -> Manifest:
    """With what the listing, which is older than every read, saw of its files and of those beside them.

    read: URLs of the files that the reader read.
    """
    above = join_url(manifest.root, "")
    named = frozenset(url.removeprefix(above) for url in read if url.startswith(above))
    manifest = replace(manifest, read=named)
    if not above.startswith(join_url(root.store.url, "")):
        return manifest
    prefix = above.removeprefix(join_url(root.store.url, ""))
    seen = {at.removeprefix(prefix): one for at, one in root.seen.items() if at.startswith(prefix)}
    files = {f.path for f in manifest.files}
    stamps = {path: (seen[path].stamp, seen[path].ctime) for path in files if path in seen}
    beside = tuple(
        StoredFile(path, one.nbytes) for path, one in seen.items() if path not in files and path not in named
    )
    return replace(manifest, stamps=stamps, beside=beside)


def _recognised(source: Source) -> list[tuple[Format, Evidence]]:
    """The formats that see their own files in a source, without those that give way."""
    with passing():  # what was looked at is read again by the format that it is of
        found = [(f, e) for f in registry().formats if f.read and (e := f.detect(source)) is not None]
    general = {name for _, e in found for name in e.refines}
    return [(f, e) for f, e in found if f.name not in general]


def _require_notes_only(root: Source, below: Source) -> None:
    """Raises `AmbiguousModel` when a root of steps is a checkpoint itself: a tracker may be a stale one."""
    others = [(f, e) for f, e in _recognised(beside_steps(root)) if f.name != torch_save.FORMAT.name]
    if others:
        form, evidence = others[0]
        raise AmbiguousModel(
            f"{_shown(root)} holds {form.name} ({', '.join(evidence.because)}), and files that name "
            f"{_shown(below)} as the checkpoint",
            hint=f"name {_shown(below)}, or move one of the two away",
        )


def _shown(source: Source) -> str:
    return f"{source.store.url}/{source.name}" if source.name else source.store.url
