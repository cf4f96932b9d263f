"""List the parameters of a rank's GPT model in registration order, with their local shapes.

Flat buffers of Megatron's distributed optimizer have no names. Their order is that in which modules
and parameters were made (megatron/core/models/gpt/gpt_model.py, transformer/{transformer_layer,
attention,multi_latent_attention,mlp}.py, transformer/moe/{moe_layer,experts,shared_experts}.py; of fused
layers, Transformer Engine's pytorch/module/layernorm_linear.py). Names and shapes of the weights in the
checkpoint say what is in the model, so this module only defines the order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ckptcore.core.manifest import TensorSpec
from ckptcore.formats.megatron.partition_rules import (
    LAYERS,
    Counts,
    Placement,
    Rank,
    World,
    cut_shape,
    first_layers,
    known_rows,
    layers_per_chunk,
    place,
)
from ckptcore.utils.text import short_repr


class Unregistered(Exception):
    """The order of the parameters is unknown; the message says why."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a rank. expert: whether it belongs to an expert."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    placement: Placement
    expert: bool

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def _pair(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}.{kind}" for name in names for kind in ("weight", "bias"))


def _names_with_norm(name: str) -> tuple[str, ...]:
    """Return the names of a layer that may contain a norm: Transformer Engine registers the norm first."""
    return f"{name}.layer_norm_weight", f"{name}.layer_norm_bias", *_pair(name)


_ATTENTION = "self_attention."
_EXPERTS = "mlp.experts."  # all of a rank's experts
# Names below a layer, in registration order.
_LAYER = (
    *_pair("input_layernorm"),
    f"{_ATTENTION}core_attention.softmax_offset",
    *_pair(f"{_ATTENTION}linear_proj"),
    *_names_with_norm(f"{_ATTENTION}linear_qkv"),
    *_pair(f"{_ATTENTION}linear_q_proj", f"{_ATTENTION}linear_q_down_proj"),
    *_names_with_norm(f"{_ATTENTION}linear_q_up_proj"),
    *_pair(f"{_ATTENTION}linear_kv_down_proj"),
    *_names_with_norm(f"{_ATTENTION}linear_kv_up_proj"),
    *_pair(*(f"{_ATTENTION}{kind}_layernorm" for kind in ("q", "k", "kv"))),
    *_pair("pre_mlp_layernorm", "mlp.router"),
    _EXPERTS,
    "mlp.shared_experts.gate_weight",
    *_pair("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"),
    *_names_with_norm("mlp.linear_fc1"),
    *_pair("mlp.linear_fc2"),
)
_FIRST = (
    "embedding.word_embeddings.weight",
    "embedding.position_embeddings.weight",
    "embedding.tokentype_embeddings.weight",
)
_LAST = (*_pair("decoder.final_layernorm"), *_pair("output_layer"))
_BUFFERS = ("mlp.router.expert_bias",)  # stored with the weights, but not parameters
_STACKED_EXPERTS = "mlp.experts.experts."
_OWN_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


