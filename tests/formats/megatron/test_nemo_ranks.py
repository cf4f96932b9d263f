"""Unpacked NeMo 1 models of several ranks, made by form from a model cut by hand, against its truth."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from legacy_ranks import HEADS, Case, F, H, expected, full_model, rank_models, ranks_of, require_equal

import ckptcore
from ckptcore.checking.summary import rank_of
from ckptcore.errors import CkptError, MalformedCheckpoint, UnreadablePart, UnsupportedFormat

CONFIG = "model_config.yaml"
# Names since Megatron-Core -> those of NeMo's own modules, which wrote one file a rank.
OWN_NAMES = {
    "decoder.final_layernorm.": "language_model.encoder.final_layernorm.",
    "decoder.layers.": "language_model.encoder.layers.",
    "embedding.": "language_model.embedding.",
    ".linear_qkv.": ".query_key_value.",
    ".linear_proj.": ".dense.",
    ".mlp.linear_fc1.": ".mlp.dense_h_to_4h.",
    ".mlp.linear_fc2.": ".mlp.dense_4h_to_h.",
    ".pre_mlp_layernorm.": ".post_attention_layernorm.",
}
# Of NeMo's own modules -> of Transformer Engine's layer, which `transformer_engine: true` has in their place.
ENGINE_NAMES = {
    ".self_attention.query_key_value.": ".self_attention.layernorm_qkv.",
    ".input_layernorm.": ".self_attention.layernorm_qkv.layer_norm_",
    ".self_attention.dense.": ".self_attention.proj.",
    ".post_attention_layernorm.": ".layernorm_mlp.layer_norm_",
    ".mlp.dense_h_to_4h.": ".layernorm_mlp.fc1_",
    ".mlp.dense_4h_to_h.": ".layernorm_mlp.fc2_",
}
MERGED_NAMES = {  # of distributed checkpoints -> of layers of Transformer Engine that were merged
    ".linear_qkv.": ".layernorm_qkv.",
    ".linear_proj.": ".proj.",
    ".mlp.linear_fc1.layer_norm_": ".layernorm_mlp.layer_norm_",
    ".mlp.linear_fc1.": ".layernorm_mlp.fc1_",
    ".mlp.linear_fc2.": ".layernorm_mlp.fc2_",
}
OWN = Case(tp=2, pp=2, bias=True, groups=HEADS, tied=True)
Edit = Callable[[dict[str, torch.Tensor], tuple[int, int, int]], None]


def own_name(name: str) -> str:
    for new, old in OWN_NAMES.items():
        name = name.replace(new, old)
    return name.replace("output_layer.", "word_embeddings.")


def config_of(case: Case, **changed: Any) -> dict[str, Any]:
    stated = {
        "tensor_model_parallel_size": case.tp,
        "pipeline_model_parallel_size": case.pp,
        "num_layers": case.layers,
        "hidden_size": H,
        "ffn_hidden_size": F,
        "num_attention_heads": HEADS,
        "num_query_groups": case.groups if case.groups != HEADS else None,
        "kv_channels": None,
        "share_embeddings_and_output_weights": case.tied,
        "activation": "fast-swiglu" if case.gated else "gelu",
        "tokenizer": {"library": "megatron", "model": "nemo:0f1e_tokenizer.model"},
    }
    return {**stated, **changed}


def save(case: Case, root: Path, own: bool = True, prefix: str = "model.", edit: Edit | None = None) -> Path:
    """Write the folder that an archive of NeMo 1 unpacks to."""
    around, layers = full_model(case)
    for rank in ranks_of(case):
        tp, pp, _ = rank
        (model,) = rank_models(case, around, layers, *rank)
        state = {prefix + (own_name(k) if own else k): v for k, v in model.items()}
        if edit is not None:
            edit(state, rank)
        folder = root / (f"mp_rank_{tp:02d}" if case.pp == 1 else f"tp_rank_{tp:02d}_pp_rank_{pp:03d}")
        folder.mkdir(parents=True)
        torch.save(state, folder / "model_weights.ckpt")
    (root / CONFIG).write_text(yaml.safe_dump(config_of(case)))
    return root


def configure(root: Path, case: Case, **changed: Any) -> None:
    (root / CONFIG).write_text(yaml.safe_dump(config_of(case, **changed)))


def codes(root: Path) -> set[str]:
    try:
        report = ckptcore.check(ckptcore.open(str(root)), level="bytes")
    except CkptError as error:
        return {error.code}
    return {f.code for f in report.findings if f.severity == "error"}


CASES = {
    "tp2": (Case(tp=2, bias=True, groups=HEADS, tied=True), True, "model."),
    "tp2-pp2": (OWN, True, "model."),
    "pp2-untied": (Case(pp=2, groups=HEADS), False, "model."),
    "tp4-ungated": (Case(tp=4, bias=True, gated=False, groups=HEADS, tied=True), True, "model."),
    "half-precision": (Case(tp=2, groups=HEADS, tied=True), True, "model.module."),
    "core-names": (Case(tp=2, pp=2), False, "model."),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_are_merged(name: str, tmp_path: Path) -> None:
    case, own, prefix = CASES[name]
    manifest = require_equal(save(case, tmp_path, own, prefix), expected(case))
    assert manifest.format == "megatron_legacy"
    assert manifest.origin["mesh"] == {"tp": case.tp, "pp": case.pp, "ep": 1, "vpp": 1}
    assert not manifest.findings
    assert len({rank_of(file.path) for file in manifest.files} - {None}) == case.tp * case.pp
    assert {b.key for b in manifest.blobs} == set()  # the config is beside the ranks, and stays there


def test_rows_of_the_old_order(tmp_path: Path) -> None:
    """``megatron_legacy``: a rank's rows are [q or k or v, head, row] (attention.py, _transpose_last_dim)."""
    case = Case(tp=2, bias=True, groups=HEADS, tied=True)

    def edit(state: dict[str, torch.Tensor], rank: tuple[int, int, int]) -> None:
        for name, value in state.items():
            if "query_key_value" in name:
                by_head = value.view(HEADS // case.tp, 3, -1, *value.shape[1:])
                state[name] = by_head.transpose(0, 1).reshape(value.shape).contiguous()

    save(case, tmp_path, edit=edit)
    configure(tmp_path, case, megatron_legacy=True)
    require_equal(tmp_path, expected(case))


def test_gate_and_up_of_two_matrices(tmp_path: Path) -> None:
    """``activation: swiglu`` has two matrices, each cut by rows (mlp.py, ParallelMLP)."""
    case = Case(tp=2, gated=False, groups=HEADS, tied=True)

    def edit(state: dict[str, torch.Tensor], rank: tuple[int, int, int]) -> None:
        for name in [n for n in state if "dense_h_to_4h." in n]:
            state[name.replace("4h.", "4h_2.")] = state[name] + 1

    save(case, tmp_path, edit=edit)
    manifest = ckptcore.open(str(tmp_path))
    want = expected(case)["decoder.layers.mlp.linear_fc1.weight"] + 1
    assert torch.equal(ckptcore.read(manifest, "decoder.layers.mlp.dense_h_to_4h_2.weight"), want)
    assert codes(tmp_path) == set()


def engine_name(name: str) -> str:
    for own, engine in ENGINE_NAMES.items():
        name = name.replace(own, engine)
    return name


def with_engine_names(state: dict[str, torch.Tensor], rank: tuple[int, int, int]) -> None:
    for name in list(state):
        state[engine_name(name)] = state.pop(name)


@pytest.mark.parametrize("stages", [1, 2])
def test_layers_of_transformer_engine_are_not_merged(stages: int, tmp_path: Path) -> None:
    """No rule defines how its fused modules are cut: norms are merged, and each weight is named."""
    case = Case(tp=2, pp=stages, bias=True, groups=HEADS, tied=True)
    manifest = ckptcore.open(str(save(case, tmp_path / "in", edit=with_engine_names)))
    unmerged = [f for f in manifest.findings if f.code == "unmerged-tensor"]
    assert len(unmerged) == 8 * case.layers * case.tp == len(manifest.findings)
    assert {f.fqn for f in unmerged} == {t.fqn for t in manifest.tensors if "/" in t.fqn}
    assert {t.fqn for t in manifest.tensors if "/" not in t.fqn} == {
        "embedding.word_embeddings.weight",
        "decoder.final_layernorm.weight",
        "decoder.layers.self_attention.layernorm_qkv.layer_norm_weight",
        "decoder.layers.layernorm_mlp.layer_norm_weight",
    }
    assert all("distributed checkpoint" in (f.hint or "") for f in unmerged)
    assert codes(tmp_path / "in") == {"unmerged-tensor"}
    with pytest.raises(UnreadablePart):
        ckptcore.convert(str(tmp_path / "in"), str(tmp_path / "out.safetensors"), catalog=False)


def test_layers_of_transformer_engine_on_one_tensor_rank(tmp_path: Path) -> None:
    """Stages alone cut no tensor."""
    case = Case(pp=2, bias=True, groups=HEADS, tied=True)
    manifest = ckptcore.open(str(save(case, tmp_path, edit=with_engine_names)))
    for name, value in expected(case).items():
        for merged, engine in MERGED_NAMES.items():
            name = name.replace(merged, engine)
        assert torch.equal(ckptcore.read(manifest, name), value), name
    assert len(manifest.tensors) == len(expected(case))
    # A config that denies the other rank is contradicted by the shapes.
    cut = save(Case(tp=2, bias=True, groups=HEADS, tied=True), tmp_path / "cut", edit=with_engine_names)
    (cut / "mp_rank_01" / "model_weights.ckpt").unlink()
    configure(cut, Case(tp=1, bias=True, groups=HEADS, tied=True))
    assert codes(cut) == {"malformed"}


# --- nothing partial passes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lost", ["tp_rank_01_pp_rank_001", "tp_rank_00_pp_rank_000", "tp_rank_01_pp_rank_000"]
)
def test_a_missing_rank_is_named(lost: str, tmp_path: Path) -> None:
    save(OWN, tmp_path)
    (tmp_path / lost / "model_weights.ckpt").unlink()
    findings = ckptcore.open(str(tmp_path)).findings
    assert [f.file for f in findings if f.code == "missing-rank"] == [f"{lost}/model_weights.ckpt"]
    assert "hole" in codes(tmp_path)


