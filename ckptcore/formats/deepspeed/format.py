"""Recognise DeepSpeed checkpoints.

The table is of its own, so that readers are imported for these checkpoints alone.
"""

from __future__ import annotations

from ckptcore.core.manifest import Manifest
from ckptcore.formats.base import Evidence, Format, Reader, Source
from ckptcore.formats.deepspeed.file_names import NAME, files_of


def detect(source: Source) -> Evidence | None:
    """Return the evidence for a folder with the files of one save."""
    if source.name is not None:
        return None
    files = files_of(source.listing)
    counts = (
        (len(files.model), "*_model_states.pt"),
        (len(files.optim), "zero_pp_rank_*_optim_states.pt"),
        (len(files.universal), "zero/<parameter>/"),
    )
    if not any(n for n, _ in counts):
        return None
    return Evidence(NAME, tuple(f"{n} {name}" for n, name in counts if n), ("torch_ranks", "torch_save"))


def read(source: Source) -> Manifest:
    """Read the manifest of a folder; raise the errors of `reader.read`."""
    from ckptcore.formats.deepspeed.reader import read as read_folder

    return read_folder(source)


FORMAT = Format(
    name=NAME,
    title="DeepSpeed checkpoint (ZeRO 0 to 3, BF16_Optimizer, pipeline, AutoTP, MoE, universal)",
    recognised_by="`*_model_states.pt`, `zero_pp_rank_*_optim_states.pt`, or `zero/<parameter>/fp32.pt`",
    detect=detect,
    suffixes=frozenset({"pt"}),
    reader=Reader(read, checksums="CRC-32 per record", objects=True),
    thin="its optimizer files may hold the weights themselves, in fp32",
)
