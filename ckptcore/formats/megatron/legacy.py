"""Recognise legacy Megatron-LM checkpoints.

The reader is a module of its own, `legacy_reader`, so that it is imported for these checkpoints alone.
"""

from __future__ import annotations

from ckptcore.core.manifest import Manifest
from ckptcore.formats.base import Evidence, Format, Reader, Source
from ckptcore.formats.common.thinning import thin_files
from ckptcore.formats.megatron.legacy_names import FILE, NAME


def detect(source: Source) -> Evidence | None:
    """Recognise rank folders by their names."""
    folders = 0 if source.name is not None else sum(1 for p in source.listing if FILE.match(p))
    return Evidence(NAME, (f"{folders} mp_rank_* folder(s) with model_optim_rng.pt",)) if folders else None


def read(source: Source) -> Manifest:
    """Read all ranks into one manifest; raise the errors of `legacy_reader.read`."""
    from ckptcore.formats.megatron.legacy_reader import read as read_ranks

    return read_ranks(source)


FORMAT = Format(
    name=NAME,
    title="Legacy Megatron-LM checkpoint of mp_rank folders",
    recognised_by="`mp_rank_*/model_optim_rng.pt`",
    detect=detect,
    suffixes=frozenset({"pt"}),
    reader=Reader(read, checksums="CRC-32 per record", objects=True),
    thin=thin_files,
)
