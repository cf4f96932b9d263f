"""Pickles as older releases of torch wrote them: globals by name, without the classes being there."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Global:
    """A global that is named."""

    name: str


@dataclass(frozen=True)
class Called:
    """``function(*args)`` as REDUCE, or as NEWOBJ; with a state, BUILD follows."""

    function: Global
    args: tuple[Any, ...] = ()
    state: Any = None
    new: bool = False


class Pickler(pickle._Pickler):  # the pure one: its saving of globals can be replaced
    """Protocol 2, with tensors as torch.save pickles them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, 2)
        self.storages: list[torch.Tensor] = []

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, Global):
            module, _, name = obj.name.rpartition(".")
            self.write(b"c" + module.encode() + b"\n" + name.encode() + b"\n")
        elif isinstance(obj, Called):
            self.save(obj.function)
            self.save(obj.args)
            self.write(pickle.NEWOBJ if obj.new else pickle.REDUCE)
            if obj.state is not None:
                self.save(obj.state)
                self.write(pickle.BUILD)
        elif isinstance(obj, torch.Tensor):
            kind = {torch.float32: "FloatStorage", torch.int64: "LongStorage", torch.int32: "IntStorage"}
            key = str(len(self.storages))
            self.storages.append(obj.contiguous())
            self.save(Global("torch._utils._rebuild_tensor_v2"))
            self.write(pickle.MARK)
            self.save(("storage", Global(f"torch.{kind[obj.dtype]}"), key, "cpu", obj.numel()))
            self.write(pickle.BINPERSID)
            hooks = Called(Global("collections.OrderedDict"))
            for value in (0, tuple(obj.shape), obj.contiguous().stride(), False, hooks):
                self.save(value)
            self.write(pickle.TUPLE + pickle.REDUCE)
        elif obj is torch.float32:
            self.save(Global("torch.float32"))
        else:
            super().save(obj, save_persistent_id)


def save(tree: Any, path: Path) -> None:
    """A torch zip of ``tree``, without the records that torch 2.7 added."""
    raw = io.BytesIO()
    pickler = Pickler(raw)
    pickler.dump(tree)
    writer = torch._C.PyTorchFileWriter(str(path))
    writer.write_record("data.pkl", raw.getvalue(), len(raw.getvalue()))
    for key, tensor in enumerate(pickler.storages):
        data = tensor.numpy().tobytes()
        writer.write_record(f"data/{key}", data, len(data))
    writer.write_end_of_file()


# Module of DTensor, of its spec and placements, and of DeviceMesh, by release.
MODULES = {
    "2.1": (
        "torch.distributed._tensor.api",
        "torch.distributed._tensor.placement_types",
        "torch.distributed._tensor.placement_types",
        "torch.distributed._tensor.device_mesh",
    ),
    "2.4": (
        "torch.distributed._tensor.api",
        "torch.distributed._tensor.placement_types",
        "torch.distributed._tensor.placement_types",
        "torch.distributed.device_mesh",
    ),
    "2.6": (
        "torch.distributed.tensor",
        "torch.distributed.tensor._dtensor_spec",
        "torch.distributed.tensor.placement_types",
        "torch.distributed.device_mesh",
    ),
    "2.10": (
        "torch.distributed.tensor",
        "torch.distributed.tensor._dtensor_spec",
        "torch.distributed.tensor.placement_types",
        "torch.distributed.device_mesh",
    ),
}


def dtensor(
    release: str,
    local: torch.Tensor,
    shape: tuple[int, ...],
    ranks: torch.Tensor,
    coordinate: list[int] | None,
    placements: list[tuple[str, dict[str, int]]],
) -> Called:
    """A DTensor as that release of torch pickles it."""
    module, spec, placement, mesh = MODULES[release]
    kind = Global(f"{module}.DTensor")
    stride = torch.empty(shape, device="meta").stride()
    meta = (shape, stride, torch.float32)
    mesh_state: dict[str, Any] = {
        "device_type": "cpu",
        "mesh": ranks,
        "mesh_dim_names": None,
        "_coordinate_on_dim": coordinate,
    }
    if release == "2.10":
        axes = {"shape": tuple(ranks.shape), "stride": ranks.stride()}
        mesh_state["_layout"] = Called(
            Global("torch.distributed._mesh_layout._MeshLayout"), (), axes, new=True
        )
        mesh_state |= {"_rank_map": ranks.flatten(), "_flatten_rank_map": tuple(ranks.flatten().tolist())}
        mesh_state |= {
            "_root_mesh": None,
            "_mesh_dim_names": None,
            "_device_type": mesh_state.pop("device_type"),
        }
        del mesh_state["mesh"]
    if release == "2.1":
        meta_value = Called(
            Global("torch.fx.passes.shape_prop.TensorMetadata"),
            (shape, torch.float32, False, stride, None, False, {}),
            new=True,
        )
        mesh_state["_dim_group_infos"] = [("", ranks.flatten().tolist())]
    else:
        meta_value = Called(Global(f"{spec}.TensorMeta"), meta, new=True)
        mesh_state |= {"_flatten_mesh_list": tuple(ranks.flatten().tolist()), "_thread_id": 1, "_hash": 5}
    fields = {
        "mesh": Called(Global(f"{mesh}.DeviceMesh"), (), mesh_state, new=True),
        "placements": tuple(
            Called(Global(f"{placement}.{name}"), (), state, new=True) for name, state in placements
        ),
        "tensor_meta": meta_value,
    }
    state = (
        None,
        {"_local_tensor": local, "_spec": Called(Global(f"{spec}.DTensorSpec"), (), fields, new=True)},
    )
    layout = Called(Global("torch.serialization._get_layout"), ("torch.strided",))
    device = Called(Global("torch.device"), ("cpu",))
    args = (kind, torch.float32, shape, stride, 0, layout, device, False)
    return Called(
        Global("torch._tensor._rebuild_from_type_v2"),
        (Global("torch._utils._rebuild_wrapper_subclass"), kind, args, state),
    )
