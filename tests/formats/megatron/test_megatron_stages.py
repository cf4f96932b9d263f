"""Number the layers of each stage when a rank's file is missing and only the arguments remain.

Counts and first layers were compared with megatron-core 0.16.1 (`get_num_layers_to_build`,
`get_transformer_layer_offset`): the cases here are of every kind that its arguments can spell.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from legacy_ranks import Case, expected, folder, ranks_of, require_equal, save

import ckptcore
from ckptcore.core.box import Box
from ckptcore.core.manifest import Manifest
from ckptcore.errors import MalformedCheckpoint

ACCOUNT = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
CASES = {
    "even": Case(pp=2, vpp=2, layers=8),
    "first and last": Case(
        pp=4,
        layers=7,
        counts=[[1, 2, 2, 2]],
        extra={"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 2},
    ),
    "first, of 0.11": Case(
        pp=3, layers=5, counts=[[3, 1, 1]], extra={"num_layers_in_first_pipeline_stage": 3}
    ),
    "last, two chunks": Case(
        pp=3, vpp=2, layers=8, counts=[[1, 1, 2], [1, 1, 2]], extra={"decoder_last_pipeline_num_layers": 4}
    ),
    "two stages, both given": Case(
        pp=2,
        layers=5,
        counts=[[1, 4]],
        extra={"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 4},
    ),
    "embedding and loss count": Case(pp=2, vpp=2, layers=6, counts=[[1, 2], [2, 1]], extra=ACCOUNT),
    "embedding alone": Case(
        pp=2, layers=3, counts=[[1, 2]], extra={"account_for_embedding_in_pipeline_split": True}
    ),
    "layout": Case(
        pp=3, layers=6, counts=[[2, 3, 1]], extra={"pipeline_model_parallel_layout": "Ett|t*3|t,L"}
    ),
    "layout, repeated": Case(
        pp=2,
        vpp=2,
        layers=7,
        counts=[[2, 2], [2, 1]],
        extra={"pipeline_model_parallel_layout": "Et*2|(tt|)*2t,L"},
    ),
    "layout, a list": Case(
        pp=2,
        vpp=2,
        layers=4,
        counts=[[1, 0], [2, 1]],
        extra={
            "pipeline_model_parallel_layout": [
                ["embedding", "decoder"],
                [],
                [" Decoder", "decoder"],
                ["decoder", "loss"],
            ]
        },
    ),
}


Place = tuple[str, Box, str, int, object]


def places(manifest: Manifest) -> set[Place]:
    """Return every box of every tensor of a layer, and where its bytes are."""
    out: set[Place] = set()
    for n, spec in enumerate(manifest.tensors):
        for chunk in manifest.chunks_of(n) if spec.fqn.startswith("decoder.layers.") else ():
            item = manifest.items[chunk.item]
            out.add((spec.fqn, chunk.box, manifest.files[item.file].path, item.start, chunk.view))
    return out


def require_same_without(case: Case, base: Path, stage: int) -> None:
    """Without the ranks of a stage, every remaining box is where it was in the complete save."""
    complete = require_equal(base, expected(case))
    lost = {f"{folder(case, *rank)}/model_optim_rng.pt" for rank in ranks_of(case) if rank[1] == stage}
    for path in lost:
        (base / path).unlink()
    left = ckptcore.open(str(base))
    assert {t.fqn: t for t in left.tensors if t.fqn.startswith("decoder.layers.")} == {
        t.fqn: t for t in complete.tensors if t.fqn.startswith("decoder.layers.")
    }
    kept = {p for p in places(complete) if p[2] not in lost}
    assert places(left) == kept
    assert kept
    assert {"hole", "missing-rank"} <= {f.code for f in ckptcore.check(left, "coverage").findings}


@pytest.mark.grid
@pytest.mark.parametrize("stage", [0, 1, -1])
@pytest.mark.parametrize("name", CASES)
def test_layers_of_the_remaining_ranks(name: str, stage: int, tmp_path: Path) -> None:
    case = CASES[name]
    require_same_without(case, save(case, tmp_path), stage % case.pp)


@pytest.mark.parametrize("spelled", ["text", "rows"])
def test_a_layout_that_is_an_object(spelled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parsed arguments of 0.13 and later hold a PipelineParallelLayerLayout, its rows LayerType."""
    import enum

    lead = "megatron.core.transformer"
    made = {}
    for name in (
        "megatron",
        "megatron.core",
        lead,
        f"{lead}.enums",
        f"{lead}.pipeline_parallel_layer_layout",
    ):
        made[name] = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, made[name])
    kinds: Any = enum.Enum("LayerType", "embedding loss encoder decoder mtp", module=f"{lead}.enums")
    layout: Any = type(
        "PipelineParallelLayerLayout", (), {"__module__": f"{lead}.pipeline_parallel_layer_layout"}
    )
    vars(made[f"{lead}.enums"])["LayerType"] = kinds
    vars(made[layout.__module__])["PipelineParallelLayerLayout"] = layout
    rows = [[kinds.embedding, kinds.decoder], [kinds.decoder, kinds.decoder, kinds.decoder, kinds.loss]]
    value = layout()
    value.input_data = "Et|ttt,L" if spelled == "text" else rows
    value.layout = [[row] for row in rows]
    case = Case(pp=2, layers=4, counts=[[1, 3]], extra={"pipeline_model_parallel_layout": value})
    require_same_without(case, save(case, tmp_path), 0)


