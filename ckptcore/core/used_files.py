"""Sort the files that a checkpoint uses by their use.

A file is used when the reader of the checkpoint's own format took something from it. A file opened only to
detect the format is not: it may be unrelated. Each file has one use, the first of these that applies: it
stores tensors or objects of the checkpoint; it stores what is compared with them, or what cannot be
read; the reader read it to interpret the others.

Callers: `ckptcore.checking.source_stamps` for the files read during a conversion (`placed`),
`ckptcore.custody.holdings` for what is proven to be elsewhere (``data``, ``described``),
`ckptcore.conversion.foreign_files` for what a format replaces (all three), and `validate` for what nothing
proves (all files beside these, `Manifest.beside`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ckptcore.core.manifest import Manifest
from ckptcore.utils.distinct_values import unique


@dataclass(frozen=True, slots=True)
class Used:
    """The used files of a manifest, by path below its root; each file has one use.

    Attributes:
        data: They store tensors or objects of the checkpoint itself.
        compared: They store only second copies, or tensors that cannot be read.
        described: The reader read them, and they store nothing.
    """

    data: frozenset[str]
    compared: frozenset[str]
    described: frozenset[str]

    @property
    def all(self) -> frozenset[str]:
        """Return all used files."""
        return self.data | self.compared | self.described


def used(manifest: Manifest) -> Used:
    """Return the use of each file. A manifest that was loaded, not read, has no ``described`` ones."""
    checkpoint = manifest.without_copies()
    chunks = [checkpoint.chunks, *([checkpoint.inputs.chunks] if checkpoint.inputs is not None else [])]
    blob_items = np.array([blob.item for blob in checkpoint.blobs], np.int64)
    items = np.concatenate([blob_items, *(part.item for part in chunks)])
    places = unique(checkpoint.items.file[items[items >= 0]])
    data = frozenset(checkpoint.files[place].path for place in places.tolist())
    compared = frozenset(placed(manifest)) - data
    return Used(data, compared, manifest.read - data - compared)


def placed(manifest: Manifest) -> list[str]:
    """Return the files that items are stored in, copies included, in the manifest's order."""
    return [manifest.files[n].path for n in unique(manifest.items.file).tolist()]
