"""Recognise, read and lay out checkpoints of every format. One package a family; `FORMATS` lists them.

A reader turns names, sizes, headers and metadata into a `Manifest`; a writer lays out files. Neither moves
tensor bytes, opens a URL (it gets a `Source`) or knows the targets of other formats. This room may use core,
store, encodings, naming and topology, but not checking, planning or execution.

For users: `detect`, `open_source`, `read_manifest`, `read_as`, `by_name`, `registry`, `FORMATS`, `KNOWN`.
For plug-ins, stable from release to release together with `ckptcore.errors` and `ckptcore.testing`:

- what describes a format: `Format`, `Reader`, `Writer`, `Layout`, `Evidence`, `Source`, `Abilities`, and the
  protocols `Detect`, `Read`, `Arrange`, `Place`;
- what a reader makes: `Builder`, `Manifest`, `TensorSpec`, `Box`, `Item`, `Envelope`, `View`, `Blob`,
  `Unread`;
- what a writer gets and makes: `Arrangement`, `FileLayout`, `Slot`, `Literal`, `natural`.

Modules: `base` (the interface), `common` (shared by several families), `plugins` (the registry), `step_roots`
(folders of steps), `refused` (formats known only by name), `nearest_reading` (what opens in a source of no
known format).
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import cache, partial

from ckptcore.core.box import Box
from ckptcore.core.byte_ledger import ByteLedger
from ckptcore.core.manifest import Blob, Envelope, Item, Manifest, StoredFile, TensorSpec, Unread, View
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.metadata_budget import metered, passing
from ckptcore.errors import AmbiguousModel, SourceUnreadable, UnknownFormat, UnsupportedFormat, finding
from ckptcore.formats.accelerate.format import COPIES, with_copy
from ckptcore.formats.accelerate.format import FORMAT as ACCELERATE
from ckptcore.formats.base import (
    Abilities,
    Arrange,
    Arrangement,
    Detect,
    Evidence,
    FileLayout,
    FilePiece,
    Format,
    KnownFormat,
    Layout,
    Literal,
    Place,
    Read,
    Reader,
    Slot,
    Source,
    SourceRange,
    Thin,
    Thinned,
    Writer,
    natural,
    possible_formats,
)
from ckptcore.formats.common.carried_values import with_carried
from ckptcore.formats.common.files_beside import unread_weights
from ckptcore.formats.dcp.format import FORMAT as DCP
from ckptcore.formats.deepspeed.format import FORMAT as DEEPSPEED
from ckptcore.formats.deepspeed.format import STAGE2, STAGE3
from ckptcore.formats.diffusers import FORMAT as DIFFUSERS
from ckptcore.formats.huggingface.nanotron import FORMAT as NANOTRON
from ckptcore.formats.huggingface.quantized import FORMAT as HF_QUANTIZED
from ckptcore.formats.huggingface.safetensors import FORMAT as SAFETENSORS
from ckptcore.formats.huggingface.shards import FORMAT as HF_SHARDS
from ckptcore.formats.lightning.format import FORMAT as LIGHTNING
from ckptcore.formats.megatron.legacy import FORMAT as MEGATRON_LEGACY
from ckptcore.formats.megatron.torch_dist import FORMAT as MCORE_DIST
from ckptcore.formats.megatron.torch_dist import FSDP_DTENSOR, TORCH_DCP
from ckptcore.formats.megatron.zarr import FORMAT as MCORE_ZARR
from ckptcore.formats.olmo.core import FORMAT as OLMO_CORE
from ckptcore.formats.olmo.local import FORMAT as OLMO_LOCAL
from ckptcore.formats.olmo.unsharded import FORMAT as OLMO_UNSHARDED
from ckptcore.formats.olmo.v01 import FORMAT as OLMO_V01
from ckptcore.formats.plugins import Registry, register
from ckptcore.formats.refused import KNOWN
from ckptcore.formats.step_roots import beside_steps, located
from ckptcore.formats.torch_ranks.format import FORMAT as TORCH_RANKS
from ckptcore.formats.torch_ranks.format import META, TORCH_CHECKPOINTING
from ckptcore.formats.torch_save.format import FORMAT as TORCH_SAVE
from ckptcore.store import ReadObserver, Store, hub_hint, join_url, near_place, open_source_store, split_url
from ckptcore.store.file_status import FileStatus
from ckptcore.store.merged import MergedStore
from ckptcore.store.subfolder import RecordingStore
from ckptcore.utils.average_url import is_adapted, is_average
from ckptcore.utils.memory import reusing_memory
from ckptcore.utils.text import listed

WRAPPED = ".tensor_class"  # what the object of a tensor that wraps others ends with
# In the order of detection. A format is recognised by its own files, never by elimination.
FORMATS: tuple[Format, ...] = (
    DCP,
    MCORE_DIST,
    MCORE_ZARR,
    FSDP_DTENSOR,
    TORCH_DCP,
    MEGATRON_LEGACY,
    DEEPSPEED,
    STAGE2,
    STAGE3,
    OLMO_CORE,
    OLMO_LOCAL,
    OLMO_UNSHARDED,
    OLMO_V01,
    HF_SHARDS,
    NANOTRON,
    DIFFUSERS,
    HF_QUANTIZED,
    SAFETENSORS,
    LIGHTNING,
    META,
    ACCELERATE,
    TORCH_CHECKPOINTING,
    TORCH_RANKS,
    TORCH_SAVE,
)

__all__ = [
    "FORMATS",
    "KNOWN",
    "Abilities",
    "Arrange",
    "Arrangement",
    "Blob",
    "Box",
    "Builder",
    "Detect",
    "Envelope",
    "Evidence",
    "FileLayout",
    "FilePiece",
    "Format",
    "Item",
    "KnownFormat",
    "Layout",
    "Literal",
    "Manifest",
    "Place",
    "Read",
    "Reader",
    "Slot",
    "Source",
    "SourceRange",
    "TensorSpec",
    "Thin",
    "Thinned",
    "Unread",
    "View",
    "Writer",
    "by_name",
    "detect",
    "located",
    "natural",
    "open_source",
    "read_as",
    "read_manifest",
    "registry",
]


@cache
def registry() -> Registry:
    """Return the registry of all formats: this project's own and those of installed packages."""
    return register(FORMATS)


