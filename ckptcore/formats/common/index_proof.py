"""Say whether an index lists all of a model, or one part of it.

An index states what a checkpoint is, and several things may contradict it: files beside it with other tensors
of the same model, a count in the names of its files, layers that it lacks by a config or by their numbers,
and tensors that are slices. A config that states as many layers as it lists, and what is before and behind
them, proves it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from ckptcore.errors import CkptError, Finding, MetadataTooLarge, finding
from ckptcore.formats.base import Source
from ckptcore.formats.common.model_layers import ModelLayers
from ckptcore.formats.common.part_proof import Shape, content_findings, evidence_beside, layer_findings
from ckptcore.formats.common.weight_index import WeightIndex, unlisted_parts

_MAX_ASKED = 64  # files beside a checkpoint whose names are read
_HINT = (
    "read all of them with an index that lists them, move the others away, or accept what is listed with "
    "--allow-incomplete; a config.json that states the number of layers decides, too"
)


def index_findings(
    source: Source,
    path: str,
    index: WeightIndex,
    shapes: Mapping[str, Shape],
    unread: Sequence[str],
    names_of: Callable[[str], Collection[str]],
) -> list[Finding]:
    """Return the findings that an index may list one part of a model.

    Args:
        source: The folder.
        path: The index.
        index: Its content.
        shapes: Shape of every tensor in the files that are there.
        unread: Files of weights that it does not list.
        names_of: Returns the names of the tensors in one of them.
    """
    if not index.files:
        return []
    return (
        continued_findings(source, path, index.files, unread, names_of)
        or content_findings(source, set(index.files.values()), shapes)
        or layer_findings(source, path, index.files)
        or unlisted_parts(index, path)
    )


def continued_findings(
    source: Source,
    path: str,
    names: Collection[str],
    unread: Sequence[str],
    names_of: Callable[[str], Collection[str]],
) -> list[Finding]:
    """Return the finding that a file beside what is read has other tensors of the same model.

    One that repeats a tensor is of another save, and one with other names of another model.

    Args:
        source: The folder.
        path: The index or file that is read.
        names: The tensors that it lists or has.
        unread: Files of weights that are not read.
        names_of: Returns the names of the tensors in one of them.
    """
    layers = ModelLayers(names) if unread else None
    if layers is None or layers.are_all(evidence_beside(source, "config.json")):
        return []
    for beside in unread[:_MAX_ASKED]:
        try:
            name = layers.continuing(names_of(beside))
        except MetadataTooLarge:
            raise
        except CkptError:
            continue  # `stray-file` names it: what cannot be read proves nothing
        if name is not None:
            code = "missing-part" if source.recover else "unproven-parts"
            message = f"{beside} has {name} of the same model as {path}, which is read without it"
            return [finding(code, "files", message, file=beside, hint=_HINT)]
    return []
