"""Read the model-parallel files of Meta's Llama: place each rank's tensors, one file at a time.

No file says how many there are. params.json does, with the rows of a rank's heads (`part_proof`).

Rules for how ranks cut a tensor, and their order, are those of llama-models/models/checkpoint.py
(`reshard_mp`): what no pattern matches is replicated. Two generations differ in the embeddings: fairscale's
ParallelEmbedding of Llama 1 and 2 cuts the width, VocabParallelEmbedding of Llama 3 and 4 the vocabulary. The
shape decides: the embeddings of a rank have the full width, or less.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from ckptcore.core.box import Box
from ckptcore.core.manifest import Manifest, TensorSpec
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.metadata_budget import passing
from ckptcore.core.object_tree import Refused
from ckptcore.encodings.pickle.torch_globals import StoredView
from ckptcore.encodings.torchzip.reader import Objects, Storages, read_objects
from ckptcore.errors import Finding, UnsupportedFormat, finding
from ckptcore.formats.base import Source, natural
from ckptcore.formats.common.part_proof import (
    PARAMS,
    json_beside,
    lacking_by_params,
    part_findings,
    ranks_by_params,
)
from ckptcore.formats.common.rank_file_names import equal_files
from ckptcore.formats.common.shard_pieces import (
    Piece,
    PlacedTensors,
    Shape,
    ShardPlacement,
    Unmerged,
    cut_parts,
    same,
)
from ckptcore.formats.common.trees import kind_of
from ckptcore.formats.torch_save.tree import TorchTree, add_odd_piece
from ckptcore.store.subfolder import FileRange

_MAX_LISTED = 20
EMBEDDINGS, HEAD, NORM = "tok_embeddings.weight", "output.weight", "norm.weight"
_EXPERTS = re.compile(r"feed_forward\.experts\.moe_w_(?P<kind>in_eD_F|swiglu_eD_F|out_eF_D)")
_ROWS = re.compile(
    r"feed_forward\.w2|feed_forward\.mlp\.fc2|attention\.wo|feed_forward\.w_out_shared_DF\.weight"
    r"|attn\.wo\.weight|mlp\.c_proj\.weight"
)
_COLUMNS = re.compile(
    r"output|feed_forward\.(?:w1|w3)|feed_forward\.mlp\.(?:fc1|fc3)|attention\.(?:wk|wq|wv|wqkv)\.weight"
    r"|feed_forward\.(?:w_in_shared_FD|w_swiglu_FD)|attn\.(?:wk|wq|wv)\.(?:weight|bias)"
    r"|mlp\.c_fc\.(?:weight|bias)|conv1\._linear\.weight|tok_embeddings\.weight|vision_projection\.weight"
)
_KEY_OR_VALUE = re.compile(r"^(?:.*\.)?layers\.\d+\.attention\.w[kv]\.weight$")


def read_ranks(source: Source, paths: Mapping[int, str]) -> Manifest:
    """Read the manifest of all ranks' files.

    Args:
        source: The folder.
        paths: Rank -> file, in the order of the ranks.

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
    return builder.build("meta", source.store.url, {"mesh": {"tp": ranks.degree}})


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
        self._tensors = PlacedTensors(builder)
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
                self._builder.report("rank-object", "files", message, fqn=name, file=path)
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
                self._builder.report("unmerged-tensor", "files", message, fqn=name, file=path)
            return None
        return placement if rank < self.degree else None

    def _place(
        self, tree: TorchTree, name: str, value: StoredView, placement: ShardPlacement | None, path: str
    ) -> None:
        item, view = tree.place(value, name)
        if placement is None:
            return
        spec = TensorSpec(name, value.dtype, placement.shape)
        if self._tensors.add(spec, placement, item, path, view):
            self.is_cut |= placement != same(value.shape)

    def unequal(self) -> Iterator[Finding]:
        """Yield findings for tensors that every rank has, and that one lacks; others are holes."""
        everywhere = frozenset[str]().union(*self._replicated.values())
        for path, names in self._replicated.items():
            for name in islice(sorted(everywhere - names, key=natural), _MAX_LISTED):
                message = f"{path} lacks {name}, which other ranks have"
                yield finding("mixed-saves", "files", message, fqn=name, file=path)


