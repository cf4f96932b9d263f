"""Recognise what the Hugging Face Trainer and Accelerate keep beside the weights, by name.

Sources: transformers/trainer.py, accelerate/checkpointing.py, accelerate/utils/constants.py; torchtune;
Megatron-Bridge (training/utils/checkpoint_utils.py).
Accelerate numbers the prepared models: ``model_1.safetensors`` is a second model, and no part of the first.
Composer and others keep ``latest-rank0.pt`` as a link to the newest save: a link to a sibling is the sibling.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckptcore.errors import AmbiguousModel, Finding, finding
from ckptcore.formats.base import Source, natural

_STATE = re.compile(
    r"^(?:(?:optimizer|scheduler)(?:_\d+)?\.(?:bin|pt)|(?:sampler|dl_state_dict)(?:_\d+)?\.bin|scaler\.pt"
    r"|random_states_\d+\.pkl|custom_checkpoint_\d+\.pkl|rng_state(?:_\d+)?\.pth|training_args\.bin|recipe_state\.pt|(?:latest_)?train_state\.pt)$"
)
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_OPTIMIZER = re.compile(r"^optimizer(?:_\d+)?\.(?:bin|pt)$")
_ADAPTERS = ("adapter_model.pt", "adapter_model.bin")
_NUMBERED = re.compile(
    r"^(?:pytorch_)?model_(?P<number>\d+)(?:-\d+-of-\d+)?\.(?:safetensors|bin)(?:\.index\.json)?$"
)


def is_state(path: str) -> bool:
    """Return whether a name is that of a trainer's own state, which has no weights of the model.

    >>> is_state("training_args.bin"), is_state("optimizer_1.bin"), is_state("pytorch_model.bin")
    (True, True, False)
    """
    return _STATE.match(path) is not None


def is_adapter(path: str) -> bool:
    """Return whether a name is that of an adapter, which torchtune saves beside the merged model.

    >>> is_adapter("adapter_model.pt"), is_adapter("model.pt")
    (True, False)
    """
    return path in _ADAPTERS


def numbered_model(path: str) -> bool:
    """Return whether a name is that of one of Accelerate's models, the first or a further one."""
    return path == "pytorch_model.bin" or _NUMBERED.match(path) is not None


def require_one_model(source: Source, read: str, files: Iterable[str] = ()) -> None:
    """Raise `AmbiguousModel` where Accelerate saved several models: the second is no stray of the first.

    Args:
        source: The folder.
        read: The file or index that is read.
        files: Its files, where it is an index.
    """
    model, model_files = _NUMBERED.match(read), {read, *files}
    other_models = sorted(
        (
            path
            for path in source.listing
            if path not in model_files
            and (match := _NUMBERED.match(path))
            and (model is None or match["number"] != model["number"])
        ),
        key=natural,
    )
    if other_models:
        raise AmbiguousModel(
            f"{source.store.url} has several models: {read} and {', '.join(other_models[:6])}",
            hint=f"name the file of one of them, such as {read}",
            candidates=[read, *other_models],
        )


def unread_optimizers(source: Source, paths: Iterable[str]) -> list[Finding]:
    """Return the finding that optimizers beside the weights are not read with them."""
    beside = sorted(p for p in source.listing if _OPTIMIZER.match(p) and p not in set(paths))
    if not beside:
        return []
    suffix = f" and {len(beside) - 1} more" if beside[1:] else ""
    message = f"the optimizer's state in {beside[0]}{suffix} is not read with the model"
    return [finding("unread-state", "files", message, file=beside[0])]


def without_links(source: Source, paths: Iterable[str]) -> list[str]:
    """Return the paths without suffix names of one file: a name with a number stays, which tells the step.

    An object store has no links: equal stamps mean equal content there, and both files are kept.
    """
    all_paths = list(paths)
    if source.store.local is None or len(all_paths) < 2:
        return all_paths
    identities = {status.identity for path in all_paths if (status := source.seen.get(path)) is not None}
    if None not in identities and len(identities) == len(all_paths):
        return all_paths
    by_stamp: dict[str, str] = {}
    for path in sorted(all_paths, key=lambda path: (not any(map(str.isdigit, _stem(path))), natural(path))):
        status = source.seen.get(path)
        stamp = source.store.stamp(path) if status is None else status.stamp  # with the inode
        by_stamp.setdefault(path if stamp is None else stamp, path)
    return sorted(by_stamp.values(), key=natural)


def unlinked(source: Source, paths: Iterable[str], read_paths: Iterable[str]) -> list[str]:
    """Return the paths that are no other name of a file that is read: links of both kinds are."""
    identities = {source.seen[path].identity for path in read_paths if path in source.seen} - {None}
    return [p for p in paths if p not in source.seen or source.seen[p].identity not in identities]


def _stem(path: str) -> str:
    """Return a name up to the number of its rank."""
    return path.rsplit("/", 1)[-1].partition("rank")[0]
