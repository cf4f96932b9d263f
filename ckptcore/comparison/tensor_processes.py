"""Read tensors in several processes: each takes some of them, with the threads and memory of its share.

`ckptcore.comparison.fingerprint`, `ckptcore.comparison.tensor_compare` and
`ckptcore.comparison.export_values` name the function that a worker calls for its tensors. What the workers
have read of records with checksums, and of files, adds up here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

from ckptcore.comparison.opened import OpenSide, SideProgress
from ckptcore.core.file_sums import FileSums
from ckptcore.core.manifest import Manifest
from ckptcore.planning.request import Settings
from ckptcore.planning.tiles import Budget, Tiles, paged_buffer
from ckptcore.reading.payload import late_imports
from ckptcore.utils.command_process import process_count
from ckptcore.utils.process_pool import Begun, ProcessPool, batches
from ckptcore.utils.workers import CountedMeter, ProgressMeter

Share = Callable[[Sequence[OpenSide], Sequence[Any], Settings, ProgressMeter], list[Any]]
"""Reads some tensors of opened checkpoints, and returns a small value for each."""


@dataclass(frozen=True, slots=True)
class _Setup:
    """What a worker begins with.

    Attributes:
        share: Module and name of the function that it calls.
        sides: (label, manifest, whether the reads of its files are observed) of each checkpoint.
        settings: The worker's share of memory and threads.
    """

    share: tuple[str, str]
    sides: tuple[tuple[str, Manifest, bool], ...]
    settings: Settings


def read_shared(
    share: Share,
    sides: Sequence[OpenSide],
    tensors: Sequence[Any],
    sizes: Sequence[int],
    settings: Settings,
    meter: ProgressMeter,
) -> list[Any]:
    """Read tensors in several processes, or in the threads of this one where these are as fast.

    Args:
        share: A function of a module.
        sides: The checkpoints that have the tensors.
        tensors: What names each tensor for ``share``.
        sizes: Bytes of each.
        settings: Memory, threads and device of all processes together.
        meter: Counts the bytes that are read.

    Returns:
        What ``share`` returns for each tensor, in order.
    """
    count = 1
    if settings.device == "cpu" and all(side.store.local is not None for side in sides):
        count = process_count(settings.threads, settings.memory, sum(sizes) * len(sides), len(tensors))
    if count == 1:
        return share(sides, tensors, settings, meter)
    # Each worker sums up the files that it reads; `join` adds the sums of all workers.
    side_setups = tuple((side.label, replace(side.manifest, sums=None), side.observes) for side in sides)
    setup = _Setup((share.__module__, share.__name__), side_setups, settings.of_processes(count))
    rows = batches(range(len(tensors)), sizes, count)
    jobs = [(batch, [tensors[n] for n in batch]) for batch in rows]
    values_by_number: dict[int, Any] = {}
    imports = [share.__module__, *late_imports(observed=any(side.observes for side in sides))]
    with ProcessPool(__name__, [setup] * count, imports=imports) as pool:
        for batch, values in pool.run(jobs, meter.add):
            values_by_number.update(zip(batch, values, strict=True))
        reports: list[list[SideProgress]] = pool.finish()
    for side, read in zip(sides, zip(*reports, strict=True), strict=True):
        side.join(read)
    return [values_by_number[n] for n in range(len(tensors))]


def begin(setup: _Setup, finished: Callable[[int], None]) -> Begun:
    """Open the checkpoints in a worker."""
    module, name = setup.share
    share: Share = getattr(import_module(module), name)
    sides = [
        OpenSide(label, replace(manifest, sums=FileSums() if observes else None))
        for label, manifest, observes in setup.sides
    ]
    sides[0].tiles = Tiles(partial(paged_buffer, Budget.of(setup.settings).tile))
    meter = CountedMeter(finished)

    def read(job: tuple[Sequence[int], Sequence[Any]]) -> tuple[Sequence[int], list[Any]]:
        return job[0], share(sides, job[1], setup.settings, meter)

    return read, lambda: [side.progress() for side in sides]
