"""hf_shards: what the ranks of torch's HuggingFaceStorageWriter leave, with or without consolidation.

With ``save_distributed`` every rank writes ``shard-*-model-*-of-*.safetensors``, pieces with offsets
(`shard_headers`). Global shapes are not stored: they are how far the pieces reach, once it is proven that
no piece is missing; what cannot be proven is said. Replicated tensors lie in one shard only.

With ``enable_consolidation`` torch makes whole files of the shards, and leaves both: shards in
``sharded/``, the whole files above. Named by its root, such a checkpoint is read from ``sharded/``:
that is what the ranks saved. torch's consolidation writes 0-d tensors as 0.0, zeros where a shard is
missing, and less than there was where the last one is. The whole files are not wasted: names, shapes,
dtypes and 0-d values are compared with theirs, they prove the shapes, and every difference is a
finding. Tensors of one shape and dtype here and there are copies (`ckptcore.core.redundant_copies`): their
elements are compared at level ``bytes``, and while they are converted. To read the whole files instead, move
``sharded/`` away.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ckptcore.core.manifest import Item, Manifest, TensorSpec, View
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.redundant_copies import Whole, with_copies
from ckptcore.errors import Finding, UnsupportedFormat, finding
from ckptcore.formats.base import Evidence, Format, Reader, Source, natural
from ckptcore.formats.common.join import Part, join
from ckptcore.formats.huggingface.expected_shapes import INDEX, known_shapes, proves_all
from ckptcore.formats.huggingface.shard_headers import (
    INFO,
    FolderShards,
    extent,
    has_info,
    is_shard,
    load,
    missing,
    named,
    unproven,
)
from ckptcore.formats.huggingface.shard_headers import ShardPart as Shard
from ckptcore.formats.huggingface.whole_files import WholeTensor, differs, whole_tensors

FOLDER = "sharded"  # torch's SHARDED_DIR_NAME
_AWAY = f"find the rank's file; to read the consolidated files instead, move {FOLDER}/ away"
_MAX_LOOKED = 1000  # values of 0-d tensors that are compared: a few bytes each
_MAX_TOLD = 100  # files that are missing, tensors that differ
_ALONE = "find the rank's file; if no rank wrote one, take what is there as it is with --allow-incomplete"
_Whole = dict[str, WholeTensor]


def detect(source: Source) -> Evidence | None:
    """Files with the writer's names, here or in ``sharded/``; or, without an index, with its headers."""
    if source.name is not None:
        if not source.name.endswith(".safetensors") or not has_info(source, source.name):
            return None
        if not is_shard(source.name):
            return None  # a full state dict of rank 0: every tensor is whole
        return Evidence("hf_shards", (f"the header of {source.name} has {INFO}",), ("safetensors",))
    inside = [p for p in source.listing if p.startswith(f"{FOLDER}/") and is_shard(p[len(FOLDER) + 1 :])]
    here = _here(source)
    if here:
        return Evidence("hf_shards", (f"found {here[0]}",), ("safetensors", "hf_quantized"))
    if inside:
        told = f"found {inside[0]}, which is read; consolidated files beside {FOLDER}/ are compared with it"
        return Evidence("hf_shards", (told,), ("safetensors", "hf_quantized"))
    loose = [p for p in source.listing if p.endswith(".safetensors") and "/" not in p]
    if loose and INDEX not in source.listing and has_info(source, loose[0]):
        return Evidence("hf_shards", (f"the header of {loose[0]} has {INFO}",), ("safetensors",))
    return None


def read(source: Source) -> Manifest:
    """The manifest of a folder of shards; raises `MalformedCheckpoint`, `DamagedCheckpoint`."""
    if source.name is not None:
        raise UnsupportedFormat(
            f"{source.name} is one rank's shard: it does not hold the tensors of the others",
            hint="name the folder it lies in",
        )
    here = _here(source)
    folder = source if here else source.below(FOLDER)
    paths = here or _here(folder)
    if not paths:
        folder = source
        paths = [p for p in source.listing if p.endswith(".safetensors") and "/" not in p]
    shards = load(folder, paths)
    whole, told = _consolidated(source)
    manifest = _shards_manifest(shards, folder, source, whole, told)
    if folder is not source:
        manifest = join("hf_shards", source.store.url, [Part(manifest, FOLDER)], manifest.origin)
    return with_copies(manifest, _copied(shards, whole), source.listing)


def _here(source: Source) -> list[str]:
    return [p for p in source.listing if is_shard(p)]


def _shards_manifest(
    shards: FolderShards, folder: Source, source: Source, whole: _Whole, findings: list[Finding]
) -> Manifest:
    builder = Builder()
    builder.findings += [
        *findings,
        *_incomplete(shards, folder, source, whole),
        *_compared(shards, folder, source, whole),
    ]
    files = {path: builder.file(path, size) for path, size in shards.sizes.items()}
    for fqn, parts in shards.parts.items():
        shape = extent(parts)
        if fqn in whole and len(whole[fqn].shape) == len(shape):
            # What is missing is seen as a hole when the whole is known.
            shape = tuple(max(a, b) for a, b in zip(shape, whole[fqn].shape, strict=True))
        row = builder.tensor(TensorSpec(fqn, parts[0].dtype, shape), parts[0].file)
        for part in parts:
            item = builder.item(Item(files[part.file], part.start, part.nbytes))
            builder.chunk(row, part.offset, part.shape, item, View())
    origin = {"ranks": shards.ranks, "model_files": max(shards.of, default=1)}
    return builder.build("hf_shards", folder.store.url, origin)


