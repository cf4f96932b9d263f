"""Used files: which files of a place are a checkpoint's, and what for?

A file is used when the reader of the checkpoint's own format took something from it. What was opened only to
find out which format it is, a stranger's file perhaps, is not. One use counts for each file, the first of
these that holds: tensors or objects of the checkpoint lie in it; what is compared with them, or cannot be
read, lies in it; the reader read it to know what the others hold.

Who asks: `ckptcore.execution.source_stamps` for what is read during a conversion (`placed`),
`ckptcore.operations.proven_files` for what proves to be elsewhere (``data``, ``described``),
`ckptcore.conversion.foreign_files` for what a format replaces (all three), and `validate` for what nothing
proves (all files beside these, `Manifest.beside`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ckptcore.core.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Used:
    """The used files of a manifest, by path below its root; no file stands in two of them.

    data: tensors or objects of the checkpoint itself lie in them. compared: only second copies, or tensors
    that cannot be read, lie in them. described: the reader read them, and nothing lies in them.
    """

    data: frozenset[str]
    compared: frozenset[str]
    described: frozenset[str]

    @property
    def all(self) -> frozenset[str]:
        """Every one of them."""
        return self.data | self.compared | self.described


def used(manifest: Manifest) -> Used:
    """What each file is used for. A manifest that was loaded, not read, knows no ``described`` ones."""
    own = manifest.without_copies()
    chunks = [own.chunks, *([own.inputs.chunks] if own.inputs is not None else [])]
    items = {blob.item for blob in own.blobs} | {n for c in chunks for n in np.unique(c.item).tolist()}
    place = own.items.file
    data = frozenset(own.files[int(place[item])].path for item in items if item >= 0)
    compared = frozenset(placed(manifest)) - data
    return Used(data, compared, manifest.read - data - compared)


def placed(manifest: Manifest) -> list[str]:
    """The files that items lie in, copies included, in the manifest's order: whose bytes are read later."""
    return [manifest.files[n].path for n in np.unique(manifest.items.file).tolist()]
