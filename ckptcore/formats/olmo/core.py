"""Read and write OLMo-core 1.0 and later, and OLMo's ``torch_new``: a trainer's step around a DCP folder.

A step folder has ``model_and_optim/`` (DCP), ``train/rank{R}.pt``, ``config.json``, and, written last,
``.metadata.json`` (olmo_core/train/checkpoint.py); OLMo's has ``config.yaml`` instead of the
last two (olmo/checkpoint.py, `TorchNewStyleShardedCheckpointer`). A DCP folder alone is OLMo-core's
when its `.metadata` names the storage class of OLMo-core, which plain torch cannot load. Names are
the stored ones: ``model.<fqn>``, ``optim.state.<fqn>.<key>``, ``optim.param_groups...``, and from
`save_state_dict_direct` ``<fqn>.main`` (flat float32 weights) and ``<fqn>.exp_avg``.
The trainer's state is ``train.<key>``, or ``train.rank<R>.<key>`` where ranks differ.

A written `.metadata` names torch's storage class, which both OLMo-core's reader
(olmo_core/distributed/checkpoint/filesystem.py) and plain torch accept. For a mesh all ranks share the DCP
folder; a rank without its own `train/rank{R}.pt` loads that of rank 0 (olmo_core/train/checkpoint.py).

Functions of `olmo_core.distributed.checkpoint`, and their counterparts here:

| OLMo-core | ckptcore |
|---|---|
| `get_checkpoint_metadata(dir)` | `ckptcore.open(dir)`: names, shapes, dtypes, places; `ckptcore inspect` |
| `load_model_and_optim_state(dir, model, optim)` | `load_into(manifest, {"model": ..., "optim": ...})` |
| `load_state_dict(dir, state_dict)` | `load_into(manifest, state_dict)`: in place, in any topology |
| `load_keys(dir, keys)` | `read(manifest, key)` for tensors, `manifest.blobs` for objects |
| prefix of a key | `load_into(..., prefix="model.")`, `--include 'model.*'` |
| `unshard_checkpoint(dir, target)` | `ckptcore consolidate dir target --include 'model.*' --rename model.=` |
| `optim=True` | `--include 'optim.*'`, in any format |
| strategy `one_file` | `target.safetensors` or `target.pt` |
| strategy `one_file_per_tensor` | `--max-file-size 1` |
| strategy `chunks(n)` | `--max-file-size n` |
| `num_threads`, `pre_download`, `work_dir` | `--workers`; URLs are read by ranges, never completely |
| `device` of loaded tensors | `read(..., device="cuda")`; `load_into` fills tensors where they are |
| `save_state_dict`, `save_model_and_optim_state` | `ckptcore consolidate`, `reshard`: `--to olmo_core` |
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ckptcore.core.manifest import Manifest
from ckptcore.core.metadata_budget import meter
from ckptcore.core.object_tree import TensorRef, decode, tensors_in
from ckptcore.core.tree_paths import Path
from ckptcore.core.used_files import placed
from ckptcore.encodings.pickle.writer import Classes
from ckptcore.errors import Finding, NotComplete, UnsupportedFormat, finding
from ckptcore.formats.base import (
    Arrangement,
    Evidence,
    FileLayout,
    Format,
    Layout,
    Literal,
    Reader,
    Source,
    Writer,
    natural,
)
from ckptcore.formats.common.join import Part, join
from ckptcore.formats.common.torch_file import torch_file
from ckptcore.formats.common.trees import leaves_below
from ckptcore.formats.dcp.format import arrange as arrange_dcp
from ckptcore.formats.dcp.format import thin
from ckptcore.formats.dcp.reader import DATA, read_folder
from ckptcore.formats.olmo.common import (
    DCP,
    TRAIN_FILE,
    missing_part,
    model_origin,
    require_renamed,
    train_part,
)
from ckptcore.utils.foreign_text import InvalidText, load_json_object
from ckptcore.utils.text import count

NAME = "olmo_core"
MARKER = ".metadata.json"
CONFIG = "config"  # the object of a start that becomes config.json
PREFIX = "train."
_MOST_RANKS = 1 << 14
_RANK = re.compile(r"^rank(\d{1,9})\.(.+)$")
WORLD = f"{PREFIX}world_size"
_RANDOM = re.compile(rf"{re.escape(PREFIX)}(rank\d+\.)?rng(\.|$)")
# `.metadata` has the module of `_StorageInfo` before the first stored item.
_OURS = b"olmo_core.distributed.checkpoint.filesystem"
_TORCHS = b"torch.distributed.checkpoint.filesystem"
_BLOCK = 4 << 20
_MAX_MARKER = 1 << 20
_MARKS = frozenset({"ephemeral", "version"})
_CONFIGS = ("config.json", "config.yaml")


def detect(source: Source) -> Evidence | None:
    """Recognise a step folder, or a DCP folder that OLMo-core's storage layer wrote."""
    if source.name is not None:
        return None
    because: list[str] = []
    inside = [p for p in source.listing if p.startswith(f"{DCP}/")]
    train = sum(bool(TRAIN_FILE.match(p)) for p in source.listing)
    if inside:
        because.append(f"{count(len(inside), 'file')} in {DCP}/")
    elif MARKER in source.listing and train:
        because.append(f"no {DCP}/")
    elif ".metadata" in source.listing and _written_by_olmo_core(source):
        because.append(f".metadata names {_OURS.decode()}")
    elif ".metadata" in source.listing and train:
        because.append("found .metadata")
    if not because:
        return None
    because += [f"found {MARKER}"] if MARKER in source.listing else []
    because += [f"{train} train/rankR.pt"] if train else []
    return Evidence(NAME, tuple(because), refines=("dcp",))


