"""Make what a trainer's loader reads beside the weights of a model that a run begins from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckptcore.core.manifest import TensorSpec
from ckptcore.errors import Finding
from ckptcore.planning.megatron_arguments import common_state
from ckptcore.planning.name_maps import NameMap
from ckptcore.planning.nanotron_config import model_config
from ckptcore.planning.olmo_core_config import step_config

StartState = Callable[
    [NameMap, Sequence[TensorSpec], Mapping[str, int]], tuple[dict[str, Any], tuple[Finding, ...]]
]
# World of names -> the objects that a format's layout of a start puts into files of their own.
_STATES: Mapping[str, StartState] = {
    "megatron": common_state,
    "nanotron": model_config,
    "olmo_core": step_config,
}


def start_state(
    naming: NameMap, tensors: Sequence[TensorSpec], mesh: Mapping[str, int]
) -> tuple[dict[str, Any], tuple[Finding, ...]]:
    """Return key -> JSON form of the objects beside the weights, and findings about what they do not say.

    Args:
        naming: How the tensors got the trainer's names.
        tensors: Under these names.
        mesh: Axis -> ranks.

    Raises:
        NameMismatch: No config of the trainer says what the model's does.
        UsageError: The trainer cannot cut the model for this mesh.
    """
    return _STATES[naming.to](naming, tensors, mesh)
