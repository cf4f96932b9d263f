"""Find the checkpoint below a folder of steps, or below a trainer's own folder.

Trainers keep many steps in one folder, and wrap a checkpoint into a folder of their own. Each function
of `ROOTS` recognises one such layout and names the subfolder with the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace

from ckptcore.errors import AmbiguousModel, MalformedCheckpoint, NotComplete
from ckptcore.formats.base import Source, natural
from ckptcore.formats.common.rank_file_names import NANOTRON_METADATA
from ckptcore.formats.deepspeed.file_names import is_checkpoint
from ckptcore.formats.huggingface import nanotron
from ckptcore.formats.megatron.config import TRACKER, marked

_MAX_HOPS = 4
_LATEST = ("latest", "latest_universal")
_LATEST_STEP = "latest.txt"
_INNER = re.compile(r"^(?:[^/]+/)?(?:dist_ckpt|weights)/metadata\.json$")
_DIST_CKPT = re.compile(r"^(?:[^/]+/)?dist_ckpt/metadata\.json$")
_ANY_FILE = re.compile(r"^(?!model|adapter_model|shard-|rank)[^/]+\.(?:safetensors|pt|pth|bin|ckpt)$")
_ITERATION = re.compile(r"^(?:iter_(?P<iter>\d{7,})|global_step_(?P<step>\d+)|release)$")


def located(source: Source) -> tuple[Source, tuple[str, ...]]:
    """Return the checkpoint's own folder, and a sentence for every folder on the way to it."""
    reasons: list[str] = []
    for _ in range(_MAX_HOPS):
        if source.name is not None:
            break
        location = next((root for find in ROOTS if (root := find(source)) is not None), None)
        if location is None:
            break
        folder, why = location
        source = source.below(folder)
        reasons.append(why)
    return source, tuple(reasons)


def beside_steps(source: Source) -> Source:
    """Return a root without the folders of its steps, and without single files that any user may add."""
    outside_steps = {p: n for p, n in source.listing.items() if not _ITERATION.match(p.split("/", 1)[0])}
    return replace(source, listing={p: n for p, n in outside_steps.items() if not _ANY_FILE.match(p)})


def _megatron(source: Source) -> tuple[str, str] | None:
    """Follow the tracker of Megatron-LM, Megatron-Bridge and verl, which names the newest step.

    The tracker holds a decimal number, or ``release`` (megatron/training/checkpointing.py,
    get_checkpoint_tracker_filename, read_metadata). It is written after the data, or before an asynchronous
    save ends.
    """
    if TRACKER not in source.listing:
        return None
    size = source.listing[TRACKER]
    # A longer file is no tracker: it is reported without being read.
    text = source.store.read(TRACKER, 0, size).decode("ascii", "replace").strip() if size <= 64 else ""
    if text != "release" and not (text.isdecimal() and text.isascii()):
        raise MalformedCheckpoint(
            f"{TRACKER} must hold an iteration (got {text[:40]!r})",
            file=TRACKER,
            hint="name the folder of one iteration",
        )
    steps = _steps(source)
    named_step = text if text == "release" else next((s for s in steps if _number(s) == int(text)), None)
    if named_step in steps and (source.recover or finished(source.below(named_step))):
        return named_step, f"{TRACKER} says {text}: {named_step}"
    complete = [s for s in steps if s != named_step and finished(source.below(s))]
    last = max(complete, key=_number, default=None)
    state = "is not complete" if named_step in steps else "does not exist"
    named = named_step or f"iteration {text}"
    raise NotComplete(
        f"{TRACKER} names {named}, which {state}"
        + (f"; the last complete one is {last}" if last else "; no other iteration is complete"),
        hint=f"name {source.store.url}/{last}" if last else "wait until the save has finished",
        **({"last_complete": last} if last else {}),
    )


def _bridge(source: Source) -> tuple[str, str] | None:
    """Recognise Megatron-Bridge before it kept a tracker: ``latest_train_state.pt`` beside the iterations."""
    if "latest_train_state.pt" not in source.listing or TRACKER in source.listing:
        return None
    steps = _steps(source)
    complete = [s for s in steps if finished(source.below(s))]
    newest = max(steps, key=_number, default=None)
    if newest is None:
        return None
    if newest not in complete and not source.recover:
        last = max(complete, key=_number, default=None)
        raise NotComplete(
            f"{newest} is not complete" + (f"; the last complete one is {last}" if last else ""),
            hint=f"name {source.store.url}/{last}" if last else None,
        )
    return newest, f"latest_train_state.pt beside {newest}"


def _nemo(source: Source) -> tuple[str, str] | None:
    """Recognise NeMo 2.0 (``weights/`` beside ``context/``), and NeMo 1 unpacked (``model_weights/``)."""
    for folder, marks in (("weights", ("context/",)), ("model_weights", ("model_config.yaml",))):
        inside = f"{folder}/metadata.json" in source.listing or f"{folder}/.metadata" in source.listing
        if inside and any(p.startswith(marks) for p in source.listing):
            return folder, f"{folder}/ beside {marks[0]}"
    return None


