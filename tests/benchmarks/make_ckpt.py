"""Write the checkpoints that the benchmarks convert.

1. `SOURCES` lists them: Llama-shaped models of several sizes, and the shapes that are slow.
2. `shard` returns the bits of one shard from the tensor's position in the list, so that every element
   of a checkpoint can be recomputed later and compared (see verify.py).
3. `write` saves one with `torch.distributed.checkpoint.save` in a real gloo job, one process per
   rank. Where that many processes do not fit on a machine, one process acts as each rank in turn.
   torch's own planner and writer make the files either way, and the smoke test compares the two
   ways byte by byte.

    python make_ckpt.py row-2gb FOLDER [--scale 16]
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptcore.utils.units import show_size

if TYPE_CHECKING:
    import torch

# The highest exponent bit stays clear: all values are finite and below 2, so that a cast has one
# right answer, while every other bit (subnormals included) is random.
_MASKS = {"bf16": 0xBFFF_BFFF_BFFF_BFFF, "fp32": 0xBFFF_FFFF_BFFF_FFFF}
_WIDTHS = {"bf16": 2, "fp32": 4}  # bytes per element
_MOST_PROCESSES = 16


@dataclass(frozen=True, slots=True)
class Source:
    """One checkpoint.

    Attributes:
        tensors: (name, shape) in the order of the state dict.
        dtype: "bf16" or "fp32".
        ranks: Number of processes that save it.
        dim: The sharded dim (the last one where a tensor has fewer); None = replicated.
        layout: A key of `LAYOUTS`: the trainer whose folder it is.
        moments: Whether AdamW's float32 state follows the model.
        groups: Ranks that shard one tensor, where they are fewer than all: expert parallelism.
        transposed: Whether matrices are stored column by column.
    """

    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    dtype: str
    ranks: int
    dim: int | None
    layout: str = "dcp"
    moments: bool = False
    groups: tuple[range | None, ...] = ()
    transposed: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, each counted once; for a job on paper, about the bytes of its metadata."""
        if self.layout in {"paper", "zero3-hollow"}:
            groups = self.groups or (None,) * len(self.tensors)
            return 200 * sum(self.ranks if group is None else len(group) for group in groups)
        return sum(
            math.prod(shape) * _WIDTHS[self.dtype_of(index)] for index, (_, shape) in enumerate(self.tensors)
        )

    def dtype_of(self, index: int) -> str:
        """Return the dtype of tensor ``index``."""
        return "fp32" if self.moments and self.tensors[index][0].startswith("optim.") else self.dtype

    def sharded_dim(self, index: int) -> int | None:
        """Return the sharded dim of tensor ``index``, or None where it is replicated."""
        if self.dim is None:
            return None
        return min(self.dim, len(self.tensors[index][1]) - 1)

    def shard_shape(self, index: int) -> tuple[int, ...]:
        """Return the shape of one rank's shard of tensor ``index``; all shards are equal."""
        shape, dim = self.tensors[index][1], self.sharded_dim(index)
        if dim is None:
            return shape
        if shape[dim] % self.ranks:
            raise ValueError(f"cannot shard {shape} into {self.ranks} equal parts on dim {dim}")
        return (*shape[:dim], shape[dim] // self.ranks, *shape[dim + 1 :])


def llama(
    hidden: int, intermediate: int, kv: int, vocab: int, layers: int
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return names and shapes of a `LlamaForCausalLM`, as in its state dict."""

    def names() -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "model.embed_tokens.weight", (vocab, hidden)
        for n in range(layers):
            layer = f"model.layers.{n}"
            yield f"{layer}.self_attn.q_proj.weight", (hidden, hidden)
            yield f"{layer}.self_attn.k_proj.weight", (kv, hidden)
            yield f"{layer}.self_attn.v_proj.weight", (kv, hidden)
            yield f"{layer}.self_attn.o_proj.weight", (hidden, hidden)
            yield f"{layer}.mlp.gate_proj.weight", (intermediate, hidden)
            yield f"{layer}.mlp.up_proj.weight", (intermediate, hidden)
            yield f"{layer}.mlp.down_proj.weight", (hidden, intermediate)
            yield f"{layer}.input_layernorm.weight", (hidden,)
            yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield "model.norm.weight", (hidden,)
        yield "lm_head.weight", (vocab, hidden)

    return tuple(names())


def _llama_1b(layers: int, dtype: str, dim: int, layout: str = "dcp") -> Callable[[int], Source]:
    """Return a source with widths of Llama 3.2 1B, a vocabulary of 32,000, and layers for its size."""
    return lambda s: Source(
        llama(2048 // s, 8192 // s, 512 // s, 32000 // s, layers), dtype, ranks=8, dim=dim, layout=layout
    )


def _llama_3b(layers: int, dtype: str, dim: int) -> Callable[[int], Source]:
    """Return a source with widths of Llama 3.2 3B."""
    return lambda s: Source(
        llama(3072 // s, 8192 // s, 1024 // s, 32000 // s, layers), dtype, ranks=8, dim=dim
    )


def _llama_8b(layers: int, dtype: str, dim: int) -> Callable[[int], Source]:
    """Return a source with widths of Llama 3.1 8B."""
    return lambda s: Source(
        llama(4096 // s, 14336 // s, 1024 // s, 32000 // s, layers), dtype, ranks=8, dim=dim
    )


def _training(hidden: int, kv: int, vocab: int, layers: int) -> Callable[[int], Source]:
    """Return a source for resuming a run: bf16 weights, and float32 moments of each."""

    def made(s: int) -> Source:
        weights = llama(hidden // s, 4 * hidden // s, kv // s, vocab // s, layers)
        moments = tuple(
            (f"optim.state.{name}.{kind}", shape)
            for name, shape in weights
            for kind in ("exp_avg", "exp_avg_sq")
        )
        return Source((*weights, *moments), "bf16", ranks=8, dim=0, moments=True)

    return made


def _paper(s: int) -> Source:
    """Llama 3.1 405B in training, as 1024 ranks save it: 3.5 million chunks."""
    weights = llama(16384 // s, 53248 // s, 1024 // s, 128256 // s, 126)
    moments = tuple(
        (f"optim.state.{name}.{kind}", () if kind == "step" else shape)
        for name, shape in weights
        for kind in ("step", "exp_avg", "exp_avg_sq")
    )
    return Source((*weights, *moments), "bf16", 1024 // s, 0, "paper", moments=True)


def _moe(s: int) -> Source:
    """A mixture of experts of 10^12 parameters, 384 experts in 61 layers, as 2048 ranks save it.

    Experts are spread over 64 groups of 32 ranks, which shard them; all ranks shard the other tensors.
    """
    ranks, experts, hidden, inner, latent = 2048 // s, 384 // s, 7168 // s, 2048 // s, 1536 // s
    size = max(ranks // 64, 1)
    tensors: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (163_840 // s, hidden))]
    groups: list[range | None] = [None]
    for n in range(61):
        layer = f"model.layers.{n}"
        for name, shape in (
            ("self_attn.q_a_proj.weight", (latent, hidden)),
            ("self_attn.q_b_proj.weight", (12_288 // s, latent)),
            ("self_attn.kv_a_proj_with_mqa.weight", (576 // s, hidden)),
            ("self_attn.kv_b_proj.weight", (16_384 // s, 512 // s)),
            ("self_attn.o_proj.weight", (hidden, 8192 // s)),
            ("mlp.gate.weight", (experts, hidden)),
            ("input_layernorm.weight", (hidden,)),
            ("post_attention_layernorm.weight", (hidden,)),
        ):
            tensors.append((f"{layer}.{name}", shape))
            groups.append(None)
        for expert in range(experts):
            first = expert * (ranks // size) // experts * size
            for name, shape in (
                ("gate", (inner, hidden)),
                ("up", (inner, hidden)),
                ("down", (hidden, inner)),
            ):
                tensors.append((f"{layer}.mlp.experts.{expert}.{name}_proj.weight", shape))
                groups.append(range(first, first + size))
    tensors += [("model.norm.weight", (hidden,)), ("lm_head.weight", (163_840 // s, hidden))]
    groups += [None, None]
    return Source(tuple(tensors), "bf16", ranks, 0, "paper", groups=tuple(groups))


def _one(name: str, shape: tuple[int, int], ranks: int, dim: int) -> Source:
    return Source(((name, shape), ("model.norm.weight", (shape[1],))), "bf16", ranks, dim)


# name -> the source at 1/scale of its widths (1/scale**2 of a matrix's bytes). Sizes are those of
# the stored bytes, in decimal GB, within 2 %.
SOURCES: dict[str, Callable[[int], Source]] = {
    "row-10mb": lambda s: Source(llama(256 // s, 1024 // s, 64 // s, 6400 // s, 2), "bf16", ranks=4, dim=0),
    "row-0.5gb": _llama_1b(2, "bf16", 0),
    "row-2gb": _llama_1b(14, "bf16", 0),
    "row-4gb": _llama_3b(18, "bf16", 0),
    "row-8gb": _llama_8b(17, "bf16", 0),
    "col-2gb": _llama_1b(14, "bf16", 1),
    "col-4gb": _llama_3b(18, "bf16", 1),
    "transposed-2gb": lambda s: replace(_llama_1b(14, "bf16", 0)(s), transposed=True),
    "lightning-2gb": _llama_1b(14, "bf16", 0, "lightning"),
    "olmo-2gb": _llama_1b(14, "bf16", 0, "olmo"),
    "verl-2gb": _llama_1b(14, "bf16", 0, "verl"),
    "hf-shards-2gb": _llama_1b(14, "bf16", 0, "hf-shards"),
    "fp32-2gb": _llama_1b(6, "fp32", 0),
    "fp32-3gb": _llama_1b(10, "fp32", 0),
    "fp32-4gb": _llama_1b(14, "fp32", 0),
    # 1 MiB each at any scale: almost no work, 20 times.
    "files-20": lambda s: Source(
        tuple((f"model.part.{n}.weight", (1024, 512)) for n in range(20)), "bf16", 4, 0
    ),
    # 4 KiB each; complete in one item, spread over 8 files as torch deduplicates replicas ...
    "many-small": lambda s: Source(
        tuple((f"model.small.{n}.weight", (2048,)) for n in range(20_000 // s)), "bf16", 8, None
    ),
    # ... and in 8 items of 512 bytes.
    "many-small-8way": lambda s: Source(
        tuple((f"model.small.{n}.weight", (2048,)) for n in range(20_000 // s)), "bf16", 8, 0
    ),
    # 32 columns of 2 bytes per rank: runs of 64 bytes; 2 GiB in all.
    "1024-way": lambda s: _one("model.wide.weight", (32768 // s, 32 * 1024 // s), 1024 // s, 1),
    # 1 GiB in one tensor: four times the memory budget of lines.py.
    "big-row": lambda s: _one("model.embed_tokens.weight", (16384 // s, 32768 // s), 8, 0),
    "training-4gb": _training(2048, 512, 23_552, 5),
    "training-8gb": _training(2048, 512, 32_768, 11),
    # 10^6 chunks.
    "chunks-1m": lambda s: Source(
        tuple((f"model.layers.{n}.mlp.weight", (2 * (1000 // s), 64)) for n in range(1000 // s)),
        "bf16",
        1000 // s,
        0,
        "hollow",
    ),
    # 10^7 chunks.
    "chunks-10m": lambda s: Source(
        tuple((f"model.layers.{n}.mlp.weight", (2 * (2000 // s), 64)) for n in range(5000 // s)),
        "bf16",
        2000 // s,
        0,
        "paper",
    ),
    "405b-1024": _paper,
    "moe-1t-2048": _moe,
    # 12 MB on 4 ranks: an adapter, or a step of reinforcement learning.
    "small-10mb": lambda s: Source(llama(256 // s, 704 // s, 128 // s, 4096 // s, 5), "bf16", 4, 0),
    # 8 ranks of DeepSpeed's ZeRO-3: the masters; moments are beside them.
    "zero3-2gb": lambda s: Source(
        llama(2048 // s, 8192 // s, 512 // s, 32000 // s, 6), "fp32", 8, None, "zero3"
    ),
    # 512 ranks, 723 parameters and 3 states of each: 10^6 chunks.
    "zero3-512": lambda s: Source(
        llama(8192 // s, 28672 // s, 1024 // s, 128256 // s, 80), "fp32", 512 // s, None, "zero3-hollow"
    ),
    "big-col": lambda s: _one("model.embed_tokens.weight", (16384 // s, 32768 // s), 8, 1),
}


def shard(source: Source, index: int, rank: int) -> torch.Tensor:
    """Return the bits of ``rank``'s shard of tensor ``index``.

    They are always the same, and equal on all ranks where the tensor is replicated.
    """
    import torch

    shape = source.shard_shape(index)
    width = source.dtype_of(index)
    nbytes = math.prod(shape) * _WIDTHS[width]
    stream = np.random.SFC64([index, 0 if source.sharded_dim(index) is None else rank])
    raw = stream.random_raw(-(-nbytes // 8))
    raw &= np.uint64(_MASKS[width])
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[width]
    return torch.from_numpy(raw.view(np.uint8)[:nbytes]).view(dtype).view(shape)


def _state_dict(source: Source, rank: int, mesh: Any) -> dict[str, Any]:
    """Return the state dict that a training job on ``mesh`` passes to DCP on ``rank``.

    It has the model under the key "model", the optimizer's state below "optim".
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    model = {}
    for index, (name, _) in enumerate(source.tensors):
        dim = source.sharded_dim(index)
        placement = Replicate() if dim is None else Shard(dim)
        local = shard(source, index, rank)
        if source.transposed and local.ndim == 2:
            local = local.t().contiguous().t()
        model[name] = DTensor.from_local(local, mesh, [placement], run_check=False)
    optim = {name: model.pop(name) for name in list(model) if source.moments and name.startswith("optim.")}
    return {"model": model, **optim}


def write(source: Source, folder: Path) -> None:
    """Save ``source`` as a new folder of its layout.

    Peak memory: the checkpoint's bytes (one process per rank holds one shard each).
    """
    if folder.exists():
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    LAYOUTS[source.layout](source, folder)


def write_dcp(source: Source, folder: Path) -> None:
    """Write the folder of `torch.distributed.checkpoint.save`."""
    if source.ranks <= _MOST_PROCESSES:
        write_in_job(source, folder)
    else:
        write_in_turn(source, folder)


def write_lightning(source: Source, folder: Path) -> None:
    """Write the folder of Lightning's Trainer with FSDPStrategy: DCP, and meta.pt with the rest."""
    import torch

    write_dcp(source, folder)
    meta = {
        "epoch": 1,
        "global_step": 100,
        "pytorch-lightning_version": "2.6.6",
        "loops": {},
        "callbacks": {},
        "lr_schedulers": [],
        "hparams_name": "kwargs",
        "hyper_parameters": {"lr": 1e-4},
    }
    torch.save(meta, folder / "meta.pt")


def write_olmo(source: Source, folder: Path) -> None:
    """Write the folder of OLMo-core's trainer: a step folder around DCP."""
    write_dcp(source, folder / "model_and_optim")
    (folder / ".metadata.json").write_text('{"ephemeral": false, "version": "3.0.0"}')


def write_verl(source: Source, folder: Path) -> None:
    """Write the folder of verl's FSDP workers: one pickle of DTensors a rank, and the Hugging Face config."""
    import json

    folder.mkdir(parents=True)
    _in_job(source, folder, _save_pickle)
    save_config(source, folder / "huggingface")
    fsdp = {"FSDP_version": 2, "world_size": source.ranks}
    (folder / "fsdp_config.json").write_text(json.dumps(fsdp))


def save_config(source: Source, folder: Path) -> None:
    """Write the config.json of a source that `llama` made."""
    from transformers import LlamaConfig

    shapes = dict(source.tensors)
    hidden = shapes["model.norm.weight"][0]
    kv = shapes["model.layers.0.self_attn.k_proj.weight"][0]
    head = min(64, kv)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=shapes["model.layers.0.mlp.up_proj.weight"][0],
        vocab_size=shapes["lm_head.weight"][0],
        num_hidden_layers=sum(name.endswith("up_proj.weight") for name in shapes),
        num_attention_heads=hidden // head,
        num_key_value_heads=kv // head,
        head_dim=head,
        tie_word_embeddings=False,
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)


def write_zero3(source: Source, folder: Path) -> None:
    """Write the folder of DeepSpeed's ZeRO-3, and a Hugging Face config where only an option finds it."""
    import zero

    zero.write(source, folder)
    save_config(source, folder)
    (folder / "config.json").rename(folder / "hf.json")


def write_zero3_hollow(source: Source, folder: Path) -> None:
    """Write the headers of a job of ZeRO-3 that is larger than this machine."""
    import zero

    zero.write_hollow(source, folder)


def write_in_job(source: Source, folder: Path) -> None:
    """Save with one gloo process per rank."""
    _in_job(source, folder, _save_dcp)


Save = Callable[[Source, Path, int, Any], None]


def _in_job(source: Source, folder: Path, save: Save) -> None:
    import torch.distributed.checkpoint  # before the fork: imported once, not once per rank
    import torch.distributed.tensor  # noqa: F401
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as meeting:
        mp.start_processes(
            _rank_main,
            args=(source, folder, f"file://{meeting}/rendezvous", save),
            nprocs=source.ranks,
            start_method="fork",
        )


def _rank_main(rank: int, source: Source, folder: Path, meeting: str, save: Save) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=source.ranks, init_method=meeting)
    save(source, folder, rank, init_device_mesh("cpu", (source.ranks,), mesh_dim_names=("fsdp",)))
    dist.barrier()  # gloo aborts a rank whose peer has exited
    os._exit(0)  # its threads can abort the interpreter at shutdown


