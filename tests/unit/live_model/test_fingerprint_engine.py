"""Test the fingerprint of a model that joins tensors of the files, cuts them for ranks, and pads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_stand_in import Engine

from ckptcore.core.manifest import TensorSpec
from ckptcore.errors import NameMismatch, UsageError
from ckptcore.fingerprints.result import Fingerprints
from ckptcore.live_model.fingerprint_engine import _parts, fingerprint_engine
from ckptcore.loading import live_fingerprint

LAYER = "model.layers.0"
SHAPES = {
    "model.embed_tokens.weight": (10, 8),
    f"{LAYER}.self_attn.q_proj.weight": (8, 8),
    f"{LAYER}.self_attn.k_proj.weight": (4, 8),
    f"{LAYER}.self_attn.v_proj.weight": (4, 8),
    f"{LAYER}.self_attn.o_proj.weight": (8, 8),
    f"{LAYER}.mlp.gate_proj.weight": (12, 8),
    f"{LAYER}.mlp.up_proj.weight": (12, 8),
    f"{LAYER}.mlp.down_proj.weight": (8, 12),
    "model.norm.weight": (8,),
}
SPECS = [TensorSpec(name, "float32", shape) for name, shape in SHAPES.items()]
GENERATOR = torch.Generator().manual_seed(1)
FILES = {name: torch.randn(shape, generator=GENERATOR) for name, shape in SHAPES.items()}
RIGHT = live_fingerprint.fingerprint_state(FILES, None)


def loaded(rank: int = 0, ranks: int = 1) -> Any:
    """A rank's part of an engine that has loaded the files."""
    engine = Engine(SHAPES, rank, ranks)
    engine.load_weights(FILES.items())
    return engine


def of_ranks(engines: list[Any]) -> Fingerprints:
    """What all ranks compute, when they exchange their sums."""
    sums = [live_fingerprint._summed(_parts(engine, SPECS, engine.rank)) for engine in engines]
    return live_fingerprint._fingerprints(live_fingerprint._merged(sums))


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_is_the_fingerprint_of_the_files(ranks: int) -> None:
    engines = [loaded(rank, ranks) for rank in range(ranks)]
    before = [{name: tensor.clone() for name, tensor in engine.state_dict().items()} for engine in engines]
    if ranks == 1:
        assert fingerprint_engine(engines[0], SPECS) == RIGHT
    assert of_ranks(engines) == RIGHT
    for engine, state in zip(engines, before, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in engine.state_dict().items())


def test_one_bit_names_its_tensor_of_the_files() -> None:
    engines = [loaded(rank, 2) for rank in range(2)]
    engines[1].weights[f"{LAYER}.self_attn.qkv.weight".replace(".", "/")].data.view(torch.int32)[5, 3] ^= 1
    assert of_ranks(engines).differing(RIGHT) == (f"{LAYER}.self_attn.k_proj.weight",)


class Computing(Engine):
    """It holds one more than the files have."""

    def load_weights(self, weights: Any) -> set[str]:
        return super().load_weights((name, tensor + 1) for name, tensor in weights)


class Forgetful(Engine):
    """It takes no norm."""

    def load_weights(self, weights: Any) -> set[str]:
        return super().load_weights((name, tensor) for name, tensor in weights if "norm" not in name)


class Doubting(Engine):
    """It takes no embedding of this size."""

    def load_weights(self, weights: Any) -> set[str]:
        for _ in weights:
            raise AssertionError("shapes differ")
        return set()


class Flattening(Engine):
    """It takes some elements in the middle."""

    def load_weights(self, weights: Any) -> set[str]:
        for _, tensor in weights:
            self.weights["model/norm/weight"].data.copy_(tensor.reshape(-1)[3:11])
        return set()


@pytest.mark.parametrize(
    ("kind", "error", "reason"),
    [
        (Computing, UsageError, "not comparable: it computes a parameter from tensors of the files"),
        (Forgetful, NameMismatch, "not comparable: the engine takes nothing of model.norm.weight"),
        (Doubting, UsageError, "not comparable: its loader does not take 'model.embed_tokens.weight'"),
        (Flattening, UsageError, "a part that it holds of model.embed_tokens.weight is no box"),
    ],
)
def test_what_is_not_comparable_is_named(kind: Callable[..., Any], error: type, reason: str) -> None:
    with pytest.raises(error, match=reason):
        fingerprint_engine(kind(SHAPES), SPECS)


def test_a_cast_is_another_fingerprint() -> None:
    engine = loaded().to(torch.bfloat16)
    assert set(fingerprint_engine(engine, SPECS).differing(RIGHT)) == set(SHAPES)
