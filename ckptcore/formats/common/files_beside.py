"""Say of the files beside a checkpoint whether they belong to it: what is read may be one part of a model.

An index states what a checkpoint is. Files beside it with other tensors of the same model contradict it, as
do a count in the names of its files, layers that it lacks by a config or by their numbers, and tensors that
are slices. A config that states as many layers as it lists, and what is before and behind them, proves it.

The hub keeps many models as safetensors and in torch form (`torch.save` files), and loaders take safetensors
first. A save that was cut short, or two saves into one folder, leave safetensors that lack what the torch
form has. Tied tensors are no such lack: safetensors files hold one of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Manifest
from ckptcore.core.metadata_budget import passing
from ckptcore.encodings.pickle.torch_globals import StoredView
from ckptcore.encodings.torchzip.reader import read_objects
from ckptcore.errors import CkptError, Finding, MetadataTooLarge, finding
from ckptcore.formats.base import Source
from ckptcore.formats.common.model_layers import ModelLayers
from ckptcore.formats.common.part_proof import (
    Shape,
    content_findings,
    evidence_beside,
    is_complete_model,
    layer_findings,
)
from ckptcore.formats.common.rank_file_names import TORCH_SUFFIXES, is_state, unlinked
from ckptcore.formats.common.weight_index import WeightIndex, indexes_of, read_index, unlisted_parts
from ckptcore.store.subfolder import FileRange, unrecorded
from ckptcore.utils.text import listed

_MAX_ASKED = 64  # files beside a checkpoint whose names are read
_LIST_HINT = (
    "read all of them with an index that lists them, move the others away, or accept what is listed with "
    "--allow-incomplete; a config.json that states the number of layers decides, too"
)
# transformers, peft, diffusers: utils/__init__.py, utils/constants.py of each.
_TORCH_FORMS = {
    "model": "pytorch_model.bin",
    "adapter_model": "adapter_model.bin",
    "diffusion_pytorch_model": "diffusion_pytorch_model.bin",
}
_STEM = re.compile(r"^(?P<stem>[^/]+?)(?:-\d+-of-\d+)?\.safetensors$")
_PARAMETERS = (".weight", ".bias")  # of floats: a mask may have such a name, too
_HINT = (
    "name the file that is meant, or accept what is there with --allow-incomplete; a config.json that the "
    "tensors fit proves them"
)
_WEIGHTS = (*TORCH_SUFFIXES, ".safetensors")


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
            return [finding(code, "files", message, file=beside, hint=_LIST_HINT)]
    return []


def fuller_torch_form(
    source: Source, paths: Collection[str], shapes: Mapping[str, tuple[int, ...]]
) -> list[Finding]:
    """Return the finding that the torch form of a model has tensors that its safetensors lack.

    A config that proves all tensors ends the question, and nothing is read. Buffers are not compared:
    releases of transformers differ in which of them they save.

    Args:
        source: The folder; a file that the user named is not compared.
        paths: The safetensors files that are read.
        shapes: Shape of every tensor in them.
    """
    torch_paths = torch_form(source, paths)
    if not torch_paths or is_complete_model(evidence_beside(source, "config.json"), shapes):
        return []
    by_storage: dict[tuple[str, str], list[str]] = {}
    findings = list[Finding]()
    for path in torch_paths:
        try:
            for name, key in parameters(source, path):
                by_storage.setdefault((path, key), []).append(name)
        except MetadataTooLarge:
            raise
        except CkptError as error:
            message = f"it cannot be compared with {min(paths)}: {error.message}"
            findings.append(finding("stray-file", "files", message, file=path))
    lacking = [
        (names[0], path)
        for (path, _), names in by_storage.items()
        if not any(name in shapes for name in names)
    ]
    if lacking:
        path = lacking[0][1]
        names = listed([name for name, _ in lacking], 1)
        message = f"{names} of {path} is not in {min(paths)}, which would be read in its place"
        code = "missing-part" if source.recover else "unproven-parts"
        findings.append(finding(code, "files", message, file=min(paths), hint=_HINT))
    return findings


def torch_form(source: Source, paths: Collection[str]) -> list[str]:
    """Return the torch files of the same model that are there."""
    stems = {match["stem"] for path in paths if (match := _STEM.match(path)) is not None}
    single = _TORCH_FORMS.get(stems.pop()) if len(stems) == 1 and source.name is None else None
    if single is None:
        return []
    if single in source.listing:
        return [single]
    index = f"{single}.index.json"
    if index not in indexes_of(source, "bin"):
        return []
    return sorted({path for path in read_index(source, index).files.values() if path in source.listing})


def parameters(source: Source, path: str) -> Iterator[tuple[str, str]]:
    """Yield name and storage of each parameter in the flat state dict of a torch file."""
    with passing():
        tree = read_objects(
            FileRange(unrecorded(source.store), path, 0, source.listing[path] or 0), path
        ).tree
    for name, tensor in tree.items() if isinstance(tree, dict) else ():
        if (
            isinstance(tensor, StoredView)
            and str(name).endswith(_PARAMETERS)
            and BY_NAME[tensor.dtype].is_float
        ):
            yield str(name), tensor.key


def unread_weights(root: Source, folder: str, manifest: Manifest) -> list[Finding]:
    """Return the finding about files of weights that were not read and that no other finding names.

    A file is of weights by its suffix. They are directly in the checkpoint's folder, or in the root that was
    opened. What a trainer keeps beside them is none, nor the torch form of safetensors, which their reader
    compares. A link to a file that was read is that file.

    Args:
        root: The source as it was opened.
        folder: The checkpoint's folder below the root, with its slash; "" where it is the root.
        manifest: What was read, with paths in that folder.
    """
    if root.name is not None:
        return []
    read_paths = manifest.read | {file.path for file in manifest.files}
    passed_paths = {folder + path for path in (*read_paths, *(f.file for f in manifest.findings if f.file))}
    unread_paths = [
        path
        for path, size in root.listing.items()
        if size
        and path.endswith(_WEIGHTS)
        and path[: path.rfind("/") + 1] in {"", folder}
        and path not in passed_paths
        and not is_state(path.rsplit("/", 1)[-1])
    ]
    if not unread_paths:
        return []
    source = root.below(folder[:-1]) if folder else root
    compared_paths = {folder + path for path in torch_form(source, read_paths)}
    stray_paths = sorted(set(unlinked(root, unread_paths, passed_paths)) - compared_paths)
    if not stray_paths:
        return []
    message = f"{listed(stray_paths, 1)} beside the checkpoint is not read"
    file = stray_paths[0].removeprefix(folder) if stray_paths[0].startswith(folder) else None
    return [finding("stray-file", "files", message, file=file)]
