"""Recognise the checkpoints of torch_checkpointing, torchtitan's new backend."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ckptcore.core.manifest import Manifest
from ckptcore.encodings.torchzip.reader import head_holds
from ckptcore.formats.base import Evidence, Format, Reader, Source
from ckptcore.formats.common.part_names import part_name
from ckptcore.formats.common.trainer_files import is_state
from ckptcore.utils.late_pattern import late_pattern

NAME, METADATA = "torch_checkpointing", "metadata.pkl"
# checkpoint_layout.py: `<item>_<rank>.pt` by default; other names and suffixes by a layout of the user's.
ITEM = late_pattern(r"^(?P<item>[A-Za-z][\w-]*?)_(?P<rank>\d{1,7})\.(?:pt|safetensors|json)$")
_TENSORS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")


def item_files(source: Source) -> dict[str, dict[int, str]]:
    """Return item -> rank -> file, by the default names, of files directly in a folder."""
    items: dict[str, dict[int, str]] = {}
    for path in source.listing:
        found = ITEM.match(path)
        if found is not None and not is_state(path):
            items.setdefault(found["item"], {})[int(found["rank"])] = path
    return {item: {rank: ranks[rank] for rank in sorted(ranks)} for item, ranks in sorted(items.items())}


def detect(source: Source) -> Evidence | None:
    """Recognise items of ranks: beside metadata.pkl, several alike, or one of distributed tensors.

    A model alone, or beside a trainer's state, is any script's.
    """
    if source.name is not None:
        return None
    tensors = [p for p in source.listing if "/" not in p and p.endswith(_TENSORS) and not is_state(p)]
    strange = any(ITEM.match(path) is None or part_name(path) is not None for path in tensors)
    if METADATA in source.listing and not strange:
        named = tensors or [p for p in source.listing if p.endswith(_TENSORS)]
        return _evidence((f"found {METADATA} and {named[0]}",)) if named else None
    items = {} if strange or not tensors else item_files(source)
    items = {item: ranks for item, ranks in items.items() if any(p in tensors for p in ranks.values())}
    ranks = next(iter(items.values()), {}).keys()
    if len(items) > 1 and all(own.keys() == ranks for own in items.values()) and _is_run(ranks):
        return _evidence((f"each rank has {', '.join(items)}",))
    return _by_content(source, items)


def _by_content(source: Source, items: Mapping[str, Mapping[int, str]]) -> Evidence | None:
    """Recognise an item by distributed tensors in its first file."""
    for ranks in items.values():
        path = next(iter(ranks.values()))
        size = source.listing[path]
        read = partial(source.store.read, path)
        if path.endswith(".pt") and head_holds(read, size, "DTensorSpec", path):
            return _evidence((f"{path} holds distributed tensors",))
    return None


def _is_run(ranks: object) -> bool:
    return isinstance(ranks, type({}.keys())) and set(ranks) == set(range(len(ranks)))


def _evidence(because: tuple[str, ...]) -> Evidence:
    return Evidence(NAME, because, ("torch_save", "safetensors", "hf_quantized", "torch_ranks"))


def read(source: Source) -> Manifest:
    """Read the manifest of all items and ranks; raise the errors of `reader.read_items`."""
    from ckptcore.formats.torch_checkpointing.reader import read_items

    return read_items(source)


FORMAT = Format(
    name=NAME,
    title="torch_checkpointing checkpoint (0.1.1, torchtitan's new backend)",
    recognised_by="`ITEM_RANK.pt` of several items and all ranks, or beside `metadata.pkl`",
    detect=detect,
    reader=Reader(read, checksums="CRC-32 per record (`.pt`)", objects=True),
)
