"""Which parameter is an optimizer's number n? Told only where the checkpoint itself proves it.

A full checkpoint's optimizer counts parameters (torch/optim/optimizer.py, state_dict), in the order of
``parameters()``, which is that of the state dict without its buffers. When one group holds them all
and the shapes of their moments fit the state dict in order in exactly one way, the names are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptcore.dtype import BY_NAME
from ckptcore.formats._torchtables import StoredView

# torch/nn/modules/batchnorm.py, _NormBase.
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
# State that has the parameter's own shape.
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum", "grad_avg")


def parameter_names(tree: Mapping[Any, Any]) -> dict[str, list[str]]:
    """``optimizer_states`` index, as text -> the names of its parameters 0, 1, ...."""
    states, model = tree.get("optimizer_states"), tree.get("state_dict")
    if not isinstance(states, list) or not isinstance(model, dict):
        return {}
    entries = [(k, v.shape) for k, v in model.items() if isinstance(k, str) and _may_be_parameter(k, v)]
    found: dict[str, list[str]] = {}
    for n, state in enumerate(states):
        shapes = _shapes(state)
        if shapes is not None:
            at = only_embedding(shapes, [s for _, s in entries])
            if at is not None:
                found[str(n)] = [entries[i][0] for i in at]
    return found


def only_embedding(wanted: Sequence[Any], there: Sequence[Any]) -> list[int] | None:
    """Positions of ``wanted`` in ``there``, in order; None when there is no way or more than one.

    >>> only_embedding("ac", "abc"), only_embedding("a", "aa"), only_embedding("ca", "abc")
    ([0, 2], None, None)
    """
    first = _leftmost(wanted, there)
    if first is None:
        return None
    last = _leftmost(wanted[::-1], there[::-1])
    assert last is not None  # what fits from one side fits from the other
    return first if first == [len(there) - 1 - i for i in reversed(last)] else None


def _leftmost(wanted: Sequence[Any], there: Sequence[Any]) -> list[int] | None:
    found: list[int] = []
    at = 0
    for shape in wanted:
        while at < len(there) and there[at] != shape:
            at += 1
        if at == len(there):
            return None
        found.append(at)
        at += 1
    return found


def _may_be_parameter(name: str, value: Any) -> bool:
    """Whether it is a tensor that can have a gradient, and no buffer of torch's own norms."""
    if not isinstance(value, StoredView) or BY_NAME[value.dtype].kind not in "fc":
        return False
    return name.rpartition(".")[2] not in _BUFFERS


def _shapes(state: Any) -> list[tuple[int, ...]] | None:
    """The shapes of parameters 0, 1, ... of an optimizer with one group and a moment for each."""
    groups = state.get("param_groups") if isinstance(state, dict) else None
    if not isinstance(groups, list) or len(groups) != 1 or not isinstance(groups[0], dict):
        return None
    held, ids = state.get("state"), groups[0].get("params")
    if not isinstance(held, dict) or not isinstance(ids, list) or ids != list(range(len(ids))):
        return None
    shapes: list[tuple[int, ...]] = []
    for number in ids:
        own = held.get(number)
        moments = [own[k] for k in _MOMENTS if isinstance(own, dict) and isinstance(own.get(k), StoredView)]
        if not moments or any(m.shape != moments[0].shape for m in moments):
            return None
        shapes.append(moments[0].shape)
    return shapes
