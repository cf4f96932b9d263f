"""Read an index of weights, and say whether other files beside what is read are of the same model.

An index states what a checkpoint is. Files beside it with other tensors of the same model contradict it, as
do a count in the names of its files, layers that it lacks by a config or by their numbers, and tensors that
are slices. A config that states as many layers as it lists, and what is before and behind them, proves it.

The hub keeps many models as safetensors and in torch form (`torch.save` files), and loaders take safetensors
first. A save that was cut short, or two saves into one folder, leave safetensors that lack what the torch
form has. Tied tensors are no such lack: safetensors files hold one of them.

Indexes: transformers, huggingface_hub, diffusers and torchtune write ``model.safetensors.index.json`` and
``pytorch_model.bin.index.json``, with other stems, and with a variant before ``.json``. An index whose name
does not say what it lists, such as ``model.index.json``, is one of the files that it lists.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Manifest, TensorSpec
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.metadata_budget import meter, passing
from ckptcore.encodings.json_text import parse
from ckptcore.encodings.pickle.torch_globals import StoredView
from ckptcore.encodings.torchzip.reader import read_objects
from ckptcore.errors import CkptError, Finding, MalformedCheckpoint, MetadataTooLarge, UnsafeContent, finding
from ckptcore.formats.base import Source, natural
from ckptcore.formats.common.model_layers import ModelLayers
from ckptcore.formats.common.part_proof import (
    Shape,
    content_findings,
    evidence_beside,
    is_complete_model,
    lack,
    layer_findings,
)
from ckptcore.formats.common.rank_file_names import TORCH_SUFFIXES, absent_parts, is_state, series, unlinked
from ckptcore.store import inner_path
from ckptcore.store.subfolder import FileRange, unrecorded
from ckptcore.utils.foreign_text import InvalidText, parsing
from ckptcore.utils.text import listed

INDEX = "model.safetensors.index.json"
_FILES, _ABOUT, _TOTAL, _TOTAL_PARAMETERS = "weight_map", "metadata", "total_size", "total_parameters"
_NAME = re.compile(r"^[^/]+?(?:\.(?P<kind>safetensors|bin|h5|msgpack))?\.index(?:\.[^./]+)?\.json$")
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


def index_name(stem: str) -> str:
    """Return the name of the index of files with a stem.

    >>> index_name("model") == INDEX
    True
    """
    return f"{stem}.safetensors.index.json"


def indexes_of(source: Source, kind: str) -> list[str]:
    """Return the indexes of a folder's files of one suffix, ``safetensors`` or ``bin``."""
    if source.name is not None:
        return []
    named = ((p, _NAME.match(p)) for p in source.listing if ".index." in p)
    return sorted((p for p, m in named if m and kind == (m["kind"] or _kind_listed(source, p))), key=natural)


def _kind_listed(source: Source, path: str) -> str | None:
    """Return the suffix of the files that an index lists, None where it is no index."""
    with suppress(MalformedCheckpoint, UnsafeContent):
        files = read_index(source, path).files
        return next((file.rpartition(".")[2] for file in files.values()), None)
    return None


@dataclass(frozen=True, slots=True)
class WeightIndex:
    """The content of a `model.safetensors.index.json`.

    Attributes:
        files: Tensor -> file.
        metadata: Its entry ``metadata``.
        other_entries: The entries beside these two.
    """

    files: Mapping[str, str]
    metadata: Mapping[str, Any]
    other_entries: Mapping[str, Any]

    @property
    def total(self) -> int | None:
        """Return the bytes of all tensors, or None if it does not record them.

        transformers and huggingface_hub write the number (`split_torch_state_dict_into_shards`), and no
        loader reads it.
        """
        total = self.metadata.get(_TOTAL)
        return total if type(total) is int else None

    @property
    def odd(self) -> tuple[str, ...]:
        """Return the known entry that is no dict, or has a number that is none."""
        numbers = (self.metadata.get(key, 0) for key in (_TOTAL, _TOTAL_PARAMETERS))
        odd = _ABOUT in self.other_entries or any(type(n) not in (int, float) for n in numbers)
        return (_ABOUT,) if odd else ()

    def carried(self, parameters: int) -> dict[str, Any]:
        """Return what is not computed from tensors: a count of other than ``parameters`` is not, either."""
        metadata = dict(self.metadata)
        if self.total is not None:
            del metadata[_TOTAL]
        if type(metadata.get(_TOTAL_PARAMETERS)) is int and metadata[_TOTAL_PARAMETERS] == parameters:
            del metadata[_TOTAL_PARAMETERS]
        return {**self.other_entries, **({_ABOUT: metadata} if metadata else {})}


