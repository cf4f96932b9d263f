"""Fuzz readers, guided by coverage.

    pip install atheris
    python tests/fuzz/guided.py CORPUS -atheris_runs=100000 [-seed=7 and other options of libFuzzer]

An input is two bytes and a file: the sample, the file of it that is replaced, its new content. The
corpus is filled from the real samples; libFuzzer keeps what reaches new lines of ``ckptcore``.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parents[1]))

import atheris  # noqa: E402

with atheris.instrument_imports(include=["ckptcore"]):
    from mutate import changed
    from targets import run, targets

# Two bytes name the sample and the file, so at most 255 of each.
TARGETS = [t for t in targets(HERE.parent / "fixtures", 60_000) if len(t.files) < 256][:255]


def one_input(data: bytes) -> None:
    """Read the sample with one file replaced; a defect is an exception that libFuzzer reports."""
    if len(data) < 6:
        return
    target = TARGETS[data[0] % len(TARGETS)]
    names = sorted(target.files)
    name = names[data[1] % len(names)]
    content = target.files[name][:4] + data[6:]  # its first bytes stay: they identify its format
    run(target, {**target.files, name: content}, deep=data[0] & 7 == 0)


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Change an input: half of the changes keep the file's structure, half are libFuzzer's."""
    rng = random.Random(seed)
    if len(data) < 6 or rng.random() < 0.5:
        mutated: bytes = atheris.Mutate(data, max_size)
        return mutated
    target = TARGETS[data[0] % len(TARGETS)]
    names = sorted(target.files)
    return data[:2] + changed(names[data[1] % len(names)], data[2:], rng)[: max_size - 2]


def fill(corpus: Path) -> None:
    """Write every file of every sample, unchanged, to the corpus."""
    corpus.mkdir(parents=True, exist_ok=True)
    for t, target in enumerate(TARGETS):
        for n, name in enumerate(sorted(target.files)):
            (corpus / f"{t:03d}-{n:03d}").write_bytes(bytes([t, n]) + target.files[name])


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    fill(Path(sys.argv[1]))
    atheris.Setup(sys.argv, one_input, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