def by_name(name: str, *, writes: bool = False) -> Format:
    """Return the format with this name.

    Args:
        name: As in `--to` and in the output of `inspect`.
        writes: Whether the format must be writable; otherwise it must be readable.

    Raises:
        UsageError: No format has this name; the error lists the known ones.
    """
    return registry().find("write" if writes else "read", name)


def open_source(
    url: str, *, recover: bool = False, keep_quantized: bool = False, weights: str = "auto"
) -> Source:
    """Open a folder, or one file of a folder, and list it.

    Args:
        url: Local path or URL.
        recover: Whether an unfinished save may be read as it is.
        keep_quantized: Whether quantised weights keep their stored form.
        weights: Which of two copies of trained weights is the model, ``master``, ``module``, or
            ``auto`` for the one that the format prefers.

    Raises:
        SourceUnreadable: The URL does not exist, is no regular file, or cannot be opened.
    """

    def opened(store: Store, name: str | None, statuses: dict[str, FileStatus]) -> Source:
        listing = {path: status.nbytes for path, status in statuses.items()}
        return Source(store, name, listing, recover, keep_quantized, weights, statuses)

    store = open_source_store(url)
    if is_average(url):  # each input is opened and listed when it is read
        return opened(store, None, {})
    if isinstance(store, MergedStore):
        statuses = store.stamped()
        store.require_equal()
        return opened(store, None, statuses)
    if store.local is not None:
        try:
            is_folder = store.local.is_dir()
        except OSError as error:  # for example, a name that is too long
            raise SourceUnreadable(f"cannot open {url[:200]}: {error.strerror}") from error
        if is_folder:
            return opened(store, None, store.stamped())
        exists = store.local.exists()
        parent, name = split_url(url)
        store = open_source_store(parent)
        status = store.look(name)
        if status is None:
            why = "is neither a folder nor a regular file" if exists else "does not exist"
            raise SourceUnreadable(f"{url} {why}", hint=hub_hint(url) or near_place(url) or None)
        return opened(store, name, {name: status})
    parent, name = split_url(url)
    if "." in name:  # an object store cannot tell a folder from a file; a name with a suffix may be a file
        above = open_source_store(parent)
        status = above.look(name)
        if status is not None:
            return opened(above, name, {name: status})
    return opened(store, None, store.stamped())


