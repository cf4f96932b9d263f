"""Recognise legacy Megatron-LM checkpoints.

The reader is a module of its own, `legacy_reader`, so that it is imported for these checkpoints alone.
"""

from __future__ import annotations

from ckptcore.core.manifest import Manifest
from ckptcore.formats.base import Evidence, Format, Reader, Source
from ckptcore.formats.common.thinning import thin_files
from ckptcore.formats.megatron.legacy_names import FILE, NAME, NEMO_FILE

_NAMES = (
    (FILE, "mp_rank_* folder(s) with model_optim_rng.pt"),
    (NEMO_FILE, "rank folder(s) with model_weights.ckpt"),
)


def detect(source: Source) -> Evidence | None:
    """Recognise rank folders by their names."""
    for pattern, title in _NAMES if source.name is None else ():
        if folders := sum(1 for p in source.listing if pattern.match(p)):
            return Evidence(NAME, (f"{folders} {title}",))
    return None


def read(source: Source) -> Manifest:
    """Read all ranks into one manifest; raise the errors of `legacy_reader.read`."""
    from ckptcore.formats.megatron.legacy_reader import read as read_ranks

    return read_ranks(source)


FORMAT = Format(
    name=NAME,
    title="Legacy Megatron-LM checkpoint of mp_rank folders, and unpacked NeMo 1 model of several ranks",
    recognised_by="`mp_rank_*/model_optim_rng.pt`; `model_weights.ckpt` in `mp_rank_*` or `tp_rank_*`",
    detect=detect,
    suffixes=frozenset({"pt", "ckpt"}),
    reader=Reader(read, checksums="CRC-32 per record", objects=True),
    thin=thin_files,
)
