"""Compare flat buckets of a real Megatron-Core optimizer with each parameter's own state."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from samples import SAMPLES

import ckptcore
from ckptcore.core.manifest import Item, Manifest, TensorSpec, View
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.object_tree import Named, encode
from ckptcore.formats import open_source
from ckptcore.formats.dcp.reader import read_folder
from ckptcore.formats.megatron.flat_buffers import map_buckets, stored_args

NAME = "optim_llama_tp2dp2_dp_reshardable_0.19.2"
FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


@pytest.fixture
def buckets(request: pytest.FixtureRequest) -> Any:
    return next(s for s in request.config.stash[SAMPLES] if s.name == NAME)


@pytest.fixture
def flat(buckets: Any) -> Manifest:
    """Return the folder read as plain DCP, and the arguments of its model."""
    return read_folder(open_source(str(buckets.root / "ckpt")))


@pytest.fixture
def args(buckets: Any) -> dict[str, Any]:
    return dict(stored_args(ckptcore.open(str(buckets.root / "ckpt"))))


def test_every_parameter_has_its_state(buckets: Any) -> None:
    manifest = ckptcore.open(str(buckets.root / "ckpt"))
    truth = load_file(buckets.root / "expected_optimizer_by_param.safetensors")
    assert len(truth) == 54
    for key, want in truth.items():
        kind, name = key.split(".", 1)
        found = re.match(r"decoder\.layers\.(\d+)\.(.*)", name)
        if found:
            full = ckptcore.read(
                manifest, f"optimizer.state.{kind}.decoder.layers.{FUSED.get(found[2], found[2])}"
            )
            assert torch.equal(full[int(found[1])], want), key
        else:
            assert torch.equal(ckptcore.read(manifest, f"optimizer.state.{kind}.{name}"), want), key
    assert not [t for t in manifest.tensors if "gbuf_idx" in t.fqn]
    report = ckptcore.check(manifest, level="bytes")
    assert {f.code for f in report.findings} == {"alignment-gap"}


def test_a_reshard_is_what_a_job_by_parameter_loads(buckets: Any, tmp_path: Path) -> None:
    """Parameter groups are in the common state, as `fully_reshardable` has them."""
    source = ckptcore.open(str(buckets.root / "ckpt"))
    ckptcore.convert(source.root, str(tmp_path / "out"), verb="reshard", to="torch_dist", mesh="tp=4")
    common = torch.load(tmp_path / "out" / "common.pt", weights_only=False)
    assert common["optimizer"]["param_state_sharding_type"] == "fully_reshardable"
    (first,) = (
        k for k in read_folder(open_source(source.root)).blobs if ".dp_group_idx_0.optimizer/" in k.key
    )
    assert isinstance(first.tree, list)  # in the list that torch_dist has around every object
    groups = common["optimizer"]["optimizer"]["param_groups"]
    assert encode(groups) == first.tree[0]["param_groups"]
    written = ckptcore.open(str(tmp_path / "out"))
    assert {t.fqn for t in written.tensors} == {
        t.fqn for t in source.tensors if not t.fqn.startswith("rng_state")
    }
    for manifest in (source, written):
        assert not [b.key for b in manifest.blobs if "dp_group_idx" in b.key]


def test_gaps_are_counted(flat: Manifest, args: dict[str, Any]) -> None:
    before = sum(t.numel for t in flat.tensors if "gbuf_idx" in t.fqn)
    mapped = map_buckets(flat, args)
    shapes = {t.fqn: t for t in mapped.tensors}
    mapped_elements = 0
    for fqn, spec in shapes.items():
        if fqn.startswith("optimizer.state."):
            copies = 2 if "norm" in fqn else 1  # norms are on both tensor ranks
            mapped_elements += copies * spec.numel
    assert mapped.origin["alignment_gaps"] == before - mapped_elements > 0


def test_manifests_without_buffers_are_unchanged(flat: Manifest, args: dict[str, Any]) -> None:
    mapped = map_buckets(flat, args)
    assert map_buckets(mapped, args) is mapped


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda a: a.clear(), "transformer_impl"),
        (lambda a: a.update(transformer_impl="transformer_engine"), "add up|begin at|end where"),
        (
            lambda a: a.update(pipeline_model_parallel_size=2),
            "after the last stage|of [0-9]+ buffers|end where",
        ),
        (lambda a: a.update(tensor_model_parallel_size=1), "end where|after the last stage|on 1 ranks"),
        (lambda a: a.update(num_layers=3), "end where|does not fit"),
        (lambda a: a.update(num_layers="4"), "which layers"),
        (lambda a: a.update(padded_vocab_size=100), "rows"),
    ],
    ids=["none", "order", "stages", "ranks", "layers", "text", "rows"],
)
def test_buffers_that_do_not_add_up_stay(
    change: Change, reason: str, flat: Manifest, args: dict[str, Any]
) -> None:
    change(args)
    mapped = map_buckets(flat, args)
    found = mapped.findings[-1]
    assert found.code == "flat-buffers"
    assert re.search(reason, found.message), found.message
    assert (mapped.tensors, mapped.chunks) == (flat.tensors, flat.chunks)


def test_a_missing_weight(flat: Manifest, args: dict[str, Any]) -> None:
    renamed = tuple(
        TensorSpec(t.fqn.replace("linear_fc2", "adapter"), t.dtype, t.shape) if "linear_fc2" in t.fqn else t
        for t in flat.tensors
    )
    mapped = map_buckets(replace(flat, tensors=renamed), args)
    assert mapped.findings[-1].code == "flat-buffers"


@pytest.mark.parametrize("layout", ["bucket space", "dp zero"])
def test_other_layouts(layout: str, flat: Manifest, args: dict[str, Any], tmp_path: Path) -> None:
    """Other sharding types pad the same buffers into equal parts, or store them in one object."""
    builder = Builder()
    for spec in flat.tensors:
        if "gbuf_idx" not in spec.fqn and not spec.fqn.startswith("rng"):
            builder.tensor(spec)
    data = bytearray()
    for spec in flat.tensors:
        if "gbuf_idx" not in spec.fqn:
            continue
        values = ckptcore.read(flat, spec.fqn)
        name = spec.fqn
        if layout == "bucket space":
            values = torch.cat([values, torch.full((-len(values) % 256,), float("nan"))])
        else:
            pair = "(Named(kind='dtype', value='bfloat16'), Named(kind='dtype', value='float32'))"
            head, kind = spec.fqn.split(".gbuf_idx_0")[0], spec.fqn.rsplit(".", 1)[1]
            name = f"{head}.param_state/shard_0_1.0.{pair}.{kind}"
        at = builder.tensor(TensorSpec(name, "float32", tuple(values.shape)))
        ranks = 2 if layout == "bucket space" else 1
        for n, part in enumerate(values.chunk(ranks)):
            item = Item(0, len(data), part.numel() * 4)
            builder.chunk(at, (n * part.numel(),), tuple(part.shape), builder.item(item), View())
            data += part.numpy().tobytes()
    builder.file("buffers", len(data))
    (tmp_path / "buffers").write_bytes(data)
    mapped = map_buckets(builder.build("torch_dist", str(tmp_path), {}), args)
    same = map_buckets(flat, args)
    names = [t.fqn for t in same.tensors if t.fqn.startswith("optimizer.state.")]
    assert len(names) == 27
    for name in names:
        assert torch.equal(ckptcore.read(mapped, name), ckptcore.read(same, name)), name


def test_args_are_found(buckets: Any) -> None:
    assert stored_args(ckptcore.open(str(buckets.root / "ckpt")))["params_dtype"] == Named(
        "dtype", "bfloat16"
    )