def detect(source: Source) -> tuple[Format, Evidence]:
    """Return the format of a source, and the evidence for it.

    Raises:
        UnsupportedFormat: The format is known but not read.
        UnknownFormat: No format recognises the source; the error lists its files.
        AmbiguousModel: The folder has files of two formats.
    """
    # First, because some of them have files that look like those of a format that is read.
    for refused in possible_formats(KNOWN, source):
        because = refused.detect(source)
        if because:
            raise UnsupportedFormat(
                f"{_address(source)} is {refused.title}: {'; '.join(because)}",
                hint=refused.hint,
                format=refused.name,
            )
    recognised = _matching_formats(source)
    if len(recognised) > 1:
        formats = "; ".join(f"{f.name} ({', '.join(e.because)})" for f, e in recognised)
        raise AmbiguousModel(
            f"{_address(source)} contains checkpoints of more than one format: {formats}",
            hint="name the file to read, or move one checkpoint away",
        )
    if recognised:
        return recognised[0]
    from ckptcore.formats.nearest_reading import kinds_of_files

    names = sorted(source.listing)
    files = listed(names, 6)
    kinds = f" ({kinds_of_files(source)})" if len(names) > 1 else ""
    raise UnknownFormat(
        f"{_address(source)} is not a checkpoint of a known format; it contains: {files or 'nothing'}{kinds}"
    )


def read_manifest(source: Source) -> Manifest:
    """Detect the format of a source and read its manifest; the evidence goes into ``origin``.

    `Manifest.read` lists the files that the format's reader used, without those opened only for detection.

    Raises:
        MetadataTooLarge: The metadata takes more memory than `ckptcore.core.metadata_budget` allows.
        CkptError: What `detect` and the format's reader raise.
    """
    if is_adapted(source.store.url):
        from ckptcore.formats.average import read_adapted  # most sources are no sum

        return read_adapted(source, partial(_read_input, source))
    if is_average(source.store.url):
        from ckptcore.formats.average import read_average

        return read_average(source, partial(_read_input, source))
    with metered(), reusing_memory():
        return _read_manifest(source)


def _read_input(average: Source, url: str, observer: ReadObserver | None) -> Manifest:
    """Read the manifest of one input of an average."""
    source = open_source(
        url, recover=average.recover, keep_quantized=average.keep_quantized, weights=average.weights
    )
    source.store.observer = observer
    with closing(source.store):
        return read_manifest(source)


def _read_manifest(source: Source) -> Manifest:
    root = source
    try:
        source, way = located(source)
        return _of_format(root, source, way)
    except UnknownFormat as error:
        from ckptcore.formats.nearest_reading import what_opens

        openable, hint = what_opens(source, lambda inner: detect(located(inner)[0]))
        raise UnknownFormat(f"{error.message}{openable}", hint=hint or error.hint) from error


