"""Topologies: from a mesh in words and rules on names to which rank holds which box of each tensor.

1. The mesh: axes in the order of trainers (`ckptcore.topology.mesh_spec`).
2. Parameters: the tensors of the model part, under their own names (no prefix, no wrappers).
3. Rules: one's own, or those of the family that the names are of (`ckptcore.topology.rules`).
4. Each parameter's layout (`ckptcore.topology.fsdp_over_tp`), its pipeline stage, and the rank of an expert
   by name.
5. Optimizer state: what has a parameter's name in its own and its shape lies as the parameter does; what
   has another shape (steps, factors) is replicated where the parameter is. What belongs to no parameter is
   replicated on all ranks.
6. Buffers (integers, truth values) are replicated where a parameter of that name would be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Manifest, TensorSpec
from ckptcore.errors import UsageError
from ckptcore.naming.optimizer_state import parameters
from ckptcore.topology.layout import REPLICATED, Mesh, TensorLayout, Topology
from ckptcore.topology.mesh_spec import parse_mesh
from ckptcore.utils.text import shown, some

if TYPE_CHECKING:
    from ckptcore.topology.rules import ShardingRules

Shape = tuple[int, ...]


def lay_out(
    manifest: Manifest, mesh: str, sharding: str | None = None, model_prefix: str | None = None
) -> Topology:
    """Which rank of the mesh holds what of each tensor of the manifest.

    mesh: ``fsdp=4,tp=2``. sharding: the text of a TOML file with rules (`ckptcore.topology.rules_file`), or
    None for the built-in ones. model_prefix: where the model is, or None to find it.
    Raises `UsageError` for a mesh or rules that cannot be, with the numbers: unknown axes, parameters without
    a rule or a stage, more stages than layers, experts that do not divide, shards that torch cannot tell.
    """
    from ckptcore.topology import rules as placementrules
    from ckptcore.topology import rules_file as shardingfile  # pydantic: only those who reshard wait for it

    whole = parse_mesh(mesh)
    own = None if sharding is None else shardingfile.load(sharding)
    if own is not None and own.mesh is not None:
        told = parse_mesh(",".join(f"{a}={n}" for a, n in own.mesh.items()))
        if told.axes != whole.axes:
            raise UsageError(
                f"--mesh {mesh} is not the [mesh] of --sharding: {dict(told.axes)}",
                hint="take it out of the file, or ask for that mesh",
            )
    shapes, owner = parameters(manifest, model_prefix)
    rules = placementrules.rules_for(list(shapes), own, _needs_rules(whole))
    layouts = _placed(shapes, whole, rules)
    found: dict[str, TensorLayout] = {}
    for spec in manifest.tensors:
        of = owner.get(spec.fqn)
        if of is not None:
            same = spec.shape == shapes[of] and not _is_buffer(spec)
            found[spec.fqn] = layouts[of] if same else TensorLayout(at=layouts[of].at)
    topology = Topology(whole, {fqn: layout for fqn, layout in found.items() if layout != REPLICATED})
    _require_boxes(topology, manifest.tensors)
    return topology


@dataclass(frozen=True, slots=True)
class Balance:
    """How a checkpoint lies on its ranks.

    held: bytes that each rank has in memory, in rank order, replicas included. total: bytes of all tensors.
    """

    held: tuple[int, ...]
    total: int

    @property
    def ratio(self) -> float:
        """The fullest rank over the mean; 1.0 is even."""
        return max(self.held) * len(self.held) / sum(self.held) if sum(self.held) else 1.0

    def as_dict(self) -> dict[str, object]:
        """The JSON form."""
        return {
            "ranks": len(self.held),
            "bytes_total": self.total,
            "bytes_per_rank": list(self.held),
            "bytes_max": max(self.held),
            "bytes_min": min(self.held),
            "balance": round(self.ratio, 4),
        }


def balance(topology: Topology, tensors: Iterable[TensorSpec]) -> Balance:
    """What each rank of a topology holds of the tensors."""
    count: dict[tuple[str, Shape, TensorLayout], int] = {}
    total = 0
    one: dict[tuple[str, Shape, TensorLayout], str] = {}
    for spec in tensors:
        key = spec.dtype, spec.shape, topology.layout(spec.fqn)
        count[key] = count.get(key, 0) + 1
        one[key] = spec.fqn
        total += spec.nbytes
    held = [0] * topology.mesh.size
    for (dtype, shape, layout), times in count.items():
        for rank, box in enumerate(topology.held(one[dtype, shape, layout], shape)):
            if box is not None:
                held[rank] += times * TensorSpec("", dtype, box.shape).nbytes
    return Balance(tuple(held), total)


def rank_bytes(topology: Topology, manifest: Manifest) -> list[int]:
    """Bytes that each rank holds in memory, in rank order."""
    return list(balance(topology, manifest.tensors).held)


def _is_buffer(spec: TensorSpec) -> bool:
    """Positions, masks and counters: trainers shard parameters, and leave buffers whole on every rank.

    Integers of one byte may be packed weights; buffers of floats look like parameters.
    """
    dtype = BY_NAME[spec.dtype]
    return dtype.kind == "b" or (dtype.kind in "iu" and dtype.itemsize > 1)


def _needs_rules(mesh: Mesh) -> bool:
    return any(n > 1 for a, n in mesh.axes if a in ("pp", "ep", "tp"))


def _placed(shapes: Mapping[str, Shape], mesh: Mesh, rules: ShardingRules) -> dict[str, TensorLayout]:
    from ckptcore.topology.fsdp_over_tp import place
    from ckptcore.topology.pipeline_stages import place_experts, place_stages

    sizes = dict(mesh.axes)
    if sizes.get("tp", 1) > 1 or sizes.get("ep", 1) > 1:
        _require_rules(shapes, rules)
    stage: dict[str, tuple[int, ...] | None] = {}
    if sizes.get("pp", 1) > 1:
        if rules.stages is None:
            raise UsageError(
                f"no pipeline stages for pp={sizes['pp']} in {rules.origin}",
                hint="add [stages] to --sharding",
            )
        stage = place_stages(shapes, rules.stages, sizes["pp"])
    expert = place_experts(shapes, rules, sizes["ep"]) if sizes.get("ep", 1) > 1 else {}
    found: dict[str, TensorLayout] = {}
    known: dict[tuple[object, ...], TensorLayout] = {}
    for name, shape in shapes.items():
        at = [("pp", where)] if (where := stage.get(name)) is not None else []
        at += [("ep", (expert[name],))] if name in expert else []
        stacked = name in stage and stage[name] is None
        rule = rules.find(name)
        key = shape, id(rule), tuple(at), stacked
        if key not in known:
            known[key] = place(name, shape, mesh, rule, tuple(at), stacked)
        found[name] = known[key]
    return found


def _require_rules(shapes: Mapping[str, Shape], rules: ShardingRules) -> None:
    bare = [n for n, shape in shapes.items() if shape and rules.find(n) is None]
    if bare:
        raise UsageError(
            f"{len(bare)} of {len(shapes)} parameters have no rule in {rules.origin}: {some(bare)}",
            hint="add [[rule]] tables for them: --sharding FILE; one with a name alone leaves tp out",
        )


def _require_boxes(topology: Topology, tensors: Iterable[TensorSpec]) -> None:
    for spec in tensors:
        try:
            topology.held(spec.fqn, spec.shape)
        except UsageError as error:
            raise UsageError(f"{shown(spec.fqn)}: {error.message}", hint=error.hint) from error
