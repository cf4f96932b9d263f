"""Run programs under simulated faults: python -m tests.simulation --seed S [--steps N].

    python -m tests.simulation --seed 7                one program; its last line is the same every time
    python -m tests.simulation --seed 0 --count 1000 --jobs 2   many; prints the seeds that fail

A program that fails is made shorter by leaving out steps, and printed with what was wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "helpers")]

from tests.simulation.running import LENGTH, main  # noqa: E402

if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is a part of the schedule
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.simulation", *sys.argv[1:]],
            os.environ | {"PYTHONHASHSEED": "0"},
        )
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1, help="how many seeds from this one on")
    parser.add_argument("--steps", type=int, default=LENGTH, help="only this many; 0 for all")
    parser.add_argument("--disk", choices=("local", "bucket"), default="local")
    parser.add_argument("--theme", default="", help="of every program: a name of tests/simulation/themes.py")
    parser.add_argument("--mutant", default="", help="a name of tests/simulation/mutants.py")
    parser.add_argument(
        "--mutants", type=int, default=0, metavar="N", help="run the program of every N-th mutant"
    )
    parser.add_argument("--suite", type=int, default=0, metavar="N", help="what `make test` runs, N programs")
    parser.add_argument("--jobs", type=int, default=1, help="how many run at the same time")
    parser.add_argument("--first", action="store_true", help="stop at the first failure")
    parser.add_argument("--log", action="store_true", help="print every call of every process")
    sys.exit(main(parser.parse_args()))
