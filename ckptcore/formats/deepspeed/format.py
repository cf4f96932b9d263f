"""Recognise DeepSpeed checkpoints, and declare the two forms of a universal folder as output formats.

A folder of either form is read as DeepSpeed's, and `FORMAT` recognises it: these are names for ``--to``. The
forms differ in what the loader of each ZeRO stage looks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from ckptcore.core.manifest import Manifest
from ckptcore.core.tree_paths import Path
from ckptcore.formats.base import Arrangement, Evidence, FileLayout, Format, Layout, Reader, Source, Writer
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


def place(source: Manifest) -> Callable[[Path], Path]:
    """Return the mapping of `place_universal`; raise its errors."""
    from ckptcore.formats.deepspeed.universal_writer import place_universal

    return place_universal(source)


def _arrange(request: Arrangement, stage: int) -> Iterable[FileLayout]:
    from ckptcore.formats.deepspeed.universal_writer import arrange

    return arrange(request, stage)


def _universal(name: str, title: str, stage: int) -> Format:
    layout = Layout(partial(_arrange, stage=stage), nests=True, place=place, values="trainers")
    # Nothing is recognised as one: a folder that was written is one of `FORMAT`.
    return Format(name, title, f"as `{NAME}`", lambda source: None, _READER, Writer(layout))


_READER = Reader(read, checksums="CRC-32 per record", objects=True)
FORMAT = Format(
    name=NAME,
    title="DeepSpeed checkpoint (ZeRO 0 to 3, BF16_Optimizer, pipeline, AutoTP, MoE, universal)",
    recognised_by="`*_model_states.pt`, `zero_pp_rank_*_optim_states.pt`, or `zero/<parameter>/fp32.pt`",
    detect=detect,
    suffixes=frozenset({"pt"}),
    reader=_READER,
    thin="its optimizer files may hold the weights themselves, in fp32",
)
STAGE2 = _universal(
    "deepspeed_universal", "DeepSpeed universal folder for ZeRO 1, ZeRO 2 and BF16_Optimizer", 2
)
STAGE3 = _universal("deepspeed_universal_zero3", "DeepSpeed universal folder for ZeRO-3", 3)
