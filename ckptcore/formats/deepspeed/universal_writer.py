"""Lay out a universal checkpoint folder, which DeepSpeed loads on any number of ranks.

``zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt``, ``zero/optimizer_state.pt``, one model-state file and
``latest_universal``. What DeepSpeed 0.19.8 loads of them, for stages up to 2 (runtime/base_optimizer.py,
checkpoint/universal_checkpoint.py) and for stage 3 (runtime/zero/stage3.py):

| file | stages up to 2 | stage 3 |
|---|---|---|
| model states | ``mp_rank_00``: counters, scheduler, client state | ``zero_pp_rank_0_mp_rank_00``: same |
| ``zero/<parameter>/`` | all files: ``{"param": tensor, "cat_dim": 0}``, a bare step | three, flat |
| ``optimizer_state.pt`` | ``param_groups`` in their order, the loss scale | one group, one step |

It loads no weight of the model-state file: frozen parameters and buffers are there for other readers.
``latest_universal`` holds ``.``, so that the folder itself can be given to `load_checkpoint`.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from ckptcore.core.manifest import TensorSpec
from ckptcore.core.object_tree import Named, TensorRef, tensors_in
from ckptcore.encodings.pickle.writer import Classes
from ckptcore.errors import NameMismatch, UnsupportedFormat
from ckptcore.formats.base import Arrangement, FileLayout, Literal, natural
from ckptcore.formats.common.torch_file import Inline, torch_file
from ckptcore.formats.deepspeed.optimizer_states import MASTER
from ckptcore.formats.deepspeed.universal_contents import (
    MOMENTS,
    SCHEDULER,
    STEP,
    UniversalContents,
    universal_contents,
)
from ckptcore.utils.text import count, short_repr

LATEST = "latest_universal"
_STATES = "zero/optimizer_state.pt"
_MODEL_FILE = {2: "mp_rank_00_model_states.pt", 3: "zero_pp_rank_0_mp_rank_00_model_states.pt"}
# The release whose loaders were tried. They refuse an optimizer's file that names none.
_VERSION = "0.19.8"
# What other trainers call the number of optimizer steps; the first that is there counts.
_COUNTERS = (
    "global_steps",
    "global_step",
    "iteration",
    "step",
    "train.global_step",
    "train_state.step",
    "trainer.global_step",
)
_SCALERS = frozenset(
    f"deepspeed.runtime.fp16.loss_scaler.{name}" for name in ("LossScaler", "DynamicLossScaler")
)
_EXACT = 1 << 24  # up to here float32 has every integer
# Values of an optimizer's file that are written from the contents.
_OF_STATES = frozenset({"state", "optimizer_state_dict", "zero_stage", "ds_version"})


def arrange(request: Arrangement, stage: int) -> Iterator[FileLayout]:
    """Lay out the folder that ZeRO-3 loads, or (2) that ZeRO 1, ZeRO 2 and BF16_Optimizer load.

    Raises:
        UnsupportedFormat: As `universal_contents` does, and for what ZeRO-3 would load wrongly.
    """
    contents = universal_contents(request)
    if stage == 3:
        _require_of_stage3(contents)
    tensors: Sequence[TensorSpec] = request.tensors
    if stage == 3:
        tensors = [TensorSpec(t.fqn, t.dtype, (prod(t.shape),)) for t in tensors]
    for name, parameter in contents.parameters.items():
        _require_folder_name(name)
        for key, position in parameter.states.items():
            ref = TensorRef(request.tensors[position].fqn)
            path = f"zero/{name}/{key}.pt"
            if key == STEP:
                yield torch_file(path, ref, request.tensors, [position])
            else:
                tree = ref if stage == 3 else {"param": ref, "cat_dim": 0}
                yield torch_file(path, tree, tensors, [position])
        if parameter.step is not None:
            ref, inline = _number(parameter.step)
            yield torch_file(f"zero/{name}/{STEP}.pt", ref, request.tensors, [], inline=inline)
    yield _states_file(request, contents, stage)
    yield _model_file(request, contents, stage)
    yield FileLayout(LATEST, 1, (), (), (Literal(0, b"."),), commit=True)


def _require_of_stage3(contents: UniversalContents) -> None:
    """Raise `UnsupportedFormat` for what DeepSpeed's ZeRO-3 leaves out of a universal folder silently."""
    options = [repr(sorted(group.options.items())) for group in contents.groups]
    if len(set(options)) > 1:
        differing = sorted(
            {
                key
                for group in contents.groups
                for key, value in group.options.items()
                if contents.groups[0].options.get(key) != value
            }
        )
        raise UnsupportedFormat(
            f"cannot write {count(len(options), 'parameter group')} for ZeRO-3: DeepSpeed gives every group "
            f"the options of the first (they differ in {', '.join(differing)})",
            hint="load it with ZeRO 1 or 2 (--to deepspeed_universal), whose groups keep their options",
        )
    counts = sorted({p.step for p in contents.parameters.values() if p.step is not None})
    if len(counts) > 1:
        raise UnsupportedFormat(
            f"cannot write step counts from {counts[0]:g} to {counts[-1]:g} for ZeRO-3: DeepSpeed gives "
            "every parameter that of the first",
            hint="write DCP, whose optimizers keep one count each: ckptcore reshard SRC DST --mesh fsdp=N",
        )
    states = next(iter(contents.parameters.values())).states
    extra = sorted(states.keys() - {MASTER, STEP, *MOMENTS})
    if extra:
        raise UnsupportedFormat(
            f"cannot write {', '.join(extra)} for ZeRO-3: DeepSpeed loads {' and '.join(MOMENTS)} alone",
            hint=f"leave it out, if the engine makes its own: --exclude '*.{extra[0]}'",
        )