def fits_index(entries: Mapping[str, Any]) -> bool:
    """Report whether an index may have these entries beside its own: none is one that it has itself."""
    metadata = entries.get(_ABOUT, {})
    return (
        _FILES not in entries and type(metadata) is dict and not {_TOTAL, _TOTAL_PARAMETERS} & metadata.keys()
    )


def read_index(source: Source, path: str = INDEX) -> WeightIndex:
    """Read an index.

    Raises:
        MalformedCheckpoint: The file is not an index.
        UnsafeContent: A path leaves the folder.
        MetadataTooLarge: It is over the budget of metadata.
    """
    meter().require(source.listing[path], path)
    raw = source.store.read(path, 0, source.listing[path])
    try:
        with parsing("an index"):
            form = parse(raw, path)
            rows = form[_FILES]
            inner = {file: inner_path(file, origin=path) for file in set(rows.values())}
            files = {str(name): inner[file] for name, file in rows.items()}
    except InvalidText as error:
        raise MalformedCheckpoint(f"{path} is not an index: {error}", file=path) from error
    metadata = form.get(_ABOUT)
    is_dict = type(metadata) is dict
    other_entries = {k: v for k, v in form.items() if k != _FILES and not (is_dict and k == _ABOUT)}
    return WeightIndex(files, metadata if is_dict else {}, other_entries)


def take_index(source: Source, path: str, index: WeightIndex, tensors: Iterable[TensorSpec]) -> None:
    """Record an index as read: what is not computed from the tensors becomes an object."""
    source.explain(path)
    carried = index.carried(sum(t.numel for t in tensors))
    source.carry(path, INDEX, carried, [key for key in index.odd if key in carried])


def files_of(index: WeightIndex) -> dict[str, set[str]]:
    """Return file -> its tensors, as an index lists them."""
    files: dict[str, set[str]] = {}
    for name, path in index.files.items():
        files.setdefault(path, set()).add(name)
    return files


def unlike_index(names: set[str], listed: set[str], path: str, index: str) -> list[Finding]:
    """Return findings about the tensors of a file that are not those which the index lists."""
    holes = [
        finding(
            "hole", "coverage", f"{name} is missing in {path}, where {index} lists it", fqn=name, file=path
        )
        for name in sorted(listed - names)
    ]
    return holes + [
        finding(
            "unlisted-tensor",
            "coverage",
            f"{path} contains {name}, which {index} does not list",
            fqn=name,
            file=path,
        )
        for name in sorted(names - listed)
    ]


def unlisted_parts(index: WeightIndex, path: str) -> list[Finding]:
    """Return the finding that an index lists fewer files than their names count."""
    for parts in series(set(index.files.values())).values():
        if all(part.is_run for part in parts):
            missing, total = absent_parts(parts, 1)
            if total:
                message = (
                    f"{path} lists {len(parts)} of {parts[0].count} files: {missing[0]} is not one of them"
                )
                return [finding("unproven-whole", "files", message, file=missing[0])]
    return []


def unlike_total(builder: Builder, index: WeightIndex, path: str) -> list[Finding]:
    """Return the finding that the files hold other bytes than the index records, if nothing else is wrong."""
    stored, total = builder.item_bytes, index.total  # as the writer counts: of every dtype
    # A missing or short file changes the sum, too, and has its own finding.
    if total in (None, stored) or any(f.severity == "error" for f in builder.findings):
        return []
    message = f"{path} records {total} bytes of tensors, but the files contain {stored}"
    return [finding("total-mismatch", "coverage", message, file=path)]


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
            message = f"{beside} has {name} of the same model as {path}, which is read without it"
            return [lack(source, "unproven-parts", "files", message, file=beside, hint=_LIST_HINT)]
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
        findings.append(lack(source, "unproven-parts", "files", message, file=min(paths), hint=_HINT))
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
