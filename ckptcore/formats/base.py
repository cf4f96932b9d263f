"""The seam every format fills: recognise a checkpoint, read its manifest, arrange output files.

A `Reader` turns headers and metadata into a `Manifest` and reads no tensor byte. A `Writer` is pure: given
what is to be written it says which literal bytes and which tensor slots make up each file. Moving bytes
is the job of `ckptcore.execution` alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ckptcore.core.box import Box
from ckptcore.core.manifest import Manifest, TensorSpec
from ckptcore.core.tree_paths import Path
from ckptcore.store import Readable, Stamped
from ckptcore.store.subfolder import SubStore
from ckptcore.topology.layout import Topology


@dataclass(frozen=True, slots=True)
class Source:
    """What a detector may look at.

    store: the folder. name: the one file of it that was named, or None for the folder itself.
    listing: relative path -> size. recover: whether an unfinished save may be taken as it is.
    keep_quantized: whether quantised weights stay as they are stored. seen: the files as they were when they
    were listed; of the place that was opened, not of folders below it. weights: ``master`` or ``module``, of
    formats that store trained weights twice; "" for what the format prefers.
    """

    store: Readable
    name: str | None
    listing: Mapping[str, int]
    recover: bool = False
    keep_quantized: bool = False
    weights: str = ""
    seen: Mapping[str, Stamped] = field(default_factory=dict)

    def below(self, folder: str) -> Source:
        """The source that a subfolder is; its paths are relative to it."""
        prefix = folder.rstrip("/") + "/"
        listing = {p.removeprefix(prefix): n for p, n in self.listing.items() if p.startswith(prefix)}
        store = SubStore(self.store, prefix)
        return Source(store, None, listing, self.recover, self.keep_quantized, self.weights)

    def file(self, name: str) -> Source:
        """The source that one file of this folder is."""
        listing = {name: self.listing[name]}
        return Source(self.store, name, listing, self.recover, self.keep_quantized, self.weights)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Why a source is taken for a format: sentences shown to the user.

    refines: more general formats that see their own files here too, and give way.
    """

    format: str
    because: tuple[str, ...]
    refines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a format can do here; columns of the support matrix.

    reads, writes: whether there is a reader, a writer. checksums: what the format itself stores to
    prove its bytes. objects: whether non-tensor values are carried.
    """

    reads: bool
    writes: bool
    checksums: str
    objects: bool


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a tensor's bytes go in a file: the tensor's position in the layout's list, first byte."""

    tensor: int
    start: int


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes that are known before any tensor is moved.

    start: first byte in the file. crc_at: (position in ``data``, tensor) pairs: four bytes there
    are the little-endian CRC-32 of that tensor's slot, filled in when the slot is written.
    """

    start: int
    data: bytes
    crc_at: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class FileLayout:
    """One output file: literals and slots tile ``[0, nbytes)`` exactly.

    path: relative to the output's root. tensors: positions into the list given to `arrange`, in
    file order; slots refer to positions in this tuple. commit: whether this file makes the folder
    loadable, and is published last. boxes: which box of each of ``tensors`` the slot holds; empty when
    all are whole.
    """

    path: str
    nbytes: int
    tensors: tuple[int, ...]
    slots: tuple[Slot, ...]
    literals: tuple[Literal, ...]
    commit: bool = False
    boxes: tuple[Box, ...] = ()


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What a writer is asked to lay out.

    tensors: what to write, names final. objects: key -> value tree in `ckptcore.core.object_tree` JSON form.
    paths: name of a tensor or object -> where it stood in the saved tree (dict keys are text, list
    positions are ints), where that is known.
    order: names as their modules had them in the saved state dict, where that is known better than by paths.
    single: name of the one output file, or None for a folder. max_file_bytes: tensor bytes a file
    of a folder may hold. topology: which rank of a mesh holds what, or None for a mesh of one.
    serialization: how a DCP folder's items are written, torch_save or safetensors.
    """

    tensors: Sequence[TensorSpec]
    objects: Mapping[str, Any] = field(default_factory=dict)
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    single: str | None = None
    max_file_bytes: int = 5_000_000_000
    topology: Topology | None = None
    serialization: str = "torch_save"
    order: Sequence[str] = ()


