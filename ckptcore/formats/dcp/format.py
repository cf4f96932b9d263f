"""torch.distributed.checkpoint folders: `.metadata` and `__R_I.distcp` (torch 2.1 to today)."""

from __future__ import annotations

import re
from dataclasses import replace

from ckptcore.core.manifest import Manifest
from ckptcore.errors import finding
from ckptcore.formats.base import Arrangement, Evidence, FileLayout, Format, Layout, Reader, Source, Writer
from ckptcore.formats.dcp.reader import DATA, RANK_METADATA, ranges, read_folder
from ckptcore.formats.dcp.writer import arrange_folder

# Lightning's Trainer numbers its optimizers, and keeps the model under one of two names. Its version is
# in meta.pt, or among the objects of what was made of such a folder.
_NUMBERED = re.compile(r"^optimizer_\d+\.")
_MODELS, _VERSION = ("model.", "state_dict."), "pytorch-lightning_version"


def detect(source: Source) -> Evidence | None:
    """A DCP folder is known by its metadata file, finished or not."""
    if source.name is not None:
        return None
    data = [p for p in source.listing if DATA.search(p) and "/" not in p]
    told = [f"{len(data)} *.distcp file(s)"] if data else []
    if ".metadata" in source.listing:
        return Evidence("dcp", ("found .metadata", *told))
    ranks = sorted(int(m[1]) for p in source.listing if (m := RANK_METADATA.match(p)))
    if ranks:
        return Evidence("dcp", (f"found rank-local metadata of ranks {ranges(ranks)}", *told))
    if ".metadata.tmp" in source.listing and (data or source.recover):
        return Evidence("dcp", ("found .metadata.tmp of a save that did not finish", *told))
    if data:
        return Evidence("dcp", (*told, "but no .metadata"))
    return None


def read(source: Source) -> Manifest:
    """The manifest of a DCP folder; raises as `read_folder` does."""
    found = read_folder(source)
    names = [*(t.fqn for t in found.tensors), *(b.key for b in found.blobs)]
    of_trainer = any(n.startswith(_MODELS) for n in names) and any(_NUMBERED.match(n) for n in names)
    if of_trainer and _VERSION not in names:
        message = "there is no meta.pt, in which Lightning's Trainer keeps all but model and optimizers"
        hint = "copy meta.pt from where it was saved: Lightning resumes from nothing less"
        told = finding("missing-part", "files", message, file="meta.pt", hint=hint)
        found = replace(found, findings=(*found.findings, told))
    return found


def arrange(request: Arrangement) -> tuple[FileLayout, ...]:
    """A folder as `torch.distributed.checkpoint.save` leaves it on the asked mesh."""
    return tuple(arrange_folder(request))


_LAYOUT = Layout(arrange, nests=True)
FORMAT = Format(
    name="dcp",
    title="PyTorch Distributed Checkpoint (torch.distributed.checkpoint)",
    recognised_by="`.metadata` (or `__R.metadata` per rank) beside `__R_I.distcp`",
    detect=detect,
    reader=Reader(read, checksums="CRC-32 per item", objects=True),
    writer=Writer(_LAYOUT, for_mesh=_LAYOUT, serializations=("torch_save", "safetensors")),
)
