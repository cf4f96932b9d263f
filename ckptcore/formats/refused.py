"""Recognise formats that are not read, and refuse them by name with the next step.

A refusal that names the files saves its reader an afternoon; "unknown format" does not. These formats are
detected before the readable ones, because some of them have files that look like those.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from ckptcore.encodings.safetensors_header import read_header
from ckptcore.encodings.tar_members import tar_members
from ckptcore.encodings.torchzip.archive import TAR_BLOCK, is_tar
from ckptcore.encodings.torchzip.before_zip import BEFORE_ZIP, TEXT_HINT, TEXT_REASON, is_text_before_zip
from ckptcore.errors import CkptError, MalformedCheckpoint
from ckptcore.formats.accelerate.format import has_model, parts
from ckptcore.formats.base import KnownFormat, Source, natural, suffixes_of
from ckptcore.formats.common import torch_xla
from ckptcore.formats.common.part_proof import evidence_beside
from ckptcore.formats.common.rank_file_names import ITEM, METADATA, NANOTRON, NANOTRON_METADATA, is_state
from ckptcore.formats.dcp.format import stage_folders
from ckptcore.formats.huggingface import nanotron
from ckptcore.formats.huggingface.shards import is_shard
from ckptcore.formats.olmo.common import RANK_SAFETENSORS, is_step
from ckptcore.formats.torch_save.format import in_tar
from ckptcore.utils.step_names import stage_of
from ckptcore.utils.text import listed


def _text_pickles(source: Source) -> tuple[str, ...] | None:
    """Recognise a pickle of protocol 0 or 1 by torch.save before 1.6: the named file, or one of a folder."""
    has_other_format = any(p.endswith((".metadata", ".distcp", ".safetensors")) for p in source.listing)
    files = [] if has_other_format else [p for p in source.listing if p.endswith(_TORCH) and "/" not in p]
    for name in (source.name,) if source.name is not None else sorted(files)[:_MAX_FILES]:
        size = source.listing[name]
        if size >= BEFORE_ZIP and is_text_before_zip(source.store.read(name, 0, BEFORE_ZIP)):
            return (f"{name} {TEXT_REASON}",)
    return None


def _torch_tar(source: Source) -> tuple[str, ...] | None:
    """Recognise the tar that torch.save wrote before 0.1.11."""
    name = source.name or next((p for p in source.listing if p.endswith(_TORCH) and "/" not in p), None)
    if name is None or source.listing[name] < TAR_BLOCK or not is_tar(source.store.read(name, 0, TAR_BLOCK)):
        return None
    try:
        members = tar_members(partial(source.store.read, name), source.listing[name], name)
    except MalformedCheckpoint:
        return None  # whatever it was, it was cut
    names = {member.name for member in members}
    return (f"{name} is a tar with {', '.join(sorted(_TAR_PARTS))}",) if names >= _TAR_PARTS else None


def _found_nested(source: Source) -> tuple[str, ...] | None:
    if source.name is not None or ".metadata" in source.listing or has_model(source):
        return None
    if any(is_shard(path) for path in source.listing):
        return None
    inner = sorted({_saved_at(p.rsplit("/", 1)[0]) for p in source.listing if p.endswith("/.metadata")})
    if (
        not inner
        or stage_folders(source)
        or is_step(source)
        or any("/" not in p and p.endswith(".distcp") for p in source.listing)
    ):
        return None
    return (f"checkpoints are in its subfolders: {', '.join(inner[:4])}",)


def _accelerate_optimizer(source: Source) -> tuple[str, ...] | None:
    """Recognise what is left of Accelerate's save without the model: an optimizer's DCP folder."""
    if source.name is not None or ".metadata" in source.listing or has_model(source):
        return None
    weights = (*_TORCH, ".safetensors")
    if any("/" not in p and p.endswith(weights) and not is_state(p) for p in source.listing):
        return None  # a trainer's model in full, which its format reads
    optimizers = [part.folder for part in parts(source) if part.folder]
    has_ranks = any(p.startswith("random_states_") and "/" not in p for p in source.listing)
    return (f"{optimizers[0]} is there, and no model",) if optimizers and has_ranks else None


def _without_boxes(source: Source) -> tuple[str, ...] | None:
    """Recognise the local tensors of torch_checkpointing's ranks by torchtitan's state beside them."""
    if source.name is not None or METADATA in source.listing:
        return None
    items = [p for p in source.listing if ITEM.match(p)]
    state = next((p for p in items if p.startswith("train_state_") and p.endswith(".json")), None)
    local = next((p for p in items if p.endswith(".safetensors")), None)
    return (f"{local} is beside {state}, and {METADATA} is not there",) if local and state else None


def _saved_at(folder: str) -> str:
    """Return the folder of the checkpoint that a DCP folder belongs to: of a stage, the one above."""
    above, _, name = folder.rpartition("/")
    return above if above and stage_of(name) is not None else folder


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
    name = source.name or next((p for p in source.listing if p in (*_MEGATRON, _NEMO)), None)
    if (name in _MEGATRON and _MP_RANK.match(folder)) or (name == _NEMO and _NEMO_RANK.match(folder)):
        return (f"{folder}/{name} is one model-parallel rank's file",)
    if name == _NEMO:
        # Imported for such files alone: it reads YAML.
        from ckptcore.formats.megatron.legacy_ranks import CONFIG, stated_ranks

        if (ranks := stated_ranks(source)) > 1:
            return (f"{name} is one file, and {CONFIG} beside it states {ranks} model-parallel ranks",)
    if source.name is not None and ITEM.match(source.name) and source.store.size(METADATA):
        return (f"{source.name} is beside {METADATA}, and is one rank's item",)
    flat = source.name is not None and RANK_SAFETENSORS.match(source.name)
    if flat and source.store.size("metadata.json") is not None:
        return (f"{source.name} is beside metadata.json, and holds flattened shards",)
    return None


_TAR_PARTS = {"sys_info", "pickle", "tensors", "storages"}
_COMPRESSED = {
    "gzip": b"\x1f\x8b\x08",
    "bzip2": b"BZh",
    "xz": b"\xfd7zXZ\x00",
    "zstd": b"\x28\xb5\x2f\xfd",
    "lz4": b"\x04\x22\x4d\x18",
}
_MEGATRON = ("model_optim_rng.pt", "distrib_optim.pt")
_MP_RANK = re.compile(r"^mp_rank_\d{2}")
_NEMO = "model_weights.ckpt"  # a model of one rank has it beside model_config.yaml, in no folder of ranks
_NEMO_RANK = re.compile(r"^(?:mp_rank_\d{2}(?:_fsdp_shard_\d+)?|tp_rank_\d{2}_pp_rank_\d{3})$")
_NEMO_FSDP = re.compile(r"^mp_rank_\d+_fsdp_shard_\d+/model_weights\.ckpt$")
_STEP = re.compile(r"^step\d+(-unsharded)?/")
_TORCH = (".pt", ".pth", ".bin", ".ckpt", ".th", ".pkl", ".tar")
_TORCH_SUFFIXES = suffixes_of(_TORCH)
_SAFETENSORS = frozenset({"safetensors"})
_MAX_FILES = 16
_READABLE = (*_TORCH, ".safetensors", ".distcp", ".metadata", ".gguf", ".nemo")
_TEXTS = (".symlink", ".json", ".jsonl", ".yaml", ".yml", ".txt", ".md", ".log", ".csv")
# composer/utils/compression.py: suffixes of commands, and of tars.
_PACKED = re.compile(
    r"^[^/]*\.(?:(?:pt|pth|ckpt|bin|safetensors|tar)\.(?:gz|bz2|xz|lz4|lzma|lzo|zst)|tgz|tbz2?|txz)$"
)
_METASEQ = re.compile(r"^(?:reshard|checkpoint[\w.]*)-model_part-\d+(?:-shard\d+)?\.pt$")
_VLLM = re.compile(r"^model-(?:rank-\d+|pp-\d+-tp-\d+)-part-\d+\.safetensors$")
_FUSED = re.compile(r"\.(?:qkv_proj|gate_up_proj|qkv|w13_weight)(?:\.|$)")
_XLA = re.compile(r"^(?:rank\d+-of-\d+-[^/]*|[^/]*_rank-\d{8}-of-\d{8})\.(?:bin|pth|pt)$")
_EPOCH = re.compile(
    r"^(?:(?:hf|meta|torchtune)_model_(?:\d{4}_)?|adapter_)(\d{1,6})\.(?:pt|bin|safetensors)$"
)
_ORBAX = ("_CHECKPOINT_METADATA", "manifest.ocdbt")
_BESIDE_ZARR = ("_METADATA", "_sharding", "checkpoint")  # of releases before and after OCDBT; of T5X
_ZARRAY = re.compile(r"^[^/]+/\.zarray$")
_TENSORRT = re.compile(r"^rank\d+\.safetensors$")


def _files_like(
    source: Source, start: str, pattern: re.Pattern[str], least: int = 1
) -> tuple[str, ...] | None:
    """Return the evidence of files of one kind, directly in a folder; their names begin with ``start``."""
    if source.name is not None:
        return None
    matching = [p for p in source.listing if p.startswith(start) and pattern.match(p)]
    if len(matching) < least:
        return None
    return (f"found {listed(matching, 1)}",)


def _vllm(source: Source) -> tuple[str, ...] | None:
    """Recognise vLLM's ranks and parts: several, or one with fused tensors, which no config proves."""
    files = (
        [source.name] if source.name is not None else [p for p in source.listing if p.startswith("model-")]
    )
    ranks = [p for p in files if _VLLM.match(p)]
    if source.name is None and (ranks[1:] or any(not p.startswith("model-rank-0-") for p in ranks)):
        return _files_like(source, "model-", _VLLM)
    for path in ranks[:_MAX_FILES]:
        try:
            tensors, _, _ = read_header(source.store, path, source.listing[path], None)
        except CkptError:
            continue  # its own reader reports what is wrong
        fused = next((name for name in tensors if _FUSED.search(name)), None)
        if fused is not None:
            return (f"{path} has {fused}",)
    return None


