"""Find how the tensors of a source are called in an export of it, as the conversion mapped them.

The map is that of `ckptcore.planning.compose.map_export`, from the source's metadata and the recorded
options. No tensor is read. A cast changes no name, so it is left out: it would ask for the model's classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckptcore.catalog.tensor_differences import NameMapping
from ckptcore.catalog.types import CheckpointDetail, ConversionRow
from ckptcore.errors import CkptError
from ckptcore.page.shards import Manifests
from ckptcore.planning.compose import map_export
from ckptcore.planning.export_source import with_own_config
from ckptcore.planning.request import Request


def mapping_between(manifests: Manifests, sides: Sequence[CheckpointDetail]) -> NameMapping | None:
    """Return how names map between two checkpoints if one was exported from the other; None if not.

    Args:
        manifests: Reads the source's metadata.
        sides: The two checkpoints.
    """
    for number, (source, output) in enumerate((tuple(sides), tuple(reversed(sides)))):
        read = {row.id for row in source.used_by}
        exports = [row for row in output.written_by if row.id in read and row.verb == "export"]
        if exports:
            return _mapping(manifests, number, source, exports[-1], output.checkpoint.uri)
    return None


def _mapping(
    manifests: Manifests, number: int, source: CheckpointDetail, conversion: ConversionRow, export: str
) -> NameMapping:
    row = source.checkpoint
    try:
        request = with_own_config(Request.from_dict(conversion.request), export)
        manifest = manifests.read(row.uri, row.manifest_digest)
        mapped = map_export(replace(request, dtype=None, dtype_for=()), manifest).mapped
    except CkptError as error:
        return NameMapping(number, unmapped=error.message)
    except TypeError:  # a field is missing
        return NameMapping(number, unmapped="the options of the conversion are not recorded")
    # Of a tensor that is dropped in part, the rest is in the output.
    dropped = {drop.fqn: drop.rule for drop in mapped.dropped if drop.part is None}
    dropped |= {tied_name: f"equal to {owner_name}" for tied_name, owner_name in mapped.ties}
    unchanged = {target.sources[0]: target.name for target in mapped.made if target.same}
    composed = {target.name: target.sources for target in mapped.made if not target.same}
    return NameMapping(number, dict(mapped.renamed) | unchanged, composed, dropped)