class Detect(Protocol):
    """Recognises a source by names and first bytes."""

    def __call__(self, source: Source, /) -> Evidence | None:
        """Return the evidence, or None for a source of another format."""


class Read(Protocol):
    """Reads the manifest of a source, and no tensor byte."""

    def __call__(self, source: Source, /) -> Manifest:
        """Return the manifest; raise an error of `ckptcore.errors` where there is none."""


class Arrange(Protocol):
    """Lays out output files. It is pure: workers move the bytes."""

    def __call__(self, request: Arrangement, /) -> Iterable[FileLayout]:
        """Return every file; raise an error of `ckptcore.errors` for what the format cannot hold."""


class Place(Protocol):
    """Says where the paths of a source go in an output that has a structure of its own."""

    def __call__(self, source: Manifest, /) -> Callable[[Path], Path]:
        """Return the rule; raise `UnsupportedFormat` when the source cannot be written so."""


@dataclass(frozen=True, slots=True)
class Reader:
    """How a format is read.

    read: the function. checksums: what the format itself stores to prove its bytes, for people.
    objects: whether it carries non-tensor values.
    """

    read: Read
    checksums: str = "none"
    objects: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """How one kind of output is laid out in files.

    arrange: the function. nests: whether it asks where names stand in the tree. place: where the paths of a
    source go, for an output that only some sources fit; None keeps every path.
    """

    arrange: Arrange
    nests: bool = False
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class Writer:
    """How a format is written.

    whole: what one process writes (consolidate, export). for_mesh: what the ranks of a mesh write (reshard),
    often the same; None where they cannot. single_file: whether ``whole`` is always one file, whatever the
    destination is called. serializations: the values of `--serialization` that it knows. hub: what an export
    writes, where that differs from ``whole``. adapter: the same of a LoRA adapter, or None.
    """

    whole: Layout
    for_mesh: Layout | None = None
    single_file: bool = False
    serializations: tuple[str, ...] = ("torch_save",)
    hub: Layout | None = None
    adapter: Layout | None = None


@dataclass(frozen=True, slots=True, eq=False)  # by identity: a plug-in's reader may be unhashable
class Format:
    """A format: its facts, how it is recognised, read and written.

    name: as in `--to` and `inspect`. title: for people. recognised_by: for the support matrix.
    versions: of the format itself, where it counts them; the first is what is written by default.
    Raises TypeError for what is no reader or writer, and for a writer without a reader.
    """

    name: str
    title: str
    recognised_by: str
    detect: Detect
    reader: Reader | None = None
    writer: Writer | None = None
    versions: tuple[str, ...] = ("1",)

    def __post_init__(self) -> None:
        for field_, kind in (("reader", Reader), ("writer", Writer)):
            value = getattr(self, field_)
            if value is not None and not isinstance(value, kind):
                raise TypeError(
                    f"{field_} of format {self.name!r} must be a {kind.__name__} (got {type(value).__name__})"
                )
        if self.writer is not None and self.reader is None:
            raise TypeError(
                f"format {self.name!r} has a writer and no reader: every output is read back before it is "
                "published"
            )

    @property
    def abilities(self) -> Abilities:
        """The format's columns of the support matrix."""
        read, written = self.reader is not None, self.writer is not None
        checksums, objects = (self.reader.checksums, self.reader.objects) if self.reader else ("none", False)
        return Abilities(read, written, checksums, objects)


@dataclass(frozen=True, slots=True)
class KnownFormat:
    """A format that is recognised only to be refused by name.

    detect: evidence sentences, or None. hint: the next step.
    """

    name: str
    title: str
    detect: Callable[[Source], tuple[str, ...] | None]
    hint: str


def natural(name: str) -> tuple[Any, ...]:
    """Sort key that counts: layers.2 before layers.10.

    >>> sorted(["l.10", "l.2"], key=natural)
    ['l.2', 'l.10']
    """
    parts = re.split(r"([0-9]+)", name)
    # By the number of digits first, as numbers are: a name may have more digits than `int` takes.
    # The name itself comes last: "a01" and "a1" count alike.
    rows = ((p.lstrip("0"), p) if i % 2 else ("", p) for i, p in enumerate(parts))
    return (*((len(n), n) if i % 2 else (0, p) for i, (n, p) in enumerate(rows)), (0, name))