def _save_dcp(source: Source, folder: Path, rank: int, mesh: Any) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(_state_dict(source, rank, mesh), checkpoint_id=folder)


def _save_pickle(source: Source, folder: Path, rank: int, mesh: Any) -> None:
    import torch

    state = _state_dict(source, rank, mesh)["model"]
    torch.save(state, folder / f"model_world_size_{source.ranks}_rank_{rank}.pt")


def _save_safetensors(source: Source, folder: Path, rank: int, mesh: Any) -> None:
    import torch.distributed.checkpoint as dcp

    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    dcp.save(_state_dict(source, rank, mesh)["model"], storage_writer=writer)


def write_hf_shards(source: Source, folder: Path) -> None:
    """Write the folder of torch's HuggingFaceStorageWriter: one safetensors file of shards a rank."""
    _in_job(source, folder, _save_safetensors)


def write_in_turn(source: Source, folder: Path) -> None:
    """Save from one process that acts as each rank in turn: the steps of `dcp.save`, in their order."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    writer = dcp.FileSystemWriter(folder)
    planners, plans = [], []
    for rank in range(source.ranks):
        dist.init_process_group("fake", rank=rank, world_size=source.ranks, store=FakeStore())
        planner = dcp.DefaultSavePlanner()
        state_dict = _state_dict(source, rank, init_device_mesh("cpu", (source.ranks,)))
        planner.set_up_planner(state_dict, writer.storage_meta(), is_coordinator=rank == 0)
        writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
        planners.append(planner)
        dist.destroy_process_group()

    plans, metadata = planners[0].create_global_plan(plans)
    plans = writer.prepare_global_plan(plans)
    results = []
    for planner, plan in zip(planners, plans, strict=True):
        done = writer.write_data(planner.finish_plan(plan), planner)
        done.wait()
        results.append(done.value())
    writer.finish(metadata, results)


def write_hollow(source: Source, folder: Path) -> None:
    """Write the metadata of a job of that many ranks; the items themselves are holes in sparse files."""
    import pickle

    import torch
    from torch.distributed.checkpoint import metadata as meta
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    folder.mkdir(parents=True)
    listed: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    end = [0] * source.ranks
    for index, (name, shape) in enumerate(source.tensors):
        part, dim = source.shard_shape(index), source.sharded_dim(index)
        length = math.prod(part) * _WIDTHS[source.dtype] + 1400  # about what a torch zip adds
        chunks = []
        for rank in range(source.ranks):
            offset = torch.Size(rank * n if d == dim else 0 for d, n in enumerate(part))
            chunks.append(meta.ChunkStorageMetadata(offset, torch.Size(part)))
            stored[meta.MetadataIndex(name, offset, rank)] = _StorageInfo(
                f"__{rank}_0.distcp", end[rank], length
            )
            end[rank] += length
        properties = meta.TensorProperties(dtype=torch.bfloat16)
        listed[name] = meta.TensorStorageMetadata(properties, torch.Size(shape), chunks)
    for rank, size in enumerate(end):
        with (folder / f"__{rank}_0.distcp").open("wb") as file:
            file.truncate(size)
    (folder / ".metadata").write_bytes(pickle.dumps(meta.Metadata(listed, storage_data=stored)))


def write_paper(source: Source, folder: Path) -> None:
    """Write the metadata of a job that is larger than this machine; see paper.py."""
    import paper

    paper.write(as_job(source), folder)


def as_job(source: Source) -> Any:
    """Return the `paper.Job` of a source, with its tensors at their paths in a training job's state dict."""
    import paper

    names = {"bf16": "bfloat16", "fp32": "float32"}
    tensors = []
    for n, (name, shape) in enumerate(source.tensors):
        path = ("model", name)
        if name.startswith("optim."):
            inner, kind = name.removeprefix("optim.state.").rsplit(".", 1)
            path = ("optim", "state", inner, kind)
        group = source.groups[n] if source.groups else None
        tensors.append(paper.Tensor(path, names[source.dtype_of(n)], shape, group))
    return paper.Job(tuple(tensors), source.ranks)


LAYOUTS: dict[str, Callable[[Source, Path], None]] = {
    "dcp": write_dcp,
    "hf-shards": write_hf_shards,
    "hollow": write_hollow,
    "lightning": write_lightning,
    "olmo": write_olmo,
    "paper": write_paper,
    "verl": write_verl,
    "zero3": write_zero3,
    "zero3-hollow": write_zero3_hollow,
}


def main() -> int:
    """Write one source; print its size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", choices=SOURCES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scale", type=int, default=1, help="divide all widths by this")
    parser.add_argument("--in-turn", action="store_true", help="one process for all ranks")
    args = parser.parse_args()
    source = SOURCES[args.source](args.scale)
    (write_in_turn if args.in_turn else write)(source, args.folder)
    print(f"{args.folder}: {show_size(source.nbytes)}, {len(source.tensors)} tensors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
