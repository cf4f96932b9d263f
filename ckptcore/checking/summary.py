"""Say what a checkpoint is in a few lines: its parts, its step, and which rank holds which pieces."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np

from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Manifest, TensorSpec
from ckptcore.errors import CkptError
from ckptcore.formats import natural
from ckptcore.naming.model_part import find_model
from ckptcore.naming.rename import ModelPart
from ckptcore.naming.training_state import StoredKinds
from ckptcore.store import split_url
from ckptcore.utils.step_names import step_of

MODEL, OPTIMIZER, OTHER, UNSURE = "model", "optimizer", "other", "tensors"
# Names of a step in metadata and in plain values, and values that have one in them.
_STEPS = ("step", "global_step", "global_steps", "iteration")
_STEP_PARENTS = ("train_state.", "trainer.", "train.")
_PLACED = 100_000  # cut tensors whose pieces are looked at
_Cut: TypeAlias = tuple[tuple[tuple[int, int], ...], tuple[str, ...]]  # cuts and owners of `PieceOwners`
# How trainers name the rank in a file's name, most specific first.
_RANKS = (
    re.compile(r"(?:^|/)__(\d{1,6})_\d+\.distcp$"),
    re.compile(r"(?:^|/)(?:zero_pp_rank|bf16_zero_pp_rank)_(\d{1,6})_"),
    re.compile(r"(?:^|/)mp_rank_(\d{1,3}(?:_\d{3})*)/"),
    re.compile(r"(?:^|/)tp_rank_(\d{2,6}_pp_rank_\d{3,6})/"),
    re.compile(r"(?:^|[/_.-])rank[_-]?(\d{1,6})(?:[._/-]|$)"),
    re.compile(r"(?:^|/)model_world_size_\d+_rank_(\d{1,6})\."),
)


@dataclass(frozen=True, slots=True)
class PartSummary:
    """The tensors of one kind.

    Attributes:
        name: ``model``, a kind of training state such as ``optimizer``, ``other``, or ``tensors`` where it is
            not known which are the model's.
        tensors: How many.
        elements: Of all of them.
        nbytes: Their bytes.
        dtypes: Dtype -> bytes, the largest first.
        note: Where they are, or why it is not known.
    """

    name: str
    tensors: int
    elements: int
    nbytes: int
    dtypes: dict[str, int]
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "name": self.name,
            "tensors": self.tensors,
            "elements": self.elements,
            "bytes": self.nbytes,
            "dtypes": self.dtypes,
            "note": self.note,
        }


@dataclass(frozen=True, slots=True)
class PieceOwners:
    """Tensors that are cut alike, and whose pieces are in the files of the same ranks.

    Attributes:
        cuts: Dim -> number of pieces, for each dim that is cut.
        owners: The rank of each piece, the last dim fastest; the name of a file that names none.
        tensors: How many tensors are so.
        example: One of them.
    """

    cuts: tuple[tuple[int, int], ...]
    owners: tuple[str, ...]
    tensors: int
    example: str

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "cuts": [{"dim": dim, "pieces": pieces} for dim, pieces in self.cuts],
            "owners": list(self.owners),
            "tensors": self.tensors,
            "example": self.example,
        }


@dataclass(frozen=True, slots=True)
class Summary:
    """What `inspect`, `validate` and `plan` say first.

    Attributes:
        parts: The model first, then what is beside it.
        dtypes: Dtype -> bytes, over all parts.
        step: The step of the training that the checkpoint or its place states.
        ranks: Ranks that the files name, in natural order.
        files: Number of files that hold tensors.
        chunks: Number of stored chunks.
        objects: Number of plain values beside the tensors.
    """

    parts: tuple[PartSummary, ...]
    dtypes: dict[str, int]
    step: int | None
    ranks: tuple[str, ...]
    files: int
    chunks: int
    objects: int

    @property
    def without_optimizer(self) -> bool:
        """Whether it is certain that no tensor is of an optimizer."""
        names = {part.name for part in self.parts}
        return bool(names) and names.isdisjoint((OPTIMIZER, UNSURE))

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "parts": [part.as_dict() for part in self.parts],
            "step": self.step,
            "ranks": list(self.ranks),
        }


def summarize(manifest: Manifest) -> Summary:
    """Return the summary of a checkpoint, from its manifest alone."""
    used = [manifest.files[file].path for file in sorted({*manifest.items.file.tolist()})]
    ranks = {rank for path in used if (rank := rank_of(path)) is not None}
    parts, dtypes = tuple(_parts(manifest)), Counter[str]()
    for part in parts:
        dtypes.update(part.dtypes)
    return Summary(
        parts,
        dict(dtypes.most_common()),
        _step(manifest),
        tuple(sorted(ranks, key=natural)),
        len(used),
        len(manifest.chunks) + (len(manifest.inputs.chunks) if manifest.inputs is not None else 0),
        len(manifest.blobs) - len(manifest.unread),
    )


def _step(manifest: Manifest) -> int | None:
    """Return the step that the metadata, a plain value or the name of the folder or file states."""
    origin = manifest.origin
    stated = [origin.get(name) for name in _STEPS]
    stated += [facts.get("global_step") for facts in origin.values() if isinstance(facts, dict)]
    values = {blob.key: blob.tree for blob in manifest.blobs if blob.known}
    stated += [values.get(prefix + name) for prefix in ("", *_STEP_PARENTS) for name in _STEPS]
    steps = (step for step in stated if type(step) is int and step >= 0)
    return next(steps, step_of(split_url(manifest.root)[1]))


def rank_of(file: str) -> str | None:
    """Return the rank in a file's name, as it is spelled; None if the name has none.

    >>> rank_of("__3_0.distcp"), rank_of("iter_1/mp_rank_01_002/model.pt"), rank_of("model.safetensors")
    ('3', '01_002', None)
    """
    for pattern in _RANKS:
        matched = pattern.search(file)
        if matched is not None:
            return matched[1]
    return None


def _parts(manifest: Manifest) -> Iterable[PartSummary]:
    """Yield the parts of a checkpoint with their counts and bytes: the model first, what has no name last."""
    if not manifest.tensors:
        return
    try:
        model: ModelPart | None = find_model(manifest)
        note = model.because if model is not None else ""
    except CkptError as error:
        model, note = None, error.message
    named: dict[str, list[TensorSpec]] = {}
    if model is not None and not model.prefix and not model.beside:
        named = {MODEL: list(manifest.tensors)}
    else:
        kinds = StoredKinds(manifest)
        for spec in manifest.tensors:
            if model is not None and model.holds(spec.fqn):
                kind = MODEL
            else:
                kind = kinds.kind_of(spec.fqn) or (UNSURE if model is None else OTHER)
            named.setdefault(kind, []).append(spec)
    first = (MODEL, UNSURE)
    for kind in sorted(named, key=lambda name: (name not in first, name == OTHER, name)):
        elements: dict[str, int] = {}
        for spec in named[kind]:
            elements[spec.dtype] = elements.get(spec.dtype, 0) + prod(spec.shape)
        sizes = {dtype: number * BY_NAME[dtype].itemsize for dtype, number in elements.items()}
        dtypes = dict(sorted(sizes.items(), key=lambda row: -row[1]))
        yield PartSummary(
            kind,
            len(named[kind]),
            sum(elements.values()),
            sum(sizes.values()),
            dtypes,
            note if kind in first else "",
        )


def piece_owners(manifest: Manifest) -> tuple[PieceOwners, ...]:
    """Return how tensors are cut and who holds the pieces: of those that are cut, the first ones."""
    chunks, files = manifest.chunks, manifest.items.file
    owner = [rank_of(file.path) or file.path for file in manifest.files]
    alike: dict[_Cut, tuple[int, str]] = {}  # -> how many tensors, and one of them
    pieces_of = chunks.first[1:] - chunks.first[:-1]
    alone = np.flatnonzero(pieces_of == 1)  # most tensors of most checkpoints
    file_of = files[chunks.item[chunks.first[:-1][alone]]]
    for file in sorted({*file_of.tolist()}):
        rows = alone[file_of == file]
        key: _Cut = (), (owner[file],)
        number, example = alike.get(key, (0, manifest.tensors[int(rows[0])].fqn))
        alike[key] = number + len(rows), example
    file_of_chunk, first = files[chunks.item], chunks.first.tolist()
    cut_of: dict[tuple[int, bytes, bytes], _Cut] = {}  # many tensors have the same boxes in the same files
    for row in np.flatnonzero(pieces_of > 1)[:_PLACED].tolist():
        chunk_rows = slice(first[row], first[row + 1])
        spec, lo, chunk_files = manifest.tensors[row], chunks.lo[chunk_rows], file_of_chunk[chunk_rows]
        boxes = len(spec.shape), lo.tobytes(), chunk_files.tobytes()
        if boxes not in cut_of:
            cut_of[boxes] = _cut(
                lo[:, : len(spec.shape)].tolist(), [owner[file] for file in chunk_files.tolist()]
            )
        number, example = alike.get(cut_of[boxes], (0, spec.fqn))
        alike[cut_of[boxes]] = number + 1, example
    placed = [PieceOwners(cuts, owners, *of) for (cuts, owners), of in alike.items()]
    return tuple(sorted(placed, key=lambda placement: (not placement.cuts, -placement.tensors)))


def _cut(offsets: Sequence[Sequence[int]], owners: Sequence[str]) -> _Cut:
    """Return how boxes cut a tensor, and who holds each piece. offsets, owners: of each box."""
    pieces: dict[tuple[int, ...], list[str]] = {}
    for offset, owner in sorted(zip(offsets, owners, strict=True)):
        pieces.setdefault(tuple(offset), []).append(owner)
    counts = [len({*column}) for column in zip(*pieces, strict=True)]
    cuts = tuple((dim, number) for dim, number in enumerate(counts) if number > 1)
    return cuts, tuple("+".join(dict.fromkeys(names)) for names in pieces.values())


def spans(owners: Sequence[str]) -> str:
    """Return owners in a row, runs of numbers as spans.

    >>> spans(["0", "1", "2", "3", "8"]), spans(["0", "2"]), spans(["1"])
    ('0 to 3, 8', '0, 2', '1')
    """
    parts: list[str] = []
    start = 0
    for end in range(1, len(owners) + 1):
        follows = (
            end < len(owners)
            and owners[end].isdecimal()
            and owners[end - 1].isdecimal()
            and int(owners[end]) == int(owners[end - 1]) + 1
        )
        if follows:
            continue
        long = end - start > 2
        parts += [f"{owners[start]} to {owners[end - 1]}"] if long else owners[start:end]
        start = end
    return ", ".join(parts)
