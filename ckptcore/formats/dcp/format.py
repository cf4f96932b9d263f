"""Recognise, read and write torch.distributed.checkpoint folders: `.metadata` and `__R_I.distcp`."""

from __future__ import annotations

import re
from dataclasses import replace

from ckptcore.core.manifest import Manifest
from ckptcore.errors import finding
from ckptcore.formats.base import (
    Arrangement,
    Evidence,
    FileLayout,
    Format,
    Layout,
    Reader,
    Source,
    Thinned,
    Writer,
)
from ckptcore.formats.dcp.reader import DATA, RANK_METADATA, ranges, read_folder
from ckptcore.formats.dcp.stages import named_alone, read_stages, stage_folders

# Lightning's Trainer numbers its optimizers, and keeps the model under one of two names. Its version is
# in meta.pt, or among the objects of a folder converted from a Lightning checkpoint.
_NUMBERED = re.compile(r"^optimizer_\d+\.")
_MODELS, _VERSION = ("model.", "state_dict."), "pytorch-lightning_version"


def detect(source: Source) -> Evidence | None:
    """Recognise a DCP folder by its metadata file, finished or not."""
    if source.name is not None:
        return None
    data = [p for p in source.listing if DATA.search(p) and "/" not in p]
    files = [f"{len(data)} *.distcp file(s)"] if data else []
    if ".metadata" in source.listing:
        return Evidence("dcp", ("found .metadata", *files))
    ranks = sorted(int(m[1]) for p in source.listing if (m := RANK_METADATA.match(p)))
    if ranks:
        return Evidence("dcp", (f"found rank-local metadata of ranks {ranges(ranks)}", *files))
    if ".metadata.tmp" in source.listing and (data or source.recover):
        return Evidence("dcp", ("found .metadata.tmp of a save that did not finish", *files))
    if data:
        return Evidence("dcp", (*files, "but no .metadata"))
    stages = list(stage_folders(source).values())
    if stages:
        return Evidence("dcp", (f"found a folder of each pipeline stage: {', '.join(stages[:8])}",))
    return None


def read(source: Source) -> Manifest:
    """Read the manifest of a DCP folder, or of one per pipeline stage; raise the errors of `read_folder`."""
    has_own_files = any(p == ".metadata" or DATA.match(p) or RANK_METADATA.match(p) for p in source.listing)
    if not has_own_files and stage_folders(source):
        return read_stages(source)
    manifest = read_folder(source)
    alone = named_alone(source, manifest)
    manifest = replace(manifest, findings=(*manifest.findings, *alone)) if alone else manifest
    names = [*(t.fqn for t in manifest.tensors), *(b.key for b in manifest.blobs)]
    of_trainer = any(n.startswith(_MODELS) for n in names) and any(_NUMBERED.match(n) for n in names)
    if of_trainer and _VERSION not in names:
        message = "meta.pt is missing: Lightning's Trainer keeps everything but model and optimizers in it"
        hint = "copy meta.pt from where it was saved: Lightning cannot resume without it"
        missing = finding("missing-part", "files", message, file="meta.pt", hint=hint)
        manifest = replace(manifest, findings=(*manifest.findings, missing))
    return manifest


def arrange(request: Arrangement) -> tuple[FileLayout, ...]:
    """Lay out a folder as `torch.distributed.checkpoint.save` writes it on the requested mesh."""
    from ckptcore.formats.dcp.writer import arrange_folder

    return tuple(arrange_folder(request))


def thin(source: Source, manifest: Manifest, drop: frozenset[str]) -> Thinned:
    """Leave names out of the DCP folders of a checkpoint; raise the errors of `thinning.thin_folders`."""
    from ckptcore.formats.dcp.thinning import thin_folders

    return thin_folders(source, manifest, drop)


_LAYOUT = Layout(arrange, nests=True, values="libraries", flattens=True)
FORMAT = Format(
    name="dcp",
    title="PyTorch Distributed Checkpoint (torch.distributed.checkpoint)",
    recognised_by="`.metadata` (or `__R.metadata` per rank) beside `__R_I.distcp`, or `pp0/`, ... with them",
    detect=detect,
    suffixes=frozenset({"metadata", "distcp", "tmp"}),
    reader=Reader(read, checksums="CRC-32 per item", objects=True),
    writer=Writer(_LAYOUT, for_mesh=_LAYOUT, serializations=("torch_save", "safetensors")),
    thin=thin,
)
