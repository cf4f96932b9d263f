"""Ask transformers: does an export open, and does it compute what a reference folder computes?

Both are opened in one process of their own (`ckptcore.comparison.logits_process`), one after the other, on
seeded token ids. Unlike everything else here this takes a whole model's memory, so it is asked for by name,
and sizes are compared with what is free before anything starts.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptcore.checking.export_proof import LOGITS, Check, Problem, failed, not_done, passed
from ckptcore.core import dtype as dtypes
from ckptcore.core.manifest import Manifest
from ckptcore.errors import BudgetTooSmall, UsageError
from ckptcore.planning import transformers_process
from ckptcore.store import local_path
from ckptcore.utils.memory import available_memory
from ckptcore.utils.units import show_size

SEED, BATCH, LENGTH = 0, 2, 16
_BASE = 1 << 30  # bytes of the interpreter, torch, transformers and what lies between layers
_MOST_FIELDS = 8
_OPENED_IN = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, slots=True)
class LogitsWanted:
    """What is to be computed.

    reference: the folder that is right, or None to see that logits are finite. dtype: that models are opened
    in. device: where. tolerance: the largest absolute difference that is no failure. any_memory: do not
    compare sizes with what is free.
    """

    reference: str | None = None
    dtype: str = "float32"
    device: str = "cpu"
    tolerance: float = 0.0
    any_memory: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in _OPENED_IN:
            raise UsageError(
                f"cannot open models as {self.dtype}", hint=f"Try one of {', '.join(_OPENED_IN)}"
            )
        if not 0 <= self.tolerance < math.inf:  # never true of NaN
            raise UsageError(f"cannot use a tolerance of {self.tolerance}", hint="Try a number from 0 on")


def require_memory(wanted: LogitsWanted, manifests: Mapping[str, Manifest]) -> None:
    """Raises `BudgetTooSmall` unless the larger of the models fits into what is free.

    manifests: folder -> what lies there.
    """
    width = dtypes.get(wanted.dtype).itemsize
    free = available_memory()
    if wanted.any_memory or free is None:
        return
    sizes = {url: sum(t.numel for t in m.tensors) * width for url, m in manifests.items()}
    url, most = max(sizes.items(), key=lambda row: row[1])
    if most + _BASE > free:
        raise BudgetTooSmall(
            f"cannot open {url} as {wanted.dtype}: it takes {show_size(most + _BASE)}, "
            f"{show_size(free)} are free",
            hint="Try a machine with more memory, --logits-dtype bf16, or --any-memory to try all the same",
            needed=most + _BASE,
            free=free,
        )


def check_logits(export: str, wanted: LogitsWanted) -> Check:
    """Opens the export, and the reference, and compares what they compute; the check `LOGITS`."""
    if importlib.util.find_spec("transformers") is None:
        return not_done(LOGITS, "transformers is not installed: pip install 'ckptcore[hf]'")
    folders = [require_folder(u) for u in (export, wanted.reference) if u is not None]
    for folder in folders:
        if not os.path.isfile(f"{folder}/config.json"):
            return not_done(LOGITS, f"cannot open {folder} with transformers: there is no config.json")
    asked = {
        "folders": folders,
        "dtype": dtypes.get(wanted.dtype).name,
        "device": wanted.device,
        "seed": SEED,
        "batch": BATCH,
        "length": LENGTH,
    }
    # No limit of time: two models are read whole, from disks and on devices of any speed.
    outcome = transformers_process.ask("ckptcore.comparison.logits_process", asked, seconds=None)
    return _logits_check(outcome, folders, wanted)


def _logits_check(outcome: dict[str, Any], folders: Sequence[str], wanted: LogitsWanted) -> Check:
    if "error" in outcome:
        return not_done(LOGITS, outcome["error"])
    mine, *others = outcome["folders"]
    if problems := _unopened(mine):
        return failed(LOGITS, problems, transformers=outcome["transformers"])
    if others and (problems := _unopened(others[0])):
        return not_done(LOGITS, f"the reference {folders[1]} does not open: {problems[0]}", problems)
    values = {"transformers": outcome["transformers"], "class": mine["class"], "shape": mine["shape"]}
    values |= {"dtype": wanted.dtype, "finite": mine["finite"]}
    if not others:
        if not mine["finite"]:
            return failed(LOGITS, [Problem("", "the logits hold NaN or Inf")], **values)
        return passed(LOGITS, f"{mine['class']} opens, and its logits are finite", **values)
    if "difference" not in outcome:
        what = f"logits have the shape {mine['shape']}, those of the reference {others[0]['shape']}"
        return failed(LOGITS, [Problem("", what)], **values)
    difference = outcome["difference"]
    values |= {"max_abs_difference": difference["max_abs"], "bit_equal": difference["equal"]}
    if difference["equal"] or difference["max_abs"] <= wanted.tolerance:  # NaN is never below
        same = "bit for bit" if difference["equal"] else f"within {difference['max_abs']:.3g}"
        return passed(LOGITS, f"{mine['class']}: equal to the reference {same}", **values)
    wrong = [Problem("", f"logits differ from the reference by up to {difference['max_abs']:.3g}")]
    return failed(LOGITS, wrong + _fields(folders), **values)


def _unopened(outcome: Mapping[str, Any]) -> list[Problem]:
    """Why a folder has no logits."""
    if "refused" in outcome:
        return [Problem("", f"transformers does not open it: {outcome['refused']}")]
    texts = {"missing": "is not there: transformers starts it at random", "mismatched": "has another shape"}
    return [Problem(name, what) for kind, what in texts.items() for name in outcome.get(kind, ())]


def _fields(folders: Sequence[str]) -> list[Problem]:
    """Where the two config.json say other things: what no shape shows."""
    one, two = (_config_form(folder) for folder in folders)
    skipped = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}
    keys = [key for key in sorted({*one, *two} - skipped) if one.get(key) != two.get(key)]
    return [
        Problem(f"config.json {key}", f"{one.get(key)!r}, the reference has {two.get(key)!r}")
        for key in keys[:_MOST_FIELDS]
    ]


def _config_form(folder: str) -> dict[str, Any]:
    with open(f"{folder}/config.json", "rb") as file:  # it was opened by transformers before
        form = json.load(file)
    return form if isinstance(form, dict) else {}


def require_folder(url: str) -> str:
    """The absolute path of a folder of this machine; raises `UsageError` for anything else."""
    path = local_path(url)
    if path is None:
        raise UsageError(
            f"cannot open {url} with transformers: it is no path of this machine", hint="Try a copy of it"
        )
    if not path.is_dir():
        raise UsageError(f"cannot open {url} with transformers: it is no folder", hint="Try its folder")
    return str(path.absolute())
