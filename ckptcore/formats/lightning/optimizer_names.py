"""Name the numbered parameters of the optimizers in a full checkpoint, where the file itself proves them.

The Trainer keeps the numbers of torch's optimizers; the FSDP and ModelParallel strategies number in the
order of the model's parameters (lightning/pytorch/strategies/fsdp.py and model_parallel.py, optimizer_state).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptcore.core.dtype import BY_NAME
from ckptcore.encodings.pickle.torch_globals import StoredView
from ckptcore.errors import Finding, finding
from ckptcore.formats.common.optimizer_numbers import NumberingProof, numbered, prove
from ckptcore.formats.common.shape_matching import Shape

# torch/nn/modules/batchnorm.py, _NormBase.
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def parameter_names(tree: Mapping[Any, Any], file: str) -> tuple[dict[str, dict[str, str]], list[Finding]]:
    """Return names of the parameters, and findings for optimizers without a proof.

    Args:
        tree: Content of the file.
        file: Its path, for findings.

    Returns:
        (index in ``optimizer_states`` -> number -> name, with index and number as text; findings).
    """
    states, model = tree.get("optimizer_states"), tree.get("state_dict")
    if not isinstance(states, list) or not isinstance(model, dict):
        return {}, []
    optimizers = {n: o for n, state in enumerate(states) if (o := numbered(state)) is not None}
    proofs = prove(_possible_parameters(model), list(optimizers.values()), _shape)
    names: dict[str, dict[str, str]] = {}
    findings: list[Finding] = []
    for (n, optimizer), proof in zip(optimizers.items(), proofs, strict=True):
        if proof.names:
            names[str(n)] = {str(i): name for i, name in sorted(proof.names.items())}
        elif proof.names is None:
            findings.append(_unproven(f"optimizer_states.{n}", len(optimizer.ids), proof, file))
    return names, findings


def _unproven(where: str, count: int, proof: NumberingProof, file: str) -> Finding:
    message = f"{where} numbers its {count} parameters: {proof.why}"
    return finding("unnamed-states", "files", message, fqn=where, file=file)


def _possible_parameters(model: Mapping[Any, Any]) -> list[tuple[str, Shape]]:
    """Return the possible parameters, tied ones once; a state dict has the order of ``parameters()``."""
    views: set[StoredView] = set()
    parameters: list[tuple[str, Shape]] = []
    for name, value in model.items():
        if isinstance(name, str) and _may_be_parameter(name, value) and value not in views:
            if value.shape.count(0) == 0:  # empty storages are all alike
                views.add(value)
            parameters.append((name, value.shape))
    return parameters


def _may_be_parameter(name: str, value: Any) -> bool:
    """Return whether a value is a tensor that can have a gradient, and no buffer of torch's own norms."""
    if not isinstance(value, StoredView) or BY_NAME[value.dtype].kind not in "fc":
        return False
    return name.rpartition(".")[2] not in _BUFFERS


def _shape(value: Any) -> Shape | None:
    return value.shape if isinstance(value, StoredView) else None
