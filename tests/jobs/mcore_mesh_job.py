"""A job of DP x TP x PP ranks: Megatron-Core loads a folder for its models.

    RANK=0 python mcore_mesh_job.py FOLDERS TP PP DP OUT

FOLDERS: JSON, checkpoint folder -> safetensors files with its whole tensors. Every rank asks for its
layers, its rows or columns, and the two halves of its SwiGLU weights, with the offsets that Megatron-LM's
layers have (megatron/core/transformer/mlp.py, tensor_parallel/layers.py). Where TP does not divide the
vocabulary it is padded, as Megatron-LM does it; what else TP does not divide no such model has.
Optimizer state is asked for as the distributed optimizer of releases up to 0.15 does, in slices of flattened
shards (optimizer/distrib_optimizer.py, sharded_param_state_fs_model_space); later ones cannot ask for it.
OUT: where rank 0 puts the JSON of, per folder, the names that differ on any rank, how many each rank asked
for, and the names of the common state.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mcore_job import stand_in

warnings.filterwarnings("ignore")
ROWS = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight")
COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
VOCABULARY = ("word_embeddings.weight", "output_layer.weight")
CUT = (*ROWS, "linear_fc1.weight")
STACKED = "decoder.layers."
STATE = "optimizer.state."
FLATTENED_UNTIL = 15  # minor release


class Asked:
    """What one rank asks for, and what it should get."""

    def __init__(self, tp: int, pp: int, dp: int, rank: int) -> None:
        self.tp, self.pp, self.dp = tp, pp, dp
        self.copy, rest = divmod(rank, tp * pp)
        self.stage, self.place = divmod(rest, tp)
        self.flattened = int(version("megatron-core").split(".")[1]) <= FLATTENED_UNTIL
        self.state: dict[str, Any] = {}
        self.wanted: dict[str, torch.Tensor] = {}

    def tensor(self, key: str, full: torch.Tensor) -> None:
        if key.startswith(STATE) and (
            not self.flattened or (key.endswith(VOCABULARY) and len(full) % self.tp)
        ):
            return  # rows that pad a flattened vocabulary are not initialised
        if STACKED in key:
            for layer in range(len(full)):
                if layer * self.pp // len(full) == self.stage:
                    self._cut(key, full[layer], f"{key} {layer}", ((0, layer, len(full)),))
        elif self.stage == (0 if "embedding" in key else self.pp - 1):
            self._cut(key, full, key, ())

    def _cut(self, key: str, full: torch.Tensor, name: str, before: tuple[Any, ...]) -> None:
        n = len(before)
        if key.endswith(VOCABULARY):
            full = torch.cat([full, full.new_zeros(-len(full) % self.tp, *full.shape[1:])])
        cut = full.shape[int(key.endswith(COLUMNS))] if key.endswith((*CUT, *COLUMNS)) else 0
        if cut % self.tp:
            return
        if key.endswith("linear_fc1.weight"):  # gate of all ranks, then up of all ranks
            for half in (0, 1):
                k = half * self.tp + self.place
                self._ask(
                    key, full.chunk(2 * self.tp)[k], f"{name} {half}", (*before, (n, k, 2 * self.tp)), n
                )
        elif key.endswith((*ROWS, *COLUMNS)):
            dim = int(key.endswith(COLUMNS))
            part = full.chunk(self.tp, dim)[self.place]
            self._ask(key, part, name, (*before, (n + dim, self.place, self.tp)), n)
        else:
            self._ask(key, full, name, before, n, self.place)

    def _ask(
        self,
        key: str,
        part: torch.Tensor,
        name: str,
        offsets: tuple[Any, ...],
        stacked: int,
        replica: int = 0,
    ) -> None:
        from megatron.core.dist_checkpointing import ShardedTensor

        if key.startswith(STATE):
            size = -(-part.numel() // self.dp)
            run = slice(min(self.copy * size, part.numel()), min((self.copy + 1) * size, part.numel()))
            self.wanted[name] = part.flatten()[run].contiguous()
            self.state[name] = ShardedTensor.from_rank_offsets_flat(
                key,
                torch.zeros_like(self.wanted[name]),
                part.shape,
                *offsets,
                flattened_range=run,
                prepend_axis_num=stacked,
                replica_id=(0, replica, 0),
                allow_shape_mismatch=key.endswith(VOCABULARY),
            )
            return
        self.wanted[name] = part.contiguous()
        self.state[name] = ShardedTensor.from_rank_offsets(
            key,
            torch.zeros_like(self.wanted[name]),
            *offsets,
            prepend_axis_num=stacked,
            replica_id=(0, replica, self.copy),
            allow_shape_mismatch=key.endswith(VOCABULARY),
        )


def main(folders: str, tp: str, pp: str, dp: str, out: str) -> None:
    stand_in()
    rank, world = int(os.environ["RANK"]), int(tp) * int(pp) * int(dp)
    dist.init_process_group("gloo", store=dist.FileStore(f"{out}.store", world), rank=rank, world_size=world)
    results = {
        folder: load(folder, truth, Asked(int(tp), int(pp), int(dp), rank), world)
        for folder, truth in json.loads(folders).items()
    }
    if rank == 0:
        Path(out).write_text(json.dumps(results))
    dist.barrier()  # gloo aborts a rank whose peer has gone
    os._exit(0)  # and its threads can abort an interpreter that is taken down


def load(folder: str, truth: list[str], asked: Asked, world: int) -> dict[str, Any]:
    from megatron.core import dist_checkpointing
    from safetensors.torch import load_file

    for file in truth:
        for key, full in load_file(file).items():
            asked.tensor(key, full)
    got = dist_checkpointing.load(asked.state, folder)

    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8)

    differ = [k for k, v in asked.wanted.items() if not torch.equal(raw(got[k]), raw(v))]
    everywhere: list[Any] = [None] * world
    dist.all_gather_object(everywhere, (differ, len(asked.wanted)))
    return {
        "differ": sorted({k for names, _ in everywhere for k in names}),
        "asked": [n for _, n in everywhere],
        "common": sorted(k for k in got if k not in asked.wanted),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
