"""Compare safetensors with the model's torch form beside them: the same tensors in `torch.save` files.

The hub keeps many models in both forms, and loaders take safetensors first. A save that was cut short, or two
saves into one folder, leave safetensors that lack what the torch form has. Tied tensors are no such lack:
safetensors files hold one of them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from ckptcore.core.dtype import BY_NAME
from ckptcore.core.metadata_budget import passing
from ckptcore.encodings.pickle.torch_globals import StoredView
from ckptcore.encodings.torchzip.reader import read_objects
from ckptcore.errors import CkptError, Finding, MetadataTooLarge, finding
from ckptcore.formats.base import Source
from ckptcore.formats.common.part_proof import evidence_beside, is_complete_model
from ckptcore.formats.common.weight_index import indexes_of, read_index
from ckptcore.store.subfolder import FileRange, unrecorded

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
        name, path = lacking[0]
        suffix = f" and {len(lacking) - 1} more" if lacking[1:] else ""
        message = f"{name}{suffix} of {path} is not in {min(paths)}, which would be read in its place"
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
