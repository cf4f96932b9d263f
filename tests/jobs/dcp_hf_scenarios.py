"""Scenarios of Hugging Face folders: torch's safetensors writer and reader, sharded, joined, quantised."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from dcp_scenario import SAVED, Job, Make, State, filled, known, parts, require_equal
from dcp_tensor_scenarios import ONE, TWO, pairs, spread
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files,
    consolidate_safetensors_files_on_every_rank,
)
from torch.distributed.tensor import Replicate, Shard

import ckptcore

EVERY = ("dcp", "mesh", "hf")


def saved(job: Job, state: State, path: Path, **options: Any) -> None:
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(path), **options))


def from_hub(state: State, path: Path) -> None:
    """torch's reader of such folders, or of what ckptcore has made of one."""
    if (path / ".metadata").exists():
        dcp.load(state, checkpoint_id=path)
    else:
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(path)))


def proves(job: Job, path: Path, make: Make, **options: Any) -> None:
    job.loads(path, make, by_torch=from_hub, **options)
    job.rewrites(path, make, EVERY, by_torch=from_hub, **options)


def weights(job: Job, places: Any = ONE[1]) -> Make:
    """Names and dtypes of a model; torch's writer takes flat dicts of tensors."""
    mesh = job.mesh()

    def state(seed: int) -> State:
        kinds = (torch.float32, torch.bfloat16, torch.float16)
        rows = {f"layers.{n}.weight": spread((n + 4, 6), mesh, places, d) for n, d in enumerate(kinds)}
        return filled(rows | {"norm.weight": spread((7,), mesh, ONE[1])}, seed)

    return state


def full(job: Job) -> Make:
    def state(seed: int) -> State:
        return filled({n: torch.zeros(t.shape, dtype=t.dtype) for n, t in weights(job)(seed).items()}, seed)

    return state


def hf_one_rank(job: Job) -> None:
    """The first rank saves full tensors, into one file or several; read with threads, and into nothing."""
    make = full(job)
    mapping = {name: 1 + n % 2 for n, name in enumerate(make(SAVED))}
    for n, options in enumerate(({}, {"fqn_to_index_mapping": mapping}, {"thread_count": 2})):
        path = job.folder / str(n)
        job.alone(
            lambda path=path, options=options: dcp.save(
                make(SAVED), storage_writer=dcp.HuggingFaceStorageWriter(str(path), **options), no_dist=True
            )
        )
        proves(job, path, make)
        job.loads(path, weights(job, ONE[2]), by_torch=from_hub)

    def threaded(state: State, path: Path) -> None:
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(path), thread_count=2))

    job.loads(job.folder / "1", make, by_torch=threaded)


def hf_shards(job: Job) -> None:
    """Every rank saves its shards, into one file or several of a numbering that is given."""
    make = weights(job)
    mapping = {name: 1 + n % 2 for n, name in enumerate(make(SAVED))}
    for n, options in enumerate(({}, {"fqn_to_index_mapping": mapping})):
        path = job.folder / str(n)
        saved(job, make(SAVED), path, save_distributed=True, **options)
        proves(job, path, weights(job, ONE[2]))


def hf_consolidated(job: Job) -> None:
    """The writer joins the shards when all are saved; both are in the folder."""
    make = weights(job)
    mapping = {name: 1 + n % 2 for n, name in enumerate(make(SAVED))}
    for n, options in enumerate(({}, {"fqn_to_index_mapping": mapping, "thread_count_consolidation": 2})):
        path = job.folder / str(n)
        saved(job, make(SAVED), path, save_distributed=True, enable_consolidation=True, **options)
        proves(job, path, weights(job, ONE[2]))


def hf_consolidated_later(job: Job) -> None:
    """torch's tools join the shards into another folder, on one rank or on all."""
    make = weights(job)
    mapping = {name: 1 + n % 2 for n, name in enumerate(make(SAVED))}
    source = job.folder / "shards"
    saved(job, make(SAVED), source, save_distributed=True, fqn_to_index_mapping=mapping)
    one, each = job.folder / "one", job.folder / "each"
    job.alone(lambda: [folder.mkdir() for folder in (one, each)])
    job.alone(lambda: consolidate_safetensors_files(str(source), str(one), mapping))
    consolidate_safetensors_files_on_every_rank(str(source), str(each), mapping)
    torch.distributed.barrier()
    for path in (one, each):
        proves(job, path, weights(job, ONE[2]))


def hf_placements(job: Job) -> None:
    """From every placement of one mesh axis into every one of two, and back."""
    one, two = job.mesh(), job.mesh(2, 2)
    # Shards of equal size do not tell how many ranks there were, and no file does: ckptcore asks for consent.
    even = (8, 12)
    for n, (source, target) in enumerate((((one, ONE), (two, TWO)), ((two, TWO), (one, ONE)))):
        make, loaded = pairs(source, target, even)
        path = job.folder / str(n)
        saved(job, make(SAVED), path, save_distributed=True)
        proves(job, path, loaded, incomplete=True)


