"""Measure the gate that decides whether a copy under an obligation may be replaced.

    python custody_gate.py [--count 1000000] [--runs 3] [--json]

Two places hold COUNT tensors, and an obligation counts on the first. The catalog and the record beside it say
so, as a purge leaves them. What the gate asks of the disk is given to it: the manifests, and the sums of the
tensors of the second place. What is left is its own work: to read the obligation, to find who may hold its
contents, and to compare them. Exit status 1 when its processor time or its memory is above the bound.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from verdicts import ended

from ckptcore.catalog import holdings, obligations, open_catalog
from ckptcore.catalog.catalog import Catalog
from ckptcore.catalog.obligations import ObligationRow
from ckptcore.checking.source_stamps import published_stamp
from ckptcore.conversion.registration import facts, with_fingerprints
from ckptcore.conversion.staging.open_staging import at_rest
from ckptcore.core.manifest import Manifest, TensorSpec
from ckptcore.core.manifest_builder import Builder
from ckptcore.custody import gate, place_contents
from ckptcore.custody.obligation_records import Obligation, add_obligations
from ckptcore.fingerprints.holdings import Holding, ids_of, pack_ids, pack_specs, tensor_holdings
from ckptcore.fingerprints.sums import Fingerprinted
from ckptcore.planning.request import Settings

COUNT = 1_000_000
SECONDS = 5.0
BYTES = 1 << 30  # beside the manifests and sums that are given
MIB = 1 << 20
SHAPE = (2, 4)
FILE = "model.safetensors"


def opened(place: Path, sums: Sequence[Fingerprinted]) -> Manifest:
    """Write an empty file, and return the manifest of a checkpoint of these tensors in it."""
    place.mkdir()
    (place / FILE).touch()
    builder = Builder()
    specs = [TensorSpec(name, dtype, shape) for name, dtype, shape, _ in sums]
    starts = np.arange(len(specs), dtype=np.int64) * specs[0].nbytes
    builder.file(FILE, 0)
    builder.raw_tensors(specs, FILE, np.column_stack([starts, np.full(len(specs), specs[0].nbytes)]))
    return builder.build("safetensors", str(place), {})


def recorded(catalog: Catalog, manifest: Manifest, sums: Sequence[Fingerprinted]) -> str:
    """Record a checkpoint with the fingerprints of its tensors; return its id."""
    prints = {name: fingerprint for name, _, _, fingerprint in sums}
    checkpoint = with_fingerprints(facts(manifest, manifest.root), ("0" * 64, prints))
    return catalog.record_validation(checkpoint)


def put_obligation(catalog: Catalog, place: str, contents: Sequence[Holding]) -> None:
    """Put an obligation on the contents of a place, as a purge does."""
    row = ObligationRow("1" * 32, None, f"{place}-before", place, pack_specs(contents), catalog.now())
    obligation = Obligation.of(row, contents)
    add_obligations(place, [obligation])
    with catalog.writing() as conn:
        obligations.put(conn, row, obligation.packed)


def peak(*, reset: bool = False) -> int:
    """Return the most bytes that this process had in memory. reset: from now on."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) << 10


def measure(folder: Path, count: int, runs: int) -> list[dict[str, float]]:
    """Ask the gate; return the processor seconds of each time, and the memory that it took."""
    random = np.random.default_rng(35)
    names = (f"model.layers.{n // 1000}.mlp.experts.{n % 1000}.weight" for n in range(count))
    sums = tuple((name, "float32", SHAPE, random.bytes(32).hex()) for name in names)
    place, copy = (opened(folder / name, sums) for name in ("place", "copy"))
    contents = tensor_holdings(sums, dict.fromkeys((name for name, *_ in sums), 32))
    manifests = {place.root: place, copy.root: copy}
    taken = []
    with open_catalog(str(folder / "catalog.sqlite")) as catalog:
        checkpoint = recorded(catalog, place, sums)
        recorded(catalog, copy, sums)
        with catalog.writing() as conn:
            holdings.keep(conn, checkpoint, pack_ids(ids_of(contents)), published_stamp(place))
        put_obligation(catalog, place.root, contents)
        del contents
        for _ in range(runs):
            with ExitStack() as given:
                given.enter_context(
                    mock.patch.object(place_contents, "inspect", lambda at, *_: manifests[at])
                )
                read = mock.patch("ckptcore.custody.holdings.fingerprint")
                given.enter_context(read).return_value.tensors = sums
                before = peak(reset=True)
                begin = time.process_time()
                judged = gate.judge(catalog, place.root, Settings(workers=1), at_rest)
                seconds = time.process_time() - begin
            assert judged.moves == {"1" * 32: (copy.root,)}
            taken.append({"seconds": seconds, "bytes": float(peak() - before)})
    return taken


def verdict(runs: Sequence[Mapping[str, float]], count: int) -> dict[str, Any]:
    """Judge the median; return the figures and the texts for the table."""
    seconds = statistics.median(run["seconds"] for run in runs)
    nbytes = max(run["bytes"] for run in runs)
    return {
        "figure": seconds,
        "measured": f"{seconds:.2f} CPU s for {count:,} tensors, {nbytes / MIB:.0f} MiB",
        "bound": f"≤ {SECONDS:g} CPU s, {BYTES / MIB:.0f} MiB",
        "ok": seconds <= SECONDS and nbytes <= BYTES,
    }


def main() -> int:
    """Run it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        runs = measure(Path(folder), given.count, given.runs)
    return ended(verdict(runs, given.count), load, as_json=given.json, runs=runs)


if __name__ == "__main__":
    sys.exit(main())
