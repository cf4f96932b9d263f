"""Recognise checkpoints of one file per rank, and declare their formats.

- `FORMAT`: state dicts of DTensor, ShardedTensor, or full tensors. FSDP jobs write such files when they save
  without torch.distributed.checkpoint: verl, Accelerate with ``use_dcp=False``, OLMo's torch_legacy, and
  scripts that call torch.save on every rank. Each pickle records the boxes of its rank.
- `TORCH_CHECKPOINTING`: items of torch_checkpointing, torchtitan's new backend, and metadata.pkl.
- `META`: the model-parallel files of Meta's Llama, whose names say how ranks cut them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import partial

from ckptcore.core.manifest import Manifest
from ckptcore.encodings.torchzip.before_zip import BEFORE_ZIP
from ckptcore.encodings.torchzip.reader import head_holds, is_torch
from ckptcore.errors import AmbiguousModel
from ckptcore.formats.base import Arrangement, Evidence, FileLayout, Format, Layout, Reader, Source, Writer
from ckptcore.formats.common.join import Part, join
from ckptcore.formats.common.rank_file_names import (
    ITEM,
    METADATA,
    RankFiles,
    is_rank_file,
    is_state,
    item_files,
    part_name,
    rank_files,
    without_links,
)
from ckptcore.formats.common.thinning import thin_files
from ckptcore.formats.huggingface.shards import is_shard

_NAME = "torch_ranks"
# verl keeps a folder per component (actor, critic) in a folder per step.
_BELOW = re.compile(r"^(?P<folder>(?:[^/]+/){1,2})[^/]+_world_size_\d+_rank_\d+\.pt$")
_VERL_MODEL = re.compile(r"^model_world_size_\d+_rank_\d+\.pt$")
_MODEL_FOLDER = "huggingface"  # verl/utils/checkpoint/fsdp_checkpoint_manager.py, save_checkpoint
_META = re.compile(r"^consolidated\.(?P<rank>\d{2,4})\.pth$")
CHECKPOINTING = "torch_checkpointing"
_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
_OTHERS = (".metadata", ".distcp", ".safetensors", ".zarray")


def detect(source: Source) -> Evidence | None:
    """Recognise a folder of files named by rank, at least one of them a torch zip."""
    if source.name is not None:
        return None
    if any(p.endswith(_OTHERS) and "/" not in p for p in source.listing):
        # Beside another format, rank files are a trainer's own state, except verl's models.
        models = [p for p in source.listing if _VERL_MODEL.match(p)]
        return Evidence(_NAME, (f"{len(models)} files like {models[0]}",)) if models else None
    paths = [p for kind in rank_files_of(source) for p in kind.paths.values()]
    if paths:
        # A few files only: each costs a request on an object store.
        zips = [p for p in paths[:8] if _is_torch(source, p)]
        verl = any("_world_size_" in p for p in paths)
        if not zips and not verl:
            return None
        # A name with a world size is a rank's file, even if it contains a trainer's keys.
        instead = ("torch_save", "lightning") if verl else ("torch_save",)
        return Evidence(_NAME, (f"{len(paths)} files named by rank, {paths[0]} for one",), instead)
    folders = _folders(source)
    if folders:
        return Evidence(_NAME, (f"files named by rank in {', '.join(folders)}",), ("torch_save",))
    return None


def read(source: Source) -> Manifest:
    """Read the manifest of all ranks' files, or of those in the only subfolder that has some.

    Raises:
        AmbiguousModel: Several subfolders have such files.
        CkptError: What `RankReader.add` raises.
    """
    from ckptcore.formats.torch_ranks.reader import read_ranks

    kinds = rank_files(_rank_paths(source))
    if kinds:
        return _with_huggingface(read_ranks(source, kinds, _NAME), source, "", kinds)
    folders = _folders(source)
    if len(folders) > 1:
        raise AmbiguousModel(
            f"{source.store.url} contains {len(folders)} checkpoints: {', '.join(folders[:8])}",
            hint=f"name one of them, for example {source.store.url.rstrip('/')}/{folders[0]}",
            candidates=list(folders),
        )
    inner = source.below(folders[0])
    kinds = rank_files(_rank_paths(inner))
    manifest = read_ranks(inner, kinds, _NAME)
    joined = join(_NAME, source.store.url, [Part(manifest, folders[0])], manifest.origin)
    return _with_huggingface(joined, source, f"{folders[0]}/", kinds)


def _with_huggingface(
    manifest: Manifest, source: Source, below: str, kinds: tuple[RankFiles, ...]
) -> Manifest:
    """Add the consolidated copy of the model that verl saves on request (``hf_model``)."""
    from ckptcore.formats.huggingface.shards import with_consolidated_folder

    model = "model." if len(kinds) > 1 else ""
    return with_consolidated_folder(manifest, source, f"{below}{_MODEL_FOLDER}", lambda name: model + name)


def rank_files_of(source: Source) -> tuple[RankFiles, ...]:
    """Return `rank_files`, or all such files if the names are those of two saves: `read` reports it."""
    try:
        return rank_files(_rank_paths(source))
    except AmbiguousModel:
        return tuple(RankFiles("", None, {0: p}) for p in source.listing if "/" not in p and "rank" in p)


def _rank_paths(source: Source) -> list[str]:
    return without_links(source, filter(is_rank_file, source.listing))


def _folders(source: Source) -> list[str]:
    folders = {m["folder"].rstrip("/") for p in source.listing if (m := _BELOW.match(p))}
    return sorted(folders)


def _is_torch(source: Source, path: str) -> bool:
    return is_torch(source.store.read(path, 0, min(source.listing[path], BEFORE_ZIP)))


def arrange(request: Arrangement) -> Iterable[FileLayout]:
    """Lay out the files of all ranks, as `writer` does; raise its errors."""
    from ckptcore.formats.torch_ranks.writer import arrange as arrange_files

    return arrange_files(request)


def meta_paths(source: Source) -> dict[int, str]:
    """Return rank -> file, of files that are no links to each other."""
    paths = [p for p in source.listing if p.startswith("consolidated.") and _META.match(p)]
    ranks = {int(p.split(".")[1]): p for p in without_links(source, paths)}
    return {rank: ranks[rank] for rank in sorted(ranks)}


def detect_meta(source: Source) -> Evidence | None:
    """Recognise several ``consolidated.NN.pth`` of a folder, at least one of them a torch zip."""
    if source.name is not None:
        return None
    paths = [p for p in source.listing if p.startswith("consolidated.") and _META.match(p)]
    if len(paths) < 2 or not any(_is_torch(source, path) for path in paths[:8]):
        return None
    return Evidence("meta", (f"{len(paths)} files like {min(paths)}",), ("torch_save",))


def read_meta(source: Source) -> Manifest:
    """Read the manifest of all ranks' files; raise the errors of `meta_reader.read_ranks`."""
    from ckptcore.formats.torch_ranks.meta_reader import read_ranks

    return read_ranks(source, meta_paths(source))