@pytest.mark.parametrize(
    ("own", "end"),
    [
        (own, end)
        for own in (True, False)
        for end in ("word_embeddings.weight", "final_layernorm.weight", "output_layer.weight")
        if not own or not end.startswith("output")  # these are tied
    ],
)
def test_an_end_that_no_rank_has(own: bool, end: str, tmp_path: Path) -> None:
    """What every GPT has is not learned from other ranks: a writer may have lost it on all of them."""

    def edit(state: dict[str, torch.Tensor], rank: tuple[int, int, int]) -> None:
        for name in [n for n in state if n.endswith(f".{end}")]:
            del state[name]

    save(OWN if own else Case(tp=2, pp=2, groups=HEADS), tmp_path, own, edit=edit)
    if not own:
        configure(tmp_path, Case(tp=2, pp=2, groups=HEADS))
    assert codes(tmp_path) == {"hole"}


def test_a_missing_last_tensor_rank_is_named(tmp_path: Path) -> None:
    case = Case(tp=2, groups=HEADS, tied=True)
    save(case, tmp_path)
    (tmp_path / "mp_rank_01" / "model_weights.ckpt").unlink()
    findings = ckptcore.open(str(tmp_path)).findings
    assert [f.file for f in findings if f.code == "missing-rank"] == ["mp_rank_01/model_weights.ckpt"]
    # A config that was edited to fit what is there is contradicted by the shapes.
    configure(tmp_path, case, tensor_model_parallel_size=1)
    assert codes(tmp_path)


