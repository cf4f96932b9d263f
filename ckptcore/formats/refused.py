"""Recognise formats that are not read, and refuse them by name with the next step.

A refusal that names the files saves its reader an afternoon; "unknown format" does not. These formats are
detected before the readable ones, because some of them have files that look like those.
"""

from __future__ import annotations

from ckptcore.formats.accelerate.file_names import has_model
from ckptcore.formats.base import KnownFormat, Source, natural
from ckptcore.formats.olmo.common import RANK_SAFETENSORS, is_step
from ckptcore.utils.late_pattern import late_pattern


def _before_zip(source: Source) -> tuple[str, ...] | None:
    """Recognise files of torch.save before 1.6, which wrote a pickled magic number instead of a zip."""
    others = any(p.endswith((".metadata", ".distcp", ".safetensors")) for p in source.listing)
    ranks = () if others else (p for p in source.listing if _OF_A_RANK.search(p))
    name = source.name or next(iter(ranks), None)
    if name is None or not name.endswith((".pt", ".pth", ".bin", ".ckpt")) or source.listing[name] < 14:
        return None
    if source.store.read(name, 0, 14) != _MAGIC:
        return None
    return (f"{name} begins with the magic number of torch.save before 1.6",)


def _found_nested(source: Source) -> tuple[str, ...] | None:
    if source.name is not None or ".metadata" in source.listing or has_model(source):
        return None
    inner = sorted(p.rsplit("/", 1)[0] for p in source.listing if p.endswith("/.metadata"))
    if not inner or is_step(source) or any("/" not in p and p.endswith(".distcp") for p in source.listing):
        return None
    return (f"checkpoints are in its subfolders: {', '.join(inner[:4])}",)


def _olmo_steps(source: Source) -> tuple[str, ...] | None:
    """Recognise the folder in which OLMo's trainers keep every step; no file names the current one."""
    if source.name is not None:
        return None
    tops = sorted({p.split("/", 1)[0] for p in source.listing if _STEP.match(p)}, key=natural)
    steps = [t for t in tops if is_step(source.below(t))]
    return (f"checkpoints are in its subfolders: {', '.join(steps[-4:])}",) if steps else None


def _rank_alone(source: Source) -> tuple[str, ...] | None:
    """Recognise one rank's part, named alone: its shards look like complete tensors."""
    folder = source.store.url.rstrip("/").rsplit("/", 1)[-1]
    name = source.name or next((p for p in source.listing if p in _MEGATRON), None)
    if name in _MEGATRON and _MP_RANK.match(folder):
        return (f"{folder}/{name} is one model-parallel rank's file",)
    flat = source.name is not None and RANK_SAFETENSORS.match(source.name)
    if flat and source.store.size("metadata.json") is not None:
        return (f"{source.name} is beside metadata.json, and holds flattened shards",)
    return None


_OF_A_RANK = late_pattern(r"^mp_rank_[\d_]+/model_optim_rng\.pt$|^[^/]*rank_?\d+\.(?:pt|pth|bin)$")
_MEGATRON = ("model_optim_rng.pt", "distrib_optim.pt")
_MP_RANK = late_pattern(r"^mp_rank_\d{2}")
_STEP = late_pattern(r"^step\d+(-unsharded)?/")
# torch/serialization.py MAGIC_NUMBER 0x1950a86a20f9469cfc6c as pickle protocol 2.
_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"
KNOWN: tuple[KnownFormat, ...] = (
    KnownFormat(
        "torch-legacy",
        "a torch.save file of the format before zip (torch 1.5 and earlier)",
        _before_zip,
        "load it with torch and save it again",
    ),
    KnownFormat("rank-alone", "one rank's part of a checkpoint", _rank_alone, "name the folder of all ranks"),
    KnownFormat("olmo-steps", "a folder of OLMo steps", _olmo_steps, "name one of the subfolders"),
    KnownFormat(
        "trainer-folder",
        "a trainer's folder, not one checkpoint",
        _found_nested,
        "name one of the subfolders",
    ),
)
