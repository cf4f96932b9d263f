"""Read and write OLMo-core 1.0 and later, and OLMo's ``torch_new``: a trainer's step around a DCP folder.

A step folder has ``model_and_optim/`` (DCP), ``train/rank{R}.pt``, ``config.json``, and, written last,
``.metadata.json`` (olmo_core/train/checkpoint.py); OLMo's has ``config.yaml`` instead of the
last two (olmo/checkpoint.py, `TorchNewStyleShardedCheckpointer`). A DCP folder alone is OLMo-core's
when its `.metadata` names the storage class of OLMo-core, which plain torch cannot load. Names are
the stored ones: ``model.<fqn>``, ``optim.state.<fqn>.<key>``, ``optim.param_groups...``, and from
`save_state_dict_direct` ``<fqn>.main`` (flat float32 weights) and ``<fqn>.exp_avg``.
The trainer's state is ``train.<key>``, or ``train.rank<R>.<key>`` where ranks differ.

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

from collections.abc import Callable, Iterable
from typing import Any

from ckptcore.core.manifest import Manifest
from ckptcore.core.metadata_budget import meter
from ckptcore.core.tree_paths import Path
from ckptcore.core.used_files import placed
from ckptcore.errors import Finding, NotComplete, finding
from ckptcore.formats.base import Arrangement, Evidence, FileLayout, Format, Layout, Reader, Source, Writer
from ckptcore.formats.common.join import Part, join
from ckptcore.formats.dcp.format import thin
from ckptcore.formats.dcp.reader import DATA, read_folder
from ckptcore.formats.olmo.common import (
    CONFIG,
    DCP,
    MARKER,
    TRAIN_FILE,
    missing_part,
    model_origin,
    require_renamed,
    train_part,
)
from ckptcore.utils.foreign_text import InvalidText, load_json_object
from ckptcore.utils.text import count

NAME = "olmo_core"
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


def arrange(request: Arrangement) -> tuple[FileLayout, ...]:
    """Lay out a step folder as the ranks of a mesh save it."""
    from ckptcore.formats.olmo.writer import arrange_step

    return arrange_step(request)


def like_source(source: Manifest) -> Layout | None:
    """Return the layout of a DCP folder alone for a source that is one: its loaders are called with it."""
    is_bare = source.format == NAME and not any(p.startswith(f"{DCP}/") for p in placed(source))
    return _BARE if is_bare else None


def arrange_bare(request: Arrangement) -> Iterable[FileLayout]:
    """Lay out the DCP folder alone."""
    from ckptcore.formats.dcp.writer import arrange_folder

    return arrange_folder(request)


def arrange_start(request: Arrangement) -> tuple[FileLayout, ...]:
    """Lay out a step that a run begins from, with the model's config."""
    from ckptcore.formats.olmo.writer import arrange_start as arrange_first_step

    return arrange_first_step(request)


def in_model(source: Manifest) -> Callable[[Path], Path]:
    """Return the rule of a start's names: the trainer loads the model's below this key."""
    return lambda path: path if path == (CONFIG,) else ("model", *path)


_LAYOUT = Layout(arrange, nests=True, values="libraries", flattens=True)
_BARE = Layout(arrange_bare, nests=True, values="libraries", flattens=True)
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