def read(source: Source) -> Manifest:
    """Read the manifest of a step folder, or of a DCP folder alone.

    Raises:
        NotComplete: Model and optimizer were not saved completely.
        MalformedCheckpoint: As reading a DCP folder does.
    """
    require_renamed(source)
    bare = ".metadata" in source.listing
    if not bare and not any(p.startswith(f"{DCP}/") for p in source.listing):
        raise NotComplete(
            f"{source.store.url} has no {DCP}/: model and optimizer are not saved yet, or were moved",
            hint="wait if the save is running; otherwise copy the folder from where it was written",
        )
    stored = read_folder(source if bare else source.below(DCP), NAME)
    parts = [Part(stored, "" if bare else DCP)]
    train = train_part(source)
    origin, findings = dict(stored.origin), list[Finding]()
    if train is not None:
        parts.append(train)
        origin |= {**train.manifest.origin, **_paths(stored, train.manifest)}
    elif not bare:
        findings.append(missing_part("train", "train/rank0.pt: the trainer's own state"))
    writer, marker_findings = _marker(source)
    findings += marker_findings if not bare or MARKER in source.listing else ()
    origin |= writer | model_origin(t.fqn for t in stored.tensors)
    origin |= {p.split(".")[0]: p for p in _CONFIGS if p in source.listing}
    return join(NAME, source.store.url, parts, origin, findings)


def _written_by_olmo_core(source: Source) -> bool:
    """Return whether `.metadata` names OLMo-core's storage class; read until it or torch's is found."""
    size, tail = source.listing[".metadata"], b""
    if not any(DATA.search(p) for p in source.listing):
        return False
    meter().require(size, ".metadata")  # as its reader will
    for start in range(0, size, _BLOCK):
        block = tail + source.store.read(".metadata", start, min(_BLOCK, size - start))
        if _OURS in block:
            return True
        if _TORCHS in block:
            return False
        # A name may begin in one block and end in the next.
        tail = block[-len(_OURS) :]
    return False


