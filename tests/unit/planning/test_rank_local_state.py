"""Rank-local state: a reshard drops random and loader states, and nothing else."""

from __future__ import annotations

import pytest

from ckptcore.core.manifest import Blob, Manifest, TensorSpec
from ckptcore.core.manifest_builder import Builder
from ckptcore.errors import UsageError
from ckptcore.planning.rank_local_state import without_bound
from ckptcore.topology.layout import Mesh


def _manifest(*keys: str) -> Manifest:
    builder = Builder()
    for key in keys:
        builder.blobs.append(Blob(key, -1, 1))
    return builder.build("dcp", "memory://nowhere", {})


def _left_out(mesh: Mesh, *keys: str) -> set[str]:
    kept, rules = without_bound(_manifest(*keys), mesh)
    assert {b.key for b in kept.blobs} == set(keys) - {name for name, _ in rules}
    return {name for name, _ in rules}


@pytest.mark.parametrize(
    "name",
    [
        "rng_state/shard_0.1_2.2",
        "extra_state.rng.numpy.rank3",
        "rng",
        "random_states.random_state.rank0",
        "rng_state.(0, 0).0.np_rng_state",
    ],
)
def test_random_states_stay_behind(name: str) -> None:
    assert _left_out(Mesh((("fsdp", 2),)), name, "step") == {name}


@pytest.mark.parametrize(
    "name", ["step", "lr_scheduler.last_epoch", "strange.weight", "optim.param_groups.0.lr"]
)
def test_what_holds_for_all_ranks_goes_along(name: str) -> None:
    assert not _left_out(Mesh((("fsdp", 2),)), name)


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "dropped"),
    [
        ("model.rng.proj.weight", "float32", (4, 4), False),
        ("model.rng.codes", "int8", (64, 64), False),
        ("random_state.net.weight", "bfloat16", (4,), False),
        ("dataloader.net.weight", "float32", (4, 4), False),
        ("rng.a", "uint8", (5056,), True),
        ("rng_state.(0, 0).0.cuda_rng_state", "uint8", (16,), True),
        ("dataloader.generator", "uint8", (5056,), True),
    ],
)
def test_weights_go_along_whatever_they_are_called(
    name: str, dtype: str, shape: tuple[int, ...], dropped: bool
) -> None:
    builder = Builder()
    builder.tensor(TensorSpec(name, dtype, shape))
    builder.blobs.append(Blob("dataloader.dp_rank_0", -1, 1))
    kept, rules = without_bound(builder.build("dcp", "memory://nowhere", {}), Mesh((("fsdp", 2),)))
    assert (name in {n for n, _ in rules}) == dropped
    assert [t.fqn for t in kept.tensors] == ([] if dropped else [name])


def test_a_data_loader_goes_along_to_as_many_data_parallel_ranks() -> None:
    keys = ("dataloader.dp_rank_0", "dataloader.dp_rank_1", "dataloader.world_size", "step")
    assert not _left_out(Mesh((("dp_replicate", 1), ("fsdp", 2), ("tp", 4))), *keys)
    gone = {"dataloader.dp_rank_0", "dataloader.dp_rank_1", "dataloader.world_size"}
    assert _left_out(Mesh((("fsdp", 4),)), *keys) == gone


def test_dropped_state_is_kept_on_request() -> None:
    names = ("dataloader.dp_rank_0", "dataloader.world_size", "rng", "step")
    mesh = Mesh((("fsdp", 4),))
    kept, rules = without_bound(_manifest(*names), mesh, ["dataloader.*"])
    assert {name for name, _ in rules} == {"rng"}
    assert {b.key for b in kept.blobs} == {*names} - {"rng"}
    with pytest.raises(UsageError, match="--keep-object step matches no state"):
        without_bound(_manifest(*names), mesh, ["step"])