def _verl(source: Source) -> tuple[str, str] | None:
    """Find ``global_step_N/actor/dist_ckpt`` of verl.

    Source: verl/utils/checkpoint/megatron_checkpoint_manager.py.
    """
    folders = sorted(
        {
            p.removesuffix("/metadata.json")
            for p in source.listing
            if p.endswith("dist_ckpt/metadata.json") and _DIST_CKPT.match(p)
        }
    )
    if not folders or "metadata.json" in source.listing:
        return None
    if len(folders) > 1:
        raise AmbiguousModel(
            f"{source.store.url} contains more than one model: {', '.join(folders)}",
            hint=f"name one: {source.store.url}/{folders[0]}",
            candidates=folders,
        )
    return folders[0], f"found {folders[0]}"


def _deepspeed(source: Source) -> tuple[str, str] | None:
    """Return the folder of DeepSpeed's newest save.

    ``latest`` holds its tag, and is written when all ranks have saved:
    deepspeed/runtime/engine.py, `save_checkpoint`. Tags are any text (``global_step10``, ``checkpoint`` of
    Lightning, ``pytorch_model`` of Accelerate). ``latest_universal`` names a folder made of another save,
    and is followed only where ``latest`` is missing.
    """
    parts = (p.partition("/") for p in source.listing)
    tags = [*dict.fromkeys(top for top, _, rest in parts if rest and is_checkpoint((rest,)))]
    if is_checkpoint(source.listing):
        return None
    for marker in _LATEST:
        size = source.listing.get(marker)
        if size is None:
            continue
        text = source.store.read(marker, 0, size).decode("utf-8", "replace").strip() if size <= 4096 else ""
        if text in tags or ("/" in text and is_checkpoint(source.below(text).listing)):
            return text, f"{marker} names {text}"
        if not tags:
            return None
        last = max((t for t in tags if not t.endswith("_universal")), key=natural, default=None)
        raise NotComplete(
            f"{marker} names {text[:80]!r}, which is missing"
            + (f"; {last} is the last save that is there" if last else ""),
            hint=f"name {source.store.url}/{last}" if last else None,
        )
    if not tags:
        return None
    if len(tags) == 1:
        return tags[0], f"{tags[0]} is the only save, and no file names the latest"
    raise AmbiguousModel(
        f"{source.store.url} holds more than one save, and no file names the latest: {', '.join(tags[:6])}",
        hint=f"name one: {source.store.url}/{max(tags, key=natural)}",
        candidates=tags,
    )


def _nanotron(source: Source) -> tuple[str, str] | None:
    """Follow ``latest.txt`` of nanotron, which names the newest step when all ranks have saved it.

    nanotron/trainer.py, `save_checkpoint`: each step is a folder named by its number.
    """
    size = source.listing.get(_LATEST_STEP)
    if size is None:
        return None
    tops = dict.fromkeys(p.split("/", 1)[0] for p in source.listing if p.endswith(f"/{NANOTRON_METADATA}"))
    steps = [top for top in tops if top.isdecimal() and nanotron.detect(source.below(top)) is not None]
    if not steps:
        return None
    text = source.store.read(_LATEST_STEP, 0, size).decode("ascii", "replace").strip() if size <= 64 else ""
    if text in steps:
        return text, f"{_LATEST_STEP} says {text}"
    last = max(steps, key=int)
    raise NotComplete(
        f"{_LATEST_STEP} names {text[:40]!r}, which is not complete; the last complete step is {last}",
        hint=f"name {source.store.url}/{last}",
        last_complete=last,
    )


def finished(source: Source) -> bool:
    """Return whether a step's folder has the file that its trainer writes last."""
    names = source.listing
    if any(p.startswith("mp_rank_") for p in names):
        return True  # the legacy format has no last file
    if "metadata.json" in names or any(_INNER.match(p) for p in names):
        return True
    # `.metadata` is the last file of a plain DCP folder (Megatron-FSDP), and the last but one of torch_dist.
    if ".metadata" in names:
        return not marked(source)
    return any("model_world_size_" in p for p in names)  # verl's per-rank files have no last one


def _steps(source: Source) -> list[str]:
    tops: Iterable[str] = dict.fromkeys(p.split("/", 1)[0] for p in source.listing if "/" in p)
    return [t for t in tops if _ITERATION.match(t)]


def _number(step: str) -> int:
    m = _ITERATION.match(step)
    return int((m["iter"] or m["step"] or -1) if m else -1)


# Each returns (subfolder, reason), or None for another source. It raises `NotComplete` when the named
# subfolder is not finished, `MalformedCheckpoint`, `AmbiguousModel`.
ROOTS: tuple[Callable[[Source], tuple[str, str] | None], ...] = (
    _megatron,
    _bridge,
    _nemo,
    _verl,
    _deepspeed,
    _nanotron,
)
