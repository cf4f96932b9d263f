"""Give the tensors of an export one after another, with their values, and without writing it.

A batch of tensors is read at a time, with a thread for each core. A loader that takes tensors from an
iterator, as engines do, so never holds more than a batch beside its own model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import torch

from ckptcore.conversion.source_digests import inspected
from ckptcore.conversion.virtual_folder import PinnedSource, pinned
from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Manifest, TensorSpec
from ckptcore.errors import Finding, UnsupportedDtype, UsageError
from ckptcore.naming.rename import Mapped
from ckptcore.planning.compose import Composed, compose
from ckptcore.planning.hub_files import CONFIG
from ckptcore.planning.request import Request
from ckptcore.reading.box_reader import BoxReader
from ckptcore.reading.checksums import Records
from ckptcore.reading.equality import require_equal
from ckptcore.reading.fill_memory import PIECE, Fill, fill_memory
from ckptcore.reading.gather import tile_view
from ckptcore.store import Store
from ckptcore.utils.foreign_text import load_json_object
from ckptcore.utils.text import listed
from ckptcore.utils.workers import usable_cores

BATCH = 16 * PIECE  # bytes of the tensors that are read at a time; a larger one is read alone
_log = logging.getLogger("ckptcore")
_QUANTISATION = ("quantization_config", "compression_config")


class ExportedTensors:
    """The tensors of an export, in the hub's names and the dtypes of its files.

    Attributes:
        specs: Name, dtype and shape of each.
        are_proven: Whether all of them were taken, and the checks behind the last one have passed.
    """

    def __init__(self, composed: Composed, source: PinnedSource) -> None:
        self.specs = specs_of(composed)
        self.are_proven = False
        self._mapped, self._source = composed.mapped, source
        self._records = Records(source.store, len(composed.mapped.manifest.items))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of each. The tensors of a batch are in memory until the next one.

        Raises:
            DamagedCheckpoint: A checksum fails, or copies or tied tensors differ.
            SourceChanged: The source was rewritten since it was opened.
        """
        for rows in _batches(self.specs):
            fills = []
            for row in rows:
                spec = self.specs[row]
                memory = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="cpu")
                fills.append(Fill(row, Box.full(spec.shape), memory))
            manifest, store = self._mapped.manifest, self._source.store
            fill_memory(manifest, store, fills, verify=True, copies=True, records=self._records)
            for row, _, tensor in fills:
                yield self.specs[row].fqn, tensor
        # Behind the last read: what was read in parts is verified, and no file was another one meanwhile.
        self._records.finish(usable_cores())
        require_equal_ties(self._mapped, self._source.store)
        self._source.require_same()
        self.are_proven = True


def specs_of(composed: Composed) -> tuple[TensorSpec, ...]:
    """Return name, dtype and shape of each tensor of an export's files."""
    casts = composed.plan.target.dtypes
    return tuple(replace(t, dtype=casts.get(t.fqn, t.dtype)) for t in composed.mapped.manifest.tensors)


def _batches(specs: Sequence[TensorSpec]) -> Iterator[range]:
    """Yield the rows of tensors that are read together."""
    begin = nbytes = 0
    for row, spec in enumerate(specs):
        if nbytes and nbytes + spec.nbytes > BATCH:
            yield range(begin, row)
            begin, nbytes = row, 0
        nbytes += spec.nbytes
    if begin < len(specs):
        yield range(begin, len(specs))


@contextmanager
def open_tensors(request: Request) -> Iterator[ExportedTensors]:
    """Open the tensors of an export.

    Args:
        request: The export; nothing is written to its destination.

    Yields:
        Its tensors.

    Raises:
        CkptError: What `compose` raises: a damaged, incomplete or unmapped source is refused here.
        UnsupportedDtype: Its weights are quantised.
        SourceChanged: The source was rewritten while it was opened.
    """
    manifest = inspected(request)
    composed = compose_model(request, manifest)
    log_findings(composed.warnings)
    with pinned(request, manifest) as source:
        yield ExportedTensors(composed, source)


def log_findings(findings: Iterable[Finding]) -> None:
    """Log findings of a plan that do not stop an export."""
    for finding in findings:
        _log.log(logging.INFO if finding.severity == "info" else logging.WARNING, "%s", finding.message)


def compose_model(request: Request, manifest: Manifest) -> Composed:
    """Plan an export whose tensors become a model, and whose config.json says which.

    Raises:
        CkptError: What `compose` raises.
        UnsupportedDtype: Its weights are quantised.
        UsageError: No config was found.
    """
    if manifest.derived:
        names = [manifest.tensors[row].fqn for row in manifest.derived]
        raise _quantised(manifest, f"{listed(names)} would be computed")
    composed = compose(request, manifest)
    data = composed.extra.get(CONFIG)
    if data is None:
        raise UsageError(
            f"cannot open {manifest.root} as a model: no config.json was found beside it",
            hint="name the folder of the model that was trained: --config FOLDER",
        )
    form = load_json_object(data)
    field = next((name for name in _QUANTISATION if form.get(name)), None)
    if field is not None:
        raise _quantised(manifest, f"config.json has {field}")
    return composed


def _quantised(manifest: Manifest, reason: str) -> UnsupportedDtype:
    return UnsupportedDtype(
        f"cannot open {manifest.root} as a model: its weights are quantised ({reason})",
        hint="export it, and open the export",
    )


def require_equal_ties(mapped: Mapped, store: Store) -> None:
    """Require that tensors which the model ties are equal where both are stored, as an export does."""
    if mapped.twins is None:
        return
    sides = (mapped.manifest, mapped.twins)
    records = [Records(store, len(side.items)) for side in sides]
    for number, (_, stays) in enumerate(mapped.ties):
        rows = (mapped.manifest.index[stays], number)
        with ExitStack() as opened:
            readers = [BoxReader(*side, once=False) for side in zip(sides, rows, records, strict=True)]
            for reader in readers:
                opened.callback(reader.close)
            paths = tuple(map(_first_file, sides, rows))
            _require_equal(readers, mapped.twins.tensors[number], (paths[0], paths[1]))


def _require_equal(readers: Sequence[BoxReader], spec: TensorSpec, paths: tuple[str, str]) -> None:
    width = BY_NAME[spec.dtype].itemsize
    scratch, *buffers = (np.empty(PIECE, np.uint8) for _ in range(3))
    for box in Box.full(spec.shape).tiles(PIECE // width):
        tiles = [tile_view(buffer[: box.numel * width], box.shape, spec.dtype) for buffer in buffers]
        for reader, tile in zip(readers, tiles, strict=True):
            reader.read(box, tile, scratch)
        require_equal(tiles[0], tiles[1], box, spec.fqn, lambda: paths)


def _first_file(manifest: Manifest, row: int) -> str:
    """Return the path of the file with a tensor's first chunk."""
    item = int(manifest.chunks.item[manifest.chunks.first[row]])
    return manifest.files[int(manifest.items.file[item])].path