def _gguf(source: Source) -> tuple[str, ...] | None:
    names = (source.name,) if source.name is not None else tuple(source.listing)
    matching = [name for name in names if name.endswith(".gguf") and "/" not in name]
    if not matching or any(name.endswith((*_TORCH, ".safetensors", ".distcp")) for name in names):
        return None
    return (f"found {matching[0]}",)


def _orbax(source: Source) -> tuple[str, ...] | None:
    """Recognise Orbax by its metadata, or by arrays of zarr beside one of its files."""
    for mark in _ORBAX:
        if source.name is None and mark in source.listing:
            return (f"found {mark}",)
    array = next((p for p in source.listing if _ZARRAY.match(p)), None) if source.name is None else None
    beside = None if array is None else next((p for p in _BESIDE_ZARR if p in source.listing), None)
    return None if beside is None else (f"found {array} beside {beside}",)


def _engine(source: Source) -> tuple[str, ...] | None:
    """Recognise an engine of TensorRT, named or in a folder without weights."""
    names = (source.name,) if source.name is not None else tuple(source.listing)
    engines = [name for name in names if name.endswith(".engine") and "/" not in name]
    if not engines or any(name.endswith(_READABLE) for name in names):
        return None
    return (f"found {min(engines, key=natural)}",)


def _torchtune_epochs(source: Source) -> tuple[str, ...] | None:
    """Recognise epochs by the last number of torchtune's names before 0.5 (training/checkpointing)."""
    if source.name is not None:
        return None
    epoch_of = {p: int(match[1]) for p in source.listing if (match := _EPOCH.match(p))}
    epochs = sorted({*epoch_of.values()})
    if len(epochs) < 2:
        return None
    weights = (p for p in source.listing if "/" not in p and p.endswith(_READABLE) and not is_state(p))
    if all(p.startswith("adapter_") for p in epoch_of) and not epoch_of.keys() >= {*weights}:
        return None  # other programs number adapters, too
    newest = sorted((p for p, epoch in epoch_of.items() if epoch == epochs[-1]), key=natural)
    verb = "are" if newest[1:] else "is"
    return (f"epochs {listed([*map(str, epochs)])} are in it; of the newest {verb} {listed(newest)}",)


