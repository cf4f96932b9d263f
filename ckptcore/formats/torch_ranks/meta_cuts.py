"""Say how Meta's ranks cut each tensor of a Llama.

Rules and their order are those of llama-models/models/checkpoint.py (`reshard_mp`): what no pattern matches
is replicated. Two generations differ in the embeddings: fairscale's ParallelEmbedding of Llama 1 and 2 cuts
the width, VocabParallelEmbedding of Llama 3 and 4 the vocabulary. The shape decides: the embeddings of a rank
have the full width, or less.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckptcore.core.box import Box
from ckptcore.formats.common.shard_pieces import Piece, Shape, ShardPlacement, Unmerged, cut_parts, same

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
        return cut_parts(shape, dim, [(shape[dim], shape[dim] * self._degree)], self._degree, rank)

    def _parts(self, shape: Shape, parts: list[int], rank: int) -> ShardPlacement:
        return cut_parts(shape, 0, [(n, n * self._degree) for n in parts], self._degree, rank)

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
