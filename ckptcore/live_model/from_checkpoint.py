"""Open a checkpoint of any format as a model of transformers, without an export between.

1. The export is planned, and nothing of it is written: what `export` refuses is refused here.
2. `from_pretrained` makes the model of the export's names, without values (`ckptcore.live_model.skeleton`).
3. The maps of live modules say which stored elements each parameter has. They are read into its memory.

The ranks of a mesh share the model by torch's `fully_shard` (FSDP2).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ckptcore.api import Several, speaks_python, url_of
from ckptcore.api import open as open_checkpoint
from ckptcore.core.manifest import Manifest
from ckptcore.errors import CkptError, NameMismatch, UsageError
from ckptcore.live_model.exported_tensors import compose_model, log_findings, require_equal_ties, specs_of
from ckptcore.live_model.skeleton import build_skeleton
from ckptcore.loading.live_tensors import pieces, require_cast
from ckptcore.naming import transformers_private
from ckptcore.naming.worlds import LIVE
from ckptcore.planning.compose import Composed
from ckptcore.planning.hub_files import CONFIG
from ckptcore.planning.live_maps import map_live_names
from ckptcore.planning.name_maps import NameRequest
from ckptcore.planning.request import Request
from ckptcore.reading.fill_memory import Fill, fill_memory
from ckptcore.store import open_source_store
from ckptcore.utils.foreign_text import load_json_object
from ckptcore.utils.isolation import error_of
from ckptcore.utils.text import listed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_GENERATION = "generation_config.json"


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
        request = Request(
            url_of(source),
            "memory://from-checkpoint",  # nothing is written
            verb="export",
            config=None if config is None else os.fspath(config),
            dtype=None if dtype is None else str(dtype).removeprefix("torch."),
            model_prefix=model_prefix,
        )
        composed = compose_model(request, manifest)
        generation = composed.extra.get(_GENERATION)
        # Without values, in the dtypes of the export's files.
        model = build_skeleton(composed.extra[CONFIG], generation, specs_of(composed))
        live = _live_tensors(composed, manifest, request, model)
        rows = _rows(model, live)
        log_findings(composed.warnings)
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
        require_equal_ties(composed.mapped, store)
    model.config.name_or_path = request.source
    return model.to(place)  # buffers that transformers computed


def _live_tensors(composed: Composed, manifest: Manifest, request: Request, model: Any) -> Manifest:
    """Return the tensors of the export under the names of the model's parameters."""
    named = map_live_names(
        composed.mapped,
        NameRequest(
            to=LIVE,
            source=manifest,
            config=load_json_object(composed.extra[CONFIG]),
            url=request.config or CONFIG,
        ),
        parameters=[n for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)],
    )
    return composed.mapped.manifest if named is None else named.mapped.manifest


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


def device_of(mesh: DeviceMesh | None, device: str | torch.device | None) -> torch.device:
    """Return where this rank's part of a model is.

    Raises:
        UsageError: It is not a device of the mesh, or this rank is not in it.
    """
    if mesh is None:
        return torch.device("cpu" if device is None else device)
    if mesh.get_coordinate() is None:
        raise UsageError("cannot open a model: this rank is not in the mesh", hint="call it on its ranks")
    if device is None:
        if mesh.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(mesh.device_type, torch.accelerator.current_device_index())
    if torch.device(device).type != mesh.device_type:
        raise UsageError(f"device must be one of the mesh, {mesh.device_type} (got {device})")
    return torch.device(device)


def shard(model: Any, mesh: DeviceMesh, device: torch.device) -> None:
    """Shard each layer of a model, and the model, and give memory to this rank's part.

    Args:
        model: Its parameters are on the meta device.
        mesh: One axis, or one that replicates before one that shards.
        device: Of this rank.

    Raises:
        UsageError: Parameters have random values, others on each rank.
    """
    from torch.distributed.fsdp import fully_shard

    random = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
    if random:
        raise UsageError(
            f"cannot share {type(model).__name__} between ranks: no checkpoint has {listed(random)}, and "
            "ranks would have different values",
            hint="leave mesh out, and shard the model that is returned",
        )
    computed = {name: buffer.clone() for name, buffer in model.named_buffers() if not buffer.is_meta}
    layers = transformers_private.unsplit_layers(model)
    for module in model.modules():
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        if name in computed:
            buffer.copy_(computed[name])


@contextmanager
def raising_on_all(mesh: DeviceMesh | None) -> Iterator[None]:
    """Raise what one rank raises on every rank of a mesh, so that none waits for another forever."""
    if mesh is None:
        yield
        return
    import torch.distributed as dist

    outcome: CkptError | None = None
    try:
        yield
    except Exception as error:  # the other ranks wait for this one
        outcome = error_of(error)
    # A mesh has groups of single axes: along one after another, an error reaches every rank.
    for group in mesh.get_all_groups():
        outcomes: list[CkptError | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(outcomes, outcome, group)
        outcome = next((reported for reported in outcomes if reported is not None), None)
    if outcome is not None:
        raise outcome
