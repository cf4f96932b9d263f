"""Merge legacy Megatron-LM folders of every kind, and compare with tensors split by hand."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from legacy_ranks import HEADS, Case, E, V, expected, full_model, local_layer, require_equal, save

import ckptcore
from ckptcore.errors import CkptError, DamagedCheckpoint, MalformedCheckpoint, UnsupportedFormat

CASES = {
    "tp2": Case(tp=2),
    "tp4-pp2": Case(tp=4, pp=2),
    "pp2-vpp2": Case(pp=2, vpp=2),
    "tp2-pp2-vpp2-8": Case(tp=2, pp=2, vpp=2, layers=8),
    "te-names": Case(tp=2, norms="fused"),
    "bias-ungated": Case(tp=2, bias=True, gated=False),
    "bias-gated": Case(tp=2, bias=True),
    "uneven": Case(
        pp=3,
        layers=5,
        counts=[[1, 3, 1]],
        extra={"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 1},
    ),
    "layout": Case(
        pp=2, vpp=2, layers=5, counts=[[2, 1], [2, 0]], extra={"pipeline_model_parallel_layout": "Ett|t|tt|L"}
    ),
    "tied": Case(tp=2, pp=2, tied=True),
    "tied-pp1": Case(tp=2, tied=True),
    "moe-ep2": Case(ep=2, experts="sequential"),
    "moe-tp2-ep2": Case(tp=2, ep=2, experts="sequential"),
    "moe-tp2-pp2-ep4-te": Case(tp=2, pp=2, ep=4, experts="te", norms="fused"),
    "moe-grouped": Case(tp=2, ep=2, experts="grouped"),
    "moe-grouped-ungated": Case(tp=2, experts="grouped", gated=False),
    "moe-etp1": Case(tp=2, ep=2, experts="te", etp=1, norms="fused"),
    "latent": Case(tp=2, latent=True),
    "latent-copied": Case(tp=2, pp=2, latent=True, copied=True),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_are_merged(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    save(case, tmp_path)
    manifest = require_equal(tmp_path, expected(case))
    assert manifest.format == "megatron_legacy"
    assert manifest.origin["mesh"] == {"tp": case.tp, "pp": case.pp, "ep": case.ep, "vpp": case.vpp}


def test_layers_of_two_kinds_are_separate_tensors(tmp_path: Path) -> None:
    """A dense first layer before layers of experts: distributed checkpoints store one tensor per layer."""
    dense, moe = Case(layers=1), Case(layers=2, experts="sequential")
    around, first = full_model(dense)
    rest = full_model(moe)[1]
    layers = [*first, *rest]
    model = {f"decoder.layers.0.{k}": v for k, v in local_layer(dense, first[0], 0, 0).items()}
    for n, layer in enumerate(rest, 1):
        model |= {f"decoder.layers.{n}.{k}": v for k, v in local_layer(moe, layer, 0, 0).items()}
    args = Case(layers=3, experts="sequential", extra={"moe_layer_freq": [0, 1, 1]}).args
    path = tmp_path / "mp_rank_00"
    path.mkdir()
    torch.save(
        {"args": args, "checkpoint_version": 3.0, "iteration": 1, "model": {**around, **model}},
        path / "model_optim_rng.pt",
    )
    manifest = ckptcore.open(str(tmp_path))
    got = ckptcore.read(manifest, "decoder.layers.2.mlp.experts.experts.linear_fc1.weight")
    assert torch.equal(got, torch.stack([layers[2][f"mlp.experts.{e}.linear_fc1.weight"] for e in range(E)]))
    assert torch.equal(
        ckptcore.read(manifest, "decoder.layers.0.mlp.linear_fc1.weight"), layers[0]["mlp.linear_fc1.weight"]
    )


# --- damaged saves --------------------------------------------------------------------------------


def codes(url: Path, level: str = "bytes") -> set[str]:
    try:
        report = ckptcore.check(ckptcore.open(str(url)), level=level)
    except DamagedCheckpoint as error:
        return {error.code}
    return {f.code for f in report.findings if f.severity == "error"}


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    base = save(Case(tp=2, pp=2), tmp_path)
    for path in (base / "mp_rank_01_001").iterdir():
        path.unlink()
    findings = ckptcore.open(str(base)).findings
    assert [f.file for f in findings if f.code == "missing-rank"] == ["mp_rank_01_001/model_optim_rng.pt"]
    assert "hole" in codes(base)


def test_a_missing_stage_stays_missing(tmp_path: Path) -> None:
    base = save(Case(pp=2), tmp_path)
    (base / "mp_rank_00_000" / "model_optim_rng.pt").unlink()
    manifest = ckptcore.open(str(base))
    fc1 = manifest.tensors[manifest.index["decoder.layers.mlp.linear_fc1.weight"]]
    assert fc1.shape[0] == 4
    assert {"hole", "missing-rank"} <= codes(base)


def test_replicas_that_differ_are_found(tmp_path: Path) -> None:
    def edit(tree: dict[str, Any], rank: tuple[int, int, int]) -> None:
        if rank[0] == 1:
            tree["model"]["decoder.layers.1.input_layernorm.weight"][3] += 1

    assert "replica-mismatch" in codes(save(Case(tp=2), tmp_path, edit))


def test_a_tied_copy_that_differs_is_found(tmp_path: Path) -> None:
    def edit(tree: dict[str, Any], rank: tuple[int, int, int]) -> None:
        if rank == (1, 1, 0):
            tree["model"]["output_layer.weight"][0, 0] += 1

    assert "replica-mismatch" in codes(save(Case(tp=2, pp=2, tied=True), tmp_path, edit))


@pytest.mark.parametrize(
    ("key", "value"), [("iteration", 200), ("num_layers", 8), ("tensor_model_parallel_size", 4)]
)
def test_a_file_of_another_save_is_reported(key: str, value: int, tmp_path: Path) -> None:
    def edit(tree: dict[str, Any], rank: tuple[int, int, int]) -> None:
        if rank[0] == 1:
            if key == "iteration":
                tree[key] = value
            else:
                setattr(tree["args"], key, value)

    assert "item-mismatch" in codes(save(Case(tp=2), tmp_path, edit), level="coverage")


def test_a_folder_of_a_larger_job_is_reported(tmp_path: Path) -> None:
    base = save(Case(tp=2), tmp_path)
    (base / "mp_rank_01").rename(base / "mp_rank_02")
    assert {"item-mismatch", "missing-rank", "hole"} <= codes(base, level="coverage")


def test_a_tensor_without_a_rule_stays_with_its_ranks(tmp_path: Path) -> None:
    def edit(tree: dict[str, Any], rank: tuple[int, int, int]) -> None:
        tree["model"]["decoder.layers.0.mixer.in_proj.weight"] = torch.zeros(2, 2)

    base = save(Case(tp=2), tmp_path, edit)
    assert "unmerged-tensor" in codes(base, level="coverage")
    names = {t.fqn for t in ckptcore.open(str(base)).tensors}
    assert {f"decoder.layers.0.mixer.in_proj.weight/mp_rank_0{n}" for n in (0, 1)} <= names


def test_wrong_sizes_are_refused(tmp_path: Path) -> None:
    case = Case(tp=2, extra={"padded_vocab_size": 2 * V})
    with pytest.raises(MalformedCheckpoint, match="word_embeddings"):
        ckptcore.open(str(save(case, tmp_path)))


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"moe_extended_tp": True}, "moe_extended_tp"),
        ({"expert_tensor_parallel_size": 4}, "1719"),
        ({"moe_mlp_glu_interleave_size": 32}, "interleave"),
    ],
)
def test_partitions_that_folders_do_not_name_are_refused(
    extra: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    case = Case(tp=2, ep=2, experts="te", extra=extra)
    with pytest.raises(UnsupportedFormat, match=reason):
        ckptcore.open(str(save(case, tmp_path)))


OLD_NAMES = {
    "embedding.": "language_model.embedding.",
    "output_layer.": "word_embeddings_for_head.",
    "decoder.": "language_model.encoder.",
    ".self_attention.linear_qkv.": ".self_attention.query_key_value.",
    ".self_attention.linear_proj.": ".self_attention.dense.",
    ".mlp.linear_fc1.": ".mlp.dense_h_to_4h.",
    ".mlp.linear_fc2.": ".mlp.dense_4h_to_h.",
    ".pre_mlp_layernorm.": ".post_attention_layernorm.",
}


def nested(model: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return a model in the form before Megatron-Core: a dict of dicts, one of them with the layers."""
    out: dict[str, Any] = {}
    for name, value in model.items():
        for new, old in OLD_NAMES.items():
            name = name.replace(new, old)
        depth = 2 if name.startswith("language_model.encoder") else name.count(".")
        *path, last = name.split(".", depth)
        into = out
        for part in path:
            into = into.setdefault(part, {})
        into[last] = value
    return out


