"""Measure an export on a GPU against the speed of PCIe and of the output's file system.

    python gpu.py SRC OUT [--dtype DTYPE] [--fingerprint] [--runs 5] [--json]

1. The limits, in bytes a second: a copy of pinned memory to the device and back, and a copy of the source.
2. The export runs in this process, after CUDA has started, so that torch reports the peak of device memory.

The export must reach `SHARE` of the lesser limit beside `FIXED` seconds, with at most `DEVICE_BYTES` on the
device. Exit status 1 when it does not. Without a GPU the line is not run, and says so.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SHARE = 0.8
FIXED = 1.0  # seconds: metadata, plan, catalog
DEVICE_BYTES = 256 << 20
_PROBE = 1 << 30


def pcie_speed(device: str) -> float:
    """Return bytes a second to the device and back at the same time, the slower way."""
    import torch

    host = [torch.empty(_PROBE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(_PROBE, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]
    times = []
    for _ in range(4):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        with torch.cuda.stream(streams[0]):
            there[0].copy_(host[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            host[1].copy_(there[1], non_blocking=True)
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return _PROBE / min(times[1:])


def copy_speed(source: Path, out: Path) -> float:
    """Return bytes a second of a copy of the source's files."""
    nbytes = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    begin = time.perf_counter()
    shutil.copytree(source, out)
    seconds = time.perf_counter() - begin
    shutil.rmtree(out)
    return nbytes / seconds


def export_seconds(argv: Sequence[str]) -> float:
    """Return the wall seconds of an export in this process.

    Raises:
        RuntimeError: It failed.
    """
    from ckptcore.cli.main import run

    begin = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        code = run(list(argv))
    if code:
        raise RuntimeError(f"ckptcore {' '.join(argv)}: exit {code}")
    return time.perf_counter() - begin


def verdict(nbytes: int, seconds: Sequence[float], speeds: dict[str, float], peak: int) -> dict[str, Any]:
    """Judge the median; return the figures and the texts for the table."""
    median, (slowest, speed) = statistics.median(seconds), min(speeds.items(), key=lambda item: item[1])
    share = nbytes / max(median - FIXED, 1e-9) / speed
    limits = ", ".join(f"{name} {value / 1e9:.1f} GB/s" for name, value in speeds.items())
    return {
        "figure": share,
        "measured": f"{share:.2f} of {slowest}: {median:.2f} s; {limits}; {peak >> 20} MiB on the device",
        "bound": f"≥ {SHARE:g} of the slower beside {FIXED:g} s, ≤ {DEVICE_BYTES >> 20} MiB on the device",
        "ok": share >= SHARE and peak <= DEVICE_BYTES,
    }


def lacking(device: str) -> str | None:
    """Return what keeps this machine from running on ``device``, or None."""
    import torch

    if not torch.cuda.is_available():
        return f"it needs a GPU that torch {torch.__version__} can use (got {torch.cuda.device_count()})"
    free, _ = torch.cuda.mem_get_info(device)
    need = 2 * _PROBE + DEVICE_BYTES
    return None if free >= need else f"it needs {need >> 20} MiB of free GPU memory (got {free >> 20} MiB)"


def measure(source: Path, out: Path, options: Sequence[str], device: str, runs: int) -> dict[str, Any]:
    """Run the export, and leave the last output for the comparison with the source."""
    import torch

    speeds = {"PCIe": pcie_speed(device), "cp": copy_speed(source, out)}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for _ in range(runs):
        if out.exists():
            shutil.rmtree(out)
        seconds.append(export_seconds(["export", str(source), str(out), "--device", device, *options]))
    nbytes = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    result = verdict(nbytes, seconds, speeds, torch.cuda.max_memory_reserved(device))
    return result | {"seconds": seconds, "speeds": speeds, "load": os.getloadavg()[0]}


def main() -> int:
    """Run it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype")
    parser.add_argument("--fingerprint", action="store_true")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    options = ["--dtype", given.dtype] if given.dtype else []
    options += ["--fingerprint"] if given.fingerprint else []
    why = lacking(given.device)
    if why is None:
        result = measure(given.source, given.out, options, given.device, given.runs)
        result["dtype"] = given.dtype
    else:
        result = {"measured": f"not run: {why}", "bound": "runs", "ok": None}
    print(json.dumps(result) if given.json else f"{result['measured']}; {result['bound']}: {result['ok']}")
    return 1 if result["ok"] is False else 0


if __name__ == "__main__":
    sys.exit(main())
