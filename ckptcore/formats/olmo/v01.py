"""Read and write OLMo-core 0.1 (and the revisions before it): safetensors a rank, and one `metadata.json`.

A single state dict is a folder with both. A model and its optimizer are two such folders, ``model/`` and
``optim/``; beside them OLMo saves ``train/rank{R}.pt`` and, last, ``config.yaml``
(olmo_core/distributed/checkpoint.py of 0.1.0, `save_model_and_optim_state`).

| stored in ``optim/`` | here |
|---|---|
| ``state.<fqn>.__<key>``, before 2024-03-25 ``state.<key>.<fqn>`` | ``optim.state.<fqn>.<key>`` |
| ``param_group<i>``, a pickle of plain values | object ``optim.param_groups.<i>`` |
| ``state_keys``, a pickle of names | object ``optim.state_keys`` |
| ``num_param_groups`` | object ``optim.num_param_groups`` |

Tensors of ``model/`` are ``model.<fqn>``; a folder with one state dict keeps its stored names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from math import prod
from typing import Any

from ckptcore.core.manifest import Blob, Envelope, Item, Manifest
from ckptcore.core.manifest_builder import Builder
from ckptcore.encodings.pickle.unpickler import loads
from ckptcore.encodings.torchzip.reader import bound_tree, refused_in
from ckptcore.errors import MalformedCheckpoint, NotComplete, UnsafeContent, finding
from ckptcore.formats.base import Arrangement, Evidence, FileLayout, Format, Layout, Reader, Source, Writer
from ckptcore.formats.common.join import Part, join
from ckptcore.formats.olmo.common import missing_part, model_origin, require_renamed, train_part
from ckptcore.formats.olmo.v01_reader import METADATA, RankFolder, Stored
from ckptcore.formats.torch_save.tree import add_object

_RANKS = re.compile(r"^(model/|optim/|)rank_(\d+)\.safetensors$")
_SPEC = re.compile(rb'^\s*\{\s*"tensors"\s*:\s*\{')
_COUNT = "num_param_groups"
_PICKLED = re.compile(r"^(param_group\d+|state_keys)$")
_STATE = re.compile(r"^state\.(?P<fqn>.+)\.__(?P<key>.+)$")
_MAX_PICKLE = 64 << 20


def detect(source: Source) -> Evidence | None:
    """Recognise `rank_R.safetensors` in the folder itself, or in its model/ and optim/."""
    if source.name is not None:
        return None
    counts: dict[str, int] = {}
    for path in source.listing:
        if m := _RANKS.match(path):
            counts[m[1]] = counts.get(m[1], 0) + 1
    if not counts and METADATA in source.listing:  # every data file may be missing
        head = source.store.read(METADATA, 0, min(64, source.listing[METADATA]))
        return Evidence("olmo_v01", (f"{METADATA} lists shards per file",)) if _SPEC.match(head) else None
    if "" in counts and len(counts) > 1:
        counts = {k: n for k, n in counts.items() if k}  # loose files beside model/ and optim/ are strays
    because = [f"{n} {f}rank_R.safetensors" for f, n in sorted(counts.items())]
    because += [f"found {f}{METADATA}" for f in sorted(counts) if f + METADATA in source.listing]
    # The only file of one rank looks like a safetensors folder's.
    refines = ("safetensors",) if counts == {"": 1} and "model.safetensors" not in source.listing else ()
    return Evidence("olmo_v01", tuple(because), refines) if because else None


def read(source: Source) -> Manifest:
    """Read the manifest of a state dict's folder, or of a step folder with its parts.

    Raises:
        NotComplete: A folder has no `metadata.json`.
        MalformedCheckpoint: A file is not what OLMo-core writes.
    """
    require_renamed(source)
    folders = [f for f in ("model", "optim") if any(p.startswith(f + "/") for p in source.listing)]
    if METADATA in source.listing or not folders:
        return _folder_manifest(source)[0]
    parts = []
    for folder in folders:
        manifest, rename = _folder_manifest(source.below(folder))
        parts.append(Part(manifest, folder, _RENAMES[folder](rename)))
    findings = [missing_part(f, f"{f}/ beside {folders[0]}/") for f in ("model", "optim") if f not in folders]
    origin: dict[str, Any] = model_origin(["model."] if "model" in folders else [])
    train = train_part(source)
    if train is not None:
        parts.append(train)
        origin |= train.manifest.origin
    return join("olmo_v01", source.store.url, parts, origin, findings)


def _folder_manifest(source: Source) -> tuple[Manifest, Callable[[str], str]]:
    """Read a folder under stored names; also return the function that makes an optimizer's names plain."""
    if METADATA not in source.listing:
        raise NotComplete(
            f"{source.store.url} has rank_R.safetensors but no {METADATA}: rank 0 writes it last",
            hint="wait if the save is running; otherwise copy it from the node of rank 0",
        )
    folder, builder = RankFolder(source), Builder()
    plain: dict[str, Stored] = {}
    if any(t.name == _COUNT for t in folder.tensors):  # an optimizer; names like _PICKLED alone are not one
        plain = {t.name: t for t in folder.tensors if t.name == _COUNT or _PICKLED.match(t.name)}
    folder.add_to(builder, frozenset(plain))
    values = {name: _add_value(builder, folder, stored) for name, stored in plain.items()}
    keys = values.get("state_keys")
    names = [t.name for t in folder.tensors]
    return builder.build("olmo_v01", source.store.url, {}), _plain_names(names, keys)