def hf_empty_shards(job: Job) -> None:
    """Fewer rows than ranks."""
    make, loaded = pairs((job.mesh(), ONE[1:]), (job.mesh(2, 2), TWO), (3, 2))
    path = job.folder / "saved"
    saved(job, make(SAVED), path, save_distributed=True)
    proves(job, path, loaded)


def quantised(job: Job, files: dict[str, dict[str, torch.Tensor]], path: Path) -> None:
    """A folder of quantised weights with the index that torch's reader asks for."""
    path.mkdir()
    for name, tensors in files.items():
        save_file({n: t.contiguous() for n, t in tensors.items()}, path / name, metadata={"format": "pt"})
    places = {n: name for name, tensors in files.items() for n in tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def compared(job: Job, path: Path, shapes: dict[str, tuple[int, ...]], places: Any) -> None:
    """`load_into` gives the values that torch's reader of quantised folders computes."""
    mesh = job.mesh()

    def state(seed: int) -> State:
        matrices = {n: spread(shape, mesh, places) for n, shape in shapes.items() if len(shape) > 1}
        rest = {n: torch.zeros(shape) for n, shape in shapes.items() if len(shape) == 1}
        return filled(matrices | rest, seed)

    def by_torch(wanted: State, path: Path) -> None:
        dcp.load(wanted, storage_reader=dcp.QuantizedHuggingFaceStorageReader(str(path)))

    def expected(seed: int) -> State:
        made_state = state(seed)
        if seed == SAVED:
            by_torch(made_state, path)
        return made_state

    job.loads(path, expected, by_torch=by_torch)


def hf_fp8_blocks(job: Job) -> None:
    """float8 weights with a scale for each block of 128 x 128, blocks that are cut included."""
    path = job.folder / "saved"
    shapes = {"a.weight": (300, 200), "b.weight": (128, 128), "norm.weight": (200,)}

    def write() -> None:
        made_files: dict[str, dict[str, torch.Tensor]] = {"model-00001-of-00001.safetensors": {}}
        tensors = made_files["model-00001-of-00001.safetensors"]
        for name, shape in shapes.items():
            full = known(name, torch.empty(shape), SAVED)
            if len(shape) == 2:
                tensors[name] = full.to(torch.float8_e4m3fn)
                blocks = tuple(-(-n // 128) for n in shape)
                tensors[f"{name}_scale_inv"] = known(f"{name}/scale", torch.empty(blocks), SAVED)
            else:
                tensors[name] = full
        quantised(job, made_files, path)
        config = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
        (path / "config.json").write_text(json.dumps({"quantization_config": config}))

    job.alone(write)
    for places in ONE:
        compared(job, path, shapes, places)


def hf_mxfp4(job: Job) -> None:
    """Two 4-bit numbers a byte and one exponent for 32, as gpt-oss stores its experts."""
    path = job.folder / "saved"

    def write() -> None:
        maker = torch.Generator().manual_seed(5)
        name = "model.layers.0.mlp.experts.down_proj"
        tensors = {
            f"{name}_blocks": torch.randint(0, 256, (2, 64, 3, 16), dtype=torch.uint8, generator=maker),
            f"{name}_scales": torch.randint(120, 134, (2, 64, 3), dtype=torch.uint8, generator=maker),
            "model.norm.weight": known("n", torch.empty(64), SAVED),
        }
        quantised(job, {"model-00001-of-00001.safetensors": tensors}, path)
        (path / "config.json").write_text(
            json.dumps({"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}})
        )

    job.alone(write)
    # torch's reader leaves columns of such a tensor as they were; its function for the values does not.
    stored = load_file(path / "model-00001-of-00001.safetensors")
    fqn, shape = "model.layers.0.mlp.experts.down_proj_blocks", (2, 64, 96)
    request = SimpleNamespace(storage_offsets=(0, 0, 0), lengths=shape, storage_index=None)
    full = dcp.QuantizedHuggingFaceStorageReader(str(path))._dequantize_tensor_mxfp4(
        stored[fqn], stored[fqn.replace("blocks", "scales")], request, 0, 0
    )
    assert full.shape == shape
    for places in ((Replicate(),), (Shard(1),), (Shard(2),)):
        state = {fqn: spread(shape, job.mesh(), places), "model.norm.weight": torch.zeros(64)}
        ckptcore.load_into(ckptcore.open(str(path)), state)
        (part, at), *_ = parts(state[fqn])
        box = tuple(slice(a, a + n) for a, n in zip(at, part.shape, strict=True))
        require_equal({"blocks": part}, {"blocks": full[box]}, "what torch computes")
        require_equal({"norm": state["model.norm.weight"]}, {"norm": stored["model.norm.weight"]}, "the file")
        job.checks.append("load_into equals torch's values")


RUNS: dict[str, Callable[[Job], None]] = {
    f.__name__: f
    for f in (
        hf_one_rank,
        hf_shards,
        hf_consolidated,
        hf_consolidated_later,
        hf_placements,
        hf_empty_shards,
        hf_fp8_blocks,
        hf_mxfp4,
    )
}
