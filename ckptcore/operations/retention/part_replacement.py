"""Find whether an export proves the model part of its source, and name everything else that would be lost.

``--accept-loss optimizer`` accepts the loss of what only a resumed training needs
(`ckptcore.naming.training_state`). The model part is proven in one of two ways:

- by record: the conversion's fingerprint, computed from the source's bytes under the export's names, equals
  the export's own; the source's files are those that it read, and names map as they did then;
- by reading both sides (`ckptcore.comparison.verify_export.compare_part`). A cast is always computed again
  and compared bit by bit, and needs ``--accept-loss cast``, too.

Every other tensor, object or file that the export lacks needs its own name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ckptcore.catalog.retirements import GivenUp
from ckptcore.catalog.types import CheckpointRow, ConversionRow
from ckptcore.comparison.verify_export import PartProof, compare_part
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Manifest
from ckptcore.errors import UsageError
from ckptcore.naming.model_part import find_model
from ckptcore.naming.rename import is_kept
from ckptcore.naming.training_state import StoredKinds
from ckptcore.planning.export_source import ExportSource
from ckptcore.planning.request import Request, Settings
from ckptcore.utils.text import some

CAST = "cast"  # the name that accepts the loss of precision by a cast
OPTIMIZER = "optimizer"  # the name that accepts the loss of training state
TENSOR = "tensor"  # outside of the model part and no training state, or left out by the map of names
MODEL = "model tensor"  # is never given up
_READS = "--fingerprint reads both"


@dataclass(frozen=True)
class ProvenPart:
    """The proof that an export holds the model part of its source.

    Attributes:
        recomputed: Whether both sides were read for this.
        losses: Tensors and objects that the export lacks; of cast ones, the precision.
        proof: The comparison.
    """

    recomputed: bool
    losses: tuple[GivenUp, ...]
    proof: PartProof


def prove_part(
    source: CheckpointRow,
    manifest: Manifest,
    conversion: ConversionRow,
    child: CheckpointRow,
    settings: Settings | None,
    verify_settings: Settings,
) -> ProvenPart:
    """Prove that an export holds the model part of its source.

    The caller checks, for a proof by record, that the source's files are those that the conversion read.

    Args:
        source: The source.
        manifest: Its manifest.
        conversion: The conversion that made the export.
        child: The export.
        settings: Memory and threads for reading both sides; None for a proof by record, without a cast.
        verify_settings: Memory and threads where a cast has to be computed again.

    Raises:
        UsageError: It proves nothing; the message says why.
        CkptError: A side cannot be read, or the source cannot be mapped as it was.
    """
    request = replace(Request.from_dict(dict(conversion.request)), source=source.uri)
    if settings is None and (request.dtype or request.dtype_for):
        settings = verify_settings
    if settings is None:
        _require_recorded(conversion, child)
    export_source = ExportSource(request, "the catalog", exact=True, digest=manifest.digest)
    proof = compare_part(child.uri, export_source, settings)
    if proof.problems:
        raise UsageError(f"{child.uri} does not hold the model part: {some(list(proof.problems))}")
    if settings is None and proof.map_digest != conversion.map_digest:
        raise UsageError(f"names of {child.uri} were mapped in another way when it was made; {_READS}")
    if settings is None and proof.cast:
        raise UsageError(f"{child.uri} is cast, and its conversion does not say so; {_READS}")
    losses = (*_casts(proof), *_dropped(manifest, request, proof))
    return ProvenPart(settings is not None, losses, proof)


def _require_recorded(conversion: ConversionRow, child: CheckpointRow) -> None:
    if conversion.fingerprint is None or child.fingerprint is None:
        raise UsageError(f"the fingerprint of {child.uri} is not known; {_READS}")
    if conversion.fingerprint != child.fingerprint:
        raise UsageError(f"{child.uri} has other tensors")


def _casts(proof: PartProof) -> Iterator[GivenUp]:
    shapes = {spec.fqn: spec.numel for spec in proof.mapped.manifest.tensors}
    for name, before, after in proof.cast:
        lost = (BY_NAME[before].itemsize - BY_NAME[after].itemsize) * shapes[name]
        yield GivenUp(name, CAST, max(0, lost))


def _dropped(manifest: Manifest, request: Request, proof: PartProof) -> Iterator[GivenUp]:
    """Yield the tensors of the source that are not in the export."""
    model, mapped, kinds = find_model(manifest, request.model_prefix), proof.mapped, StoredKinds(manifest)
    strays = frozenset(model.strays)
    # Ties come last (`ckptcore.naming.rename.remap`). Their equality is part of the comparison of values; by
    # record, the conversion proved it.
    dropped = mapped.dropped[: len(mapped.dropped) - len(mapped.ties)]
    for tensor in dropped:
        if tensor.only_zero and tensor.part is None:
            continue  # proven to be zero, element by element
        spec = manifest.tensors[manifest.index[tensor.fqn]]
        if tensor.fqn in strays:
            yield GivenUp(tensor.fqn, MODEL, spec.nbytes)
            continue
        if not model.holds(tensor.fqn):
            yield GivenUp(tensor.fqn, kinds.kind_of(tensor.fqn) or TENSOR, spec.nbytes)
            continue
        by_map = bool(mapped.made) and is_kept(tensor.fqn, request.include, request.exclude)
        yield GivenUp(tensor.fqn, TENSOR if by_map else MODEL, spec.nbytes)
