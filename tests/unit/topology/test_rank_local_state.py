"""Rank-local state: a reshard drops random and loader states, and nothing else."""

from __future__ import annotations

import pytest

from ckptcore.core.manifest import Blob, Manifest
from ckptcore.core.manifest_builder import Builder
from ckptcore.errors import UsageError
from ckptcore.topology.layout import Mesh
from ckptcore.topology.rank_local_state import without_bound


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
