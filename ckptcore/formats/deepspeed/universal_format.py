"""Declare the two forms of a universal folder as output formats. A module of its own: `format` only reads.

A folder of either form is read as DeepSpeed's, and `format.FORMAT` recognises it: these are names for
``--to``. The forms differ in what the loader of each ZeRO stage looks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ckptcore.core.manifest import Manifest
from ckptcore.core.tree_paths import Path
from ckptcore.formats.base import Arrangement, Evidence, FileLayout, Format, Layout, Reader, Source, Writer
from ckptcore.formats.deepspeed.format import FORMAT as DEEPSPEED
from ckptcore.formats.deepspeed.format import read


def _never(source: Source) -> Evidence | None:
    """Recognise nothing: a folder that was written is one of `DEEPSPEED`."""
    return None


def place(source: Manifest) -> Callable[[Path], Path]:
    """Return the mapping of `place_universal`; raise its errors."""
    from ckptcore.formats.deepspeed.universal_names import place_universal

    return place_universal(source)


def arrange_stage2(request: Arrangement) -> Iterable[FileLayout]:
    """Lay out the folder for stages up to 2, as `universal_writer` does; raise its errors."""
    from ckptcore.formats.deepspeed.universal_writer import arrange_stage2 as arrange

    return arrange(request)


def arrange_stage3(request: Arrangement) -> Iterable[FileLayout]:
    """Lay out the folder for stage 3, as `universal_writer` does; raise its errors."""
    from ckptcore.formats.deepspeed.universal_writer import arrange_stage3 as arrange

    return arrange(request)


_READER = Reader(read, checksums="CRC-32 per record", objects=True)
_SEEN = f"as `{DEEPSPEED.name}`"
STAGE2 = Format(
    name="deepspeed_universal",
    title="DeepSpeed universal folder for ZeRO 1, ZeRO 2 and BF16_Optimizer",
    recognised_by=_SEEN,
    detect=_never,
    reader=_READER,
    writer=Writer(Layout(arrange_stage2, nests=True, place=place, values="trainers")),
)
STAGE3 = Format(
    name="deepspeed_universal_zero3",
    title="DeepSpeed universal folder for ZeRO-3",
    recognised_by=_SEEN,
    detect=_never,
    reader=_READER,
    writer=Writer(Layout(arrange_stage3, nests=True, place=place, values="trainers")),
)