def _incomplete(shards: FolderShards, folder: Source, source: Source, whole: _Whole) -> Iterator[Finding]:
    """What the names of the files and the lengths of the parts say about files that are not there."""
    if len(shards.of) > 1:
        counts = ", ".join(map(str, sorted(shards.of)))
        yield finding(
            "mixed-saves",
            "files",
            f"the shards claim to be of {counts} model files: they are of several saves",
            hint="move the files of the older save away",
        )
    beyond = [p for p in shards.sizes if (n := named(p)) and not 0 < n[1] <= n[2]]
    if beyond:
        yield finding("mixed-saves", "files", f"{beyond[0]} is numbered beyond its own count", file=beyond[0])
    proven = (bool(whole) and _same_shapes(shards, whole)) or any(
        proves_all(beside, shards) for beside in {id(s): s for s in (folder, source)}.values()
    )
    lost = [] if proven else list(islice(missing(shards), _MAX_TOLD))
    for file in lost:
        code = "missing-file" if file.sure and not folder.recover else "missing-part"
        yield finding(
            code,
            "files",
            f"{file.path} is not there, although {file.why}",
            file=file.path,
            hint=_AWAY if whole else _ALONE,
        )
    names = () if proven else unproven(shards, known_shapes([folder, source], shards))
    if names:
        more = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
        yield finding(
            "missing-part" if folder.recover else "unproven-shape",
            "cover",
            f"{names[0]}{more} would be larger if ranks behind rank "
            f"{max(shards.ranks, 1) - 1} had written shards: no file says how many ranks there were",
        )
    known = shards.sizes.keys() | {one.path for one in whole.values()}
    for path in folder.listing:
        if path.endswith(".safetensors") and "/" not in path and path not in known:
            yield finding("stray-file", "files", f"{path} lies among the shards and is none", file=path)


def _same_shapes(shards: FolderShards, whole: _Whole) -> bool:
    """Whether the consolidated files hold these tensors, and no other, in these shapes."""
    return whole.keys() == shards.parts.keys() and all(
        extent(parts) == whole[fqn].shape for fqn, parts in shards.parts.items()
    )


def _copied(shards: FolderShards, whole: _Whole) -> dict[str, Whole]:
    """The whole tensors that are what shards hold: of equal dtype and shape, and not of rank 0.

    torch writes whole tensors of rank 0 wrong; their values are compared when the headers are.
    """
    return {
        fqn: Whole(one.path, one.start)
        for fqn, parts in shards.parts.items()
        if (one := whole.get(fqn)) is not None
        and one.shape
        and (one.dtype, one.shape) == (parts[0].dtype, extent(parts))
    }


def _consolidated(source: Source) -> tuple[_Whole, list[Finding]]:
    """The tensors of the whole files beside the shards, and a finding for each that cannot be read."""
    flat = [p for p in source.listing if "/" not in p and p.endswith(".safetensors") and not is_shard(p)]
    return whole_tensors(source, [p for p in flat if named(p) is not None or p == "model.safetensors"])


def _compared(shards: FolderShards, folder: Source, source: Source, whole: _Whole) -> Iterator[Finding]:
    """What the whole files made of the shards have more, and where else they differ."""
    if not whole:
        return
    for fqn in sorted(whole.keys() - shards.parts.keys(), key=natural):
        yield finding("hole", "cover", f"{fqn} is in {whole[fqn].path}, and in no shard", fqn=fqn, hint=_AWAY)
    told = list(_differences(shards, folder, source, whole))
    yield from (differs(message, fqn) for fqn, message in told[:_MAX_TOLD])
    if len(told) > _MAX_TOLD:
        yield differs(f"{len(told) - _MAX_TOLD} more tensors of the consolidated files differ")


def _differences(
    shards: FolderShards, folder: Source, source: Source, whole: _Whole
) -> Iterator[tuple[str, str]]:
    looked = 0
    for fqn, parts in shards.parts.items():
        if fqn not in whole:
            yield fqn, f"{fqn} is in no consolidated file"
            continue
        one = whole[fqn]
        dtype, shape, start, path = one.dtype, one.shape, one.start, one.path
        here = parts[0].dtype, extent(parts)
        if here != (dtype, shape):
            told = f"{here[0]} {list(here[1])} in the shards"
            yield fqn, f"{fqn} is {dtype} {list(shape)} in {path}, and {told}"
        elif not shape and looked < _MAX_LOOKED:
            looked += 1
            if _bytes(folder, parts[0].file, parts[0]) != _bytes(source, path, parts[0], start):
                yield fqn, f"{fqn}, a 0-d tensor, has another value in {path} than in the shards"


def _bytes(source: Source, path: str, part: Shard, start: int | None = None) -> bytes:
    return source.store.read(path, part.start if start is None else start, part.nbytes)


FORMAT = Format(
    name="hf_shards",
    title="shards of torch's HuggingFaceStorageWriter",
    recognised_by="`shard-*-model-*-of-*.safetensors`, here or in `sharded/`",
    detect=detect,
    reader=Reader(read),
)
