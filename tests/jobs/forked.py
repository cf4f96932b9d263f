"""Start the ranks of a job, as forks of a process that has imported what they need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def start_ranks(rank_main: Callable[..., None], args: tuple[Any, ...], ranks: int) -> None:
    """Run ``rank_main(rank, *args)`` in a forked process for each rank, and wait for all of them.

    Optimizers and DTensor import the modules below at their first use: seconds of each rank, unless the
    process that forks them has done it.

    Raises:
        ProcessRaisedException: A rank raised an exception.
        ProcessExitedException: A rank ended in another way.
    """
    import torch
    import torch._dynamo
    import torch._inductor.config
    import torch.distributed.checkpoint
    import torch.distributed.fsdp

    torch.multiprocessing.start_processes(rank_main, args, ranks, start_method="fork")