def lose(case: Case, base: Path, stage: int) -> None:
    for rank in ranks_of(case):
        if rank[1] == stage:
            (base / folder(case, *rank) / "model_optim_rng.pt").unlink()


@pytest.mark.parametrize(
    "extra",
    [
        {"num_layers": None},
        {"num_layers": "4"},
        {"num_layers": 5},  # odd, and nothing says where the fifth is
        {"num_layers": 1 << 30},
        {"decoder_first_pipeline_num_layers": "1"},
        {"decoder_first_pipeline_num_layers": 9},
        {"decoder_last_pipeline_num_layers": -1},
        {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 2},
        {"pipeline_model_parallel_layout": "Ett|t|tL"},  # of three stages
        {"pipeline_model_parallel_layout": "Ett|tX"},
        {"pipeline_model_parallel_layout": "Ett|t*99999999"},
        {"pipeline_model_parallel_layout": "E(t*999)*999|t"},
        {"pipeline_model_parallel_layout": 7},
        {"pipeline_model_parallel_layout": [["decoder"], 4]},
    ],
    ids=repr,
)
def test_arguments_that_are_not_enough(extra: dict[str, Any], tmp_path: Path) -> None:
    case = Case(pp=2, layers=4, extra=extra)
    base = save(case, tmp_path)
    lose(case, base, 1)
    with pytest.raises(MalformedCheckpoint, match="cannot number the layers") as caught:
        ckptcore.open(str(base))
    assert "every rank" in caught.value.hint


def test_chunks_that_do_not_divide(tmp_path: Path) -> None:
    """Six layers on two stages are three each, which do not divide into two chunks."""
    case = Case(pp=2, vpp=2, layers=6, counts=[[2, 1], [1, 2]])
    base = save(case, tmp_path)
    assert ckptcore.check(ckptcore.open(str(base)), "bytes").ok  # the tensors of all ranks decide
    lose(case, base, 1)
    with pytest.raises(MalformedCheckpoint):
        ckptcore.open(str(base))
    other = Case(
        pp=2, vpp=2, layers=6, counts=[[2, 1], [1, 2]], extra={"decoder_first_pipeline_num_layers": 3}
    )
    base = save(other, tmp_path / "uneven")
    lose(other, base, 1)
    with pytest.raises(MalformedCheckpoint):
        ckptcore.open(str(base))
