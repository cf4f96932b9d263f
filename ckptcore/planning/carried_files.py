"""Carry config and tokenizer into the folder that a format keeps for them beside its tensors.

verl writes ``huggingface/`` beside its rank files, and its merger needs the config in it. An export has files
of its own (`ckptcore.planning.config_folder`): here bytes stay as they are, since names and dtypes stay, too.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptcore.core.manifest import Manifest
from ckptcore.errors import AmbiguousModel, Finding, finding
from ckptcore.planning.hub_files import CONFIG, json_object
from ckptcore.planning.model_files import find_files
from ckptcore.planning.request import Request


def carried_files(
    request: Request, manifest: Manifest, folder: str
) -> tuple[dict[str, bytes], tuple[Finding, ...]]:
    """Return path -> bytes of the files to carry, and findings about them.

    A trainer loads the output without them, so several configs that differ are a warning, and none is taken.

    Args:
        request: The output.
        manifest: The source.
        folder: Where the format keeps them; empty: nowhere.

    Raises:
        UsageError: A file that an option names is missing, or a tokenizer's file is too large.
    """
    if not folder or request.single is not None:
        return {}, ()
    try:
        found = find_files(request, manifest)
    except AmbiguousModel as error:
        message = f"no config and no tokenizer is written to {folder}/: {error.message}"
        return {}, (finding("left-beside", "files", message, hint=error.hint),)
    config = found.config.content if found.config is not None else {}
    files = {**(found.tokenizer or {}), **(config if _is_model(config) else {})}
    return {f"{folder}/{name}": data for name, data in files.items()}, found.findings


def _is_model(content: Mapping[str, bytes]) -> bool:
    """Return whether config.json is a model's. ``--config`` may also name numbers of another trainer."""
    form = json_object(content.get(CONFIG, b""))
    return form is not None and isinstance(form.get("model_type"), str)