def old_order(rows: torch.Tensor, heads: int, version: float) -> torch.Tensor:
    """Reorder QKV rows, [head, q or k or v, row], for an old checkpoint_version."""
    by_head = rows.view(heads, 3, -1, *rows.shape[1:])
    moved = {0: (1, 0, 2), 1.0: (0, 2, 1)}.get(version)
    if moved is None:
        return rows
    return by_head.permute(*moved, *range(3, by_head.dim())).reshape(rows.shape).contiguous()


@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("old", [True, False], ids=["old-names", "new-names"])
def test_names_and_orders_before_megatron_core(version: float, old: bool, tmp_path: Path) -> None:
    extra = {"num_query_groups": None, "kv_channels": None}
    case = Case(tp=2, pp=2, tied=True, bias=True, gated=False, groups=HEADS, extra=extra)

    def edit(tree: dict[str, Any], rank: tuple[int, int, int]) -> None:
        tree["checkpoint_version"] = version
        if not old:
            return
        if version < 3:
            del tree["args"].untie_embeddings_and_output_weights
        if version == 0:
            del tree["checkpoint_version"]
        model = {
            n: old_order(v, 2, version) if "linear_qkv" in n else v
            for n, v in tree["model"].items()
            if v is not None
        }
        tree["model"] = nested(model)

    require_equal(save(case, tmp_path, edit), expected(case))