def _marker(source: Source) -> tuple[dict[str, Any], list[Finding]]:
    """Return what `.metadata.json` records about the writer. OLMo has none, its last file is config.yaml."""
    size = source.listing.get(MARKER)
    if size is None:
        if "config.yaml" in source.listing:
            return {}, []
        return {}, [missing_part(MARKER, f"{MARKER}, the file that a trainer writes last")]
    try:
        raw = source.store.read(MARKER, 0, min(size, _MAX_MARKER))
        form = load_json_object(raw, unique=True)
        marks = {k: form[k] for k in sorted(_MARKS) if type(form.get(k)) in (str, bool)}
        source.explain(MARKER, 0, len(raw))
        other_entries = {k: v for k, v in form.items() if k not in marks}
        source.carry(MARKER, MARKER, other_entries, other_entries.keys() & _MARKS)
    except InvalidText as error:
        return {}, [_no_marker(str(error))]
    if other_entries and form.keys().isdisjoint(_MARKS):  # another file has its name
        return {}, [_no_marker(f"none of its keys is {' or '.join(sorted(_MARKS))}")]
    return {f"writer_{k}" if k == "version" else k: v for k, v in marks.items()}, []


def _no_marker(reason: str) -> Finding:
    message = f"cannot read {MARKER}: it is not what a trainer writes ({reason})"
    return finding("malformed-metadata", "files", message, file=MARKER)


def _paths(stored: Manifest, train: Manifest) -> dict[str, Any]:
    """Return the recorded paths with the trainer's names, which have no recorded path, appended."""
    form = stored.origin.get("paths")
    if not form:
        return {}
    no_paths = [-1] * len(train.tensors), [-1] * len(train.blobs)
    return {
        "paths": form
        | {
            "tensors": form["tensors"] + no_paths[0],
            "objects": form["objects"] + no_paths[1],
            "order": form["order"] + no_paths[1],
        }
    }


def train_files(request: Arrangement, classes: Classes) -> list[FileLayout]:
    """Lay out a file per rank of the job that saved it, as far as recorded; each has the shared values.

    Args:
        request: The tensors and objects of the output.
        classes: Whose classes the files may name, as the format's layout declares.

    Raises:
        UnsupportedFormat: The names do not nest.
    """
    leaves: dict[str, Any] = {t.fqn: TensorRef(t.fqn) for t in request.tensors if t.fqn.startswith(PREFIX)}
    for key in request.objects:
        if key.startswith(PREFIX):
            inside = leaves_below(decode(request.objects[key]), key, TensorRef)
            leaves |= {path: leaf for path, _, leaf in inside}
    shared: dict[str, Any] = {}
    ranks: dict[int, dict[str, Any]] = {}
    for name in sorted(leaves, key=natural):
        below = name.removeprefix(PREFIX)
        match = _RANK.match(below)
        if match:
            ranks.setdefault(int(match[1]), {})[match[2]] = leaves[name]
        else:
            shared[below] = leaves[name]
    if not shared and not ranks:
        return []
    number = {t.fqn: i for i, t in enumerate(request.tensors)}
    world = shared.get("world_size")
    # A state that all ranks share still needs a file per rank: a reader counts them.
    all_ranks = range(world) if type(world) is int and 0 < world <= _MOST_RANKS else ()
    files = []
    for rank in sorted({0, *ranks, *all_ranks}):
        tree = _nested_tree({**shared, **ranks.get(rank, {})})
        order = [number[ref] for ref in tensors_in(tree)]
        # The trainers load it with weights_only=False, so numpy's random state stays numpy.
        files.append(torch_file(f"train/rank{rank}.pt", tree, request.tensors, order, classes=classes))
    return files


def _nested_tree(leaves: dict[str, Any]) -> Any:
    """Return the tree of dotted names. A value that was stored as one stays as it is, whatever its keys."""
    top: dict[str, Any] = {}
    dict_ids = {id(top)}  # dicts made from names; nothing is added to values
    for name, value in leaves.items():
        *parents, last = name.split(".")
        node = top
        for part in parents:
            if part not in node:
                node[part] = {}
                dict_ids.add(id(node[part]))
            node = node[part]
            if id(node) not in dict_ids:
                break
        if id(node) not in dict_ids or last in node:
            raise UnsupportedFormat(
                f"cannot write {PREFIX}{name}: it is inside another value",
                hint=f"leave one out: --exclude '{PREFIX}{name}'",
            )
        node[last] = value
    return _lists(top, dict_ids)