def _add_value(builder: Builder, folder: RankFolder, stored: Stored) -> Any:
    """Add a count, or the value pickled in a U8 tensor, as an object; return it, or None if unreadable."""
    shard = next((s for s in stored.shards if s.numel), None)
    header = folder.headers.get(shard.file) if shard else None
    entry = header[0].get(stored.name) if header else None
    if shard is None or header is None or entry is None or not _is_plain(stored, entry):
        message = f"object {stored.name} is not where {METADATA} records it"
        builder.findings.append(finding("no-place", "coverage", message, fqn=stored.name))
        builder.blobs.append(Blob(stored.name, -1, known=False))
        return None
    start, length = header[1] + entry[2], entry[3] - entry[2]
    item_number = builder.item(
        Item(builder.file(shard.file, folder.source.listing[shard.file]), start, length, Envelope.RAW)
    )
    label = f"{stored.name} in {shard.file}"
    try:
        raw = folder.source.store.read(shard.file, start, length)
        value = int.from_bytes(raw, "little", signed=True) if stored.name == _COUNT else _unpickle(raw, label)
    except (MalformedCheckpoint, UnsafeContent) as error:
        builder.findings.append(
            finding("malformed-item", "coverage", error.message, fqn=stored.name, file=shard.file)
        )
        builder.blobs.append(Blob(stored.name, item_number, known=False))
        return None
    add_object(builder, stored.name, value, label)
    if any(name.startswith("torch.") for name in refused_in(value)):  # e.g. a learning rate as a tensor
        message = f"cannot read the tensors inside object {stored.name}"
        builder.findings.append(finding("refused-tensors", "coverage", message, fqn=stored.name))
    return value


def _is_plain(stored: Stored, entry: tuple[str, tuple[int, ...], int, int]) -> bool:
    """Return whether a file holds a complete count or pickle, as the metadata says."""
    expected_dtype = "int64" if stored.name == _COUNT else "uint8"
    numel = 1 if stored.name == _COUNT else prod(stored.shape)
    stored_dtype, shape, start, stop = entry
    recorded = (stored.dtype or stored_dtype, prod(stored.shape), stored_dtype, prod(shape))
    return recorded == (expected_dtype, numel, expected_dtype, numel) and stop - start <= _MAX_PICKLE


def _unpickle(raw: bytes, label: str) -> Any:
    value = loads(raw, {}, label=label, refused=[])
    bound_tree(value, len(raw), label)
    return value


def _plain_names(names: list[str], keys: Any) -> Callable[[str], str]:
    """Return the function that gives names in an optimizer's folder their spelling in other generations."""
    current = any(_STATE.match(n) for n in names)
    state_keys = (
        sorted((k for k in keys if type(k) is str), key=len, reverse=True) if type(keys) is list else []
    )

    def rename(name: str) -> str:
        if m := _STATE.match(name):
            return f"state.{m['fqn']}.{m['key']}"
        if not current and name.startswith("state."):
            key = next((k for k in state_keys if name.startswith(f"state.{k}.")), None)
            return f"state.{name[len(key) + 7 :]}.{key}" if key else name
        if name.startswith("param_group") and name[11:].isdigit():
            return f"param_groups.{name[11:]}"
        return name

    return rename


_RENAMES: dict[str, Callable[[Callable[[str], str]], Callable[[str], str]]] = {
    "model": lambda rename: lambda name: f"model.{name}",
    "optim": lambda rename: lambda name: f"optim.{rename(name)}",
}


# It nests because the saving order is needed to rebuild groups from flattened parameter groups.
def arrange(request: Arrangement) -> Iterable[FileLayout]:
    """Lay out a step folder or a single state dict, as `v01_writer` does; raise its errors."""
    from ckptcore.formats.olmo.v01_writer import arrange as arrange_files

    return arrange_files(request)


_LAYOUT = Layout(arrange, nests=True, values="plain")
FORMAT = Format(
    name="olmo_v01",
    title="OLMo-core 0.1 checkpoint (safetensors a rank)",
    recognised_by="`metadata.json` beside `rank_R.safetensors`, also in `model/` and `optim/`",
    detect=detect,
    suffixes=frozenset({"safetensors", "json"}),
    reader=Reader(read, objects=True),
    writer=Writer(_LAYOUT, for_mesh=_LAYOUT),
    thin="its metadata lists every file",
)
