"""Recognise a step of nanotron: a file for each rank of a tensor, in a folder named after its module.

``model/model/decoder/0/pp_block/attn/o_proj/model_weight_pp-rank-0-of-1_tp-rank-0-of-2.safetensors`` is a
part of ``model.decoder.0.pp_block.attn.o_proj.weight``. config.yaml is written first,
checkpoint_metadata.json last (nanotron/serialize/main.py, `save`).
"""

from __future__ import annotations

from collections.abc import Iterable

from ckptcore.core.manifest import Manifest
from ckptcore.formats.base import Arrangement, Evidence, FileLayout, Format, Layout, Reader, Source, Writer
from ckptcore.formats.common.rank_file_names import NANOTRON, NANOTRON_METADATA, NANOTRON_MODEL

_CONFIG = "config.yaml"


def detect(source: Source) -> Evidence | None:
    """Recognise the folder of a step, also of one whose save has not finished."""
    if source.name is not None or not (NANOTRON_METADATA in source.listing or _CONFIG in source.listing):
        return None
    tensor = next((p for p in source.listing if p.startswith(NANOTRON_MODEL) and NANOTRON.match(p)), None)
    if tensor is None:
        return None
    first = NANOTRON_METADATA if NANOTRON_METADATA in source.listing else _CONFIG
    return Evidence("nanotron", (f"found {first} and {tensor}",))


def read(source: Source) -> Manifest:
    """Read the manifest of a step; raise the errors of `nanotron_step.read_step`."""
    from ckptcore.formats.huggingface.nanotron_step import read_step

    return read_step(source)


def arrange(request: Arrangement) -> Iterable[FileLayout]:
    """Lay out a step that a run begins from; raise the errors of `nanotron_step.arrange_step`."""
    from ckptcore.formats.huggingface.nanotron_step import arrange_step

    return arrange_step(request)


_START = Layout(arrange)
FORMAT = Format(
    name="nanotron",
    title="nanotron checkpoint (versions 1.2 to 1.5)",
    recognised_by="`checkpoint_metadata.json`, and `model/**/model_*.safetensors`",
    detect=detect,
    suffixes=frozenset({"safetensors"}),
    reader=Reader(read, objects=True),
    writer=Writer(_START, world="nanotron", starts={"nanotron": _START}),
)
