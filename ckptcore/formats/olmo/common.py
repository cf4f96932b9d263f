"""Read what the step folders of OLMo-core's and OLMo's trainers share, whatever holds their tensors.

A step folder is ``step{N}``; ``step{N}-tmp`` until it is renamed (olmo_core/train/checkpoint.py
`_temporary_wd`, olmo/checkpoint.py `Checkpointer._temporary_wd`). Each rank saves its trainer
state in ``train/rank{R}.pt``; loaders read ``rank0.pt`` where a rank's own file is missing.

| objects | writer |
|---|---|
| ``optim.param_groups.<i>`` | OLMo-core 0.1, as read here |
| ``optim.param_groups`` | OLMo's local and unsharded checkpoints, `torch.save` |
| ``optim.param_groups.<i>.<option>`` | OLMo-core 1.x and torch's DCP |
| ``optim.param_groups.<fqn>.<option>`` | flattened optimizer state: OLMo-core 2 on, torch's DCP |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ckptcore.core.manifest_builder import Builder
from ckptcore.encodings.pickle.torch_globals import OBJECT_TABLE
from ckptcore.encodings.pickle.unpickler import loads
from ckptcore.encodings.torchzip.reader import bound_tree, read_objects
from ckptcore.errors import Finding, MalformedCheckpoint, NotComplete, UnsupportedFormat, finding
from ckptcore.formats.base import Source
from ckptcore.formats.common.join import Part
from ckptcore.formats.common.optimizer_numbers import is_opaque, join_equal_groups
from ckptcore.formats.common.trees import holds_tensor
from ckptcore.formats.torch_save.tree import TorchTree, add_object
from ckptcore.store.subfolder import FileRange
from ckptcore.utils.foreign_text import is_number
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
_GROUPS = "optim.param_groups"
_NAMES = ("_param_names", "param_names")


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
        try:
            state, torch_tree = open_file(source, builder, path)
        except MalformedCheckpoint as error:
            builder.report("malformed-item", "coverage", error.message, file=path)
            continue
        trees[rank] = state if isinstance(state, dict) else {"state": state}, torch_tree
    keys = dict.fromkeys(k for tree, _ in trees.values() for k in tree)
    for key in keys:
        by_rank = {rank: tree[key] for rank, (tree, _) in trees.items() if key in tree}
        first = min(by_rank)
        if len(by_rank) == len(trees) and all(_same_values(by_rank[first], v) for v in by_rank.values()):
            if holds_tensor(by_rank[first]):  # only one rank has it
                trees[first][1].add(f"train.{key}", by_rank[first])
            else:
                add_object(builder, f"train.{key}", by_rank[first], files[first])
            continue
        for rank, value in by_rank.items():
            trees[rank][1].add(f"train.rank{rank}.{key}", value)
    builder.findings += _contradictions({r: t for r, (t, _) in trees.items()}, files)
    tree = trees[min(trees)][0] if trees else {}
    facts = {k: tree[k] for k in ("global_step", "world_size") if type(tree.get(k)) is int}
    return Part(builder.build("torch_save", source.store.url, facts))


def missing_part(name: str, part: str) -> Finding:
    """Return the warning that a part of such a checkpoint is missing."""
    return finding("missing-part", "files", f"there is no {part}", file=name)


def unpickled(raw: bytes, label: str) -> Any:
    """Unpickle plain values; globals are refused one by one."""
    value = loads(raw, {}, label=label, refused=[])
    bound_tree(value, len(raw), label)
    return value


def open_file(
    source: Source, builder: Builder, path: str, table: Mapping[str, Any] = OBJECT_TABLE
) -> tuple[Any, TorchTree]:
    """Return the content of a torch file, and what adds values of it to the builder."""
    size = source.listing[path]
    file_number = builder.file(path, size)
    objects = read_objects(FileRange(source.store, path, 0, size), path, table)
    return objects.tree, TorchTree(builder, file_number, objects, path)


def _same_values(first: Any, second: Any) -> bool:
    """Return whether two ranks' values are equal, without reading bytes of tensors."""
    return first is second or (type(first) is type(second) and first == second and not holds_tensor(first))


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


