"""Name the files of weights beside a checkpoint that its reader did not use: their values are in no output.

The rule is the same for every format. A file is of weights by its suffix. What a trainer keeps beside them is
not, nor the torch form of safetensors, which their reader compares (`torch_form`).
"""

from __future__ import annotations

from ckptcore.core.manifest import Manifest
from ckptcore.errors import Finding, finding
from ckptcore.formats.base import Source
from ckptcore.formats.common.trainer_files import TORCH_SUFFIXES, is_state, unlinked

_WEIGHTS = (*TORCH_SUFFIXES, ".safetensors")


def unread_weights(root: Source, folder: str, manifest: Manifest) -> list[Finding]:
    """Return the finding about files of weights that were not read and that no other finding names.

    They are directly in the checkpoint's folder, or in the root that was opened. A link to a file that was
    read is that file.

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
    from ckptcore.formats.common.torch_form import torch_form

    source = root.below(folder[:-1]) if folder else root
    compared_paths = {folder + path for path in torch_form(source, read_paths)}
    stray_paths = sorted(set(unlinked(root, unread_paths, passed_paths)) - compared_paths)
    if not stray_paths:
        return []
    suffix = f" and {len(stray_paths) - 1} more" if stray_paths[1:] else ""
    message = f"{stray_paths[0]}{suffix} beside the checkpoint is not read"
    file = stray_paths[0].removeprefix(folder) if stray_paths[0].startswith(folder) else None
    return [finding("stray-file", "files", message, file=file)]
