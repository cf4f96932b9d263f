"""Read small files with large claims: none costs its reader more than its size allows."""

from __future__ import annotations

import io
import json
import struct
import time
import tracemalloc
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import ckptcore
from ckptcore.encodings.limits import absent
from ckptcore.errors import CkptError, MalformedCheckpoint
from ckptcore.formats.base import natural

_META = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_SHARD = "torch.distributed._shard"
_PLACE = "torch.distributed.tensor.placement_types"


class Global:
    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name


class Made:
    """The result of a call; new: by NEWOBJ."""

    def __init__(
        self, function: Global, args: tuple[Any, ...] = (), state: Any = None, new: bool = False
    ) -> None:
        self.function, self.args, self.state, self.new = function, args, state, new


class Stored:
    """A storage by its persistent id."""

    def __init__(self, key: str, kind: str, numel: int) -> None:
        self.id = ("storage", Global("torch", kind), key, "cpu", numel)


def pickled(value: Any) -> bytes:
    """A pickle of classes that are not installed, in which equal objects are shared."""
    out, seen, kept = [b"\x80\x04"], dict[int, int](), list[Any]()

    def memo(one: Any) -> None:
        seen[id(one)] = len(seen)
        kept.append(one)
        out.append(b"\x94")

    def each(values: Any) -> None:
        out.append(b"(")
        for one in values:
            write(one)

    def write(one: Any) -> None:
        if id(one) in seen:
            out.append(b"j" + struct.pack("<I", seen[id(one)]))
        elif one is None or type(one) is bool:
            out.append({None: b"N", True: b"\x88", False: b"\x89"}[one])
        elif type(one) is int:
            raw = one.to_bytes(one.bit_length() // 8 + 1, "little", signed=True)
            out.append(b"\x8a" + bytes([len(raw)]) + raw)
        elif type(one) is str:
            out.append(b"X" + struct.pack("<I", len(one.encode())) + one.encode())
            memo(one)
        elif type(one) is dict:
            out.append(b"}")
            memo(one)
            each(part for pair in one.items() for part in pair)
            out.append(b"u")
        elif type(one) is list:
            out.append(b"]")
            memo(one)
            each(one)
            out.append(b"e")
        elif type(one) is tuple:
            each(one)
            out.append(b"t")
            memo(one)
        elif isinstance(one, Global):
            write(one.module)
            write(one.name)
            out.append(b"\x93")
            memo(one)
        elif isinstance(one, Stored):
            write(one.id)
            out.append(b"Q")
            memo(one)
        else:
            write(one.function)
            write(one.args)
            out.append(b"\x81" if one.new else b"R")
            memo(one)
            if one.state is not None:
                write(one.state)
                out.append(b"b")

    write(value)
    return b"".join([*out, b"."])


def record(module: str, name: str, **state: Any) -> Made:
    return Made(Global(module, name), state=state, new=True)


def tensor(key: str, kind: str, numel: int, size: tuple[int, ...], stride: tuple[int, ...]) -> Made:
    hooks = Made(Global("collections", "OrderedDict"))
    rebuild = Global("torch._utils", "_rebuild_tensor_v2")
    return Made(rebuild, (Stored(key, kind, numel), 0, size, stride, False, hooks))


def save(path: Path, tree: Any, **storages: bytes) -> Path:
    """A torch zip as laid out by `torch.save`; storage ``s0`` is the key "s0"."""
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickled(tree))
        archive.writestr("archive/byteorder", "little")
        for key, data in storages.items():
            archive.writestr(f"archive/data/{key}", data)
        archive.writestr("archive/version", "3\n")
    path.write_bytes(raw.getvalue())
    return path


def plain() -> dict[str, Any]:
    return {"w": tensor("s0", "FloatStorage", 2, (2,), (1,))}


def wrapped(kind: str, module: str, size: tuple[int, ...], state: Any) -> Made:
    own, torch32 = Global(module, kind), Global("torch", "float32")
    args = (own, torch32, size, (1,) * len(size), 0, None, "cpu", False)
    return Made(
        Global("torch._tensor", "_rebuild_from_type_v2"),
        (Global("torch._utils", "_rebuild_wrapper_subclass"), own, args, state),
    )


