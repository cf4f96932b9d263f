"""Read changed checkpoints, and report every forbidden behaviour of a reader.

    python tests/fuzz/fuzz.py [--inputs 1000000] [--jobs 2] [--seed 7] [--samples DIR] [--only REGEX]
    python tests/fuzz/fuzz.py --replay FILE

Prints inputs, rate and outcomes per sample. A defect is saved to a file for `--replay`, and makes the exit
status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import time
import zlib
from collections import Counter
from multiprocessing import get_context
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from mutate import mutated  # noqa: E402
from targets import Defect, Target, run, targets  # noqa: E402

SAMPLES = HERE.parent / "fixtures"
DEEP = 8  # every n-th input is read to its last byte


def hunt(
    samples: str, only: str, seed: int, inputs: int, found: str, seconds: float
) -> tuple[Counter[str], int]:
    """Change and read samples in turn.

    Args:
        samples: Folder of the samples.
        only: Regular expression for the names of targets.
        seed: Of the random changes.
        inputs: How many to read at most.
        found: Folder for defects.
        seconds: Stop after these.

    Returns:
        Counts by "sample outcome", and the number of defects.
    """
    chosen = [t for t in targets(Path(samples)) if re.search(only, t.name)]
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    defects = 0
    until = time.monotonic() + seconds
    for n in range(inputs):
        target = chosen[n % len(chosen)]
        state = rng.getrandbits(62)
        files = change(target, state)
        try:
            outcome = run(target, files, deep=n % DEEP == 0)
        except Defect as defect:
            outcome = "DEFECT"
            defects += 1
            keep(Path(found), target, state, n % DEEP == 0, str(defect))
        outcomes[f"{target.name} {outcome}"] += 1
        if time.monotonic() > until:
            break
    return outcomes, defects


def change(target: Target, state: int) -> dict[str, bytes]:
    """Return the input of a random state; some are changed twice."""
    rng = random.Random(state)
    files = mutated(target.files, rng)
    return mutated(files, rng) if rng.random() < 0.3 else files


def keep(folder: Path, target: Target, state: int, deep: bool, what: str) -> None:
    """Save what reproduces a defect."""
    folder.mkdir(parents=True, exist_ok=True)
    form = {"target": target.name, "state": state, "deep": deep, "defect": what}
    (folder / f"{zlib.crc32(f'{target.name}{state}'.encode()):08x}.json").write_text(
        json.dumps(form, indent=1)
    )
    print(f"DEFECT {target.name} {state}: {what[:300]}", flush=True)


def replay(path: Path, samples: str) -> None:
    """Run a saved input; its traceback is not caught."""
    form = json.loads(path.read_text())
    (target,) = [t for t in targets(Path(samples)) if t.name == form["target"]]
    print(run(target, change(target, form["state"]), deep=form["deep"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4)))
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--samples", default=str(SAMPLES))
    parser.add_argument("--only", default="")
    parser.add_argument("--found", default="fuzz-found")
    parser.add_argument("--replay", type=Path)
    args = parser.parse_args()
    if args.replay:
        replay(args.replay, args.samples)
        return 0
    began = time.monotonic()
    print(f"seed {args.seed}", flush=True)
    share = args.inputs // args.jobs
    seeds = [args.seed * 1000 + j for j in range(args.jobs)]
    work = [(args.samples, args.only, seed, share, args.found, args.seconds) for seed in seeds]
    total: Counter[str] = Counter()
    defects = 0
    if args.jobs == 1:
        total, defects = hunt(*work[0])
    else:
        with get_context("fork").Pool(args.jobs) as pool:
            for outcomes, bad in pool.starmap(hunt, work, chunksize=1):
                total += outcomes
                defects += bad
    by_name: dict[str, Counter[str]] = {}
    for key, count in total.items():
        name, _, outcome = key.rpartition(" ")
        by_name.setdefault(name, Counter())[outcome] += count
    for name, outcomes in sorted(by_name.items()):
        counts = ", ".join(f"{o} {c}" for o, c in outcomes.most_common(6))
        print(f"{name}: {sum(outcomes.values())}: {counts}")
    seconds = time.monotonic() - began
    count = sum(total.values())
    print(f"{count} inputs in {seconds:.0f} s ({count / seconds:.0f}/s), {defects} defects, seed {args.seed}")
    return 1 if defects else 0


if __name__ == "__main__":
    sys.exit(main())
