"""Tell weights that are trained from frozen ones and from training state, by what a checkpoint stores.

An optimizer has state for what it trains. A weight without state, in a checkpoint whose optimizer has state
for others by name, is frozen, if it is called like one that is trained: ``weight``, not ``running_mean``,
which a forward pass changes. Where the optimizer is not stored, or numbers its parameters, nothing is known.
"""

from __future__ import annotations

from ckptcore.core.manifest import Manifest
from ckptcore.naming.model_part import in_model
from ckptcore.naming.moments import endings, trained_parameters

STATE, WEIGHT, TRAINED, FROZEN = "state", "weight", "trained", "frozen"


def roles_of(manifest: Manifest) -> dict[str, str]:
    """Return FQN -> its role: STATE, TRAINED, FROZEN, or WEIGHT where nothing more is known of a weight."""
    inside = in_model(manifest, None)
    weights = {spec.fqn: name for spec in manifest.tensors if (name := inside(spec.fqn)) is not None}
    parameters = {
        name for own in trained_parameters(t.fqn for t in manifest.tensors).values() for name in own
    }
    # The optimizer may call a parameter by its stored name, or by one without the names around the model.
    trained = {
        fqn
        for fqn, name in weights.items()
        if name in parameters or any(ending in parameters for ending in endings(fqn))
    }
    last = {fqn.rpartition(".")[2] for fqn in trained}
    roles = {}
    for spec in manifest.tensors:
        role = WEIGHT if spec.fqn in weights else STATE
        if spec.fqn in trained:
            role = TRAINED
        elif role == WEIGHT and spec.fqn.rpartition(".")[2] in last:
            role = FROZEN
        roles[spec.fqn] = role
    return roles
