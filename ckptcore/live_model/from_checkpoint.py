"""Open a checkpoint of any format as a model of transformers, without an export between.

1. The export is planned, and nothing of it is written: what `export` refuses is refused here.
2. `from_pretrained` makes the model of the export's names, without values (`ckptcore.live_model.skeleton`).
3. The maps of live modules say which stored elements each parameter has. They are read into its memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckptcore.api import Several, speaks_python, url_of
from ckptcore.api import open as open_checkpoint
from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Manifest, TensorSpec
from ckptcore.errors import NameMismatch, UnsupportedDtype, UsageError
from ckptcore.live_model.ranks import device_of, raising_on_all, shard
from ckptcore.live_model.skeleton import build_skeleton
from ckptcore.loading.live_tensors import pieces, require_cast
from ckptcore.naming.rename import Mapped
from ckptcore.naming.worlds import LIVE
from ckptcore.planning.compose import Composed, compose
from ckptcore.planning.hub_files import CONFIG
from ckptcore.planning.live_maps import map_live_names
from ckptcore.planning.name_maps import NameRequest
from ckptcore.planning.request import Request
from ckptcore.reading.box_reader import BoxReader
from ckptcore.reading.checksums import Records
from ckptcore.reading.equality import require_equal
from ckptcore.reading.fill_memory import PIECE, Fill, fill_memory
from ckptcore.reading.gather import tile_view
from ckptcore.store import Store, open_source_store
from ckptcore.utils.foreign_text import load_json_object
from ckptcore.utils.text import listed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_GENERATION = "generation_config.json"
_QUANTISATION = ("quantization_config", "compression_config")
_log = logging.getLogger("ckptcore")


@speaks_python
def from_checkpoint(
    source: Several | Manifest,
    config: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    *,
    model_prefix: str | None = None,
    mesh: DeviceMesh | None = None,
) -> Any:
    """Open a checkpoint of any format as a model of transformers.

    The model is the one that `from_pretrained` returns for the folder that ``export`` would write: its class,
    parameters, buffers, ties and generation config. Nothing is written. Memory is that of the model, and
    buffers of 16 MiB: up to four for each thread.

    Args:
        source: A manifest, or a path or URL, or several of one checkpoint.
        config: Folder with the model's config.json, or that file; None searches beside the checkpoint, as
            ``export`` does.
        dtype: Cast floating-point tensors to this dtype, except for those that the model keeps in float32;
            None keeps the stored dtypes, as far as the model's class does.
        device: Where the model is; None: the CPU, or the device of the mesh.
        model_prefix: Prefix of the model's names; None finds it.
        mesh: The ranks that share the model, by torch's `fully_shard` of each layer and of the model. All of
            them call this function. Each reads its own boxes.

    Returns:
        The model, in evaluation mode.

    Raises:
        SourceUnreadable: There is nothing at the URL, or it cannot be read.
        UnknownFormat: Nothing there is a checkpoint of a known format.
        NotComplete: The save has not finished.
        DamagedCheckpoint: It is incomplete, a checksum fails, or copies or tied tensors differ.
        AmbiguousModel: Several parts could be the model, or several configs are at one place.
        NameMismatch: Names or shapes do not fit the config, or no map leads to the model's parameters.
        UnsupportedDtype: Its weights are quantised, or torch does not cast them.
        UsageError: No config was found, it is a LoRA adapter or a pipeline of diffusers, or the model cannot
            be on this mesh.
        MissingDependency: transformers is not installed, or older than version 5.
    """
    place = device_of(mesh, device)
    with raising_on_all(mesh):
        manifest = source if isinstance(source, Manifest) else open_checkpoint(source)
        _require_values(manifest)
        request = Request(
            url_of(source),
            "memory://from-checkpoint",  # nothing is written
            verb="export",
            config=None if config is None else os.fspath(config),
            dtype=None if dtype is None else str(dtype).removeprefix("torch."),
            model_prefix=model_prefix,
        )
        composed = compose(request, manifest)
        form = _require_weights(composed, manifest)
        model = _skeleton(composed, manifest)
        live = _live_tensors(composed, manifest, request, form, model)
        rows = _rows(model, live)
        for warning in composed.warnings:
            level = logging.INFO if warning.severity == "info" else logging.WARNING
            _log.log(level, "%s", warning.message)
    with raising_on_all(mesh), closing(open_source_store(manifest.root, manifest.versions)) as store:
        if mesh is None:
            _allocate(model, place)
        else:
            shard(model, mesh, place)
        state = model.state_dict()
        fills = [
            Fill(row, box, memory) for name, row in rows.items() for memory, box in pieces(name, state[name])
        ]
        fill_memory(live, store, fills, verify=True, copies=True)
        _require_equal_ties(composed.mapped, store)
    model.config.name_or_path = request.source
    return model.to(place)  # buffers that transformers computed


def _require_config(composed: Composed, manifest: Manifest) -> bytes:
    """Return the export's config.json; raise `UsageError` where it has none."""
    data = composed.extra.get(CONFIG)
    if data is None:
        raise UsageError(
            f"cannot open {manifest.root} as a model: no config.json was found beside it",
            hint="name the folder of the model that was trained: --config FOLDER",
        )
    return data


