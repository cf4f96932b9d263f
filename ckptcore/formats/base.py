"""Define the interface of a format: recognise a checkpoint, read its manifest, arrange output files.

A `Reader` turns headers and metadata into a `Manifest` and reads no tensor bytes. A `Writer` is pure: from an
`Arrangement` it computes the literal bytes and the tensor slots of each file. Only `ckptcore.execution` moves
bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

# Formats of other packages import these from here.
from ckptcore.core.file_layout import FileLayout as FileLayout
from ckptcore.core.file_layout import Literal as Literal
from ckptcore.core.file_layout import Slot as Slot
from ckptcore.core.manifest import Manifest, TensorSpec
from ckptcore.core.tree_paths import Path
from ckptcore.store import Readable
from ckptcore.store.file_status import FileStatus
from ckptcore.store.subfolder import FileRange, SubStore, explain
from ckptcore.topology.layout import Topology


@dataclass(frozen=True, slots=True)
class Source:
    """A folder or a file that a detector and a reader may look at.

    Attributes:
        store: The folder.
        name: The one file of the folder that the user named, or None for the folder itself.
        listing: Relative path -> size in bytes.
        recover: Whether an unfinished save may be read as it is.
        keep_quantized: Whether quantised weights keep their stored form.
        weights: Which of two copies of trained weights is the model, ``master``, ``module``, or
            ``auto`` for the one that the format prefers.
        seen: Relative path -> state of the file when it was listed. Empty for a folder below the opened one.
    """

    store: Readable
    name: str | None
    listing: Mapping[str, int]
    recover: bool = False
    keep_quantized: bool = False
    weights: str = "auto"
    seen: Mapping[str, FileStatus] = field(default_factory=dict)

    def below(self, folder: str) -> Source:
        """Return a subfolder as a source of its own, with paths relative to it."""
        prefix = folder.rstrip("/") + "/"
        listing = {p.removeprefix(prefix): n for p, n in self.listing.items() if p.startswith(prefix)}
        store = SubStore(self.store, prefix)
        return Source(store, None, listing, self.recover, self.keep_quantized, self.weights)

    def explain(self, path: str, start: int = 0, end: int | None = None) -> None:
        """Record that the reader has read bytes of a file, all by default, and takes what they say.

        Payloads need no record: the manifest has them as items. Encodings record what they read themselves.
        """
        explain(self.store, path, start, self.listing[path] if end is None else end)

    def carry(self, path: str, name: str, values: Mapping[str, Any], odd: Collection[str] = ()) -> None:
        """Record values of a file that the reader does not take; they become an object called ``name``.

        Args:
            path: The file.
            name: Name of the object; one of several files is called ``name`` where they agree.
            values: Key -> decoded value (`ckptcore.core.object_tree`).
            odd: Those of the keys that the reader knows, with values of another type; a finding names them.
        """
        FileRange(self.store, path, 0, 0).carry(name, values, odd)

    def file(self, name: str) -> Source:
        """Return one file of this folder as a source of its own."""
        listing = {name: self.listing[name]}
        return Source(self.store, name, listing, self.recover, self.keep_quantized, self.weights)


@dataclass(frozen=True, slots=True)
class Evidence:
    """The reasons why a source has a format.

    Attributes:
        format: Name of the format.
        because: Sentences for the user. Like messages of findings they are part of `Manifest.digest`:
            rewording them gives unchanged checkpoints another digest.
        refines: More general formats that recognise the same files and give way to this one.
    """

    format: str
    because: tuple[str, ...]
    refines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Abilities:
    """What ckptcore can do with a format; columns of the support matrix.

    Attributes:
        reads: Whether there is a reader.
        writes: Whether there is a writer.
        checksums: The checksums that the format itself stores.
        objects: Whether non-tensor values are carried.
    """

    reads: bool
    writes: bool
    checksums: str
    objects: bool


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The request that a writer lays out.

    Attributes:
        tensors: What to write, under final names.
        objects: Key -> value tree in the JSON form of `ckptcore.core.object_tree`.
        paths: Name of a tensor or object -> its path in the saved tree, where known. Dict keys are text,
            list positions are ints.
        single: Name of the one output file, or None for a folder.
        max_file_bytes: Tensor bytes that one file of a folder may hold.
        topology: Which rank of a mesh has which boxes, or None for a mesh of one.
        serialization: Encoding of the items of a DCP folder: torch_save or safetensors.
        order: Names in the order of the saved state dict, where known better than from ``paths``.
        stem: What the names of files of weights begin with, where a library finds them by it.
    """

    tensors: Sequence[TensorSpec]
    objects: Mapping[str, Any] = field(default_factory=dict)
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    single: str | None = None
    max_file_bytes: int = 5_000_000_000
    topology: Topology | None = None
    serialization: str = "torch_save"
    order: Sequence[str] = ()
    stem: str = "model"