def dtensor(
    local: Made, sizes: tuple[int, ...], ranks: Any, placements: tuple[Any, ...], shape: tuple[int, ...]
) -> Made:
    at = [0] * len(sizes)
    mesh = record("torch.distributed.device_mesh", "DeviceMesh", mesh=ranks, _coordinate_on_dim=at, _rank=0)
    spec = record("torch.distributed.tensor._dtensor_spec", "DTensorSpec", mesh=mesh, placements=placements)
    return wrapped("DTensor", "torch.distributed.tensor", shape, {"_local_tensor": local, "_spec": spec})


def strided(dim: int, factor: int) -> Made:
    return record(_PLACE, "_StridedShard", dim=dim, split_factor=factor)


def metadata(path: Path, **state: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    empty = {"state_dict_metadata": {}, "planner_data": None, "storage_data": {}}
    path.write_bytes(pickled(record(_META, "Metadata", **{**empty, **state})))


def cheap(path: Path, refused: str | None = None) -> None:
    """Open a checkpoint in little time and memory; refused: what the error matches, None for no error."""
    begin = time.process_time()
    tracemalloc.start()
    try:
        if refused is None:
            ckptcore.open(str(path))
        else:
            with pytest.raises(MalformedCheckpoint, match=refused):
                ckptcore.open(str(path))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 256 << 20
    assert time.process_time() - begin < 30


def doubled() -> Any:
    value: Any = [1]
    for _ in range(60):
        value = [value, value]
    return value


_TEXT = "a" * 100_000
_SHARED = {
    "text": lambda: [_TEXT] * 20_000,
    "keys": lambda: {(f"k{i}", *[_TEXT] * 200): i for i in range(100)},
    "encode": lambda: [Made(Global("_codecs", "encode"), (_TEXT, "latin1")) for _ in range(20_000)],
    "path": lambda: [Made(Global("pathlib", "PosixPath"), (_TEXT,) * 100) for _ in range(500)],
    "set": lambda: [Made(Global("builtins", "set"), (_NUMBERS,)) for _ in range(5_000)],
    "namespace": lambda: [Made(_NAMESPACE, state=_NAMES, new=True) for _ in range(5_000)],
    "device": lambda: Made(Global("torch", "device"), (doubled(),)),
    "layout": lambda: Made(Global("torch.serialization", "_get_layout"), (doubled(),)),
}
_NAMESPACE = Global("argparse", "Namespace")
_NUMBERS = list(range(20_000))
_NAMES = {f"a{i}": i for i in range(20_000)}


@pytest.mark.grid
@pytest.mark.parametrize("name", _SHARED)
@pytest.mark.parametrize("file", ["a.ckpt", "rank0.pt"])
def test_values_shared_through_the_memo(name: str, file: str, tmp_path: Path) -> None:
    """One value with many references, and calls that would copy it each time."""
    tree: dict[str, Any] = {"state_dict": plain(), "pytorch-lightning_version": "2.6", "x": _SHARED[name]()}
    save(tmp_path / "c" / file, tree, s0=bytes(8))
    cheap(tmp_path / "c", r"a pickle of \d+ bytes|\d+ bytes of pickle|device|layout")


def test_rank_numbers_in_names(tmp_path: Path) -> None:
    """One file whose name claims a billion others."""
    save(tmp_path / "a" / "rank9999999.pt", plain(), s0=bytes(8))
    save(tmp_path / "b" / "pytorch_model_fsdp_rank99999999999.bin", plain(), s0=bytes(8))
    save(tmp_path / "c" / "pytorch_model_fsdp.bin", plain(), s0=bytes(8))
    save(tmp_path / "c" / "random_states_999999999.pkl", {"a": 1})
    metadata(tmp_path / "d" / "__999999999.metadata")
    (tmp_path / "d" / "__0_0.distcp").write_bytes(b"x")
    for part, tree in (("model", {"modules": []}), ("optim", {"state": {}, "param_groups": []})):
        save(tmp_path / "e" / part / "rank999999999.pt", tree)
    (tmp_path / "e" / "config.yaml").write_text("a: 1")
    for name in "abcde":
        cheap(tmp_path / name)
    lost = [f.code for f in ckptcore.open(str(tmp_path / "a")).findings]
    assert lost.count("missing-rank") == 100


def test_strided_shards(tmp_path: Path) -> None:
    """Split factors of no real mesh: steps multiply along one dim, pieces over two."""
    for case, placements, local, shape, message in (
        ("steps", (strided(0, 65535),) * 3, ((2,), (1,)), (1 << 40,), "steps"),
        ("pieces", (strided(0, 4096), strided(1, 4096)), ((4096, 4096), (0, 0)), (8192, 8192), "pieces"),
    ):
        sizes = (2,) * len(placements)
        n = 2 ** len(sizes)
        ranks = tensor("s1", "LongStorage", n, sizes, tuple(2**k for k in reversed(range(len(sizes)))))
        one = dtensor(tensor("s0", "FloatStorage", 2, *local), sizes, ranks, placements, shape)
        raw = struct.pack(f"<{n}q", *range(n))
        cheap(save(tmp_path / case / "rank0.pt", {"w": one}, s0=bytes(8), s1=raw).parent, message)


def test_shared_shards_and_meshes(tmp_path: Path) -> None:
    """One list of shards in a thousand tensors, and one list of ranks in as many meshes."""
    torch32 = Global("torch", "float32")
    where = record(f"{_SHARD}.metadata", "ShardMetadata", shard_offsets=[0], shard_sizes=[1])
    local = tensor("s0", "FloatStorage", 1, (1,), (1,))
    shard = record(f"{_SHARD}.sharded_tensor.shard", "Shard", tensor=local, metadata=where)
    kinds = f"{_SHARD}.sharded_tensor.metadata"
    properties = record(kinds, "TensorProperties", dtype=torch32)
    metadata = record(kinds, "ShardedTensorMetadata", size=(1,), tensor_properties=properties)
    api = f"{_SHARD}.sharded_tensor.api"
    group = record(api, "ShardedTensor.ProcessGroupState", global_rank=0, global_world_size=1)
    state = ([shard] * 20_000, metadata, group)
    sharded = {f"w{i}": wrapped("ShardedTensor", api, (1,), state) for i in range(500)}
    cheap(save(tmp_path / "a" / "rank0.pt", sharded, s0=bytes(4)).parent, "pieces")

    n = 1 << 18
    keep = record(_PLACE, "Replicate")

    def one() -> Made:
        local = tensor("s0", "FloatStorage", 1, (1,), (1,))
        return dtensor(local, (n,), tensor("s1", "CharStorage", n, (n,), (1,)), (keep,), (1,))

    meshes = {f"w{i}": one() for i in range(200)}
    cheap(save(tmp_path / "b" / "rank0.pt", meshes, s0=bytes(4), s1=bytes(n)).parent)


def test_a_plan_repeated_for_all_ranks(tmp_path: Path) -> None:
    """Megatron-Core's plans of all ranks, a hundred thousand times the same one."""
    index = record(_META, "MetadataIndex", fqn="w", offset=None, index=None)
    item = record(_PLANNER, "WriteItem", index=index, type=None, bytes_io_data=None, tensor_data=None)
    plan = record(_PLANNER, "SavePlan", items=[item] * 50_000)
    metadata(tmp_path / ".metadata", all_local_plans=[plan] * 50_000)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (tmp_path / "__0_0.distcp").write_bytes(b"x")
    cheap(tmp_path)


def zarray(path: Path, **fields: Any) -> None:
    form = {
        "compressor": None,
        "dtype": "<f8",
        "fill_value": None,
        "filters": None,
        "order": "C",
        "zarr_format": 2,
    }
    path.mkdir(parents=True)
    (path / ".zarray").write_text(json.dumps(form | fields))


def zarr(path: Path, args: dict[str, Any] | None = None) -> Path:
    """A folder of Megatron-Core's zarr without any array."""
    namespace = Made(Global("argparse", "Namespace"), state=args or {"a": 1}, new=True)
    save(path / "common.pt", {"args": namespace})
    (path / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    return path


def test_ranges_beyond_any_file(tmp_path: Path) -> None:
    """Sizes whose product exceeds 64 bits."""
    zarray(zarr(tmp_path / "a") / "w", shape=[2**49, 2**10], chunks=[2**49, 2**12])
    shape = [1 << 49] * 3
    spec = {"local_shape": shape, "global_offset": [0, 0, 0]}
    entry = {
        "shape": shape,
        "dtype": "F32",
        "is_sharded": True,
        "shard_spec_per_file": {"rank_0.safetensors": spec},
    }
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "metadata.json").write_text(json.dumps({"tensors": {"w": entry}}))
    for name in "ab":
        cheap(tmp_path / name, "a range that no file has")


def test_a_zarray_with_a_duplicate_key(tmp_path: Path) -> None:
    zarray(zarr(tmp_path) / "w", shape=[4], chunks=[4])
    file = tmp_path / "w" / ".zarray"
    file.write_text(file.read_text().replace('"shape"', '"shape": [8], "shape"'))
    cheap(tmp_path, "has a name twice")


_LAYOUTS: dict[str, dict[str, Any]] = {
    "stages": {
        "num_layers": 0,
        "pipeline_model_parallel_size": 1 << 19,
        "virtual_pipeline_model_parallel_size": 1 << 19,
    },
    "layers": {"num_layers": 10**12},
    "negative": {
        "num_layers": 8,
        "pipeline_model_parallel_size": 4,
        "decoder_first_pipeline_num_layers": -(10**9),
    },
    "rows": {"num_layers": 2, "pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": [1, 2]},
    "entries": {
        "num_layers": 2,
        "pipeline_model_parallel_size": 2,
        "pipeline_model_parallel_layout": [[[]], [{}]],
    },
    "experts": {"num_layers": 2, "num_experts": 10**12},
}


@pytest.mark.parametrize("case", _LAYOUTS)
def test_arguments_of_flat_buffers(case: str, tmp_path: Path) -> None:
    """Sizes of no real job: the buffers stay as they are."""
    folder = zarr(tmp_path, {"transformer_impl": "local", **_LAYOUTS[case]})
    flat = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32, torch.float32)"
    zarray(folder / f"{flat}.bucket_idx_0.exp_avg", shape=[64], chunks=[64], dtype="<f4")
    zarray(folder / "x.linear_fc1.weight", shape=[4, 2], chunks=[4, 2], dtype="<f4")
    zarray(folder / "x.linear_fc2.weight", shape=[2, 2], chunks=[2, 2], dtype="<f4")
    cheap(folder)
    assert "flat-buffers" in {f.code for f in ckptcore.open(str(folder)).findings}


