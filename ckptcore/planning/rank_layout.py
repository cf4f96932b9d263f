"""Compute a topology from a mesh and rules on names: which rank holds which box of each tensor.

1. The mesh: axes in the order of trainers (`ckptcore.topology.mesh_spec`).
2. Parameters: the tensors of the model part, under their own names (no prefix, no wrappers).
3. Rules: the user's, or those of the family that the names belong to (`ckptcore.topology.rules`).
4. Each parameter's layout (`ckptcore.topology.rules`), its pipeline stage, and the rank of an expert
   by name.
5. Optimizer state: a tensor with a parameter's name in its own, and that shape, has the parameter's layout. A
   tensor of another shape (steps, factors) is replicated where the parameter is. State that belongs to no
   parameter is replicated on all ranks.
6. Buffers (integers, booleans) are replicated where a parameter of that name would be.
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
from ckptcore.utils.text import short_repr, some

if TYPE_CHECKING:
    from ckptcore.topology.rules import ShardingRules

Shape = tuple[int, ...]


def lay_out(
    manifest: Manifest, mesh: str, sharding: str | None = None, model_prefix: str | None = None
) -> Topology:
    """Return which rank of the mesh holds what of each tensor of the manifest.

    Args:
        manifest: The checkpoint's tensors.
        mesh: Such as ``fsdp=4,tp=2``.
        sharding: The text of a TOML file with rules (`ckptcore.topology.rules`), or None for the
            built-in ones.
        model_prefix: Prefix of the model part, or None to find it.

    Raises:
        UsageError: The mesh or the rules are impossible; the message has the numbers. Unknown axes,
            parameters without a rule or a stage, more stages than layers, experts that do not divide, shards
            that torch cannot place.
    """
    from ckptcore.topology import rules as placementrules  # imports pydantic, which only reshards need

    target = parse_mesh(mesh)
    user_rules = None if sharding is None else placementrules.load(sharding)
    if user_rules is not None and user_rules.mesh is not None:
        recorded = parse_mesh(",".join(f"{a}={n}" for a, n in user_rules.mesh.items()))
        if recorded.axes != target.axes:
            raise UsageError(
                f"--mesh {mesh} must equal the [mesh] of --sharding (got {dict(recorded.axes)} there)",
                hint="remove it from the file, or request that mesh",
            )
    if not manifest.tensors:  # plain values alone need no rule
        return Topology(target, {})
    shapes, owner = parameters(manifest, model_prefix)
    rules = placementrules.rules_for(list(shapes), user_rules, _needs_rules(target))
    layouts = _placed(shapes, target, rules)
    tensor_layouts: dict[str, TensorLayout] = {}
    for spec in manifest.tensors:
        of = owner.get(spec.fqn)
        if of is not None:
            same = spec.shape == shapes[of] and not _is_buffer(spec)
            tensor_layouts[spec.fqn] = (
                layouts[of] if same else TensorLayout(coordinates=layouts[of].coordinates)
            )
    topology = Topology(
        target, {fqn: layout for fqn, layout in tensor_layouts.items() if layout != REPLICATED}
    )
    _require_boxes(topology, manifest.tensors)
    return topology


@dataclass(frozen=True, slots=True)
class Balance:
    """How evenly a checkpoint is distributed over its ranks.

    Attributes:
        per_rank: Bytes that each rank has in memory, in rank order, replicas included.
        total: Bytes of all tensors.
    """

    per_rank: tuple[int, ...]
    total: int

    @property
    def ratio(self) -> float:
        """Return the fullest rank over the mean; 1.0 is even."""
        return max(self.per_rank) * len(self.per_rank) / sum(self.per_rank) if sum(self.per_rank) else 1.0

    def as_dict(self) -> dict[str, object]:
        """Return the JSON form."""
        return {
            "ranks": len(self.per_rank),
            "bytes_total": self.total,
            "bytes_per_rank": list(self.per_rank),
            "bytes_max": max(self.per_rank),
            "bytes_min": min(self.per_rank),
            "balance": round(self.ratio, 4),
        }


def balance(topology: Topology, tensors: Iterable[TensorSpec]) -> Balance:
    """Return how many bytes of the tensors each rank of a topology holds."""
    count: dict[tuple[str, Shape, TensorLayout], int] = {}
    total = 0
    example_fqn: dict[tuple[str, Shape, TensorLayout], str] = {}
    for spec in tensors:
        key = spec.dtype, spec.shape, topology.layout(spec.fqn)
        count[key] = count.get(key, 0) + 1
        example_fqn[key] = spec.fqn
        total += spec.nbytes
    per_rank = [0] * topology.mesh.size
    for (dtype, shape, layout), times in count.items():
        for rank, box in enumerate(topology.boxes(example_fqn[dtype, shape, layout], shape)):
            if box is not None:
                per_rank[rank] += times * TensorSpec("", dtype, box.shape).nbytes
    return Balance(tuple(per_rank), total)


def _is_buffer(spec: TensorSpec) -> bool:
    """Report whether a tensor is a buffer: trainers replicate positions, masks and counters.

    Integers of one byte may be packed weights; buffers of floats look like parameters.
    """
    dtype = BY_NAME[spec.dtype]
    return dtype.kind == "b" or (dtype.kind in "iu" and dtype.itemsize > 1)


def _needs_rules(mesh: Mesh) -> bool:
    return any(n > 1 for a, n in mesh.axes if a in ("pp", "ep", "tp"))


def _placed(shapes: Mapping[str, Shape], mesh: Mesh, rules: ShardingRules) -> dict[str, TensorLayout]:
    from ckptcore.topology.pipeline_stages import place_experts, place_stages
    from ckptcore.topology.rules import place

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
    layouts: dict[str, TensorLayout] = {}
    layout_of_key: dict[tuple[object, ...], TensorLayout] = {}
    for name, shape in shapes.items():
        axis_ranks = [("pp", where)] if (where := stage.get(name)) is not None else []
        axis_ranks += [("ep", (expert[name],))] if name in expert else []
        stacked = name in stage and stage[name] is None
        rule = rules.find(name)
        key = shape, id(rule), tuple(axis_ranks), stacked
        # `place` uses the name in errors alone, so parameters of one key share a layout.
        if key not in layout_of_key:
            layout_of_key[key] = place(name, shape, mesh, rule, tuple(axis_ranks), stacked)
        layouts[name] = layout_of_key[key]
    return layouts


def _require_rules(shapes: Mapping[str, Shape], rules: ShardingRules) -> None:
    bare = [n for n, shape in shapes.items() if shape and rules.find(n) is None]
    if bare:
        raise UsageError(
            f"no rule in {rules.origin} for {len(bare)} of {len(shapes)} parameters: {some(bare)}",
            hint="add [[rule]] tables for them: --sharding FILE; a rule without tp leaves tp out",
        )


def _require_boxes(topology: Topology, tensors: Iterable[TensorSpec]) -> None:
    for spec in tensors:
        try:
            topology.boxes(spec.fqn, spec.shape)
        except UsageError as error:
            raise UsageError(f"{short_repr(spec.fqn)}: {error.message}", hint=error.hint) from error