def _require_values(manifest: Manifest) -> None:
    """Require that the tensors are values, and no quantised codes."""
    if manifest.derived:
        names = [manifest.tensors[row].fqn for row in manifest.derived]
        raise _quantised(manifest, f"{listed(names)} would be computed")


def _quantised(manifest: Manifest, reason: str) -> UnsupportedDtype:
    return UnsupportedDtype(
        f"cannot open {manifest.root} as a model: its weights are quantised ({reason})",
        hint="export it, and open the export",
    )


def _require_weights(composed: Composed, manifest: Manifest) -> dict[str, Any]:
    """Return the export's config; require that it says nothing of quantised codes."""
    form = load_json_object(_require_config(composed, manifest))
    field = next((name for name in _QUANTISATION if form.get(name)), None)
    if field is not None:
        raise _quantised(manifest, f"config.json has {field}")
    return form


def _live_tensors(
    composed: Composed, manifest: Manifest, request: Request, form: dict[str, Any], model: Any
) -> Manifest:
    """Return the tensors of the export under the names of the model's parameters."""
    named = map_live_names(
        composed.mapped,
        NameRequest(to=LIVE, source=manifest, config=form, url=request.config or CONFIG),
        parameters=[n for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)],
    )
    return composed.mapped.manifest if named is None else named.mapped.manifest


def _skeleton(composed: Composed, manifest: Manifest) -> Any:
    """Return the model of the export without values, in the dtypes of the export's files."""
    casts = composed.plan.target.dtypes
    specs = [replace(t, dtype=casts.get(t.fqn, t.dtype)) for t in composed.mapped.manifest.tensors]
    generation = composed.extra.get(_GENERATION)
    return build_skeleton(_require_config(composed, manifest), generation, specs)


def _rows(model: Any, live: Manifest) -> dict[str, int]:
    """Return the name of each parameter and buffer without memory -> the row of its tensor.

    Of tied parameters there is one name.

    Raises:
        NameMismatch: One of them has no tensor of its shape.
        UnsupportedDtype: torch does not cast the stored dtype to its own.
    """
    state = model.state_dict(keep_vars=True)
    empty = {n: t for n, t in state.items() if isinstance(t, torch.Tensor) and t.is_meta}
    rows: dict[str, int] = {}
    filled = set[int]()
    for name, tensor in empty.items():
        row = live.index.get(name)
        same_shape = row is not None and live.tensors[row].shape == tuple(tensor.shape)
        if row is not None and same_shape and id(tensor) not in filled:
            require_cast(name, live.tensors[row].dtype, tensor)
            filled.add(id(tensor))
            rows[name] = row
    lacking = [name for name, tensor in empty.items() if id(tensor) not in filled]
    lacking += [n for n, t in model.named_buffers() if t.is_meta and n not in state]
    if lacking:
        raise NameMismatch(
            f"cannot open the checkpoint as {type(model).__name__}: the maps have no values for "
            f"{listed(lacking)}",
            hint="export it, and open the export",
            missing=lacking,
        )
    return rows


def _allocate(model: Any, device: torch.device) -> None:
    """Give memory to what has none; tied parameters stay one."""
    memory: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # with the former: an id is of one object
    for module in model.modules():
        tensors = [
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ]
        for name, tensor in tensors:
            if not tensor.is_meta:
                continue
            if id(tensor) not in memory:
                fresh = torch.empty_like(tensor, device=device)
                if isinstance(tensor, torch.nn.Parameter):
                    fresh = torch.nn.Parameter(fresh, requires_grad=tensor.requires_grad)
                memory[id(tensor)] = tensor, fresh
            setattr(module, name, memory[id(tensor)][1])


def _require_equal_ties(mapped: Mapped, store: Store) -> None:
    """Require that tensors which the model ties are equal where both are stored, as an export does."""
    if mapped.twins is None:
        return
    sides = (mapped.manifest, mapped.twins)
    records = [Records(store, len(side.items)) for side in sides]
    for number, (_, stays) in enumerate(mapped.ties):
        rows = (mapped.manifest.index[stays], number)
        with ExitStack() as opened:
            readers = [BoxReader(*each, once=False) for each in zip(sides, rows, records, strict=True)]
            for reader in readers:
                opened.callback(reader.close)
            paths = tuple(map(_first_file, sides, rows))
            _require_equal(readers, mapped.twins.tensors[number], (paths[0], paths[1]))


def _require_equal(readers: Sequence[BoxReader], spec: TensorSpec, paths: tuple[str, str]) -> None:
    width = BY_NAME[spec.dtype].itemsize
    scratch, *buffers = (np.empty(PIECE, np.uint8) for _ in range(3))
    for box in Box.full(spec.shape).tiles(PIECE // width):
        tiles = [tile_view(buffer[: box.numel * width], box.shape, spec.dtype) for buffer in buffers]
        for reader, tile in zip(readers, tiles, strict=True):
            reader.read(box, tile, scratch)
        require_equal(tiles[0], tiles[1], box, spec.fqn, lambda: paths)


def _first_file(manifest: Manifest, row: int) -> str:
    """Return the path of the file with a tensor's first chunk."""
    item = int(manifest.chunks.item[manifest.chunks.first[row]])
    return manifest.files[int(manifest.items.file[item])].path
