"""Read the plain DCP folders of Megatron-LM: `fsdp_dtensor` (Megatron-FSDP) and `torch_dcp` (FSDP2).

Megatron-LM saves both with `torch.distributed.checkpoint`, without its own layer. So there is neither
``metadata.json`` nor ``common.pt``: arguments and iteration are byte items, and only key names
distinguish the two (megatron/training/checkpointing.py). Megatron-FSDP stores fp32 main parameters.
"""

from __future__ import annotations

from ckptcore.core.manifest import Manifest
from ckptcore.formats.base import Detect, Evidence, Format, Read, Reader, Source
from ckptcore.formats.dcp.reader import read_folder
from ckptcore.formats.megatron.config import CONFIG, METADATA, read_config, scan, shard_keys
from ckptcore.formats.megatron.sharded_objects import BARE

_VERSION, _WRAPPED = b"checkpoint_version", b"model.module."


def _detect(name: str, wrapped: bool) -> Detect:
    def detect(source: Source) -> Evidence | None:
        if source.name is not None or METADATA not in source.listing:
            return None
        config = read_config(source)
        if config is not None:
            because = (f"{CONFIG} says sharded_backend {config.backend}",)
            return Evidence(name, because, refines=("dcp",)) if config.backend == name else None
        if not scan(source, _VERSION) or scan(source, _WRAPPED) != wrapped:
            return None
        if shard_keys(source):  # a torch_dist or zarr checkpoint that was copied into a plain DCP folder
            return None
        keys = "model.module.*" if wrapped else "no model.module.*"
        reasons = (
            f"found {METADATA}, and no {CONFIG} of Megatron-Core",
            f"its keys: checkpoint_version, {keys}",
        )
        return Evidence(name, reasons, refines=("dcp",))

    return detect


def _reader_of(name: str) -> Read:
    def read(source: Source) -> Manifest:
        return read_folder(source, name, BARE)

    return read


def _format(name: str, title: str, keys: str, wrapped: bool) -> Format:
    return Format(
        name=name,
        title=title,
        recognised_by=f"`.metadata` without `metadata.json`, keys `checkpoint_version` and {keys}",
        detect=_detect(name, wrapped),
        suffixes=frozenset({"metadata"}),
        reader=Reader(_reader_of(name), checksums="CRC-32 per item", objects=True),
    )


FSDP_DTENSOR = _format("fsdp_dtensor", "Megatron-FSDP checkpoint (fsdp_dtensor)", "`model.module.*`", True)
TORCH_DCP = _format("torch_dcp", "Megatron-LM FSDP2 checkpoint (torch_dcp)", "no `model.module.*`", False)
