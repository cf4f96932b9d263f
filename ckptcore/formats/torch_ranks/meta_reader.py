"""Read the model-parallel files of Meta's Llama: place each rank's tensors, one file at a time.

No file says how many there are. params.json does, with the rows of a rank's heads (`part_proof`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Manifest, TensorSpec, View, row_major
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.metadata_budget import passing
from ckptcore.core.object_tree import Refused
from ckptcore.encodings.pickle.torch_globals import StoredView
from ckptcore.encodings.torchzip.reader import Objects, Storages, read_objects
from ckptcore.errors import Finding, UnsupportedFormat, finding
from ckptcore.formats.base import Source, natural
from ckptcore.formats.common.equal_files import equal_files
from ckptcore.formats.common.part_proof import (
    PARAMS,
    json_beside,
    lacking_by_params,
    part_findings,
    ranks_by_params,
)
from ckptcore.formats.common.shard_pieces import Shape, ShardPlacement, Unmerged, same
from ckptcore.formats.common.trees import kind_of
from ckptcore.formats.torch_ranks.meta_cuts import Cuts
from ckptcore.formats.torch_save.tree import TorchTree, add_odd_piece
from ckptcore.store.subfolder import FileRange

_MAX_LISTED = 20


def read_ranks(source: Source, paths: Mapping[int, str], name: str) -> Manifest:
    """Read the manifest of all ranks' files.

    Args:
        source: The folder.
        paths: Rank -> file, in the order of the ranks.
        name: Name of the format.

    Raises:
        UnsupportedFormat: A file has no state dict.
        CkptError: What `read_objects` raises.
    """
    params, builder = json_beside(source, PARAMS), Builder()
    ranks: _Ranks | None = None
    for rank, path in paths.items():
        with passing():
            content = FileRange(source.store, path, 0, source.listing[path])
            objects = read_objects(content, path)
        state = objects.tree
        if not isinstance(state, dict):
            raise UnsupportedFormat(
                f"{path} must contain a state dict (got {kind_of(state)})",
                hint="load it where its class is installed, and save its state_dict()",
            )
        if ranks is None:
            shapes = {str(n): v.shape for n, v in state.items() if isinstance(v, StoredView)}
            degree = ranks_by_params(params, shapes) or max(paths) + 1
            ranks = _Ranks(builder, Cuts(params, shapes, degree), degree, shapes)
        ranks.add(rank, path, source.listing[path], objects)
    assert ranks is not None  # there are several files, or `detect` finds none
    builder.findings += part_findings(source, paths.values(), ranks.shapes, blobs=builder.blobs)
    builder.findings += ranks.unequal()
    builder.findings += lacking_by_params(source, params, ranks.names)
    # Files of ranks that only replicate are equal rightly.
    if ranks.is_cut:
        builder.findings += equal_files(source, ranks.storages)
    if PARAMS in source.listing:
        source.explain(PARAMS)
    return builder.build(name, source.store.url, {"mesh": {"tp": ranks.degree}})


class _Ranks:
    """Collect the tensors of all ranks in a builder.

    Attributes:
        degree: Number of ranks.
        shapes: Name -> shape, of the first rank's tensors.
        names: Names of the tensors of any rank.
        is_cut: Whether ranks hold different parts of a tensor.
        storages: Path and storages of each file.
    """

    def __init__(self, builder: Builder, cuts: Cuts, degree: int, shapes: Mapping[str, Shape]) -> None:
        self.degree, self.shapes = degree, shapes
        self.names: set[str] = set()
        self.is_cut = False
        self.storages: list[tuple[str, Storages]] = []
        self._builder, self._cuts = builder, cuts
        self._tensors: dict[str, tuple[int, TensorSpec]] = {}
        self._values: dict[str, Any] = {}
        self._replicated: dict[str, frozenset[str]] = {}  # file -> its tensors that every rank has
        self._unmerged: set[str] = set()

    def add(self, rank: int, path: str, size: int, objects: Objects) -> None:
        """Add the file of one rank."""
        tree = TorchTree(self._builder, self._builder.file(path, size), objects, path)
        copies = set[str]()
        for key, value in objects.tree.items():
            name = str(key)
            if isinstance(value, StoredView):
                self.names.add(name)
                placement = self._placement(name, value.shape, rank, path)
                if placement == same(value.shape):
                    copies.add(name)
                self._place(tree, name, value, placement, path)
            elif isinstance(value, Refused):
                self.names.add(name)
                copies.add(name)
                add_odd_piece(self._builder, name, value, path)
            elif name not in self._values:
                self._values[name] = value
                tree.add(name, value)
            elif self._values[name] != value:
                message = f"{name} of {path} is not that of the first rank, which is taken"
                self._builder.findings.append(finding("rank-object", "files", message, fqn=name, file=path))
        self._replicated[path] = frozenset(copies)
        self.storages.append((path, objects.storages))
        tree.require_all()

    def _placement(self, name: str, shape: Shape, rank: int, path: str) -> ShardPlacement | None:
        """Return where a rank's tensor is; None for one that cannot be joined, or of no rank of the job."""
        try:
            placement = self._cuts.place(name, shape, rank)
        except Unmerged as error:
            if name not in self._unmerged:
                self._unmerged.add(name)
                message = f"cannot join the model-parallel shards of {name}: {error}"
                self._builder.findings.append(
                    finding("unmerged-tensor", "files", message, fqn=name, file=path)
                )
            return None
        return placement if rank < self.degree else None

    def _place(
        self, tree: TorchTree, name: str, value: StoredView, placement: ShardPlacement | None, path: str
    ) -> None:
        item, view = tree.place(value, name)
        if placement is None:
            return
        spec = TensorSpec(name, value.dtype, placement.shape)
        if name not in self._tensors:
            self._tensors[name] = self._builder.tensor(spec, path), spec
        index, first = self._tensors[name]
        if spec != first:
            spec_text, first_text = (f"{s.dtype} {list(s.shape)}" for s in (spec, first))
            message = f"{name} is {spec_text} by {path}, and {first_text} by other ranks"
            self._builder.findings.append(finding("item-mismatch", "files", message, fqn=name, file=path))
            return
        self.is_cut |= placement != same(value.shape)
        strides, width = view.strides or row_major(value.shape), BY_NAME[value.dtype].itemsize
        for piece in placement.pieces:
            start = view.start + width * sum(i * s for i, s in zip(piece.local.offset, strides, strict=True))
            piece_view = View(
                start, strides if piece.local.shape != value.shape else view.strides, view.flags
            )
            self._builder.chunk(index, piece.offset, piece.local.shape, item, piece_view)

    def unequal(self) -> Iterator[Finding]:
        """Yield findings for tensors that every rank has, and that one lacks; others are holes."""
        everywhere = frozenset[str]().union(*self._replicated.values())
        for path, names in self._replicated.items():
            for name in islice(sorted(everywhere - names, key=natural), _MAX_LISTED):
                message = f"{path} lacks {name}, which other ranks have"
                yield finding("mixed-saves", "files", message, fqn=name, file=path)
