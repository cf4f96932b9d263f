"""Say what a checkpoint is in a few lines: its parts, who wrote them, and which rank holds which pieces."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from ckptcore.core.manifest import Manifest
from ckptcore.errors import CkptError
from ckptcore.naming.model_part import ModelPart, find_model
from ckptcore.naming.training_state import StoredKinds
from ckptcore.utils.dataclass import dataclass

MODEL, OTHER, UNSURE = "model", "other", "tensors"
_PLACED = 4096  # tensors whose placement is looked at
# How trainers name the rank in a file's name, most specific first.
_RANKS = (
    re.compile(r"(?:^|/)__(\d{1,6})_\d+\.distcp$"),
    re.compile(r"(?:^|/)(?:zero_pp_rank|bf16_zero_pp_rank)_(\d{1,6})_"),
    re.compile(r"(?:^|/)mp_rank_(\d{1,3}(?:_\d{3})*)/"),
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
    """What `inspect` says first.

    Attributes:
        parts: The model first, then what is beside it.
        ranks: Ranks that the files name, in natural order.
        placements: How tensors are cut and where their pieces are, the most frequent first.
    """

    parts: tuple[PartSummary, ...]
    ranks: tuple[str, ...]
    placements: tuple[PieceOwners, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "parts": [part.as_dict() for part in self.parts],
            "ranks": list(self.ranks),
            "placements": [placement.as_dict() for placement in self.placements],
        }


def summarize(manifest: Manifest) -> Summary:
    """Return the summary of a checkpoint, from its manifest alone."""
    used = [manifest.files[file].path for file in sorted({*manifest.items.file.tolist()})]
    ranks = {rank for path in used if (rank := rank_of(path)) is not None}
    return Summary(tuple(_parts(manifest)), tuple(sorted(ranks, key=natural)), _placements(manifest))


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


def natural(text: str) -> tuple[tuple[int, int | str], ...]:
    """Return a key that sorts numbers in texts by their value."""
    return tuple((0, int(p)) if p.isdecimal() else (1, p) for p in re.split(r"(\d+)", text))


def _parts(manifest: Manifest) -> Iterable[PartSummary]:
    if not manifest.tensors:
        return
    try:
        model: ModelPart | None = find_model(manifest)
        note = model.because if model is not None else ""
    except CkptError as error:
        model, note = None, error.message
    kinds = StoredKinds(manifest)
    named: dict[str, list[int]] = {}
    for row, spec in enumerate(manifest.tensors):
        if model is not None and model.holds(spec.fqn):
            kind = MODEL
        else:
            kind = kinds.kind_of(spec.fqn) or (UNSURE if model is None else OTHER)
        named.setdefault(kind, []).append(row)
    first = (MODEL, UNSURE)
    for kind in sorted(named, key=lambda name: (name not in first, name == OTHER, name)):
        specs = [manifest.tensors[row] for row in named[kind]]
        dtypes: Counter[str] = Counter()
        for spec in specs:
            dtypes[spec.dtype] += spec.nbytes
        elements, nbytes = sum(spec.numel for spec in specs), dtypes.total()
        note_of_kind = note if kind in first else ""
        yield PartSummary(kind, len(specs), elements, nbytes, dict(dtypes.most_common()), note_of_kind)


def _placements(manifest: Manifest) -> tuple[PieceOwners, ...]:
    """Return how the first tensors are placed, those of several pieces and of several ranks."""
    first, chunks, files = manifest.chunks.first.tolist(), manifest.chunks, manifest.items.file
    owner = [rank_of(file.path) or file.path for file in manifest.files]
    alike: dict[tuple[tuple[tuple[int, int], ...], tuple[str, ...]], list[str]] = {}
    for row, spec in enumerate(manifest.tensors[:_PLACED]):
        rows = slice(first[row], first[row + 1])
        lo = chunks.lo[rows, : len(spec.shape)]
        pieces = sorted(zip(lo.tolist(), files[chunks.item[rows]].tolist(), strict=True))
        boxes: dict[tuple[int, ...], list[str]] = {}
        for offset, file in pieces:
            boxes.setdefault(tuple(offset), []).append(owner[file])
        counts = [len({*column}) for column in zip(*boxes, strict=True)]
        cuts = tuple((dim, number) for dim, number in enumerate(counts) if number > 1)
        owners = tuple("+".join(dict.fromkeys(names)) for names in boxes.values())
        alike.setdefault((cuts, owners), []).append(spec.fqn)
    placed = [PieceOwners(cuts, owners, len(names), names[0]) for (cuts, owners), names in alike.items()]
    return tuple(sorted(placed, key=lambda placement: (not placement.cuts, -placement.tensors)))


def spans(owners: Sequence[str]) -> str:
    """Return owners in a row, runs of numbers as spans.

    >>> spans(["0", "1", "2", "3", "8"]), spans(["0", "2"]), spans(["1"])
    ('0 to 3, 8', '0, 2', '1')
    """
    found: list[str] = []
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
        found += [f"{owners[start]} to {owners[end - 1]}"] if long else owners[start:end]
        start = end
    return ", ".join(found)