def test_numbers_longer_than_int_accepts(tmp_path: Path) -> None:
    """Python refuses to parse more than 4300 digits; names may have them."""
    digits = "9" * 5000
    object_ = record(_META, "BytesStorageMetadata")
    metadata(tmp_path / "a" / ".metadata", state_dict_metadata={f"rng/shard_{digits}_1": object_})
    (tmp_path / "a" / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    args = Made(Global("argparse", "Namespace"), state={"num_layers": 2}, new=True)
    tree = {"args": args, "model": {f"decoder.layers.{digits}.x": plain()["w"]}, "checkpoint_version": 3}
    save(tmp_path / "b" / "mp_rank_00" / "model_optim_rng.pt", tree, s0=bytes(8))
    for name in "ab":
        with suppress(CkptError):  # a documented one
            ckptcore.open(str(tmp_path / name))
    names = [f"w.{digits}", "w.10", "w.9", "w.009", "w"]
    assert sorted(names, key=natural) == ["w", "w.009", "w.9", "w.10", f"w.{digits}"]


def test_absent_numbers() -> None:
    assert absent({0, 2}, 4, 100) == [1, 3]
    assert absent({7}, 3, 2) == [0, 1]
    assert absent(set(), 0, 5) == []


def test_views_that_expand_one_element(tmp_path: Path) -> None:
    """Four bytes that expand to 4 TiB."""
    wide = tensor("s0", "FloatStorage", 1, (1 << 20, 1 << 20), (0, 0))
    args = Made(Global("argparse", "Namespace"), state={"num_layers": 1}, new=True)
    legacy = {"args": args, "model": {"x.w": wide}, "iteration": 1, "checkpoint_version": 3}
    trees: dict[str, Any] = {
        "b/mp_rank_00/model_optim_rng.pt": legacy,
        "d/rank0.pt": {"w": wide},
        "e/a.ckpt": {"state_dict": {"w": wide}, "pytorch-lightning_version": "2.6"},
    }
    for name, tree in trees.items():
        save(tmp_path / name, tree, s0=bytes(4))
        cheap(tmp_path / name.split("/")[0], r"bytes .* tensors of \d+ bytes")
    save(zarr(tmp_path / "c") / "common.pt", {"x": wide}, s0=bytes(4))
    save(tmp_path / "a" / "a.pt", {"w": wide}, s0=bytes(4))
    part = ckptcore.open(str(tmp_path / "a"))  # a mask, for example: the rest converts
    assert (part.tensors, [*part.unread]) == ((), ["w"])
    found = ckptcore.open(str(tmp_path / "c"))
    assert not found.tensors
    assert [f.code for f in found.findings] == ["malformed-item"]
