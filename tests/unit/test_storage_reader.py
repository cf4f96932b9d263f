"""Test `ckptcore.StorageReader` under torch's own `load` in one process: what it fills and refuses."""

from __future__ import annotations

import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from odd_tensors import KINDS, W
from paths import FIXTURES
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import ckptcore
from ckptcore import errors

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
WEIGHT, STEPS = torch.arange(2_000_000.0).reshape(1000, 2000), torch.arange(8)


class NotPlain:
    """A class that no reader looks up."""


class OneChunk(torch.Tensor):
    """A tensor of which one chunk is in memory, as `torch.distributed.checkpoint` lets tensors say it."""

    offset: tuple[int, ...]
    memory: torch.Tensor

    @staticmethod
    def __new__(cls, shape: torch.Size, offset: tuple[int, ...], memory: torch.Tensor) -> OneChunk:
        tensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=memory.dtype)
        tensor.offset, tensor.memory = offset, memory
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(function)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(self.offset), self.memory.shape)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.memory


def values() -> dict[str, Any]:
    return {
        "model": {"weight": WEIGHT, "steps": STEPS},
        "optim": {"param_groups": [{"lr": 0.5, "betas": (0.9, 0.99)}], "names": ["a", "b"]},
        "step": 7,
    }


def empty() -> dict[str, Any]:
    return {
        "model": {"weight": torch.zeros_like(WEIGHT), "steps": torch.zeros_like(STEPS)},
        "optim": {"param_groups": [{"lr": 0.0, "betas": None}], "names": None},
        "step": 0,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DCP folder, and the same in one file of `torch.save`."""
    place = tmp_path_factory.mktemp("saved")
    dcp.save(values(), checkpoint_id=place / "dcp")
    torch.save(values(), place / "all.pt")
    return place


def failure(error: pytest.ExceptionInfo[CheckpointException]) -> BaseException:
    """Return what this rank raised, as torch hands it over."""
    wrapped = error.value.failures[0]
    return wrapped[0]


@pytest.mark.parametrize("name", ["dcp", "all.pt"])
def test_tensors_and_plain_values(folder: Path, name: str) -> None:
    state = empty()
    dcp.load(state, storage_reader=ckptcore.StorageReader(folder / name))
    model, saved = state.pop("model"), values()
    for key, tensor in saved.pop("model").items():
        assert torch.equal(model[key], tensor)
    assert state == saved


def test_memory_is_filled_in_place_and_cast(folder: Path) -> None:
    """Also where it is not contiguous, under another dtype."""
    half = torch.zeros(2000, 1000, dtype=torch.float16).t()
    state = {"model": {"weight": half}}
    dcp.load(state, storage_reader=ckptcore.StorageReader(folder / "all.pt"), no_dist=True)
    assert torch.equal(half, WEIGHT.half())
    assert state["model"]["weight"] is half


def test_one_chunk_of_a_large_tensor(tmp_path: Path) -> None:
    """Only its box is read, and memory is that of the buffers."""
    large = torch.arange(48 << 20, dtype=torch.int32).reshape(-1, 1 << 20)  # 192 MiB
    torch.save({"large": large}, tmp_path / "all.pt")
    chunk = torch.zeros(1, 5, dtype=torch.int32)
    state = {"large": OneChunk(large.shape, (40, 7), chunk)}
    reader = ckptcore.StorageReader(tmp_path / "all.pt")
    tracemalloc.start()
    try:
        dcp.load(state, storage_reader=reader)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert torch.equal(chunk, large[40:41, 7:12])
    assert peak < 64 << 20


def test_missing_names(folder: Path) -> None:
    """Refused in torch's words, and left out by its planner for partial loads."""
    reader, weight = ckptcore.StorageReader(folder / "all.pt"), torch.zeros_like(WEIGHT)
    state = {"model": {"weight": weight, "absent": torch.zeros(3)}}
    with pytest.raises(CheckpointException) as error:
        dcp.load(state, storage_reader=reader)
    assert str(failure(error)) == "Missing key in checkpoint state_dict: model.absent."
    assert not weight.any()
    dcp.load(state, storage_reader=reader, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert torch.equal(weight, WEIGHT)
    assert not state["model"]["absent"].any()


def test_another_size(folder: Path) -> None:
    with pytest.raises(CheckpointException, match=r"Size mismatch .* for model\.weight"):
        dcp.load({"model": {"weight": torch.zeros(4)}}, storage_reader=ckptcore.StorageReader(folder / "dcp"))


def test_names_by_a_mapping(folder: Path) -> None:
    names = {"tied": "model.steps", "steps": "model.steps"}
    state: dict[str, Any] = {"tied": torch.zeros(8), "steps": torch.zeros(8), "step": None}
    dcp.load(state, storage_reader=ckptcore.StorageReader(folder / "all.pt", names))
    assert torch.equal(state["tied"], STEPS.float())
    assert torch.equal(state["steps"], STEPS.float())
    assert state["step"] == 7
    with pytest.raises(errors.NameMismatch, match=r"the checkpoint lacks: model\.stepz(?m:$)") as error:
        ckptcore.StorageReader(folder / "all.pt", {"x": "model.stepz"})
    assert "model.steps" in error.value.hint


def test_names_of_no_scheme(folder: Path) -> None:
    with pytest.raises(errors.UsageError, match="names must be stored or one of"):
        ckptcore.StorageReader(folder / "dcp", "nowhere")


def test_another_checkpoint_for_each_load(folder: Path, tmp_path: Path) -> None:
    dcp.save({"step": 8}, checkpoint_id=tmp_path / "next")
    reader, state = ckptcore.StorageReader(folder / "dcp"), {"step": 0}
    dcp.load(state, storage_reader=reader)
    assert state == {"step": 7}
    dcp.load(state, storage_reader=reader, checkpoint_id=tmp_path / "next")
    assert state == {"step": 8}
    assert ckptcore.StorageReader.validate_checkpoint_id(tmp_path / "next")
    assert not ckptcore.StorageReader.validate_checkpoint_id(tmp_path)


def test_a_missing_file_is_refused_before_anything_is_filled(tmp_path: Path) -> None:
    """Where something in it was requested; the rest can be loaded."""
    source = tmp_path / "ckpt"
    shutil.copytree(FIXTURES / "torch" / "dcp_file_per_item_2r" / "ckpt", source)
    manifest = ckptcore.open(source)
    first, other = [t.fqn for t in manifest.tensors if t.numel > 1][:2]
    state = {spec.fqn: ckptcore.read(manifest, spec.fqn).zero_() for spec in manifest.tensors}
    chunk = manifest.chunks.item[manifest.chunks.first[manifest.index[first]]]
    (source / manifest.files[manifest.items[int(chunk)].file].path).unlink()
    with pytest.raises(CheckpointException) as error:
        dcp.load(state, storage_reader=ckptcore.StorageReader(source))
    assert isinstance(failure(error), errors.DamagedCheckpoint)
    assert not any(tensor.any() for tensor in state.values())
    dcp.load({other: state[other]}, storage_reader=ckptcore.StorageReader(source))
    assert state[other].any()


def test_a_false_checksum(folder: Path, tmp_path: Path) -> None:
    """Ends the load, and leaves plain values as they were."""
    source = tmp_path / "all.pt"
    data = bytearray((folder / "all.pt").read_bytes())
    at = data.index(WEIGHT.numpy().tobytes()[-4000:])
    data[at] ^= 1
    source.write_bytes(data)
    state = empty()
    with pytest.raises(CheckpointException) as error:
        dcp.load(state, storage_reader=ckptcore.StorageReader(source))
    assert isinstance(failure(error), errors.DamagedCheckpoint)
    assert "CRC-32" in str(failure(error))
    assert state["step"] == 0
    dcp.load(state, storage_reader=ckptcore.StorageReader(source, verify=False))
    assert state["step"] == 7


def test_a_refused_object(tmp_path: Path) -> None:
    """It is named before anything is filled; no class is looked up."""
    torch.save({"weight": STEPS, "custom": NotPlain()}, tmp_path / "all.pt")
    state: dict[str, Any] = {"weight": torch.zeros(8), "custom": None}
    reader = ckptcore.StorageReader(tmp_path / "all.pt")
    with pytest.raises(CheckpointException) as error:
        dcp.load(state, storage_reader=reader)
    assert isinstance(failure(error), errors.NameMismatch)
    assert "NotPlain" in str(failure(error))
    assert not state["weight"].any()
    dcp.load({"weight": state["weight"]}, storage_reader=reader)
    assert torch.equal(state["weight"], STEPS.float())


def test_quantised_weights() -> None:
    """Their values are loaded; codes alone are not cast."""
    source = FIXTURES / "torch" / "hf_fp8_block" / "ckpt"
    stored = ckptcore.open(source, keep_quantized=True)
    name = next(t.fqn for t in stored.tensors if t.dtype.startswith("float8"))
    state = {name: ckptcore.read(ckptcore.open(source), name)}
    wanted = state[name].clone()
    state[name].zero_()
    dcp.load(state, storage_reader=ckptcore.StorageReader(source))
    assert torch.equal(state[name], wanted)
    state[name].zero_()
    with pytest.raises(CheckpointException) as error:
        dcp.load(state, storage_reader=ckptcore.StorageReader(stored))
    assert "its values need" in str(failure(error))
    assert not state[name].any()


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_an_unreadable_tensor(tmp_path: Path) -> None:
    """It is refused as such: it is not missing."""
    torch.save({"model": {"w": W, "odd": KINDS["qint8"]()}}, tmp_path / "all.pt")
    reader = ckptcore.StorageReader(tmp_path / "all.pt")
    state = {"model": {"w": torch.zeros_like(W), "odd": torch.zeros(2)}}
    with pytest.raises(CheckpointException) as error:
        dcp.load(state, storage_reader=reader)
    assert isinstance(failure(error), errors.UnreadablePart)
    assert not state["model"]["w"].any()
    dcp.load({"model": {"w": state["model"]["w"]}}, storage_reader=reader)
    assert torch.equal(state["model"]["w"], W)


def test_expanded_memory(folder: Path) -> None:
    """Is refused, as `load_into` refuses it."""
    state = {"model": {"steps": torch.zeros(8), "weight": torch.zeros(1, 2000).expand(1000, 2000)}}
    with pytest.raises(CheckpointException) as error:
        dcp.load(state, storage_reader=ckptcore.StorageReader(folder / "dcp"))
    assert "share one place in memory" in str(failure(error))
    assert not state["model"]["steps"].any()