class Detect(Protocol):
    """Recognise a source by file names and first bytes."""

    def __call__(self, source: Source, /) -> Evidence | None:
        """Return the evidence, or None for a source of another format."""


class Read(Protocol):
    """Read the manifest of a source, and no tensor bytes."""

    def __call__(self, source: Source, /) -> Manifest:
        """Return the manifest; raise an error of `ckptcore.errors` when the source has none."""


class Arrange(Protocol):
    """Lay out output files. The function is pure: workers move the bytes."""

    def __call__(self, request: Arrangement, /) -> Iterable[FileLayout]:
        """Return every file; raise an error of `ckptcore.errors` for what the format cannot hold."""


@dataclass(frozen=True, slots=True)
class SourceRange:
    """Bytes of a file of the source.

    Attributes:
        path: The file, relative to the root of the checkpoint.
        start: First byte.
        nbytes: Bytes.
    """

    path: str
    start: int
    nbytes: int


FilePiece = SourceRange | bytes


@dataclass(frozen=True, slots=True)
class Thinned:
    """How the files of a checkpoint change when names are left out of it.

    Attributes:
        files: Path -> the pieces that the file consists of; () for a file that goes. All others stay.
    """

    files: Mapping[str, tuple[FilePiece, ...]]


class Thin(Protocol):
    """Leave names of tensors and objects out of the files of a checkpoint, in its own format."""

    def __call__(self, source: Source, manifest: Manifest, drop: frozenset[str], /) -> Thinned:
        """Return the files that change; raise `UnsupportedFormat` for files that cannot be cut."""


class Place(Protocol):
    """Map the paths of a source to those of an output that has a structure of its own."""

    def __call__(self, source: Manifest, /) -> Callable[[Path], Path]:
        """Return the mapping; raise `UnsupportedFormat` when the output cannot hold the source."""


@dataclass(frozen=True, slots=True)
class Reader:
    """How a format is read.

    Attributes:
        read: The function that reads a manifest.
        checksums: The checksums that the format itself stores, as text for people.
        objects: Whether the format carries non-tensor values.
        several: Where a source has several models, which ``origin`` names: called with model -> the stem of
            its files, it returns the layout of all of them as one folder, for an export.
    """

    read: Read
    checksums: str = "none"
    objects: bool = False
    several: Callable[[Mapping[str, str]], Layout] | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """How one kind of output is laid out in files.

    Attributes:
        arrange: The function that lays out the files.
        nests: Whether the layout needs the paths of names in the saved tree.
        place: Maps the paths of a source, for an output that only some sources fit; None keeps every path.
        values: Which classes of plain values the files keep: "" for all, "trainers" for those of a pickle
            that trainers load, "libraries" for a pickle without classes of trainers, "plain" for one
            without any.
        torch_load: Whether people open the files with `torch.load`, which needs weights_only=False
            for classes.
        model_folder: Folder of the output for config and tokenizer, which are carried there; empty: none.
        flattens: Whether tensors inside an object get names of their own, and the object is not stored.
        repads: Whether loaders of the output accept a vocabulary that is padded for another tp.
    """

    arrange: Arrange
    nests: bool = False
    place: Place | None = None
    values: str = ""
    torch_load: bool = False
    model_folder: str = ""
    flattens: bool = False
    repads: bool = False


@dataclass(frozen=True, slots=True)
class Writer:
    """How a format is written.

    Attributes:
        whole: What one process writes (consolidate, export).
        for_mesh: What the ranks of a mesh write (reshard), often the same; None when the format has no such
            output.
        single_file: Whether ``whole`` is always one file, whatever the name of the destination.
        serializations: The supported values of `--serialization`.
        hub: What an export writes, when it differs from ``whole``.
        adapter: What an export of a LoRA adapter writes, or None.
        component: What an export of a diffusers model writes, or None.
        world: World of the names that loaders of the format look for, as `ckptcore.naming.worlds` has it;
            "" where they look for those of any module.
        starts: World of a trainer's names -> what is written under those that a map made, for a run to begin
            from; other worlds have what ``whole`` and ``for_mesh`` write.
        like: Returns the layout of a source that is saved in another way than most of its format; None for
            one that is not.
    """

    whole: Layout
    for_mesh: Layout | None = None
    single_file: bool = False
    serializations: tuple[str, ...] = ("torch_save",)
    hub: Layout | None = None
    adapter: Layout | None = None
    world: str = ""
    like: Callable[[Manifest], Layout | None] | None = None
    component: Layout | None = None
    starts: Mapping[str, Layout] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)  # by identity: a plug-in's reader may be unhashable
