"""Share a model without values between the ranks of a mesh, by torch's `fully_shard` (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ckptcore.errors import CkptError, UsageError
from ckptcore.naming import transformers_private
from ckptcore.utils.isolation import error_of
from ckptcore.utils.text import listed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
        on_host = mesh.device_type == "cpu"
        return torch.device("cpu") if on_host else torch.device(mesh.device_type, _current_index())
    if torch.device(device).type != mesh.device_type:
        raise UsageError(f"device must be one of the mesh, {mesh.device_type} (got {device})")
    return torch.device(device)


def _current_index() -> int:
    return torch.accelerator.current_device_index()


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
