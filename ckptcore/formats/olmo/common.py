"""What the folders of OLMo-core's and OLMo's trainers have in common, whatever they save tensors in.

A step folder is ``step{N}``; ``step{N}-tmp`` until it is renamed (olmo_core/train/checkpoint.py
`_temporary_wd`, olmo/checkpoint.py `Checkpointer._temporary_wd`). Each rank leaves its trainer
state in ``train/rank{R}.pt``; loaders take ``rank0.pt`` where a rank's own is not there.
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
from ckptcore.utils.text import shown

DCP = "model_and_optim"
WRAPPED = "_fsdp_wrapped_module."  # torch FSDP1 puts it into names
TRAIN_FILE = re.compile(r"^train/rank(\d+)\.pt$")
RANK_SAFETENSORS = re.compile(r"^rank_(\d+)\.safetensors$")
# What only a step folder of these trainers holds; names alone decide.
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
    """Whether the names in a folder are those of an OLMo-core or OLMo step folder."""
    if source.name is not None:
        return False
    names = list(source.listing)
    return any(all(any(re.search(p, n) for n in names) for p in marks) for marks in _MARKS)


def require_renamed(source: Source) -> None:
    """Raises `NotComplete` for the folder that a save works in, unless recovery is asked for."""
    name = source.store.url.rstrip("/").rsplit("/", 1)[-1]
    if name.endswith("-tmp") and not source.recover:
        raise NotComplete(
            f"{name} is the folder that a save works in: it is renamed when the save has finished",
            hint="wait if the save is running; if it was aborted, take it as it is with --allow-incomplete",
        )


def plain_name(name: str) -> str:
    """A parameter's name without FSDP1's wrapper."""
    return name.replace(WRAPPED, "")


def model_told(names: Iterable[str]) -> dict[str, Any]:
    """Where the model is, for the manifest's origin."""
    if not any(n.startswith("model.") for n in names):
        return {}
    return {"model": {"prefix": "model.", "because": "OLMo's trainers keep the model under model."}}


def train_part(source: Source) -> Part | None:
    """The trainer's state as a manifest of its own, or None where there is none.

    A value that all ranks agree on is ``train.<key>``; others are ``train.rank<R>.<key>``.
    """
    files = {int(m[1]): p for p in source.listing if (m := TRAIN_FILE.match(p))}
    if not files:
        return None
    builder = Builder()
    trees: dict[int, tuple[dict[Any, Any], TorchTree]] = {}
    for rank, path in sorted(files.items()):
        at = builder.file(path, source.listing[path])
        try:
            objects = _read_file(source, path)
        except MalformedCheckpoint as error:
            builder.findings.append(finding("malformed-item", "cover", error.message, file=path))
            continue
        tree = objects.tree if isinstance(objects.tree, dict) else {"state": objects.tree}
        trees[rank] = tree, TorchTree(builder, at, objects, path)
    keys = dict.fromkeys(k for tree, _ in trees.values() for k in tree)
    for key in keys:
        held = {rank: tree[key] for rank, (tree, _) in trees.items() if key in tree}
        first = min(held)
        if len(held) == len(trees) and all(_same_values(held[first], v) for v in held.values()):
            if _holds_tensor(held[first]):  # one rank: nothing to tell apart
                trees[first][1].add(f"train.{key}", held[first])
            else:
                add_object(builder, f"train.{key}", held[first], files[first])
            continue
        for rank, value in held.items():
            trees[rank][1].add(f"train.rank{rank}.{key}", value)
    builder.findings += _contradictions({r: t for r, (t, _) in trees.items()}, files)
    return Part(
        builder.build("torch_save", source.store.url, _run_facts(trees[min(trees)][0] if trees else {}))
    )


def missing_part(name: str, what: str) -> Finding:
    """The warning that a part which such a checkpoint has is not there."""
    return finding("missing-part", "files", f"there is no {what}", file=name)


def _read_file(source: Source, path: str) -> Objects:
    return read_objects(lambda start, n: source.store.read(path, start, n), source.listing[path], path)


def _same_values(one: Any, other: Any) -> bool:
    """Whether two ranks' values are the same without looking at bytes of tensors."""
    return one is other or (type(one) is type(other) and one == other and not _holds_tensor(one))


def _holds_tensor(value: Any) -> bool:
    return any(isinstance(v, StoredView) for _, _, v in leaves_below(value, "", StoredView))


def _run_facts(tree: dict[Any, Any]) -> dict[str, Any]:
    return {k: tree[k] for k in ("global_step", "world_size") if type(tree.get(k)) is int}


def _contradictions(trees: dict[int, dict[Any, Any]], files: dict[int, str]) -> Iterable[Finding]:
    """Ranks of different saves, and ranks that should be there."""
    if not trees:
        return
    first = min(trees)
    for key in ("global_step", "world_size"):
        for rank, tree in trees.items():
            if tree.get(key) != trees[first].get(key):
                one, other = tree.get(key), trees[first].get(key)
                message = f"{files[rank]} is of {key} {shown(one, 40)}, {files[first]} of {shown(other, 40)}"
                yield finding("mixed-saves", "files", message, file=files[rank])
    world = trees[first].get("world_size")
    if type(world) is not int or not 0 < world < 1 << 20:
        world = 1 + min(max(files), 1 << 20)  # as many ranks as the highest tells of
    lost = sorted(set(range(world)) - set(files))
    if lost:
        more = f" (nor of {len(lost) - 1} more)" if lost[1:] else ""
        yield missing_part(f"train/rank{lost[0]}.pt", f"trainer state of rank {lost[0]} of {world}{more}")
    beyond = sorted(r for r in files if r >= world)
    if beyond:
        message = f"{files[beyond[0]]} is of rank {beyond[0]}, and {world} ranks saved"
        yield finding("mixed-saves", "files", message, file=files[beyond[0]])