def detect_items(source: Source) -> Evidence | None:
    """Recognise items of ranks: beside metadata.pkl, several alike, or one of distributed tensors.

    A model alone, or beside a trainer's state, is any script's.
    """
    if source.name is not None:
        return None
    tensors = [p for p in source.listing if "/" not in p and p.endswith(_SUFFIXES) and not is_state(p)]
    # The shards of another format beside them are a second checkpoint, which the user is asked about.
    tensors = [path for path in tensors if not is_shard(path)]
    has_other_files = any(ITEM.match(path) is None or part_name(path) is not None for path in tensors)
    if METADATA in source.listing and not has_other_files:
        named = tensors or [p for p in source.listing if p.endswith(_SUFFIXES)]
        return _evidence((f"found {METADATA} and {named[0]}",)) if named else None
    items = {} if has_other_files or not tensors else item_files(source)
    items = {item: ranks for item, ranks in items.items() if any(p in tensors for p in ranks.values())}
    ranks = next(iter(items.values()), {}).keys()
    if (
        len(items) > 1
        and all(paths.keys() == ranks for paths in items.values())
        and set(ranks) == set(range(len(ranks)))
    ):
        return _evidence((f"each rank has {', '.join(items)}",))
    return _by_content(source, items)


def _by_content(source: Source, items: Mapping[str, Mapping[int, str]]) -> Evidence | None:
    """Recognise an item by distributed tensors in its first file."""
    for ranks in items.values():
        path = next(iter(ranks.values()))
        size = source.listing[path]
        read = partial(source.store.read, path)
        if path.endswith(".pt") and head_holds(read, size, "DTensorSpec", path):
            return _evidence((f"{path} holds distributed tensors",))
    return None


def _evidence(because: tuple[str, ...]) -> Evidence:
    return Evidence(CHECKPOINTING, because, ("torch_save", "safetensors", "hf_quantized", "torch_ranks"))


def read_checkpointing(source: Source) -> Manifest:
    """Read the manifest of all items and ranks; raise the errors of `checkpointing_reader.read_items`."""
    from ckptcore.formats.torch_ranks.checkpointing_reader import read_items

    return read_items(source)


_LAYOUT = Layout(arrange, nests=True, values="libraries", torch_load=True, model_folder=_MODEL_FOLDER)
FORMAT = Format(
    name=_NAME,
    title="torch.save file per rank (verl, Accelerate, OLMo, FSDP scripts)",
    recognised_by="torch zips named by rank: `*_rank_R.pt`, `*_rankR.bin`, `rankR.pt`",
    detect=detect,
    suffixes=frozenset({"pt", "pth", "bin", "ckpt"}),
    reader=Reader(read, checksums="CRC-32 per record", objects=True),
    writer=Writer(_LAYOUT, for_mesh=_LAYOUT),
    thin=thin_files,
)
META = Format(
    name="meta",
    title="model-parallel files of Meta's Llama (generations 1 to 4)",
    recognised_by="two or more `consolidated.NN.pth`",
    detect=detect_meta,
    suffixes=frozenset({"pth"}),
    reader=Reader(read_meta, checksums="CRC-32 per record", objects=True),
)
TORCH_CHECKPOINTING = Format(
    name=CHECKPOINTING,
    title="torch_checkpointing checkpoint (0.1.1, torchtitan's new backend)",
    recognised_by="`ITEM_RANK.pt` of several items and all ranks, or beside `metadata.pkl`",
    detect=detect_items,
    suffixes=frozenset({"pt", "pth", "bin", "ckpt", "safetensors"}),
    reader=Reader(read_checkpointing, checksums="CRC-32 per record (`.pt`)", objects=True),
)
