"""Assign each tensor of a checkpoint to a parameter of the model: its value, or a state of its optimizer.

Optimizers name the state by the parameter: ``optim.state.<fqn>.exp_avg``, ``optimizer.state.exp_avg.<fqn>``.

An optimizer has state for what it trains. A weight without state, in a checkpoint whose optimizer has state
for others by name, is frozen, if it is called like one that is trained: ``weight``, not ``running_mean``,
which a forward pass changes. Where the optimizer is not stored, or numbers its parameters, nothing is known.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptcore.core.manifest import Manifest
from ckptcore.errors import AmbiguousModel
from ckptcore.naming.model_part import find_model, in_model
from ckptcore.naming.moments import endings, trained_parameters
from ckptcore.naming.rename import strip_wrappers

Shape = tuple[int, ...]
STATE, WEIGHT, TRAINED, FROZEN = "state", "weight", "trained", "frozen"  # roles of tensors


def parameters(manifest: Manifest, prefix: str | None) -> tuple[dict[str, Shape], dict[str, str]]:
    """Return (shape by parameter, parameter by tensor of the manifest).

    If the model cannot be found, every tensor is a parameter, unless it has a parameter's shape and the name
    of a state.

    Args:
        manifest: The checkpoint.
        prefix: Prefix of the model's names, or None to find it.

    Raises:
        AmbiguousModel: No name has the prefix.
    """
    try:
        model = find_model(manifest, prefix)
    except AmbiguousModel:
        if prefix is not None:
            raise
        model = None
    shapes: dict[str, Shape] = {}
    owner: dict[str, str] = {}
    for spec in manifest.tensors:
        if model is None:
            name = spec.fqn
        elif not spec.fqn.startswith(model.prefix) or model.foreign(spec.fqn[len(model.prefix) :]):
            continue
        else:
            name = spec.fqn[len(model.prefix) :]
        owner[spec.fqn] = strip_wrappers(name)
        shapes.setdefault(owner[spec.fqn], spec.shape)
    index = _Index(shapes)
    for spec in manifest.tensors:
        if spec.fqn not in owner:
            of = index.inside(strip_wrappers(spec.fqn))
            if of is not None:
                owner[spec.fqn] = of
            continue
        of = index.inside(owner[spec.fqn], state=True)
        if of is not None and shapes[of] == spec.shape:
            owner[spec.fqn] = of
    owners = set(owner.values())
    return {n: s for n, s in shapes.items() if n in owners}, owner


class _Index:
    """Finder of the longest parameter name between the dots of a longer name."""

    def __init__(self, names: Mapping[str, object]) -> None:
        self.names = names
        self.lengths: dict[str, set[int]] = {}
        for name in names:
            parts = name.split(".")
            self.lengths.setdefault(parts[0], set()).add(len(parts))

    def inside(self, name: str, state: bool = False) -> str | None:
        """Return the parameter in a name, or None.

        state: only if the name goes on after it, or has ``state`` before it: ``layers.0.norm.weight`` is no
        state of ``norm.weight``.
        """
        parts = name.split(".")
        best: tuple[int, str] | None = None
        for start, first in enumerate(parts):
            for n in self.lengths.get(first, ()):
                inner = ".".join(parts[start : start + n])
                fits = start + n <= len(parts) and n < len(parts) and inner in self.names
                fits = fits and (not state or start + n < len(parts) or "state" in parts[:start])
                if fits and (best is None or n > best[0]):
                    best = n, inner
        return best[1] if best else None


def roles_of(manifest: Manifest) -> dict[str, str]:
    """Return FQN -> its role: STATE, TRAINED, FROZEN, or WEIGHT where nothing more is known of a weight."""
    inside = in_model(manifest, None)
    weights = {spec.fqn: name for spec in manifest.tensors if (name := inside(spec.fqn)) is not None}
    parameters = {
        name for names in trained_parameters(t.fqn for t in manifest.tensors).values() for name in names
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
