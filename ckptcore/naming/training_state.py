"""Recognise what only a resumed training needs: optimizer, schedulers, random states, progress.

A name belongs to it by its first path element, such as ``optim.state.layers.0.weight.exp_avg`` or
``rng_state/shard_0``; elements of `_CONTAINERS` before that do not count. Names of the model part are never
asked for. Whatever is not in the table, an average of the weights (EMA) or a second model, is not training
state: giving it up needs its own name.

Of its own because what may be deleted rests on this table alone; `model_part` finds what must stay.
"""

from __future__ import annotations

import re

OPTIMIZER = "optimizer"
# kind -> path elements that name it in torch, torchtitan, verl, Lightning, Megatron, DeepSpeed, Accelerate.
_KINDS = {
    OPTIMIZER: r"optim|optimizers?(_\d+)?|optim(izer)?_states?|optimizer_state_dict|chained_\d+|param_groups",
    "scheduler": r"(lr_)?schedulers?(_\d+)?|opt_param_scheduler",
    "random state": r"rng|(cuda_)?rng_states?|random_states?(_\d+)?",
    "data loader": r"data_?loaders?|dl_state|samplers?(_\d+)?",
    "loss scaler": r"(grad_|loss_)?scaler",
    "progress": r"(global_|skipped_)?steps?|iter|iteration|epoch|global_samples|train_state|loops"
    r"|num_floating_point_operations_so_far|checkpoint_version",
}
_NAMED = {kind: re.compile(names) for kind, names in _KINDS.items()}
_CONTAINERS = frozenset({"app", "extra_state", "client_state"})


def training_state(name: str) -> str | None:
    """Return the kind of training state that a name outside of the model part is, or None.

    >>> training_state("optim.state.w.exp_avg"), training_state("extra_state.rng.a"), training_state("step")
    ('optimizer', 'random state', 'progress')
    >>> training_state("ema_state.w"), training_state("layers.0.step"), training_state("args")
    (None, None, None)
    """
    parts = re.split(r"[./]", name)
    while len(parts) > 1 and parts[0] in _CONTAINERS:
        parts.pop(0)
    return next((kind for kind, names in _NAMED.items() if names.fullmatch(parts[0])), None)
