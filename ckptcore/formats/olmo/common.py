"""Read what the step folders of OLMo-core's and OLMo's trainers share, whatever holds their tensors.

A step folder is ``step{N}``; ``step{N}-tmp`` until it is renamed (olmo_core/train/checkpoint.py
`_temporary_wd`, olmo/checkpoint.py `Checkpointer._temporary_wd`). Each rank saves its trainer
state in ``train/rank{R}.pt``; loaders read ``rank0.pt`` where a rank's own file is missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ckptcore.core.manifest_builder import Builder
from ckptcore.encodings.pickle.torch_globals import StoredView
from ckptcore.encodings.torchzip.reader import Objects, read_objects
from ckptcore.errors import Finding, MalformedCheckpoint, NotComplete, finding
from ckptcore.formats.base import Source
from ckptcore.formats.common.join import Part
from ckptcore.formats.common.trees import leaves_below
from ckptcore.formats.torch_save.tree import TorchTree, add_object
from ckptcore.store.subfolder import FileRange
from ckptcore.utils.text import count, short_repr

DCP = "model_and_optim"
WRAPPED = "_fsdp_wrapped_module."  # torch FSDP1 puts it into names
TRAIN_FILE = re.compile(r"^train/rank(\d+)\.pt$")
RANK_SAFETENSORS = re.compile(r"^rank_(\d+)\.safetensors$")
# Files that only a step folder of these trainers has; names alone decide.
_MARKS = (
    (r"^\.metadata\.json$", r"^(model_and_optim|train)/"),
    (r"^model_and_optim/(\.metadata(\.tmp)?|__\d+_\d+\.distcp)$",),
    (r"^(model/|optim/)?rank_\d+\.safetensors$",),
    (r"^metadata\.yaml$", r"^(model|optim)/rank\d+\.pt$"),
    (r"^model/rank\d+\.pt$", r"^optim/rank\d+\.pt$"),
    (r"^train/rank\d+\.pt$", r"^config\.(yaml|json)$"),
    (r"^train\.pt$", r"^(model|optim)\.(pt|safetensors)$"),
)


def is_step(source: Source) -> bool:
    """Return whether the names in a folder are those of an OLMo-core or OLMo step folder."""
    if source.name is not None:
        return False
    names = list(source.listing)
    return any(all(any(re.search(p, n) for n in names) for p in marks) for marks in _MARKS)


def require_renamed(source: Source) -> None:
    """Require that a step folder has its final name, unless `Source.recover` is true.

    Raises:
        NotComplete: It is the temporary folder of a save.
    """
    name = source.store.url.rstrip("/").rsplit("/", 1)[-1]
    if name.endswith("-tmp") and not source.recover:
        raise NotComplete(
            f"{name} is the temporary folder of a save, which is renamed when the save has finished",
            hint="wait if the save is running; if it was aborted, read it with --allow-incomplete",
        )


def plain_name(name: str) -> str:
    """Return a parameter's name without FSDP1's wrapper."""
    return name.replace(WRAPPED, "")


def model_origin(names: Iterable[str]) -> dict[str, Any]:
    """Return the model's prefix for the manifest's origin; {} when no name has it."""
    if not any(n.startswith("model.") for n in names):
        return {}
    return {"model": {"prefix": "model.", "because": "OLMo's trainers save the model under model."}}


def train_part(source: Source) -> Part | None:
    """Read the trainer's state into its own manifest; return None where there is none.

    A value that is equal on all ranks is ``train.<key>``; others are ``train.rank<R>.<key>``.
    """
    files = {int(m[1]): p for p in source.listing if (m := TRAIN_FILE.match(p))}
    if not files:
        return None
    builder = Builder()
    trees: dict[int, tuple[dict[Any, Any], TorchTree]] = {}
    for rank, path in sorted(files.items()):
        file_number = builder.file(path, source.listing[path])
        try:
            objects = _read_file(source, path)
        except MalformedCheckpoint as error:
            builder.findings.append(finding("malformed-item", "coverage", error.message, file=path))
            continue
        tree = objects.tree if isinstance(objects.tree, dict) else {"state": objects.tree}
        trees[rank] = tree, TorchTree(builder, file_number, objects, path)
    keys = dict.fromkeys(k for tree, _ in trees.values() for k in tree)
    for key in keys:
        by_rank = {rank: tree[key] for rank, (tree, _) in trees.items() if key in tree}
        first = min(by_rank)
        if len(by_rank) == len(trees) and all(_same_values(by_rank[first], v) for v in by_rank.values()):
            if _holds_tensor(by_rank[first]):  # only one rank has it
                trees[first][1].add(f"train.{key}", by_rank[first])
            else:
                add_object(builder, f"train.{key}", by_rank[first], files[first])
            continue
        for rank, value in by_rank.items():
            trees[rank][1].add(f"train.rank{rank}.{key}", value)
    builder.findings += _contradictions({r: t for r, (t, _) in trees.items()}, files)
    return Part(
        builder.build("torch_save", source.store.url, _run_facts(trees[min(trees)][0] if trees else {}))
    )


def missing_part(name: str, part: str) -> Finding:
    """Return the warning that a part of such a checkpoint is missing."""
    return finding("missing-part", "files", f"there is no {part}", file=name)


def _read_file(source: Source, path: str) -> Objects:
    return read_objects(FileRange(source.store, path, 0, source.listing[path]), path)


def _same_values(first: Any, second: Any) -> bool:
    """Return whether two ranks' values are equal, without reading bytes of tensors."""
    return first is second or (type(first) is type(second) and first == second and not _holds_tensor(first))


def _holds_tensor(value: Any) -> bool:
    return any(isinstance(v, StoredView) for _, _, v in leaves_below(value, "", StoredView))


def _run_facts(tree: dict[Any, Any]) -> dict[str, Any]:
    return {k: tree[k] for k in ("global_step", "world_size") if type(tree.get(k)) is int}


def _contradictions(trees: dict[int, dict[Any, Any]], files: dict[int, str]) -> Iterable[Finding]:
    """Yield findings for ranks of different saves, and for missing ranks."""
    if not trees:
        return
    first = min(trees)
    for key in ("global_step", "world_size"):
        for rank, tree in trees.items():
            if tree.get(key) != trees[first].get(key):
                rank_value, first_value = tree.get(key), trees[first].get(key)
                message = (
                    f"{key} of {files[rank]} is {short_repr(rank_value, 40)}, "
                    f"that of {files[first]} is {short_repr(first_value, 40)}"
                )
                yield finding("mixed-saves", "files", message, file=files[rank])
    world = trees[first].get("world_size")
    # Bounded, because ranks are counted up to it: it is a number of a pickle.
    if type(world) is not int or not 0 < world < 1 << 20:
        world = 1 + min(max(files), 1 << 20)  # as many ranks as the highest number implies
    lost = sorted(set(range(world)) - set(files))
    if lost:
        suffix = f" (nor of {count(len(lost) - 1, 'other rank')})" if lost[1:] else ""
        yield missing_part(f"train/rank{lost[0]}.pt", f"trainer state of rank {lost[0]} of {world}{suffix}")
    beyond = sorted(r for r in files if r >= world)
    if beyond:
        message = f"{files[beyond[0]]} is from rank {beyond[0]}, but only {count(world, 'rank')} saved"
        yield finding("mixed-saves", "files", message, file=files[beyond[0]])
