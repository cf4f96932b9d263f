"""A program that runs scenarios of `torch.distributed.checkpoint`, each on gloo ranks of its own.

    python dcp_scenario_job.py FOLDER NAME...

The names are those of `dcp_scenarios.SCENARIOS`. Every scenario works in a folder of its name below FOLDER.
``FOLDER/report.json`` gets of each: what went wrong, by rank; what was compared; and seconds.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import dcp_hf_scenarios
import dcp_model_scenarios
import dcp_saver_scenarios
import dcp_tensor_scenarios
import dcp_value_scenarios
import torch
import torch._dynamo  # once, before ranks are forked: FSDP imports it
import torch.distributed as dist
from dcp_scenario import Job, report
from dcp_scenarios import SCENARIOS
from forked import start_ranks

TOPICS = (
    dcp_tensor_scenarios,
    dcp_model_scenarios,
    dcp_value_scenarios,
    dcp_saver_scenarios,
    dcp_hf_scenarios,
)
RUNS: dict[str, Callable[[Job], None]] = {name: run for topic in TOPICS for name, run in topic.RUNS.items()}


def rank_main(rank: int, world: int, name: str, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=120)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world, timeout=patience
    )
    job, wrong = Job(name, rank, world, folder), ""
    try:
        RUNS[name](job)
        dist.barrier()  # gloo aborts a rank whose peer has gone
    except BaseException:  # torch's CheckpointException is no Exception
        wrong = traceback.format_exc()
    stated = folder / f"rank-{rank}.json"
    stated.with_suffix(".part").write_text(report(job, wrong))
    stated.with_suffix(".part").rename(stated)  # a rank may be ended by what happened to another
    os._exit(1 if wrong else 0)  # threads of gloo can abort an interpreter that is taken down


def ran(name: str, world: int, folder: Path) -> dict[str, object]:
    """Run one scenario; a rank that fails ends the others."""
    folder.mkdir()
    began = time.perf_counter()
    try:
        start_ranks(rank_main, (world, name, folder), world)
        ended = ""
    except torch.multiprocessing.ProcessRaisedException as error:
        ended = str(error)
    except torch.multiprocessing.ProcessExitedException as error:
        ended = str(error)
    stated = {n: folder / f"rank-{n}.json" for n in range(world)}
    rows = {n: json.loads(path.read_text()) for n, path in stated.items() if path.exists()}
    wrong = {n: row["wrong"] for n, row in rows.items() if row["wrong"]}
    if ended and not wrong:
        wrong = {-1: ended}
    checks = rows.get(0, {}).get("checks", [])
    return {"wrong": wrong, "checks": checks, "seconds": round(time.perf_counter() - began, 2)}


def main() -> None:
    folder, *names = sys.argv[1:]
    ranks = {s.name: s.ranks for s in SCENARIOS}
    found = {name: ran(name, ranks[name], Path(folder, name)) for name in names}
    Path(folder, "report.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