class Format:
    """A format: its facts, and how it is recognised, read and written.

    Attributes:
        name: As in `--to` and in the output of `inspect`.
        title: Name for people.
        recognised_by: Text for the support matrix.
        detect: The function that recognises a source.
        reader: How it is read, or None.
        writer: How it is written, or None.
        versions: Versions of the format itself, if it has any; the first is written by default.
        suffixes: What the names of its files end with behind their last dots, as `suffixes_of` returns it:
            in a folder without any of them ``detect`` is not asked. Empty where names may end with anything.
        thin: What leaves names out in place, for trainers that load the rest; or why that is not possible.

    Raises:
        TypeError: ``reader`` or ``writer`` has another type, or there is a writer without a reader.
    """

    name: str
    title: str
    recognised_by: str
    detect: Detect
    reader: Reader | None = None
    writer: Writer | None = None
    versions: tuple[str, ...] = ("1",)
    suffixes: frozenset[str] = frozenset()
    thin: Thin | str = "no loader of it is known to take a part"

    def __post_init__(self) -> None:
        for field_, kind in (("reader", Reader), ("writer", Writer)):
            value = getattr(self, field_)
            if value is not None and not isinstance(value, kind):
                raise TypeError(
                    f"{field_} of format {self.name!r} must be a {kind.__name__} (got {type(value).__name__})"
                )
        if self.writer is not None and self.reader is None:
            raise TypeError(
                f"format {self.name!r} must have a reader, because it has a writer: every output is read "
                "before it is published"
            )

    @property
    def abilities(self) -> Abilities:
        """Return the format's columns of the support matrix."""
        read, written = self.reader is not None, self.writer is not None
        checksums, objects = (self.reader.checksums, self.reader.objects) if self.reader else ("none", False)
        return Abilities(read, written, checksums, objects)


@dataclass(frozen=True, slots=True)
class KnownFormat:
    """A format that is recognised only to refuse it by name.

    Attributes:
        name: Short name, for programs.
        title: Name for people.
        detect: Returns sentences of evidence, or None for another source.
        hint: The next step for the user.
        suffixes: As those of `Format`.
    """

    name: str
    title: str
    detect: Callable[[Source], tuple[str, ...] | None]
    hint: str
    suffixes: frozenset[str] = frozenset()


def suffixes_of(paths: Iterable[str]) -> frozenset[str]:
    """Return what names of files end with behind their last dots; a name without a dot as it is.

    >>> sorted(suffixes_of(["a/.metadata", "a.b/latest", "model.index.json", "c/m.pt"]))
    ['json', 'latest', 'metadata', 'pt']
    """
    return frozenset(path[path.rfind("/") + 1 :].rpartition(".")[2] for path in paths)


_Asked = TypeVar("_Asked", Format, KnownFormat)


def possible_formats(formats: Iterable[_Asked], source: Source) -> list[_Asked]:
    """Return the formats that a folder may have by the suffixes of its files, or all for a named file."""
    if source.name is not None:
        return list(formats)
    present = suffixes_of(source.listing)
    return [f for f in formats if not f.suffixes or not present.isdisjoint(f.suffixes)]


_NUMBER = re.compile(r"([0-9]+)")


def natural(name: str) -> tuple[Any, ...]:
    """Return a sort key that orders numbers by value: layers.2 before layers.10.

    >>> sorted(["l.10", "l.2"], key=natural)
    ['l.2', 'l.10']
    """
    # Compare the number of digits first: a name may have more digits than `int` accepts.
    # The name itself comes last: "a01" and "a1" have equal numbers.
    parts = _NUMBER.split(name)
    digits = [part.lstrip("0") for part in parts[1::2]]
    key: list[int | str] = [0] * (2 * len(parts) + 2)
    key[1:-2:4] = parts[::2]
    key[2:-2:4] = map(len, digits)
    key[3:-2:4] = digits
    key[-1] = name
    return tuple(key)
