"""Configs as evidence: none of them costs time or memory beyond its own size."""

from __future__ import annotations

import argparse
import time
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptcore
from ckptcore.errors import NameMismatch, UsageError
from ckptcore.planning import transformers_process
from ckptcore.planning.config_folder import ConfigFolder, check_names
from ckptcore.planning.stored_configs import stored_configs


class Backend(Enum):
    """As Megatron's enums are among its arguments."""

    AUTO = 5


@pytest.mark.parametrize(
    "form",
    [
        b'{"num_hidden_layers": 1000000000000}',
        b'{"text_config": {"num_local_experts": 1e300}}',
        b'{"vision_config": {"depth": 2000}}',
    ],
)
def test_a_config_of_more_modules_than_tensors_is_never_built(
    form: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        transformers_process, "ask", lambda *_, **__: pytest.fail("transformers was asked to build it")
    )
    with pytest.raises(UsageError, match="the checkpoint has 40 at most"):
        check_names(ConfigFolder("config", {"config.json": form}), {"w": (40, 3)})


def test_counts_that_a_checkpoint_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        transformers_process, "ask", lambda *a, **_: asked.append(a) or {"unknown": "no such model"}
    )
    form = (
        b'{"num_experts": 4096, "num_hidden_layers": 1000, "max_window_layers": 1000000, "use_layers": true}'
    )
    routers = {f"layers.{n}.router": (4096, 3) for n in range(1000)}
    assert check_names(ConfigFolder("config", {"config.json": form}), routers).warnings
    assert asked


@pytest.mark.parametrize(
    "form",
    [
        b'{"num_hidden_layers": 1000, "num_experts": 1000}',
        b'{"text_config": {"num_hidden_layers": 1000, "n_routed_experts": 4000}}',
        b'{"x_layers": NaN, "num_hidden_layers": 1000, "num_local_experts": 1000}',
    ],
)
def test_layers_times_experts_are_bounded_by_what_is_stored(
    form: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each count could be a checkpoint's; a model of both would be a million modules."""
    monkeypatch.setattr(
        transformers_process, "ask", lambda *_, **__: pytest.fail("transformers was asked to build it")
    )
    with pytest.raises(UsageError, match=r"1000 layers of \d000 experts, .* have 65536 rows"):
        check_names(ConfigFolder("config", {"config.json": form}), {"w": (4096, 3), "empty": (10**9, 0)})


@pytest.mark.parametrize("world", ["megatron", "torchtitan"])
def test_a_map_is_not_unrolled_for_a_config_of_a_million_layers(tmp_path: Path, world: str) -> None:
    import tracemalloc

    from ckptcore.naming.rename import remap
    from ckptcore.planning.name_maps import NameRequest, map_names

    layer = {"megatron": "decoder.layers.0.mlp.router", "torchtitan": "layers.0.moe.router.gate"}[world]
    experts = {
        "megatron": "decoder.layers.0.mlp.experts.experts.linear_fc2.weight",
        "torchtitan": "layers.0.moe.experts.w2",
    }[world]
    dcp.save({f"{layer}.weight": torch.ones(4, 8), experts: torch.ones(4, 8, 6)}, checkpoint_id=tmp_path)
    manifest = ckptcore.open(str(tmp_path))
    form = {"num_hidden_layers": 10**6, "n_routed_experts": 10**6, "model_type": "deepseek_v3"}
    began = time.process_time()
    tracemalloc.start()
    with pytest.raises(NameMismatch):
        map_names(
            remap(manifest), world, NameRequest(to="hf-hub", source=manifest, config=form, url="hostile")
        )
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()
    assert time.process_time() - began < 10


def _merges(levels: int) -> str:
    rows = ["a0: &a0 {k: 1}"]
    rows += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, levels)]
    return "\n".join(rows)


@pytest.mark.parametrize(
    "text", [_merges(12), "k: [1, 2]\n" * 400_000, "[" * 50_000], ids=["merges", "long", "deep"]
)
def test_a_hostile_yaml_says_nothing_and_costs_nothing(tmp_path: Path, text: str) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "run_config.yaml").write_text(text)
    began = time.process_time()
    assert all(c.numbers == {} for c in stored_configs(ckptcore.open(str(tmp_path)), "megatron"))
    assert time.process_time() - began < 10


def test_arguments_in_a_plain_dcp_folder_are_read(tmp_path: Path) -> None:
    """DCP stores a dict value by value; one of another trainer says nothing of Megatron's names."""
    args = {"num_layers": 2, "num_attention_heads": 4, "swiglu": True, "normalization": "RMSNorm"}
    dcp.save({"model": {"w": torch.ones(2)}, "args": args}, checkpoint_id=tmp_path, no_dist=True)
    manifest = ckptcore.open(str(tmp_path))
    (config,) = stored_configs(manifest, "megatron")
    assert (config.world, config.content) == ("megatron", args)
    assert {k: v for k, (v, _) in config.numbers.items()} == {"layer": 2, "heads": 4, "kv_heads": 4}
    assert list(stored_configs(manifest, "hf-hub")) == []


def test_a_pickled_namespace_in_a_plain_dcp_folder_is_read(tmp_path: Path) -> None:
    """DCP pickles it as one object. An attribute of an unknown class is left out by name, the others stay."""
    args = argparse.Namespace(num_layers=2, num_attention_heads=4, num_query_groups=2, backend=Backend.AUTO)
    dcp.save({"model": {"w": torch.ones(2)}, "args": args}, checkpoint_id=tmp_path, no_dist=True)
    manifest = ckptcore.open(str(tmp_path))
    (config,) = stored_configs(manifest, "megatron")
    assert config.content == {"num_layers": 2, "num_attention_heads": 4, "num_query_groups": 2}
    assert {k: v for k, (v, _) in config.numbers.items()} == {"layer": 2, "heads": 4, "kv_heads": 2}
    (left,) = [f for f in manifest.findings if f.code == "refused-global"]
    assert "args.backend" in left.message
    assert list(stored_configs(manifest, "hf-hub")) == []