def _with_files(*names: str) -> Callable[[Source], tuple[str, ...] | None]:
    """Return the detector of a folder that has all of these files; a name that ends in "/" is a subfolder."""

    def detect(source: Source) -> tuple[str, ...] | None:
        if source.name is not None or names[0] not in source.listing:
            return None
        for name in names[1:]:
            is_folder = name.endswith("/") and any(p.startswith(name) for p in source.listing)
            if not is_folder and name not in source.listing:
                return None
        return (f"found {', '.join(names)}",)

    return detect


def _nanotron_part(source: Source) -> tuple[str, ...] | None:
    """Recognise a folder inside of a nanotron step: of its model, or of one tensor."""
    if source.name is not None or nanotron.detect(source) is not None:
        return None
    ranks = (p for p in source.listing if "_tp-rank-" in p and NANOTRON.match(p))
    rank = next((p for p in ranks if not _below_step(source, p)), None)
    return None if rank is None else (f"found {rank}",)


def _below_step(source: Source, path: str) -> bool:
    """Return whether a file is below a step of nanotron: a folder of steps is no part of one."""
    parts = path.split("/")
    above = ("/".join(parts[:n]) for n in range(len(parts)))
    return any(f"{folder}/{NANOTRON_METADATA}".lstrip("/") in source.listing for folder in above)


