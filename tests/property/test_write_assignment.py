"""Which rank writes which box: the shares made in columns are those of torch's rule, applied box by box."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ckptcore.core.columnar_file import Spelled, canonical_json, digest
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import TensorSpec
from ckptcore.formats.common.write_assignment import by_rank, in_order
from ckptcore.topology.layout import Replicate, Shard, TensorLayout, Topology
from ckptcore.topology.mesh_spec import parse_mesh


def by_rule(
    tensors: list[TensorSpec], order: list[int], topology: Topology
) -> list[list[tuple[int, object]]]:
    """Give each box, one after the other, to the rank with the fewest bytes so far."""
    load = [0] * topology.mesh.size
    mine: list[list[tuple[int, object]]] = [[] for _ in load]
    for i in order:
        spec = tensors[i]
        holders: dict[object, list[int]] = {}
        for rank, box in enumerate(topology.boxes(spec.fqn, spec.shape)):
            if box is not None and 0 not in box.shape:
                holders.setdefault(box, []).append(rank)
        for box, ranks in holders.items():
            rank = min(ranks, key=lambda r: (load[r], r))
            load[rank] += box.numel * BY_NAME[spec.dtype].itemsize or 1  # type: ignore[attr-defined]
            mine[rank].append((i, box))
    return mine


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mesh", ["fsdp=3", "fsdp=4,tp=2", "pp=2,fsdp=2"])
def test_shares_are_those_of_the_rule(mesh: str, seed: int) -> None:
    made = random.Random(seed)
    parsed = parse_mesh(mesh)
    tensors, layouts = [], {}
    for n in range(40):
        shape = tuple(made.choice((1, 2, 3, 8, 24)) for _ in range(made.randint(0, 3)))
        tensors.append(TensorSpec(f"t.{n}", made.choice(("bfloat16", "float32")), shape))
        axes = tuple(a for a, size in parsed.axes if a != "pp" and made.random() < 0.7)
        placements = tuple(
            Shard(made.randrange(len(shape))) if shape and made.random() < 0.8 else Replicate() for _ in axes
        )
        at = (("pp", (made.randrange(2),)),) if "pp" in mesh and made.random() < 0.6 else ()
        layouts[f"t.{n}"] = TensorLayout(axes, placements, at)
    topology, order = Topology(parsed, layouts), in_order(tensors)
    shares = by_rank(tensors, order, topology)
    assert [list(share) for share in shares] == by_rule(tensors, order, topology)
    for share in shares:
        for i, piece in zip(share.tensors, share.pieces, strict=True):
            assert piece.kind == (tensors[i].dtype, piece.box.shape)


def test_texts_spelled_once_give_the_same_frame() -> None:
    names = ("b", 'a"\\', "ümlaut", "\udcff")
    arrays = {"x": np.arange(3)}
    plain = {"z": 1, "tensors": {"names": list(names), "dtypes": ["f"]}, "a": {"1": None}}
    shared = plain | {"tensors": {"names": Spelled(names), "dtypes": ["f"]}}
    assert digest(shared, arrays) == digest(plain, arrays)
    assert Spelled(names).json == canonical_json(list(names))
