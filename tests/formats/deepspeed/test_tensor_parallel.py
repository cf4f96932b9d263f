"""Shards of tensor-parallel ranks are placed as DeepSpeed's own converter joins them."""

from __future__ import annotations

import numpy as np
import pytest

from ckptcore.core.object_tree import Named
from ckptcore.errors import MalformedCheckpoint, UnsupportedFormat
from ckptcore.formats.common.shard_pieces import Unmerged
from ckptcore.formats.deepspeed.tensor_parallel import TensorParallel


def joined(info: dict, name: str, shards: list[np.ndarray]) -> np.ndarray:
    rules = TensorParallel({"universal_checkpoint_info": info}, [name], len(shards))
    placed = rules.place(name, {rank: s.shape for rank, s in enumerate(shards)})
    shape = placed[0].shape
    out = np.full(shape, -1)
    for rank, placement in placed.items():
        assert placement.shape == shape
        for piece in placement.pieces:
            here = tuple(slice(o, o + n) for o, n in zip(piece.local.offset, piece.local.shape, strict=True))
            there = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.local.shape, strict=True))
            out[there] = shards[rank][here]
    return out


def fused(shape: tuple, widths: object, version: float = 0.4) -> dict:
    """The fields of DeepSpeed since 0.19.7: widths of ranks beside the shapes."""
    return {
        "universal_checkpoint_version": version,
        "parameter_with_sub_params": [{"patterns": ["layer"], "shape": shape, "partition_dim": 0}],
        "sub_param_shard_widths": {"layer": widths},
    }


FULL = np.arange(8 * 6).reshape(8, 6)
ROWS, COLUMNS = np.split(FULL, 2, 0), np.split(FULL, 2, 1)


@pytest.mark.parametrize(
    ("info", "shards", "truth"),
    [
        ({"vocabulary_parameter_patterns": ["x"]}, ROWS, FULL),
        ({"parameter_with_row_parallelism_patterns": [r".*\.weight$"]}, COLUMNS, FULL),
        ({"tp_replicated_parameter_patterns": [r"^layer\.weight$"]}, [FULL, FULL], FULL),
        ({"parameter_to_average_patterns": ["layer"]}, [FULL, FULL], FULL),
        ({"vocabulary_parameter_patterns": ["layer"], "original_vocab_size": 7}, ROWS, FULL[:7]),
        (
            {"parameter_with_2_sub_params_cat_dim_0": ["layer"]},
            [np.concatenate([FULL[:2], FULL[4:6]]), np.concatenate([FULL[2:4], FULL[6:]])],
            FULL,
        ),
        (
            {
                "parameter_with_sub_params": [
                    Named(
                        "record",
                        [
                            "SubparamShape",
                            {"patterns": ["layer"], "shape": ((4, 2, 2), 6), "partition_dim": 0},
                        ],
                    )
                ]
            },
            [FULL[[0, 1, 4, 6]], FULL[[2, 3, 5, 7]]],
            FULL,
        ),
        (
            {"parameter_with_sub_params": [{"patterns": ["layer"], "shape": (2, -1), "partition_dim": 0}]},
            [FULL[[0, 1, 4, 5]], FULL[[2, 3, 6, 7]]],
            FULL,
        ),
        (fused(((5, 3), 6), [[4, 1], [1, 2]]), [FULL[[0, 1, 2, 3, 5]], FULL[[4, 6, 7]]], FULL),
        (fused(((4, 4), 6), [[3, 1], [1, 3]]), [FULL[[0, 1, 2, 4]], FULL[[3, 5, 6, 7]]], FULL),
        (fused(((8,), 6), [[8, 0]]), [FULL, FULL[:0]], FULL),
    ],
    ids=[
        "rows",
        "columns",
        "replicated",
        "averaged",
        "padded vocabulary",
        "two halves",
        "sub-parameters",
        "equal sub-parameters by their number",
        "uneven sub-parameters",
        "uneven sub-parameters of even shards",
        "nothing on a rank",
    ],
)
def test_each_rule(info: dict, shards: list[np.ndarray], truth: np.ndarray) -> None:
    assert np.array_equal(joined(info, "layer.weight", shards), truth)


