"""Scenarios of single tensors: DTensors between meshes, ShardedTensors, dtypes, memory layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from dcp_scenario import OTHER, SAVED, Job, Make, State, filled, known, leaves, load, require_equal
from fresh_job import DTYPES, random_tensor
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.placement_types import _StridedShard

import ckptcore

Places = tuple[Any, ...]
ONE: tuple[Places, ...] = ((Replicate(),), (Shard(0),), (Shard(1),))
TWO: tuple[Places, ...] = tuple(product((Replicate(), Shard(0), Shard(1)), repeat=2))
UNEVEN = (7, 5)


def spread(shape: Sequence[int], mesh: DeviceMesh, places: Places, dtype: Any = torch.float32) -> Any:
    return distribute_tensor(torch.zeros(tuple(shape), dtype=dtype), mesh, places, src_data_rank=None)


def pairs(
    saved: tuple[DeviceMesh, Sequence[Places]],
    loaded: tuple[DeviceMesh, Sequence[Places]],
    shape: Sequence[int] = UNEVEN,
) -> tuple[Make, Make]:
    """A tensor for each pair of placements: as it is saved, and as it is loaded."""

    def make(side: int) -> Make:
        mesh = (saved, loaded)[side][0]

        def state(seed: int) -> State:
            every = enumerate(product(saved[1], loaded[1]))
            return filled({f"w.{n}": spread(shape, mesh, pair[side]) for n, pair in every}, seed)

        return state

    return make(0), make(1)


def one_axis(job: Job) -> None:
    mesh = job.mesh()
    job.conforms(*pairs((mesh, ONE), (mesh, ONE)))


def two_axes(job: Job) -> None:
    mesh = job.mesh(2, 2)
    job.conforms(*pairs((mesh, TWO), (mesh, TWO)))


def one_axis_into_two(job: Job) -> None:
    job.conforms(*pairs((job.mesh(), ONE), (job.mesh(2, 2), TWO)))


def two_axes_into_one(job: Job) -> None:
    job.conforms(*pairs((job.mesh(2, 2), TWO), (job.mesh(), ONE)))


def empty_shards(job: Job) -> None:
    """Fewer rows than ranks, no rows at all, and scalars."""
    one, two = job.mesh(), job.mesh(2, 2)
    for n, shape in enumerate([(1, 1), (2, 3), (1, 5), (0, 4), (4, 0)]):
        part = Job(job.name, job.rank, job.world, job.folder / str(n), job.checks)
        part.conforms(*pairs((one, ONE), (two, TWO), shape))

    def scalars(mesh: DeviceMesh) -> Make:
        places = (Replicate(),) * mesh.ndim
        return lambda seed: filled(
            {"a": spread((), mesh, places), "b": torch.zeros(()), "c": torch.zeros(0)}, seed
        )

    Job(job.name, job.rank, job.world, job.folder / "scalars", job.checks).conforms(
        scalars(one), scalars(two)
    )


def strided_shards(job: Job) -> None:
    """What FSDP over tensor parallelism makes of a dim that both cut."""
    strided = ((_StridedShard(0, split_factor=2), Shard(0)), (_StridedShard(1, split_factor=2), Shard(1)))
    mesh = job.mesh(2, 2)
    job.conforms(*pairs((mesh, strided), (job.mesh(), ONE), (8, 12)))
    back = Job(job.name, job.rank, job.world, job.folder / "back", job.checks)
    back.conforms(*pairs((job.mesh(), ONE), (mesh, strided), (8, 12)))


def part_of_the_ranks(job: Job) -> None:
    """Meshes of half of the ranks: the others have no part of the tensor."""
    low, high = (DeviceMesh("cpu", torch.tensor(ranks)) for ranks in ([0, 1], [2, 3]))

    def saved(seed: int) -> State:
        return filled({"low": spread(UNEVEN, low, ONE[1]), "high": spread(UNEVEN, high, ONE[2])}, seed)

    def loaded(seed: int) -> State:
        return filled({"low": spread(UNEVEN, high, ONE[2]), "high": spread(UNEVEN, job.mesh(), ONE[1])}, seed)

    job.conforms(saved, loaded)


def of_spec(spec: Any, *shape: int) -> Any:
    return sharded_tensor.zeros(spec, *shape)


def chunked(dim: int, world: int) -> ChunkShardingSpec:
    return ChunkShardingSpec(dim, [f"rank:{r}/cpu" for r in range(world)])


def sharded_tensor_plans(job: Job) -> None:
    """ShardedTensors of another plan, of rows and of columns, and plain tensors, into each other."""

    def cut(*rows: tuple[list[int], list[int], int]) -> EnumerableShardingSpec:
        return EnumerableShardingSpec([ShardMetadata(at, size, f"rank:{r}/cpu") for at, size, r in rows])

    rows, columns = chunked(0, job.world), chunked(1, job.world)
    plans: dict[str, Callable[[], Any]] = {
        "rows": lambda: of_spec(rows, 5, 7),
        "columns": lambda: of_spec(columns, 5, 7),
        "tiles": lambda: of_spec(
            cut(([0, 0], [2, 3], 1), ([2, 0], [3, 3], 0), ([0, 3], [1, 4], 0), ([1, 3], [4, 4], 1)), 5, 7
        ),
        "first": lambda: of_spec(cut(([0, 0], [5, 7], 1)), 5, 7),
        "plain": lambda: torch.zeros(5, 7),
        "dtensor": lambda: spread((5, 7), job.mesh(), (Shard(1),)),
    }

    def make(side: int) -> Make:
        every = list(product(plans, plans))
        return lambda seed: filled({f"{a}_into_{b}": plans[(a, b)[side]]() for a, b in every}, seed)

    job.conforms(make(0), make(1))


def bits(name: str, tensor: torch.Tensor, seed: int) -> torch.Tensor:
    return random_tensor(name, tensor.dtype, tuple(tensor.shape), seed)


def dtypes(job: Job) -> None:
    """Random bits of every dtype, NaNs among them, plain and sharded."""

    def make(places: Places) -> Make:
        mesh = job.mesh()

        def state(seed: int) -> State:
            made: State = {}
            for dtype in (*DTYPES, torch.complex32):
                made[f"{dtype}.sharded"] = spread((5, 3), mesh, places, dtype)
                made[f"{dtype}.plain"] = torch.zeros(3, dtype=dtype)
                made[f"{dtype}.scalar"] = torch.zeros((), dtype=dtype)
            return filled(made, seed, bits)

        return state

    job.conforms(make(ONE[1]), make(ONE[2]))


def casts(job: Job) -> None:
    """Live tensors of other dtypes: torch copies into them, and so does `load_into`."""
    wanted = (torch.bfloat16, torch.float16, torch.float64, torch.float32)

    def through(name: str, tensor: torch.Tensor, seed: int) -> torch.Tensor:
        return known(name, torch.empty(tensor.shape), seed).to(tensor.dtype)

    def make(other: bool) -> Make:
        mesh = job.mesh()
        kinds = [d if other else torch.float32 for d in wanted]
        return lambda seed: filled(
            {f"w{n}": spread(UNEVEN, mesh, ONE[1 + other], d) for n, d in enumerate(kinds)}, seed, through
        )

    job.conforms(make(False), make(True))


def strides(job: Job) -> None:
    """Transposed, sliced, expanded and channels-last tensors, and views of one storage."""

    def saved(seed: int) -> State:
        full = known("w", torch.zeros(6, 4), seed)
        base = torch.zeros(12, 8)
        base[::2, ::2] = full
        return {
            "transposed": full.t().contiguous().t(),
            "sliced": base[::2, ::2],
            "same": full,
            "view": full.view(4, 6).view(6, 4),
            "expanded": full[:1].expand(6, 4),
            "channels": known("c", torch.zeros(2, 3, 4, 4), seed).to(memory_format=torch.channels_last),
        }

    def loaded(seed: int) -> State:
        state = saved(seed)
        state["transposed"], state["sliced"] = state["sliced"], state["transposed"]
        state["expanded"] = state["expanded"].contiguous()
        state["view"] = state["view"].clone()
        return state

    job.conforms(saved, loaded)


class Rows(torch.Tensor):
    """A tensor that tells torch itself which rows of a greater one it is: the `_Checkpointable` protocol."""

    @staticmethod
    def __new__(cls, rank: int, world: int, rows: int, columns: int) -> Rows:
        first, last = rows * rank // world, rows * (rank + 1) // world
        # Two parts of unequal size on every rank, so that a rank has several.
        middle = first + (last - first + 2) // 3
        ends = [(first, middle), (middle, last)]
        made = torch.Tensor._make_wrapper_subclass(cls, (rows, columns), dtype=torch.float32)
        made.own = {(a, 0): torch.zeros(b - a, columns) for a, b in ends if b > a}
        return made

    own: dict[tuple[int, ...], torch.Tensor]

    @classmethod
    def __torch_dispatch__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(function)

    def __create_write_items__(self, fqn: str, own: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(chunk.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), part.size()) for at, part in self.own.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.own[tuple(index.offset)]


def own_protocol(job: Job) -> None:
    """Tensors that know their own chunks, saved and loaded, beside DTensors with such a local part."""

    def wrapped() -> DTensor:
        """Two column shards on one rank, as embeddings of torchrec have them."""
        width = 5
        start = 2 * width * job.rank
        shards = [torch.zeros(4, width), torch.zeros(4, width)]
        local = LocalShardsWrapper(shards, [(0, start), (0, start + width)])
        mesh, size = job.mesh(), torch.Size([4, 2 * width * job.world])
        return DTensor.from_local(local, mesh, [Shard(1)], run_check=False, shape=size, stride=(size[1], 1))

    def own(rows: int) -> Rows:
        return Rows(job.rank, job.world, rows, 3)

    def made(protocol: bool) -> Make:
        def state(seed: int) -> State:
            mesh = job.mesh()
            dense = {
                "rows": spread((11, 3), mesh, ONE[1]),
                "columns": spread((4, 10 * job.world), mesh, ONE[1]),
            }
            return filled({"rows": own(11), "columns": wrapped()} if protocol else dense, seed)

        return state

    for n, (saved, loaded) in enumerate(product((True, False), repeat=2)):
        part = Job(job.name, job.rank, job.world, job.folder / str(n), job.checks)
        part.conforms(made(saved), made(loaded))


def meta_device(job: Job) -> None:
    """Tensors without memory get memory, and the values."""
    path = job.folder / "saved"
    mesh = job.mesh()

    def make(seed: int, places: Places = ONE[1]) -> State:
        return filled({"w": spread(UNEVEN, mesh, places), "deep": {"b": torch.zeros(3)}}, seed)

    def meta() -> State:
        rows = {n: t.to("meta") for n, t in leaves(make(OTHER, ONE[2]), full=True).items()}
        return {"w": rows["w"], "deep": {"b": rows["deep.b"]}}

    dcp.save(make(SAVED), checkpoint_id=path)
    ours, theirs = meta(), meta()
    left = ckptcore.load_into(ckptcore.open(str(path)), ours)
    assert left == []
    load(theirs, path)
    require_equal(ours, theirs, "what torch loads")
    require_equal(ours, make(SAVED, ONE[2]), "what was saved")
    assert ours["w"].device == theirs["w"].device
    job.checks.append("load_into equals torch's load")
    job.rewrites(path, lambda seed: make(seed, ONE[2]), ("dcp", "mesh"))


RUNS: dict[str, Callable[[Job], None]] = {
    f.__name__: f
    for f in (
        one_axis,
        two_axes,
        one_axis_into_two,
        two_axes_into_one,
        empty_shards,
        strided_shards,
        part_of_the_ranks,
        sharded_tensor_plans,
        dtypes,
        casts,
        strides,
        own_protocol,
        meta_device,
    )
}