def _lists(tree: Any, dict_ids: set[int]) -> Any:
    """Return the tree with lists in place of dicts made from names 0, 1, 2, ..."""
    if id(tree) not in dict_ids:
        return tree
    if tree and list(tree) == [str(n) for n in range(len(tree))]:
        return [_lists(v, dict_ids) for v in tree.values()]
    return {k: _lists(v, dict_ids) for k, v in tree.items()}


def arrange_step(request: Arrangement) -> tuple[FileLayout, ...]:
    """Lay out a step folder as the ranks of a mesh save it."""
    from ckptcore.formats.dcp.writer import arrange_folder

    stored = [i for i, t in enumerate(request.tensors) if not t.fqn.startswith(PREFIX)]
    objects = {k: v for k, v in request.objects.items() if not k.startswith(PREFIX)}
    part = replace(request, tensors=[request.tensors[i] for i in stored], objects=objects)
    layouts = [
        replace(layout, tensors=tuple(stored[t] for t in layout.tensors))
        for layout in arrange_folder(part, folder=DCP, commit=False)
    ]
    data = json.dumps({"ephemeral": False}).encode()
    return (
        *layouts,
        *train_files(_without_world_size(request), Classes.LIBRARIES),
        FileLayout(MARKER, len(data), (), (), (Literal(0, data),), commit=True),
    )


def arrange_start(request: Arrangement) -> tuple[FileLayout, ...]:
    """Lay out a step that a run begins from: weights, and the model's config in front of the marker.

    A trainer loads it with ``load_trainer_state=False``.
    """
    objects = {k: v for k, v in request.objects.items() if k != CONFIG}
    *layouts, last = arrange_step(replace(request, objects=objects))
    data = json.dumps(decode(request.objects[CONFIG]), indent=2).encode()
    return (*layouts, FileLayout(f"{CONFIG}.json", len(data), (), (), (Literal(0, data),)), last)


def _without_world_size(request: Arrangement) -> Arrangement:
    """Set the world size of a mesh to 0 where the trainer's state has no random states.

    A trainer restores them when ``world_size`` is its own (olmo_core/train/trainer.py, load_state_dict), and
    fails where they are missing.
    """
    if request.topology is None or WORLD not in request.objects:
        return request
    if any(_RANDOM.match(key) for key in request.objects):
        return request
    return replace(request, objects={**request.objects, WORLD: 0})


def like_source(source: Manifest) -> Layout | None:
    """Return the layout of a DCP folder alone for a source that is one: its loaders are called with it."""
    is_bare = source.format == NAME and not any(p.startswith(f"{DCP}/") for p in placed(source))
    return _BARE if is_bare else None


def in_model(source: Manifest) -> Callable[[Path], Path]:
    """Return the rule of a start's names: the trainer loads the model's below this key."""
    return lambda path: path if path == (CONFIG,) else ("model", *path)


_LAYOUT = Layout(arrange_step, nests=True, values="libraries", flattens=True)
_BARE = Layout(arrange_dcp, nests=True, values="libraries", flattens=True)
_START = Layout(arrange_start, nests=True, place=in_model, values="plain", flattens=True)
FORMAT = Format(
    name=NAME,
    title="OLMo-core checkpoint (1.0 and later), OLMo torch_new",
    recognised_by="`model_and_optim/` (and `.metadata.json`), or `.metadata` of OLMo-core's storage class",
    detect=detect,
    reader=Reader(read, checksums="CRC-32 per item", objects=True),
    writer=Writer(_LAYOUT, for_mesh=_LAYOUT, like=like_source, starts={NAME: _START}),
    thin=thin,
)