class ParameterOrder:
    """The parameters of every rank's model, derived from the arguments and the stored weights.

    Args:
        args: The training arguments.
        weights: Global name -> spec.

    Raises:
        Unregistered: The order of the model's parameters is unknown.
    """

    def __init__(self, args: Mapping[str, Any], weights: Mapping[str, TensorSpec]) -> None:
        self._weights = weights
        self._impl = args.get("transformer_impl")
        if self._impl not in ("local", "transformer_engine"):
            raise Unregistered(f"unknown transformer_impl {short_repr(self._impl, 40)}")
        self.grouped = bool(args.get("moe_grouped_gemm"))
        self._legacy_grouped = self.grouped and (
            self._impl == "local" or bool(args.get("moe_use_legacy_grouped_gemm"))
        )
        self.world, self.counts = self._world(args)
        self.tied = not args.get("untie_embeddings_and_output_weights", False)
        self.first = first_layers(self.counts)

    def _world(self, args: Mapping[str, Any]) -> tuple[World, Counts]:
        def size(key: str) -> int:
            value = args.get(key)
            if value is not None and (type(value) is not int or not 0 < value < 1 << 20):
                raise Unregistered(f"{key} is {short_repr(value, 40)}")
            return value or 1

        tp, pp, ep = (size(f"{kind}_model_parallel_size") for kind in ("tensor", "pipeline", "expert"))
        etp = size("expert_tensor_parallel_size") if args.get("expert_tensor_parallel_size") else tp
        vpp = size("virtual_pipeline_model_parallel_size")
        counts = layers_per_chunk(args, pp, vpp)
        if counts is None:
            raise Unregistered("the arguments do not say which layers are on which stage")
        if any(name.startswith("mtp.") for name in self._weights):
            raise Unregistered("a model with multi-token prediction")
        if args.get("moe_extended_tp") or args.get("moe_mlp_glu_interleave_size") is not None:
            raise Unregistered("experts are split by another rule")
        layers = args.get("num_layers")
        assert type(layers) is int  # layers_per_chunk checked it
        names = list(self._weights)
        stacked = not any(n.startswith(f"{LAYERS}0.") for n in names)
        norms_fused = self._impl == "local" and any("linear_qkv.layer_norm_weight" in n for n in names)
        experts = args.get("num_experts", args.get("num_moe_experts")) or 0
        if type(experts) is not int or experts >= 1 << 20:
            raise Unregistered(f"num_experts is {short_repr(experts, 40)}")
        world = World(tp, pp, ep, etp, layers, experts, self._gated(), stacked, norms_fused, known_rows(args))
        return world, counts

    def _gated(self) -> bool:
        """Return whether fc1 is a gate and an up projection: twice as many rows as fc2 has columns."""
        gated = set()
        for name, spec in self._weights.items():
            second = self._weights.get(name.replace("linear_fc1", "linear_fc2"))
            if name.endswith("linear_fc1.weight") and second is not None:
                gated.add(spec.shape[-2] == 2 * second.shape[-1])
        if len(gated) != 1:
            raise Unregistered("no layer has projections, or only some are gated")
        return gated.pop()

    def of(self, rank: tuple[int, int, int], chunk: int) -> list[Parameter]:
        """Return a model chunk's parameters in registration order.

        Args:
            rank: Tensor, pipeline and expert-parallel rank.
            chunk: Number of the chunk in the rank.

        Raises:
            Unregistered: The order of a layer's parameters is unknown.
        """
        tp, pp, ep = rank
        layers = self.counts[chunk][pp]
        where = Rank(tp, ep, self.first[chunk][pp])
        out: list[Parameter] = []
        if pp == 0 and chunk == 0:
            out += self._parameters_of(_FIRST, where)
        for layer in range(layers):
            out += self._layer(layer, where)
        if pp == self.world.pp - 1 and chunk == len(self.counts) - 1:
            out += self._parameters_of(_LAST, where)
            if self.tied and self.world.pp > 1:  # its own copy: the embedding is on another rank
                copied = self._parameters_of(_FIRST[:1], where)
                out += [replace(p, name="output_layer.weight") for p in copied]
        return out

    def shares_embedding(self, parameter: Parameter) -> bool:
        """Return whether it is one of the two copies of tied embeddings, which have their own buckets."""
        return self.tied and self.world.pp > 1 and parameter.placement.fqn == _FIRST[0]

    def _parameters_of(self, names: tuple[str, ...], where: Rank) -> Iterator[Parameter]:
        for name in names:
            if name in self._weights:
                yield self._parameter(name, self._weights[name], self._weights[name].shape, where)

    def _layer(self, layer: int, where: Rank) -> Iterator[Parameter]:
        """Yield the parameters of one layer, from the names below it in the checkpoint."""
        number = where.first_layer + layer
        specs: dict[str, tuple[TensorSpec, tuple[int, ...]]] = {}
        lead = LAYERS if self.world.stacked else f"{LAYERS}{number}."
        for name, spec in self._weights.items():
            if not name.startswith(lead) or name.endswith("_extra_state"):
                continue
            rest = name.removeprefix(lead)
            if rest not in _BUFFERS:
                specs[self._local(rest)] = spec, spec.shape[1:] if self.world.stacked else spec.shape
        order = {name: n for n, name in enumerate(_LAYER)}
        unplaced = [r for r in specs if r not in order and not r.startswith(_STACKED_EXPERTS)]
        if unplaced:
            raise Unregistered(f"a layer has {unplaced[0]}, which has no known position")
        for name in _LAYER:
            if name == _EXPERTS:
                for rest, shape in self._experts(specs):
                    spec = specs[_expert_key(rest)][0]
                    yield self._parameter(f"{LAYERS}{layer}.{rest}", spec, shape, where, cut=False)
            elif name in specs:
                spec, shape = specs[name]
                yield self._parameter(f"{LAYERS}{layer}.{name}", spec, shape, where)

    def _local(self, rest: str) -> str:
        if not self.world.norms_fused:
            return rest
        return next(
            (new + rest.removeprefix(old) for old, new in _OWN_NORMS.items() if rest.startswith(old)), rest
        )

    def _experts(self, specs: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield (name, shape) of a rank's experts: one by one, or in the order of the grouped layers."""
        shapes = {
            r.removeprefix(_STACKED_EXPERTS): shape
            for r, (_, shape) in specs.items()
            if r.startswith(_STACKED_EXPERTS)
        }
        if not shapes:
            return
        if self.world.experts % self.world.ep:
            raise Unregistered(f"{self.world.experts} experts do not divide into {self.world.ep} ranks")
        count = self.world.experts // self.world.ep
        projections = _pair("linear_fc1", "linear_fc2")
        if any(k not in projections for k in shapes):
            raise Unregistered(f"experts have {', '.join(shapes)}")
        local = {
            k: self._cut(f"{_STACKED_EXPERTS}{k}", shapes[k][1:], self.world.etp)
            for k in projections
            if k in shapes
        }
        if self._legacy_grouped:
            (rows, hidden), (_, inner) = local["linear_fc1.weight"], local["linear_fc2.weight"]
            yield f"{_EXPERTS}weight1", (hidden, count * rows)
            yield f"{_EXPERTS}weight2", (count * inner, hidden)
        elif self.grouped:
            for kind in projections:
                if kind in local:
                    yield from ((f"{_EXPERTS}{kind}{e}", local[kind]) for e in range(count))
        else:
            for e in range(count):
                yield from ((f"{_EXPERTS}local_experts.{e}.{k}", local[k]) for k in projections if k in local)

    def _parameter(
        self, name: str, spec: TensorSpec, shape: tuple[int, ...], where: Rank, cut: bool = True
    ) -> Parameter:
        local = self._cut(name, shape, self.world.tp) if cut else shape
        placement = place(name, local, where, self.world)
        if placement is None or (placement.fqn, placement.shape) != (spec.fqn, spec.shape):
            raise Unregistered(f"{name} {list(local)} does not fit {spec.fqn} {list(spec.shape)}")
        return Parameter(name, local, spec.dtype, placement, f".{_EXPERTS}" in name)

    def _cut(self, name: str, shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
        local = cut_shape(name, shape, ranks, copied=self._impl != "local")
        if local is None:
            raise Unregistered(f"cannot split {name} {list(shape)} over {ranks} tensor ranks")
        return local


def _expert_key(rest: str) -> str:
    """Return the global name of an expert's parameter."""
    if rest.startswith(f"{_EXPERTS}weight"):
        return f"{_STACKED_EXPERTS}linear_fc{rest[-1]}.weight"
    layer, _, kind = rest.rpartition(".")
    return f"{_STACKED_EXPERTS}{layer.rsplit('.', 1)[-1]}.{kind.rstrip('0123456789')}"
