"""Read and write one torch file per rank: state dicts of DTensor, ShardedTensor, or full tensors.

FSDP jobs write such files when they save without torch.distributed.checkpoint: verl, Accelerate with
``use_dcp=False``, OLMo's torch_legacy, and scripts that call torch.save on every rank. Each pickle records
the boxes of its rank; together the files are one checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckptcore.core.manifest import Manifest
from ckptcore.encodings.torchzip.archive import is_zip
from ckptcore.errors import AmbiguousModel
from ckptcore.formats.base import Arrangement, Evidence, FileLayout, Format, Layout, Reader, Source, Writer
from ckptcore.formats.common.join import Part, join
from ckptcore.formats.common.rank_file_names import RankFiles, is_rank_file, rank_files
from ckptcore.formats.common.trainer_files import without_links
from ckptcore.utils.late_pattern import late_pattern

_NAME = "torch_ranks"
# verl keeps a folder per component (actor, critic) in a folder per step.
_BELOW = late_pattern(r"^(?P<folder>(?:[^/]+/){1,2})[^/]+_world_size_\d+_rank_\d+\.pt$")
_VERL_MODEL = late_pattern(r"^model_world_size_\d+_rank_\d+\.pt$")
_MODEL_FOLDER = "huggingface"  # verl/utils/checkpoint/fsdp_checkpoint_manager.py, save_checkpoint
_OTHERS = (".metadata", ".distcp", ".safetensors", ".zarray")


def detect(source: Source) -> Evidence | None:
    """Recognise a folder of files named by rank, at least one of them a torch zip."""
    if source.name is not None:
        return None
    if any(p.endswith(_OTHERS) and "/" not in p for p in source.listing):
        # Beside another format, rank files are a trainer's own state, except verl's models.
        models = [p for p in source.listing if _VERL_MODEL.match(p)]
        return Evidence(_NAME, (f"{len(models)} files like {models[0]}",)) if models else None
    found = [p for kind in rank_files_of(source) for p in kind.paths.values()]
    if found:
        zips = [p for p in found[:8] if _is_zip(source, p)]
        verl = any("_world_size_" in p for p in found)
        if not zips and not verl:
            return None
        # A name with a world size is a rank's file, even if it contains a trainer's keys.
        instead = ("torch_save", "lightning") if verl else ("torch_save",)
        return Evidence(_NAME, (f"{len(found)} files named by rank, {found[0]} for one",), instead)
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
    from ckptcore.formats.huggingface.consolidated_files import with_consolidated_folder

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
    found = {m["folder"].rstrip("/") for p in source.listing if (m := _BELOW.match(p))}
    return sorted(found)


def _is_zip(source: Source, path: str) -> bool:
    return source.listing[path] >= 4 and is_zip(source.store.read(path, 0, 4))


def arrange(request: Arrangement) -> Iterable[FileLayout]:
    """Lay out the files of all ranks, as `writer` does; raise its errors."""
    from ckptcore.formats.torch_ranks.writer import arrange as arrange_files

    return arrange_files(request)


_LAYOUT = Layout(arrange, nests=True, values="libraries", torch_load=True, model_folder=_MODEL_FOLDER)
FORMAT = Format(
    name=_NAME,
    title="torch.save file per rank (verl, Accelerate, OLMo, FSDP scripts)",
    recognised_by="torch zips named by rank: `*_rank_R.pt`, `*_rankR.bin`, `rankR.pt`",
    detect=detect,
    reader=Reader(read, checksums="CRC-32 per record", objects=True),
    writer=Writer(_LAYOUT, for_mesh=_LAYOUT),
)