def _nemo_archive(source: Source) -> tuple[str, ...] | None:
    """Recognise the named archive, or the only thing of its folder."""
    if source.name is None and any(p.endswith((*_TORCH, ".safetensors", ".distcp")) for p in source.listing):
        return None
    names = (source.name,) if source.name is not None else tuple(source.listing)
    archive = next((name for name in names if name.endswith(".nemo")), None)
    return None if archive is None else (f"{archive} is named .nemo",)


def _compressed(source: Source) -> tuple[str, ...] | None:
    """Recognise a tar that is no checkpoint's own, and compressed files of any kind: Composer writes both.

    In a folder a file is known by its name, where all others are texts: an installed format may read them.
    """
    name = source.name
    if name is None:
        packed = [p for p in source.listing if _PACKED.match(p)]
        if not packed or any(not _PACKED.match(p) and not p.endswith(_TEXTS) for p in source.listing):
            return None
        return (f"found {listed(sorted(packed, key=natural), 1)}",)
    if name.endswith(".lzma"):  # its first bytes may be those of a safetensors file
        return (f"{name} is named .lzma",)
    if source.listing[name] < TAR_BLOCK:
        return None
    first = source.store.read(name, 0, TAR_BLOCK)
    kind = next((kind for kind, magic in _COMPRESSED.items() if first.startswith(magic)), None)
    if kind is not None:
        return (f"{name} is compressed with {kind}",)
    is_foreign_tar = is_tar(first) and in_tar(source, name) is None
    return (f"{name} is a tar of several files",) if is_foreign_tar else None


def _tensorrt(source: Source) -> tuple[str, ...] | None:
    """Recognise ranks beside TensorRT-LLM's own config, which has their mesh; one file of them, too."""
    files = _files_like(source, "rank", _TENSORRT)
    if source.name is not None and _TENSORRT.match(source.name):
        files = (f"{source.name} is beside its config.json",)
    return files if files and "mapping" in evidence_beside(source, "config.json") else None