def _require_folder_name(name: str) -> None:
    parts = name.split("/")
    # A lone surrogate is no text, and a folder like `fp32.pt` is in the way of a state's file.
    odd = any(p in ("", ".", "..") or p.endswith(".pt") for p in parts) or "\\" in name or "\0" in name
    if odd or len(name.encode(errors="surrogatepass")) > 240 or any("\ud800" <= c <= "\udfff" for c in name):
        raise NameMismatch(
            f"cannot write {short_repr(name, 80)}: a universal folder has a folder of each parameter's name",
            hint="rename it with --rename",
        )


def _states_file(request: Arrangement, contents: UniversalContents, stage: int) -> FileLayout:
    """Lay out ``zero/optimizer_state.pt``: the state of the optimizer as one rank has it, without tensors."""
    groups = [{**g.options, "params": list(g.parameters or ())} for g in contents.groups]
    tree: dict[str, Any] = {k: _scaler(v) for k, v in contents.states.items() if k not in _OF_STATES}
    tree |= {"zero_stage": stage, "ds_version": contents.states.get("ds_version") or _VERSION}
    if stage < 3:
        return torch_file(
            _STATES, {**tree, "param_groups": groups}, request.tensors, [], classes=Classes.TRAINERS
        )
    first = next(iter(contents.parameters.values()))
    ref, inline, order = TensorRef(""), dict[str, Inline](), list[int]()
    if first.step is None:
        order = [first.states[STEP]]
        ref = TensorRef(request.tensors[order[0]].fqn)
    else:
        ref, inline = _number(first.step)
    tree["optimizer_state_dict"] = {"state": {0: {STEP: ref}}, "param_groups": groups}
    return torch_file(_STATES, tree, request.tensors, order, classes=Classes.TRAINERS, inline=inline)


def _model_file(request: Arrangement, contents: UniversalContents, stage: int) -> FileLayout:
    """Lay out the model-state file of the only rank: what DeepSpeed loads beside ``zero/``."""
    position = {t.fqn: i for i, t in enumerate(request.tensors)}
    client = dict(contents.client)
    module: OrderedDict[str, Any] = OrderedDict()
    for name in sorted({*contents.module, *contents.module_objects}, key=natural):
        stored = contents.module.get(name)
        module[name] = contents.module_objects[name] if stored is None else TensorRef(stored)
    listed = [list(group.parameters or ()) for group in contents.groups]
    grouped_names = {name for names in listed for name in names}
    # Tied to a parameter of another name: a reader of DeepSpeed's own folders gives them its states.
    listed[0] += [name for name in contents.parameters if name not in grouped_names]
    shapes = [
        OrderedDict((name, Named("size", list(contents.parameters[name].shape))) for name in names)
        for names in listed
    ]
    ours = "ds_version" in client
    tree: dict[str, Any] = {
        "module": module,
        "buffer_names": [],  # nothing tells buffers from frozen parameters
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        SCHEDULER: contents.scheduler,
        "data_sampler": client.pop("data_sampler", None),
        "random_ltd": client.pop("random_ltd", None),
        "sparse_tensor_module_names": client.pop("sparse_tensor_module_names", []),
        "skipped_steps": client.pop("skipped_steps", 0),
        "global_steps": _global_steps(client),
        "dp_world_size": 1,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": client.pop("ds_config", {"zero_optimization": {"stage": stage}}),
        "ds_version": client.pop("ds_version", _VERSION),
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
    }
    client.pop("global_steps", None)
    tree |= client
    tree |= {name: TensorRef(name) for name in contents.loose}
    order = sorted(
        {position[name] for name in tensors_in(tree)}, key=lambda i: natural(request.tensors[i].fqn)
    )
    classes = Classes.TRAINERS if ours else Classes.LIBRARIES
    return torch_file(_MODEL_FILE[stage], tree, request.tensors, order, classes=classes)


def _global_steps(client: Mapping[str, Any]) -> int:
    """Return the number of optimizer steps that the trainer counted; 0 where it kept none."""
    counts = (client[key] for key in _COUNTERS if type(client.get(key)) is int)
    return next(counts, 0)


def _scaler(value: Any) -> Any:
    """Return the loss scaler as an instance of its class, which DeepSpeed sets as its own."""
    if isinstance(value, dict) and value.get("class") in _SCALERS:
        return Named("record", [value["class"], {k: v for k, v in value.items() if k != "class"}])
    return value


def _number(step: float) -> tuple[TensorRef, dict[str, Inline]]:
    """Return a step count as torch's optimizers keep it: a float32 tensor without dims."""
    name = "\0step"  # no tensor has such a name
    if not float(step).is_integer() or abs(step) > _EXACT:
        raise UnsupportedFormat(
            f"cannot write a step count of {step}: torch's optimizers keep it in float32, which has none",
            hint="leave the optimizer out: --exclude 'optimizer*'",
        )
    return TensorRef(name), {name: (TensorSpec(name, "float32", ()), struct.pack("<f", step))}
