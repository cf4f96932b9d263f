"""Say what a source of no known format has, and what in it opens, so that the next command is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from ckptcore.encodings.torchzip.reader import head_holds
from ckptcore.errors import CkptError, UnsupportedFormat
from ckptcore.formats.base import Source, natural
from ckptcore.formats.common import torch_xla
from ckptcore.formats.common.rank_file_names import is_state, part_name
from ckptcore.utils.text import count, listed

_MAX_FOLDERS, _MAX_FILES, _DEPTH = 24, 8, 2
_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")

Detect = Callable[[Source], tuple[Any, Any]]


def kinds_of_files(source: Source) -> str:
    """Return how many files of which suffix a source has, most first."""
    kinds = Counter("." + p.rpartition("/")[2].rpartition(".")[2] for p in source.listing if "." in p)
    return ", ".join(count(n, f"{kind} file") for kind, n in kinds.most_common(3))


def what_opens(source: Source, detect: Detect) -> tuple[str, str | None]:
    """Return what is known of a source that no format recognises: for the message, and as the next step.

    Args:
        source: The source; folders below it, and its own files, are looked at, a few of them.
        detect: Returns the format of a source and the evidence, and raises as `ckptcore.formats.detect`.
    """
    if source.name is not None:
        return _folder_of(source, detect)
    open_folders: list[tuple[str, str]] = []  # with a slash, and the format
    refused: tuple[str, UnsupportedFormat] | None = None
    for depth in range(1, _DEPTH + 1):
        for folder in _folders(source, depth):
            if any(folder.startswith(above) for above, _ in open_folders):
                continue  # it is part of one that opens
            below = [p.rpartition("/")[2] for p in source.listing if p.startswith(f"{folder}/")]
            if all(is_state(name) for name in below):
                continue  # a trainer's state has no weights
            try:
                form, _ = detect(source.below(folder))
            except UnsupportedFormat as error:
                refused = refused or (folder, error)
            except CkptError:
                continue  # its own reading says what is wrong with it
            else:
                open_folders.append((f"{folder}/", form.name))
    if open_folders:
        some = listed([f"{folder} ({form})" for folder, form in open_folders], 6)
        return f"; checkpoints are in {some}", f"name one of them, such as {open_folders[-1][0][:-1]}"
    if refused is not None:
        return f"; {refused[1].message}", refused[1].hint
    files = list(_files_that_open(source, detect))
    shard = next((path for path in files if _has_shards(source, path)), None)
    if shard is not None:
        refusal = torch_xla.shards_in(shard)
        return f"; {refusal.message}", refusal.hint
    if files:
        return f"; {', '.join(files)} can be read alone", f"name the file to read, such as {files[0]}"
    return "", None


def _has_shards(source: Source, path: str) -> bool:
    """Return whether a torch file has shards of torch_xla, by its pickle."""
    read = partial(source.store.read, path)
    return not path.endswith(".safetensors") and head_holds(
        read, source.listing[path], torch_xla.INSIDE, path
    )


def _folder_of(source: Source, detect: Detect) -> tuple[str, str | None]:
    """Return that the folder of a file is a checkpoint, of which the file alone is no part to read."""
    try:
        form, _ = detect(replace(source, name=None, listing=source.store.list()))
    except CkptError:
        return "", None  # the folder is none, either
    return f"; its folder is a checkpoint ({form.name})", f"name the folder: {source.store.url}"


def _folders(source: Source, depth: int) -> list[str]:
    below = {"/".join(p.split("/")[:depth]) for p in source.listing if p.count("/") >= depth}
    # The last ones in natural order: of steps, the newest.
    return sorted((f for f in below if not f.startswith(".")), key=natural)[-_MAX_FOLDERS:]


def _files_that_open(source: Source, detect: Detect) -> Iterator[str]:
    tensors = (p for p in source.listing if "/" not in p and p.endswith(_SUFFIXES) and not is_state(p))
    tensors = (p for p in tensors if part_name(p) is None)  # a part is not the model
    # The last ones in natural order: of saves in one folder, the newest.
    newest_first = sorted(tensors, key=natural, reverse=True)
    for path in sorted(newest_first, key=lambda p: "model" not in p)[:_MAX_FILES]:
        try:
            detect(replace(source.file(path), recover=False))
        except CkptError:
            continue  # the file is of no known format, too
        yield path
