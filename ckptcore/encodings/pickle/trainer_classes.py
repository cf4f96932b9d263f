"""List the classes of trainers whose instances are kept by name: the only ones that a written pickle names.

A checkpoint keeps such a value as the class's name and its fields, and a written pickle names the class
again, so that the trainer gets its own. The lists are closed: a form that names anything else, such as a
function, would make the program that loads the output call it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptcore.core.object_tree import Named
from ckptcore.encodings.pickle.unpickler import is_member_name
from ckptcore.errors import UnsafeContent
from ckptcore.utils.text import short_repr

# Pickled by value (Lib/enum.py).
MEGATRON_ENUMS = frozenset(
    {
        # megatron/core/enums.py; megatron/core/transformer/enums.py (before 0.13: megatron/core/enums.py)
        "megatron.core.enums.ModelType",
        "megatron.core.transformer.enums.ModelType",
        "megatron.model.enums.ModelType",
        "megatron.core.enums.Fp8Recipe",
        "megatron.core.enums.Fp4Recipe",
        "megatron.core.transformer.enums.LayerType",
        "megatron.core.transformer.enums.AttnType",
        "megatron.core.transformer.enums.AttnMaskType",
        "megatron.core.transformer.enums.AttnBackend",
        "megatron.core.transformer.enums.CudaGraphModule",
        "megatron.core.transformer.enums.CudaGraphScope",
        "megatron.core.transformer.enums.InferenceCudaGraphScope",
        # megatron/legacy/model/enums.py, megatron/model/enums.py
        "megatron.model.enums.LayerType",
        "megatron.model.enums.AttnType",
        "megatron.model.enums.AttnMaskType",
        "megatron.legacy.model.enums.LayerType",
        "megatron.legacy.model.enums.AttnType",
        "megatron.legacy.model.enums.AttnMaskType",
        # megatron/core/rerun_state_machine.py
        "megatron.core.rerun_state_machine.RerunDiagnostic",
        "megatron.core.rerun_state_machine.RerunMode",
        "megatron.core.rerun_state_machine.RerunState",
        # Lib/signal.py: args.exit_signal
        "signal.Signals",
    }
)
# signal(7): what a launcher may send. The others are none that a trainer waits for.
LINUX_SIGNALS = {
    "SIGHUP": 1,
    "SIGINT": 2,
    "SIGQUIT": 3,
    "SIGABRT": 6,
    "SIGUSR1": 10,
    "SIGUSR2": 12,
    "SIGALRM": 14,
    "SIGTERM": 15,
    "SIGCONT": 18,
}
DEEPSPEED_ENUMS = frozenset(
    {
        "deepspeed.runtime.fp16.loss_scaler.LossScaleProfile",
        "deepspeed.runtime.zero.offload_config.OffloadDeviceEnum",  # in ds_config of some versions
    }
)
# Dataclasses and plain classes, pickled as their attributes: of `args`, or of an optimizer's state.
MEGATRON_RECORDS = frozenset(
    {
        "megatron.core.optimizer.optimizer_config.OptimizerConfig",
        "megatron.core.transformer.pipeline_parallel_layer_layout.PipelineParallelLayerLayout",
    }
)
DEEPSPEED_RECORDS = frozenset(
    {
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.fp16.loss_scaler.LossScalerBase",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "deepspeed.checkpoint.universal_checkpoint.SubparamShape",  # of universal folders
    }
)
_ENUMS = MEGATRON_ENUMS | DEEPSPEED_ENUMS
_KNOWN = {"enum": _ENUMS, "enummember": _ENUMS, "record": MEGATRON_RECORDS | DEEPSPEED_RECORDS}
# What an instance is made from: the value or the name of a member, attributes.
_CONTENTS: dict[str, Callable[[Any], bool]] = {
    "enum": lambda value: type(value) in (int, str),
    "enummember": is_member_name,
    "record": lambda attributes: isinstance(attributes, dict),
}


def require_class(kind: str, value: Any) -> tuple[str, str]:
    """Return (module, name) of the class of an ``enum``, ``enummember`` or ``record``.

    Raises:
        UnsafeContent: It is none of the lists above, or the value is not what the class is made from.
    """
    reason = _doubt(kind, value)
    if reason:
        raise UnsafeContent(f"cannot write {reason}: it is not on the allow-list", **{"global": reason})
    module, _, name = value[0].rpartition(".")
    return module, name


def foreign_classes(tree: Any) -> tuple[str, ...]:
    """Return the classes that the values of a decoded tree name, and that are none of the lists above."""
    class_names: dict[str, None] = {}
    queue = [tree]
    while queue:
        value = queue.pop()
        if isinstance(value, Named):
            reason = _doubt(value.kind, value.value) if value.kind in _KNOWN else ""
            if reason:
                class_names[reason] = None
            queue.append(value.value)
        elif isinstance(value, dict):
            queue += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            queue += value
    return tuple(sorted(class_names))


def _doubt(kind: str, value: Any) -> str:
    """Return what is wrong with a value of a known class, as a name; empty if nothing is."""
    if not isinstance(value, (list, tuple)) or len(value) != 2 or type(value[0]) is not str:
        return f"{kind} {short_repr(value, 60)}"
    name, content = value
    return "" if name in _KNOWN[kind] and _CONTENTS[kind](content) else str(short_repr(name, 80)).strip("'\"")
