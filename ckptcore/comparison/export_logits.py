"""Open an export with transformers, and compare its logits with those of a reference folder.

Both are opened in one separate process (`ckptcore.comparison.logits_process`), one after the other, on seeded
inputs of the model's own kind. Unlike all other checks, this one loads an entire model into memory. So it
runs only on request, and model sizes are compared with free memory first.
"""

from __future__ import annotations

import importlib.util
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
from ckptcore.utils.extras import install
from ckptcore.utils.foreign_text import load_json_object
from ckptcore.utils.memory import available_memory
from ckptcore.utils.units import show_size

SEED, BATCH, LENGTH = 0, 2, 32
_BASE = 1 << 30  # bytes of the interpreter, torch, transformers and activations
_MOST_FIELDS = 8
_DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, slots=True)
class LogitsWanted:
    """How logits are computed and compared.

    Attributes:
        reference: The reference folder, or None to check only that logits are finite.
        dtype: The dtype in which models are opened.
        device: The torch device.
        tolerance: The largest absolute difference that passes.
        any_memory: Do not compare model sizes with free memory.
    """

    reference: str | None = None
    dtype: str = "float32"
    device: str = "cpu"
    tolerance: float = 0.0
    any_memory: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise UsageError(f"cannot open models as {self.dtype}", hint=f"try one of {', '.join(_DTYPES)}")
        if not 0 <= self.tolerance < math.inf:  # false for NaN
            raise UsageError(f"tolerance must be a finite number of at least 0 (got {self.tolerance})")


def require_memory(settings: LogitsWanted, manifests: Mapping[str, Manifest]) -> None:
    """Raise `BudgetTooSmall` unless the larger of the models fits into free memory.

    Args:
        settings: The dtype, and whether to compare at all.
        manifests: Folder -> manifest of the model in it.
    """
    width = dtypes.get(settings.dtype).itemsize
    free = available_memory()
    if settings.any_memory or free is None:
        return
    sizes = {url: sum(t.numel for t in m.tensors) * width for url, m in manifests.items()}
    url, most = max(sizes.items(), key=lambda row: row[1])
    if most + _BASE > free:
        raise BudgetTooSmall(
            f"cannot open {url} as {settings.dtype}: it takes {show_size(most + _BASE)}, "
            f"{show_size(free)} are free",
            hint="try a machine with more memory, --logits-dtype bf16, or --any-memory to skip this check",
            needed=most + _BASE,
            free=free,
        )


def check_logits(export: str, settings: LogitsWanted) -> Check:
    """Open the export and the reference, and compare their logits; return the check `LOGITS`."""
    if importlib.util.find_spec("transformers") is None:
        return not_done(LOGITS, f"transformers is not installed: {install('hf')}")
    folders = [require_folder(u) for u in (export, settings.reference) if u is not None]
    for folder in folders:
        if not os.path.isfile(f"{folder}/config.json"):
            return not_done(LOGITS, f"cannot open {folder} with transformers: there is no config.json")
    request = {
        "folders": folders,
        "dtype": dtypes.get(settings.dtype).name,
        "device": settings.device,
        "seed": SEED,
        "batch": BATCH,
        "length": LENGTH,
    }
    # No timeout: two entire models are read, from disks and on devices of any speed.
    outcome = transformers_process.ask("ckptcore.comparison.logits_process", request, seconds=None)
    return _logits_check(outcome, folders, settings)


def _logits_check(outcome: dict[str, Any], folders: Sequence[str], settings: LogitsWanted) -> Check:
    if "error" in outcome:
        return not_done(LOGITS, outcome["error"])
    mine, *references = outcome["folders"]
    if problems := _unopened(mine):
        return failed(LOGITS, problems, transformers=outcome["transformers"])
    if references and (problems := _unopened(references[0])):
        return not_done(LOGITS, f"the reference {folders[1]} does not open: {problems[0]}", problems)
    values = {"transformers": outcome["transformers"], "class": mine["class"], "shape": mine["shape"]}
    covered = outcome.get("covered", {})
    values |= {"dtype": settings.dtype, "finite": mine["finite"], **covered}
    on = _coverage(covered)
    if not references:
        if not mine["finite"]:
            return failed(LOGITS, [Problem("", "the logits contain NaN or Inf")], **values)
        return passed(LOGITS, f"{mine['class']} opens, and its logits are finite{on}", **values)
    if "difference" not in outcome:
        text = f"logits have the shape {mine['shape']}, those of the reference {references[0]['shape']}"
        return failed(LOGITS, [Problem("", text)], **values)
    difference = outcome["difference"]
    values |= {"max_abs_difference": difference["max_abs"], "bit_equal": difference["equal"]}
    if difference["equal"] or difference["max_abs"] <= settings.tolerance:  # false for NaN
        same = "bit for bit" if difference["equal"] else f"within {difference['max_abs']:.3g}"
        return passed(LOGITS, f"{mine['class']}: equal to the reference {same}{on}", **values)
    wrong = [Problem("", f"logits differ from the reference by up to {difference['max_abs']:.3g}")]
    return failed(LOGITS, wrong + _fields(folders), **values)


def _coverage(covered: Mapping[str, Any]) -> str:
    """Return what the model was run on, as a clause."""
    parts = [f"{name}" for name in covered.get("inputs", ()) if not name.endswith("input_ids")]
    if covered.get("tokens"):
        parts.append(f"{covered['tokens']:,} of {covered['vocabulary']:,} token ids")
    without = f", without {' and '.join(covered['without'])}" if covered.get("without") else ""
    return f", on {' and '.join(parts)}{without}" if parts else ""


def _unopened(outcome: Mapping[str, Any]) -> list[Problem]:
    """Return why a folder has no logits; an empty list if it has."""
    if "refused" in outcome:
        return [Problem("", f"transformers does not open it: {outcome['refused']}")]
    texts = {
        "missing": "is missing: transformers initialises it at random",
        "mismatched": "has another shape",
    }
    return [Problem(name, text) for kind, text in texts.items() for name in outcome.get(kind, ())]


def _fields(folders: Sequence[str]) -> list[Problem]:
    """Return the fields in which the two config.json differ: shapes do not show these."""
    export_config, reference_config = (_config_form(folder) for folder in folders)
    skipped = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}
    keys = [
        key
        for key in sorted({*export_config, *reference_config} - skipped)
        if export_config.get(key) != reference_config.get(key)
    ]
    return [
        Problem(
            f"config.json {key}",
            f"{export_config.get(key)!r}, the reference has {reference_config.get(key)!r}",
        )
        for key in keys[:_MOST_FIELDS]
    ]


def _config_form(folder: str) -> dict[str, Any]:
    with open(f"{folder}/config.json", "rb") as file:  # transformers opened it before
        return load_json_object(file.read())


def require_folder(url: str) -> str:
    """Return the absolute path of a local folder; raise `UsageError` for anything else."""
    path = local_path(url)
    if path is None:
        raise UsageError(
            f"cannot open {url} with transformers: it is not a local path", hint="try a local copy"
        )
    if not path.is_dir():
        raise UsageError(f"cannot open {url} with transformers: it is not a folder", hint="try its folder")
    return str(path.absolute())