class Cuts:
    """The rules of one checkpoint.

    Args:
        params: Content of params.json; {} without one.
        shapes: Name -> shape of one rank's tensor.
        degree: Number of ranks.
    """

    def __init__(self, params: Mapping[str, Any], shapes: Mapping[str, Shape], degree: int) -> None:
        self._params, self._shapes, self._degree = params, shapes, degree

    def place(self, name: str, shape: Shape, rank: int) -> ShardPlacement:
        """Return where a rank's tensor is in the tensor of all ranks.

        Raises:
            Unmerged: Nothing says how the ranks cut it, or its shape contradicts what does.
        """
        if _EXPERTS.search(name):
            return self._experts(name, shape, rank)
        if _ROWS.search(name):
            if len(shape) < 2:
                raise Unmerged(f"a tensor of shape {list(shape)} has no columns to cut")
            return self._along(shape, len(shape) - 1, rank)
        if not _COLUMNS.search(name):
            return same(shape)
        if not shape:
            raise Unmerged("a scalar has no rows to cut")
        if name.endswith(EMBEDDINGS):
            return self._embeddings(name, shape, rank)
        if "w13" in name or "fc1_weight" in name:
            if shape[0] % 2:
                raise Unmerged(f"half of {shape[0]} rows is no number of rows")
            return self._parts(shape, [shape[0] // 2] * 2, rank)
        if "wqkv" in name:
            return self._fused_attention(name, shape, rank)
        if _KEY_OR_VALUE.match(name):
            self._require_keys(shape[0])
        return self._along(shape, 0, rank)

    def _along(self, shape: Shape, dim: int, rank: int) -> ShardPlacement:
        return cut_parts(shape, dim, [shape[dim]], self._degree, rank)

    def _parts(self, shape: Shape, parts: list[int], rank: int) -> ShardPlacement:
        return cut_parts(shape, 0, parts, self._degree, rank)

    def _fused_attention(self, name: str, shape: Shape, rank: int) -> ShardPlacement:
        """Place queries, keys and values, which a rank has behind each other."""
        out = self._shapes.get(name.replace("wqkv", "wo"))
        if out is None or len(out) != 2:
            raise Unmerged("attention.wo, which says how many of its rows are queries, is not there")
        queries = out[1]
        keys, odd = divmod(shape[0] - queries, 2)
        if keys <= 0 or odd:
            raise Unmerged(f"{shape[0]} rows are not {queries} queries, and keys and values")
        self._require_keys(keys)
        return self._parts(shape, [queries, keys, keys], rank)

    def _require_keys(self, rows: int) -> None:
        """Raise where ranks hold copies of the keys: there may be more ranks than heads of keys."""
        heads = self._params.get("n_kv_heads")
        width, of_queries = self._params.get("dim"), self._params.get("n_heads")
        size = self._params.get("head_dim")
        if type(size) is not int and type(width) is int and type(of_queries) is int and of_queries > 0:
            size = width // of_queries
        if type(heads) is int and type(size) is int and rows * self._degree != heads * size:
            raise Unmerged(
                f"{self._degree} ranks of {rows} rows are not the {heads} heads of {size} rows of params.json"
            )

    def _embeddings(self, name: str, shape: Shape, rank: int) -> ShardPlacement:
        head = self._shapes.get(name.replace(EMBEDDINGS, HEAD))
        norm = self._shapes.get(name.replace(EMBEDDINGS, NORM))
        stated = self._params.get("dim")
        width = stated if type(stated) is int else norm[0] if norm is not None and len(norm) == 1 else None
        if len(shape) != 2 or width is None:
            raise Unmerged("neither params.json nor the last norm says how wide embeddings are")
        if shape[1] == width:
            placement = self._along(shape, 0, rank)
        elif shape[1] * self._degree == width:
            placement = self._along(shape, 1, rank)
        else:
            raise Unmerged(f"{shape[1]} columns for {self._degree} ranks and a width of {width}")
        rows = placement.shape[0]
        expected_rows = head[0] * self._degree if head is not None and len(head) == 2 else self._vocabulary()
        if expected_rows is not None and rows != expected_rows:
            raise Unmerged(f"it would have {rows} rows, and the vocabulary has {expected_rows}")
        return placement

    def _vocabulary(self) -> int | None:
        size = self._params.get("vocab_size")  # -1 in Llama 2
        return size if type(size) is int and size > 0 else None

    def _experts(self, name: str, shape: Shape, rank: int) -> ShardPlacement:
        """Place experts, whose rows a file has behind each other: (expert, dim) by the other dim."""
        args = self._params.get("moe_args")
        count = args.get("num_experts") if isinstance(args, dict) else None
        if type(count) is not int or count < 1 or len(shape) != 2 or shape[0] % count:
            raise Unmerged(f"moe_args.num_experts of params.json does not divide its rows {list(shape)}")
        if "_out_" not in name:
            return self._along(shape, 1, rank)
        rows = shape[0] // count
        pieces = tuple(
            Piece(Box((e * rows, 0), (rows, shape[1])), ((e * self._degree + rank) * rows, 0))
            for e in range(count)
        )
        return ShardPlacement((shape[0] * self._degree, shape[1]), pieces, shape)