def _of_format(root: Source, source: Source, way: tuple[str, ...]) -> Manifest:
    """Read the manifest of a source that `located` found, by the sentences of ``way``."""
    copied = _require_notes_only(root, source) if source is not root else None
    detected, evidence = detect(source)
    manifest = read_as(detected, source) if copied is None else read_as(copied, root)
    absent = root.store.absent if isinstance(root.store, MergedStore) and not root.recover else ()
    if absent:
        message = f"a folder of the source does not exist or is empty: {listed(absent, 1)}"
        lacks = finding("not-complete", "files", message, hint="name the folder of every node")
        manifest = replace(manifest, findings=(*manifest.findings, lacks))
    origin = {**manifest.origin, "evidence": [*way, *evidence.because], "file": source.name}
    return _as_listed(root, replace(manifest, origin=origin))


def read_as(format: Format, source: Source) -> Manifest:
    """Read a source with the reader of one format, with an account of what it takes from which files."""
    assert format.reader is not None  # the caller asks for a format that is read
    ledger = ByteLedger()
    manifest = format.reader.read(replace(source, store=RecordingStore(source.store, ledger)))
    if not source.keep_quantized and any(blob.key.endswith(WRAPPED) for blob in manifest.blobs):
        from ckptcore.formats.dcp.wrapped_tensors import with_values

        manifest = with_values(manifest)
    above, opened = join_url(manifest.root, ""), join_url(source.store.url, "")
    if not above.startswith(opened):
        return manifest  # of a package that reads elsewhere
    ledger = ledger.below(above.removeprefix(opened))
    return replace(with_carried(manifest, ledger), ledger=ledger)


def _as_listed(root: Source, manifest: Manifest) -> Manifest:
    """Add what the root's listing, which is older than every read, has of files and their neighbours."""
    above = join_url(manifest.root, "")
    if not above.startswith(join_url(root.store.url, "")):
        return manifest
    prefix = above.removeprefix(join_url(root.store.url, ""))
    statuses = {
        file_path.removeprefix(prefix): status
        for file_path, status in root.seen.items()
        if file_path.startswith(prefix)
    }
    files, read = {f.path for f in manifest.files}, manifest.read
    stamps = {
        path: (statuses[path].stamp, statuses[path].settled_ctime)
        for path in files | read
        if path in statuses
    }
    other_files = [StoredFile(path, status.nbytes) for path, status in statuses.items() if path not in files]
    described = tuple(file for file in other_files if file.path in read)
    beside = tuple(file for file in other_files if file.path not in read)
    manifest = replace(manifest, stamps=stamps, described=described, beside=beside)
    return replace(manifest, findings=(*manifest.findings, *unread_weights(root, prefix, manifest)))


def _matching_formats(source: Source) -> list[tuple[Format, Evidence]]:
    """Return the formats that find their own files in a source, without those that another refines."""
    # The format that is chosen reads the same bytes again; several formats look at one header.
    with metered(), passing():
        possible = possible_formats(registry().formats, source)
        recognised = [(f, e) for f in possible if f.reader and (e := f.detect(source)) is not None]
    general = {name for _, e in recognised for name in e.refines}
    return [(f, e) for f, e in recognised if f.name not in general]


def _require_notes_only(root: Source, below: Source) -> Format | None:
    """Raise `AmbiguousModel` when a folder of steps is a checkpoint itself: its tracker may be stale.

    Return the format that reads both where the root has the Trainer's copy of DeepSpeed's save.
    """
    root_formats = [(f, e) for f, e in _matching_formats(beside_steps(root)) if f.name != TORCH_SAVE.name]
    folder = below.store.url.removeprefix(join_url(root.store.url, ""))
    if root_formats and all(form.name in COPIES for form, _ in root_formats):
        copied = with_copy(folder, root)
        if copied is not None:
            return copied
    if root_formats:
        form, evidence = root_formats[0]
        raise AmbiguousModel(
            f"{_address(root)} contains {form.name} ({', '.join(evidence.because)}), and files that name "
            f"{_address(below)} as the checkpoint",
            hint=f"name {_address(below)}, or move one of the two away",
        )
    return None


def _address(source: Source) -> str:
    return f"{source.store.url}/{source.name}" if source.name else source.store.url
