"""List the ways in which a checkpoint can be damaged, and choose those that fit a given one.

`TABLE`: damages to folders of torch.distributed.checkpoint. `EVERYWHERE`: damages to any format, by
the kind of each file. Rows are made in the `damage_*` modules beside the conformance tests; every
row is done to every sample that has what it needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import damage_anyfile
import damage_boxes
import damage_files
import damage_headers
import damage_inside
import damage_items
import damage_metadata
import damage_mixed
import damage_places
from damage_sites import Row
from damaging import MAGIC, Damage

MODULES = (damage_files, damage_items, damage_metadata, damage_boxes, damage_places)
TABLE: dict[str, Damage] = {name: row for m in MODULES for name, row in m.TABLE.items()}
assert len(TABLE) == sum(len(m.TABLE) for m in MODULES), "a name is used twice"
ANYWHERE = (damage_anyfile, damage_headers, damage_inside, damage_mixed)
EVERYWHERE: dict[str, Row] = {name: row for m in ANYWHERE for name, row in m.TABLE.items()}
assert len(EVERYWHERE) == sum(len(m.TABLE) for m in ANYWHERE), "a name is used twice"


def facts(path: Path) -> frozenset[str]:
    """What a folder holds, from names and first bytes alone; the keys of `Damage.needs`.

    ``global``/``rank-local``: whose metadata. ``files``: more than one file with data. ``zip``,
    ``zstd``, ``safetensors``: item kinds. ``plain``: all items are torch zips without a codec.
    """
    local = any(path.glob("__*.metadata"))
    kinds: set[str] = set()
    filled = 0
    for file in sorted(path.glob("*.distcp")):
        data = file.read_bytes()
        filled += bool(data)
        if data:
            kinds.add(MAGIC.get(data[:4], "safetensors"))
        if b'"data_offsets"' in data:
            kinds.add("safetensors")
    out = {"any", "rank-local" if local else "global"} | kinds
    if "safetensors" in kinds:
        kinds.discard("zip")  # torch zips beside a safetensors blob are objects
        out.discard("zip")
    if filled > 1:
        out.add("files")
    if kinds == {"zip"}:
        out.add("plain")
    return frozenset(out)


def damages(path: Path) -> Iterator[Damage]:
    """The rows that can be done to a folder."""
    have = facts(path)
    yield from (row for row in TABLE.values() if row.needs in have)