def test_an_unknown_version_is_refused(tmp_path: Path) -> None:
    def edit(tree: dict[str, Any], rank: tuple[int, int, int]) -> None:
        tree["checkpoint_version"] = 1.5
        tree["model"] = nested({n: v for n, v in tree["model"].items() if v is not None})

    with pytest.raises(UnsupportedFormat, match="checkpoint_version"):
        ckptcore.open(str(save(Case(), tmp_path, edit)))


def test_missing_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CkptError, match="arguments"):
        ckptcore.open(str(save(Case(), tmp_path, lambda tree, rank: tree.pop("args"))))


def test_unknown_classes_are_left_out_by_name(tmp_path: Path) -> None:
    def edit(tree: dict[str, Any], rank: tuple[int, int, int]) -> None:
        tree["args"].hook = torch.nn.Linear(1, 1).forward.__self__.__class__

    base = save(Case(), tmp_path, edit)
    manifest = ckptcore.open(str(base))
    refused = [f for f in manifest.findings if f.code == "refused-global"]
    assert "args.hook (torch.nn.modules.linear.Linear)" in refused[0].message
    assert "hook" not in str(next(b.tree for b in manifest.blobs if b.key == "args"))


@pytest.mark.parametrize(("recorded", "wrong"), [("own", True), ("one", False), ("none", False)])
def test_swapped_folders_of_tensor_ranks(recorded: str, wrong: bool, tmp_path: Path) -> None:
    """Each rank's arguments have its rank in the job; a converter writes the same ones into all folders."""
    case = Case(tp=2, pp=2)
    ranks = {"own": lambda r: {"rank": r[0] + 8 * r[1]}, "one": lambda r: {"rank": 0}, "none": lambda r: {}}

    def edit(tree: dict[str, Any], rank: tuple[int, int, int]) -> None:
        tree["args"] = Namespace(**vars(tree["args"]), **ranks[recorded](rank))

    base = save(case, tmp_path, edit)
    assert not [f for f in ckptcore.open(str(tmp_path)).findings if f.code == "item-mismatch"]
    (base / "mp_rank_00_000").rename(base / "kept")
    (base / "mp_rank_01_000").rename(base / "mp_rank_00_000")
    (base / "kept").rename(base / "mp_rank_01_000")
    found = [f.file for f in ckptcore.open(str(tmp_path)).findings if f.code == "item-mismatch"]
    assert len(found) == (2 if wrong else 0)


@pytest.mark.parametrize("states", [True, False])
def test_a_stage_in_the_folders_of_another(states: bool, tmp_path: Path) -> None:
    """Its layers would count twice, and what only the other stage has would be gone.

    Without random states it may be a model whose layers were stacked twice.
    """

    def edit(tree: dict[str, Any], rank: tuple[int, int, int]) -> None:
        tree["rng_state"] = [{"torch_rng_state": torch.tensor([*rank, 7], dtype=torch.uint8)}]
        if not states:
            del tree["rng_state"]

    base = save(Case(tp=2, pp=2), tmp_path, edit)
    assert not [f for f in ckptcore.open(str(tmp_path)).findings if f.code == "item-mismatch"]
    for tensor in (0, 1):
        shutil.rmtree(base / f"mp_rank_0{tensor}_001")
        shutil.copytree(base / f"mp_rank_0{tensor}_000", base / f"mp_rank_0{tensor}_001")
    found = [f.file for f in ckptcore.open(str(tmp_path)).findings if f.code == "item-mismatch"]
    assert found == [f"mp_rank_0{t}_001/model_optim_rng.pt" for t in (0, 1) if states]
