"""torch.distributed.checkpoint folders: `.metadata` and `__R_I.distcp` (torch 2.1 to today)."""

from __future__ import annotations

from ckptcore.formats._dcpread import DATA, RANK_METADATA, ranges, read_folder
from ckptcore.formats._dcpwrite import arrange_folder
from ckptcore.formats.base import Abilities, Arrangement, Evidence, FileLayout, Format, Source


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


def arrange(request: Arrangement) -> tuple[FileLayout, ...]:
    """A folder as `torch.distributed.checkpoint.save` leaves it on the asked mesh."""
    return tuple(arrange_folder(request))


FORMAT = Format(
    name="dcp",
    title="PyTorch Distributed Checkpoint (torch.distributed.checkpoint)",
    recognised_by="`.metadata` (or `__R.metadata` per rank) beside `__R_I.distcp`",
    abilities=Abilities(reads=True, writes=True, checksums="CRC-32 per item", objects=True),
    detect=detect,
    read=read_folder,
    arrange=arrange,
    nests=True,
    shards=True,
)