def groups_of(objects: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the groups as 0.1 pickles them: options, ``params`` as numbers, ``_param_names`` as FQNs.

    Raises:
        UnsupportedFormat: There are no groups, or their parameters have no names.
    """
    collected = _collect_groups(objects)
    if not collected:
        raise UnsupportedFormat(
            "cannot name the optimizer's state: it has no parameter groups",
            hint="leave the optimizer out with --exclude 'optim.*'",
        )
    groups: list[dict[str, Any]] = []
    count = 0
    for n, group in enumerate(collected):
        names = next((group[k] for k in _NAMES if k in group), None)
        params = group.get("params")
        if type(params) is not list or is_opaque(group):
            raise UnsupportedFormat(
                f"cannot read parameter group {n} of the optimizer: its parameters are not plain values",
                hint="leave the optimizer out with --exclude 'optim.*'",
            )
        if names is None and all(type(p) is str for p in params):
            # Groups that list names have no numbers; 0.1 counts parameters over all groups.
            names, params = params, list(range(count, count + len(params)))
        if type(names) is not list or len(names) != len(params):
            raise UnsupportedFormat(
                f"cannot name the parameters of group {n} of the optimizer: it has numbers, no names",
                hint="leave the optimizer out with --exclude 'optim.*'",
            )
        count += len(params)
        groups.append({**group, "params": params, "_param_names": names})
    return groups


def _collect_groups(objects: Mapping[str, Any]) -> list[dict[str, Any]]:
    groups = objects.get(_GROUPS)
    if type(groups) is list and all(isinstance(g, dict) for g in groups):
        return [dict(g) for g in groups]
    below = {k[len(_GROUPS) + 1 :]: v for k, v in objects.items() if k.startswith(_GROUPS + ".")}
    if below and all(map(is_number, below)):
        return [dict(below[k]) for k in sorted(below, key=int) if isinstance(below[k], dict)]
    if below and all(is_number(k.split(".", 1)[0]) and "." in k for k in below):
        numbered: dict[int, dict[str, Any]] = {}
        for key, value in below.items():
            number, option = key.split(".", 1)
            numbered.setdefault(int(number), {})[option] = value
        return [numbered[n] for n in sorted(numbered)]
    options: dict[str, dict[str, Any]] = {}
    for key, value in below.items():
        fqn, _, option = key.rpartition(".")
        options.setdefault(fqn, {})[option] = value
    return join_equal_groups(options)


def names_by_number(groups: Any) -> dict[int, str] | None:
    """Return number of a parameter -> its plain FQN; None where the groups have no names."""
    fqn_of: dict[int, str] = {}
    if type(groups) is not list:
        return None
    for group in groups:
        if not isinstance(group, dict):
            return None
        params, names = group.get("params"), next((group[k] for k in _NAMES if k in group), None)
        if type(params) is not list or type(names) is not list or len(params) != len(names):
            return None
        if any(type(p) is not int for p in params) or any(type(n) is not str for n in names):
            return None
        fqn_of |= {p: plain_name(n) for p, n in zip(params, names, strict=True)}
    return fqn_of if len(set(fqn_of.values())) == len(fqn_of) else None


def plain_groups(groups: Any) -> dict[str, Any]:
    """Return object name -> group, with plain FQNs; a value that is not a list of groups gets one name."""
    if type(groups) is not list or not all(isinstance(g, dict) for g in groups):
        return {_GROUPS: groups}
    return {f"{_GROUPS}.{i}": _renamed_group(g) for i, g in enumerate(groups)}


def _renamed_group(group: dict[Any, Any]) -> dict[Any, Any]:
    return {
        k: [plain_name(n) if type(n) is str else n for n in v] if k in _NAMES and type(v) is list else v
        for k, v in group.items()
    }
