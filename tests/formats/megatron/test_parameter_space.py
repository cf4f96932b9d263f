"""Objects beside flat optimizer buffers become the common state of a job that saves by parameter."""

from __future__ import annotations

from typing import Any

import pytest

from ckptcore.core.manifest import Blob, Item, Manifest, TensorSpec
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.object_tree import Named, TensorRef, decode, encode
from ckptcore.formats.megatron.flat_buffers import ParameterSpace, restate, space_of

RESHARDABLE = ParameterSpace("fully_reshardable", prefixed=False)
MODEL_SPACE = ParameterSpace("fully_sharded_model_space", prefixed=True)
OLD = {"param_state_sharding_type": "dp_reshardable"}


def group(**more: Any) -> dict[str, Any]:
    return {"lr": 0.1, "wd_mult": 1.0, **more}


def groups(*found: dict[str, Any]) -> dict[str, Any]:
    return {"param_groups": list(found)}


def part(number: int, what: str = "optimizer", lead: str = "") -> str:
    return f"{lead}optimizer.distributed.dp_group_idx_{number}.{what}/shard_0_1"


def manifest(objects: dict[str, Any], *tensors: str) -> Manifest:
    builder = Builder()
    file = builder.file("f", 64)
    for name in ("embedding.weight", *tensors):
        builder.chunk(
            builder.tensor(TensorSpec(name, "float32", (1,))), (0,), (1,), builder.item(Item(file, 0, 4))
        )
    for key, value in objects.items():
        builder.blobs.append(Blob(key, builder.item(Item(file, 0, 4)), encode(value)))
    return builder.build("torch_dist", "/nowhere", {})


def values(found: Manifest) -> dict[str, Any]:
    return {b.key: decode(b.tree) for b in found.blobs}


def test_groups_of_all_ranks_are_one() -> None:
    objects = {
        part(0): groups(group(step=2)),
        part(1): groups(group(step=2)),
        part(0, "per_bucket_numel"): [[128]],
        "iteration": 2,
        "optimizer": OLD,
    }
    assert values(restate(manifest(objects), RESHARDABLE)) == {
        "iteration": 2,
        "optimizer": {"optimizer": groups(group(step=2)), "param_state_sharding_type": "fully_reshardable"},
    }


def test_each_optimizer_of_a_chain_has_its_own() -> None:
    dense, expert = group(step=2), group(step=2, is_expert_parallel=True)
    objects = {
        part(0, lead="chained_0."): groups(dense),
        part(0, lead="chained_1."): groups(expert),
        part(1, lead="chained_1."): groups(expert),
        "optimizer": {0: OLD, 1: OLD},
    }
    kind = {"param_state_sharding_type": "fully_reshardable"}
    assert values(restate(manifest(objects), RESHARDABLE)) == {
        "optimizer": {0: {"optimizer": groups(dense), **kind}, 1: {"optimizer": groups(expert), **kind}}
    }


def test_a_group_without_parameters_of_a_rank_gets_the_step_of_the_others() -> None:
    """Apex and Transformer Engine count no steps of an empty group; a stage can lack a group."""
    objects = {
        part(0): groups(group(step=7)),
        part(1): groups(group(step=7), group(wd_mult=0.0)),
        "optimizer": OLD,
    }
    found = values(restate(manifest(objects), RESHARDABLE))["optimizer"]["optimizer"]
    assert found == groups(group(step=7), group(wd_mult=0.0, step=7))


def test_tensors_of_the_loss_scale_move_with_it() -> None:
    names = [part(n, "grad_scaler") + ".scale" for n in range(2)]
    objects = {
        **{part(n): groups(group(step=1)) for n in range(2)},
        **{part(n, "grad_scaler"): {"scale": TensorRef(names[n]), "growth_tracker": 3} for n in range(2)},
        "optimizer": OLD,
    }
    found = restate(manifest(objects, *names), RESHARDABLE)
    assert [t.fqn for t in found.tensors] == ["embedding.weight", "optimizer.grad_scaler.scale"]
    scaler = values(found)["optimizer"]["grad_scaler"]
    assert scaler == {"scale": TensorRef("optimizer.grad_scaler.scale"), "growth_tracker": 3}


