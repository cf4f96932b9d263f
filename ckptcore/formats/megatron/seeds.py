"""Derive a rank's place from the seeds of its random states, for Megatron-LM and trainers made of it.

The state of a random generator has its seed. Megatron-LM seeds torch with ``seed`` of the arguments, and 100
more for each stage. From that seed on it counts tensor and expert ranks, for generators of their own on the
device (megatron/training/initialize.py, `_set_random_seed`; megatron/core/tensor_parallel/random.py,
`model_parallel_cuda_manual_seed`). A job that continues another one keeps the states, and may have another
argument: a caller compares the places of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ckptcore.encodings.pickle.torch_globals import StoredView
from ckptcore.formats.base import Source

GROUP_TITLES = {"tp": "tensor rank", "pp": "pipeline stage", "ep": "expert rank"}  # of `SeededPlace`
SeedReader = Callable[[Any], int | None]  # the stored state of a generator -> its seed
# Bytes of a generator's state -> where its seed is: of torch's CPU generator, of CUDA's today and formerly.
_SEED_OFFSETS = {5056: 0, 16: 0, 816: 800}
_BY_STAGE, _BY_EXPERT, _TENSOR, _EXPERT = 100, 100, 2718, 1024


@dataclass(frozen=True, slots=True)
class SeededPlace:
    """The rank in each parallel group by seeds, or None where they do not tell it."""

    tp: int | None
    pp: int | None
    ep: int | None


def place_of(tree: Mapping[str, Any], seed: Any, read: SeedReader) -> SeededPlace:
    """Return the place of the rank that saved a tree.

    Args:
        tree: The rank's dict: ``rng_state``, or until 2022 its entries in the dict itself.
        seed: The argument of the job.
        read: From `seed_reader`.
    """
    states = tree.get("rng_state")
    several = isinstance(states, list) and len(states) > 1  # of all data-parallel ranks, experts' ranks too
    first: Any = states[0] if isinstance(states, list) and states else tree
    first = first if isinstance(first, Mapping) else {}
    trackers = first.get("rng_tracker_states")
    trackers = trackers if isinstance(trackers, Mapping) else {}
    base = read(first.get("torch_rng_state"))
    if base is None:
        return SeededPlace(None, None, None)
    tensor = read(trackers.get("model-parallel-rng"))
    expert = None if several else read(trackers.get("expert-parallel-rng"))
    stage = base - seed if type(seed) is int else -1
    return SeededPlace(
        None if tensor is None else tensor - base - _TENSOR,
        None if stage % _BY_STAGE else stage // _BY_STAGE,
        None if expert is None else (expert - base - _EXPERT) // _BY_EXPERT,
    )


def seed_reader(source: Source, path: str, storages: Mapping[str, tuple[int, int, int | None]]) -> SeedReader:
    """Return a function that reads the seed of a state in a file, 8 bytes; None for any other value.

    Args:
        source: The folder.
        path: The file.
        storages: Key -> (first byte, length, checksum).
    """

    def read(value: Any) -> int | None:
        if not isinstance(value, StoredView) or value.dtype != "uint8" or value.strides != (1,):
            return None
        seed_offset, storage = _SEED_OFFSETS.get(prod(value.shape)), storages.get(value.key)
        if seed_offset is None or storage is None or value.offset + seed_offset + 8 > storage[1]:
            return None
        return int.from_bytes(source.store.read(path, storage[0] + value.offset + seed_offset, 8), "little")

    return read
