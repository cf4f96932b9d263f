"""The demo's training job: a real sharded run.

`train` starts `WORLD` processes (gloo, CPU). Each of them

1. builds a small Llama in bf16, the same on every rank, and shards it with FSDP2;
2. takes a few AdamW steps on bytes of real text;
3. saves model and optimizer with `torch.distributed.checkpoint`, one file per rank;
4. gathers the parameters in memory; rank 0 saves the logits of that model, the reference that the converted
   checkpoint must reproduce bit for bit.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ckptcore.utils import terminal

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WORLD = 4
STEPS = 12
BATCH = 2  # sequences per rank and step
CONTEXT = 128  # tokens per sequence
PROMPT = b"The training job leaves one file per rank; everybody after it wants one model."


def train(folder: Path, report: Callable[[str], None]) -> None:
    """Run the job in `folder`; it writes ``step-12/`` (DCP), ``config/`` and ``reference.pt``.

    Args:
        folder: an existing, empty folder.
        report: called with one line per step.

    Raises:
        RuntimeError: a rank failed. The message has the end of its log.
    """
    env = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(WORLD)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    command = [sys.executable, "-W", "ignore", "-m", "flows.demo_train", str(folder)]
    logs = [folder / f"rank{rank}.log" for rank in range(WORLD)]
    ranks = []
    try:
        for rank, log in enumerate(logs):
            with log.open("w") as stderr:
                out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
                rank_env = env | {"RANK": str(rank)}
                ranks.append(subprocess.Popen(command, env=rank_env, stdout=out, stderr=stderr, text=True))
        for line in ranks[0].stdout or ():
            report(line.rstrip())
        for process, log in zip(ranks, logs, strict=True):
            if process.wait() != 0:
                end = log.read_text().strip().splitlines()[-3:]
                raise RuntimeError("\n".join(["training failed:", *end]))
    finally:
        for process in ranks:
            process.kill()


def build() -> PreTrainedModel:
    """Build a Llama of 8 layers and 23 million parameters, in bf16, with random weights from a fixed seed."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,  # the tokens are bytes: no tokenizer to download
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        architectures=["LlamaForCausalLM"],
    )
    # Not `.to(torch.bfloat16)`: that would also round the frequencies of the rotary embedding, which are not
    # parameters and therefore not in the checkpoint.
    make = AutoModelForCausalLM.from_config
    model: PreTrainedModel = make(config, dtype=torch.bfloat16)
    return model


def logits(model: torch.nn.Module) -> torch.Tensor:
    """Return the logits of `PROMPT`, of shape (1, len(PROMPT), vocabulary), in bf16."""
    # The order of additions in a matmul may depend on the number of threads.
    torch.set_num_threads(1)
    with torch.no_grad():
        logits_of_prompt: torch.Tensor = model.eval()(input_ids=torch.tensor([list(PROMPT)])).logits
    return logits_of_prompt


def _rank(folder: Path) -> None:
    # If a rank dies at the start, the others must not wait for half an hour.
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    rank = dist.get_rank()
    model = build()
    mesh = init_device_mesh("cpu", (WORLD,))
    # Stored in bf16, computed in fp32: a CPU without AVX-512 multiplies bf16 up to fifty times slower.
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    text = torch.frombuffer(_source_text(), dtype=torch.uint8).long()
    picks = torch.Generator().manual_seed(rank)
    for step in range(1, STEPS + 1):
        starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=picks)
        batch = torch.stack([text[start : start + CONTEXT] for start in starts.tolist()])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().float() / WORLD
        dist.all_reduce(mean)
        if rank == 0 and step % 4 in (0, 1):
            terminal.line(f"step {step:2d}  loss {mean.item():.3f}")

    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=folder / f"step-{STEPS}")

    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    gathered, _ = get_state_dict(model, [], options=full)
    if rank == 0:
        in_memory = build()
        in_memory.load_state_dict(gathered)
        torch.save(logits(in_memory), folder / "reference.pt")
        in_memory.config.save_pretrained(folder / "config")
        in_memory.generation_config.save_pretrained(folder / "config")
    dist.barrier()
    dist.destroy_process_group()


def _source_text() -> bytearray:
    """Return a text that comes with every Python: the source of argparse."""
    return bytearray(Path(argparse.__file__).read_bytes())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    _rank(Path(sys.argv[1]))