def affine(pieces_of: dict[int, list[dict]], shape=(8, 6), shard=(4, 6), version=1) -> dict:
    ranks = {r: {"shard_shape": list(shard), "pieces": p} for r, p in pieces_of.items()}
    params = {r"^layer\.weight$": {"logical_shape": list(shape), "ranks": ranks}}
    return {"affine_map": {"version": version, "params": params}}


def piece(shape, source, dest) -> dict:
    return {"shape": list(shape), "source": [source[0], list(source[1])], "dest": [dest[0], list(dest[1])]}


def test_affine_maps_of_boxes_and_of_interleaved_heads() -> None:
    plain = affine({r: [piece((4, 6), (r * 24, (6, 1)), (0, (6, 1)))] for r in (0, 1)})
    assert np.array_equal(joined(plain, "layer.weight", ROWS), FULL)
    columns = affine({r: [piece((8, 3), (r * 3, (6, 1)), (0, (3, 1)))] for r in (0, 1)}, shard=(8, 3))
    assert np.array_equal(joined(columns, "layer.weight", COLUMNS), FULL)
    # Rows 0, 2, 4, 6 on rank 0: a strided piece that is no box of the parameter.
    strided = affine({r: [piece((4, 6), (r * 6, (12, 1)), (0, (6, 1)))] for r in (0, 1)})
    assert np.array_equal(joined(strided, "layer.weight", [FULL[::2], FULL[1::2]]), FULL)


@pytest.mark.parametrize(
    ("info", "error"),
    [
        (affine({}, version=2), UnsupportedFormat),
        ({"affine_map": "x"}, UnsupportedFormat),
        ({"vocabulary_parameter_patterns": ["("]}, MalformedCheckpoint),
        ({"vocabulary_parameter_patterns": "layer"}, MalformedCheckpoint),
    ],
    ids=["a later version", "no map", "no expression", "no list"],
)
def test_rules_that_are_not_known_are_refused(info: dict, error: type[Exception]) -> None:
    with pytest.raises(error):
        TensorParallel({"universal_checkpoint_info": info}, ["layer.weight"], 2)


@pytest.mark.parametrize(
    "info",
    [
        {},
        affine({0: [piece((4, 6), (100, (6, 1)), (0, (6, 1)))], 1: []}),
        affine({0: [piece((4, 6), (0, (6, 1)), (0, (6, 1))) | {"scale": 2}], 1: []}),
        affine({0: [], 1: []}, shard=(5, 6)),
        fused(((4, 4), 6), [[3, 1]]),
        fused(((4, 4), 6), [[3, 2], [1, 3]]),
        fused(((4, 4), 6), [[2, 2], [1, 3]]),
        fused(((4, 4), 6), None),
        fused((2, 6), [[2, 2], [2, 2]]),
        fused(((4, 4), 5), [[2, 2], [2, 2]]),
        fused(((5, 3), 6), None, version=0.3),
    ],
    ids=[
        "nothing says how",
        "outside",
        "scaled",
        "another shard",
        "widths of one part",
        "widths of other parts",
        "widths of other shards",
        "no widths",
        "no sizes",
        "another shape",
        "uneven before widths were recorded",
    ],
)
def test_a_parameter_that_cannot_be_joined_is_named(info: dict) -> None:
    with pytest.raises(Unmerged):
        joined(info, "layer.weight", ROWS)


@pytest.mark.soak
def test_a_hostile_expression_ends() -> None:
    names = ["a" * 40 + "!"]
    with pytest.raises(MalformedCheckpoint):
        TensorParallel({"universal_checkpoint_info": {"vocabulary_parameter_patterns": ["(a+)+$"]}}, names, 2)