@pytest.mark.parametrize(
    "changed",
    [
        {"tensor_model_parallel_size": 4},
        {"tensor_model_parallel_size": 1},
        {"pipeline_model_parallel_size": 1},
        {"num_layers": 8},
        {"num_layers": 2},
        {"num_attention_heads": HEADS * 2, "kv_channels": H // HEADS},
        {"hidden_size": H * 2},
        {"ffn_hidden_size": F * 2},
        {"ffn_hidden_size": F // 2},
    ],
    ids=lambda changed: next(iter(changed)) + str(next(iter(changed.values()))),
)
def test_a_config_that_contradicts_the_ranks(changed: dict[str, int], tmp_path: Path) -> None:
    save(OWN, tmp_path)
    configure(tmp_path, OWN, **changed)
    assert codes(tmp_path)


def test_a_file_of_another_rank_is_no_rank_of_its_own(tmp_path: Path) -> None:
    case = Case(tp=2, groups=HEADS, tied=True)
    save(case, tmp_path)
    (tmp_path / "mp_rank_01/model_weights.ckpt").write_bytes(
        (tmp_path / "mp_rank_00/model_weights.ckpt").read_bytes()
    )
    assert "item-mismatch" in codes(tmp_path)


def test_a_stray_file_of_a_rank_is_reported(tmp_path: Path) -> None:
    save(OWN, tmp_path)
    (tmp_path / "tp_rank_00_pp_rank_000/model_weights_2.ckpt").write_bytes(b"x")
    assert "stray-file" in {f.code for f in ckptcore.open(str(tmp_path)).findings}


# --- refused by name -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [None, b"", b"- 1\n", b"num_layers: ${of}\n", b"tensor_model_parallel_size: 2\n"]
)
def test_a_config_that_does_not_say_how_the_model_is_cut(content: bytes | None, tmp_path: Path) -> None:
    save(OWN, tmp_path)
    (tmp_path / CONFIG).unlink()
    if content is not None:
        (tmp_path / CONFIG).write_bytes(content)
    with pytest.raises(MalformedCheckpoint) as caught:
        ckptcore.open(str(tmp_path))
    assert CONFIG in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("prefix", ["enc_dec_model.", "bert_model.", ""])
def test_models_of_other_kinds(prefix: str, tmp_path: Path) -> None:
    save(OWN, tmp_path, prefix=prefix)
    with pytest.raises(UnsupportedFormat) as caught:
        ckptcore.open(str(tmp_path))
    assert "NeMo" in caught.value.message
    assert caught.value.hint


def test_virtual_stages(tmp_path: Path) -> None:
    save(OWN, tmp_path)
    configure(tmp_path, OWN, virtual_pipeline_model_parallel_size=2)
    with pytest.raises(UnsupportedFormat, match="virtual_pipeline_model_parallel_size"):
        ckptcore.open(str(tmp_path))


def test_shards_of_fsdp(tmp_path: Path) -> None:
    for shard in range(2):
        folder = tmp_path / f"mp_rank_00_fsdp_shard_{shard:05d}"
        folder.mkdir()
        torch.save({"model.w": torch.ones(2)}, folder / "model_weights.ckpt")
    with pytest.raises(UnsupportedFormat) as caught:
        ckptcore.open(str(tmp_path))
    assert caught.value.values["format"] == "nemo-fsdp"
    assert caught.value.hint
    with pytest.raises(UnsupportedFormat) as caught:
        ckptcore.open(str(tmp_path / "mp_rank_00_fsdp_shard_00001/model_weights.ckpt"))
    assert caught.value.values["format"] == "rank-alone"