def test_what_a_loader_asks_for_is_restated() -> None:
    """0.13 and later read it from ``content_metadata``, 0.12 from an argument."""
    objects = {
        part(0): groups(group(step=1)),
        "optimizer": {"param_state_sharding_type": "dp_zero_gather_scatter"},
        "content_metadata": {"distrib_optim_sharding_type": "dp_zero_gather_scatter", "more": 1},
        "args": Named("namespace", {"ckpt_fully_parallel_save": False, "lr": 0.1}),
    }
    found = values(restate(manifest(objects), MODEL_SPACE))
    assert found["content_metadata"] == {"distrib_optim_sharding_type": MODEL_SPACE.type, "more": 1}
    assert found["args"].value == {"ckpt_fully_parallel_save": True, "lr": 0.1}
    assert values(restate(manifest(objects), RESHARDABLE))["args"] == objects["args"]


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (groups(group(step=2, lr=0.2)), "optimizer differs"),
        (groups(group(step=3)), "steps are 2, 3"),
        (groups(group(step=2, lr=0.2), group(step=2, lr=0.3)), "optimizer differs"),
        ({**groups(group(step=2)), "more": 1}, "optimizer differs"),
        ({"groups": []}, "has none"),
        ({"param_groups": [1]}, "has none"),
        ([], "has none"),
        (groups(group(step=[2])), r"steps are 2, [2]"),
    ],
    ids=["option", "step", "groups", "field", "none", "number", "list", "odd step"],
)
def test_groups_that_contradict_each_other_stay(second: Any, reason: str) -> None:
    stored = manifest({part(0): groups(group(step=2)), part(1): second, "optimizer": OLD})
    found = restate(stored, RESHARDABLE)
    assert found.blobs == stored.blobs
    assert [f.code for f in found.findings] == ["flat-buffers"]
    assert reason in found.findings[0].message


def test_a_loss_scale_that_differs_stays() -> None:
    scalers = {part(n, "grad_scaler"): {"growth_tracker": n} for n in range(2)}
    found = restate(manifest({part(0): groups(group()), **scalers, "optimizer": OLD}), RESHARDABLE)
    assert "grad_scaler differs" in found.findings[0].message


def test_an_optimizer_without_groups_stays() -> None:
    objects = {part(0, lead="chained_0."): groups(group()), "optimizer": {0: OLD, 1: OLD}}
    found = restate(manifest(objects), RESHARDABLE)
    assert "not every one of 2 optimizers has them" in found.findings[0].message


def test_an_optimizer_without_a_sharding_type_stays() -> None:
    objects = {part(0, lead=f"chained_{n}."): groups(group()) for n in range(2)}
    found = restate(manifest({**objects, "optimizer": {0: OLD}}), RESHARDABLE)
    assert "2 optimizers for 1 sharding type" in found.findings[0].message


def test_without_a_sharding_type_nothing_moves() -> None:
    stored = manifest({part(0): groups(group()), "iteration": 1})
    assert restate(stored, RESHARDABLE) is stored


@pytest.mark.parametrize(
    ("stored", "content", "before_016", "space"),
    [
        ("dp_reshardable", None, True, RESHARDABLE),
        ("dp_reshardable", {"chained_optim_avoid_prefix": True}, False, RESHARDABLE),
        ("dp_reshardable", {}, False, ParameterSpace("fully_reshardable", prefixed=True)),
        ("fully_sharded_bucket_space", None, True, MODEL_SPACE),
        ("dp_zero_gather_scatter", None, True, MODEL_SPACE),
        (
            "dp_zero_gather_scatter",
            {"chained_optim_avoid_prefix": True},
            True,
            ParameterSpace("fully_sharded_model_space", prefixed=False),
        ),
        ("dp_zero_gather_scatter", None, False, RESHARDABLE),
        (None, None, True, RESHARDABLE),
    ],
)
def test_the_form_follows_the_release(
    stored: str | None, content: dict[str, Any] | None, before_016: bool, space: ParameterSpace
) -> None:
    objects: dict[str, Any] = {} if stored is None else {"optimizer": {"param_state_sharding_type": stored}}
    objects |= {} if content is None else {"content_metadata": content}
    assert space_of(manifest(objects), before_016=before_016) == space


def test_names() -> None:
    assert RESHARDABLE.name("param", "w", 1) == "optimizer.state.param.w"
    assert MODEL_SPACE.name("param", "w", 1) == "chained_1.optimizer.state.fp32_param.w"
    assert MODEL_SPACE.name("exp_avg", "w", None) == "optimizer.state.exp_avg.w"