KNOWN: tuple[KnownFormat, ...] = (
    KnownFormat(
        "torch-text-pickle",
        "a torch.save file of pickle protocol 0 or 1",
        _text_pickles,
        TEXT_HINT,
        _TORCH_SUFFIXES,
    ),
    KnownFormat("torch-tar", "a torch.save file of torch 0.1, a tar", _torch_tar, TEXT_HINT, _TORCH_SUFFIXES),
    KnownFormat(
        "gguf",
        "a GGUF file",
        _gguf,
        "convert what it was made from: its blocks are quantised",
        frozenset({"gguf"}),
    ),
    KnownFormat(
        "orbax",
        "an Orbax checkpoint of JAX",
        _orbax,
        "restore it with orbax-checkpoint, and save its arrays as safetensors",
        frozenset({"_CHECKPOINT_METADATA", "ocdbt", "zarray"}),
    ),
    KnownFormat(
        "tensorrt-engine",
        "an engine of TensorRT, built for one kind of GPU",
        _engine,
        "convert the checkpoint that it was built from",
        frozenset({"engine"}),
    ),
    KnownFormat(
        "torchtune-epochs",
        "a folder with several epochs of torchtune",
        _torchtune_epochs,
        "move the files of one epoch to a folder of their own, and name it; name an epoch of one file itself",
        _TORCH_SUFFIXES,
    ),
    KnownFormat(
        "torchsnapshot",
        "a snapshot of torchsnapshot",
        _with_files(".snapshot_metadata"),
        "restore it with torchsnapshot, and save the state dict with torch.save",
        frozenset({"snapshot_metadata"}),
    ),
    KnownFormat(
        "nanotron-part",
        "a folder inside of a nanotron checkpoint",
        _nanotron_part,
        "name the folder that has checkpoint_metadata.json",
        _SAFETENSORS,
    ),
    KnownFormat(
        "nemo-archive",
        "an archive of NeMo",
        _nemo_archive,
        "unpack it with tar -xf FILE -C DIR, and name the folder",
        frozenset({"nemo"}),
    ),
    KnownFormat(
        "nemo-fsdp",
        "the FSDP shards of an unpacked NeMo model",
        lambda source: _files_like(source, "mp_rank_", _NEMO_FSDP),
        "save it with the NeMo that wrote it, as a distributed checkpoint",
        frozenset({"ckpt"}),
    ),
    KnownFormat(
        "archive",
        "an archive, not a checkpoint",
        _compressed,
        "unpack it with tar -xf FILE -C DIR, gunzip or its like, and name the result",
    ),
    KnownFormat(
        "tensorrt-llm", "a TensorRT-LLM checkpoint", _tensorrt, "convert what it was made from", _SAFETENSORS
    ),
    KnownFormat(
        torch_xla.NAME,
        torch_xla.TITLE,
        lambda source: _files_like(source, "", _XLA),
        torch_xla.HINT,
        frozenset({"bin", "pth", "pt"}),
    ),
    KnownFormat(
        "metaseq",
        "the model-parallel files of metaseq",
        lambda source: _files_like(source, "", _METASEQ, 2),
        "join them with metaseq's reshard_mp.py, to one part",
        frozenset({"pt"}),
    ),
    KnownFormat(
        "vllm-sharded-state",
        "the sharded state of vLLM, one rank's weights in each file",
        _vllm,
        "convert what it was made from",
        _SAFETENSORS,
    ),
    KnownFormat(
        "rank-alone",
        "one rank's part of a checkpoint",
        _rank_alone,
        "name the folder of all ranks",
        frozenset({"pt", "ckpt"}),
    ),
    KnownFormat("olmo-steps", "a folder of OLMo steps", _olmo_steps, "name one of the subfolders"),
    KnownFormat(
        "torch-checkpointing-local",
        "local tensors of torch_checkpointing's ranks, without their boxes",
        _without_boxes,
        "copy metadata.pkl from where it was saved",
        _SAFETENSORS,
    ),
    KnownFormat(
        "accelerate-optimizer",
        "an Accelerate checkpoint without its model",
        _accelerate_optimizer,
        "copy the model's folder from where it was saved; name the optimizer's folder to read it alone",
        frozenset({"metadata"}),
    ),
    KnownFormat(
        "trainer-folder",
        "a trainer's folder, not one checkpoint",
        _found_nested,
        "name one of the subfolders",
        frozenset({"metadata"}),
    ),
)
