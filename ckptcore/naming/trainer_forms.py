"""Compare checkpoints of one trainer that has several forms: the forms, and how their names differ.

A trainer may save the same state as a folder and as one file, with other names in each. Both are recognised
by names, because a copy in another format (safetensors, `torch.save`) keeps them. Nothing is guessed: a name
that no rule moves stays as it is, and is then a difference.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptcore.core.manifest import Manifest

# The one trainer with several forms, so far: lightning/pytorch/strategies/fsdp.py and model_parallel.py,
# save_checkpoint; in one file trainer/connectors/checkpoint_connector.py, dump_checkpoint, whose optimizers
# are those of torch.
_TRAINER = "Lightning's Trainer"
_MARKER = "pytorch-lightning_version"  # an object that each of its checkpoints has
_SHARDED = re.compile(r"optimizer_\d{1,9}\.")  # in names that only the folder has
_MODEL = re.compile(r"model\.")  # of the model in a folder, which has no name that `_SINGLE` matches
_SINGLE = re.compile(r"state_dict(\.|$)")  # of the model in a file
# Pattern of the folder's names, and what the file's have there.
_MOVES = (
    (re.compile(r"^model\."), "state_dict."),
    (re.compile(r"^optimizer_(\d{1,9})\."), r"optimizer_states.\1."),
)
_STATE = re.compile(  # in the file
    r"^(?P<head>optimizer_states\.(?P<optimizer>\d+)\.state\.)(?P<number>\d+)(?P<rest>\..+)$"
)
# Path of an entry in a list of parameters.
_LISTED = re.compile(r"^optimizer_states\.(?P<optimizer>\d+)\.param_groups\.\d+\.params\.\d+$")
_FACTS = "lightning"  # key of the origin that has ``parameters``: optimizer -> number -> name


# What a reshard sets in a trainer's state because it leaves out random states, so that the trainer does not
# look for them: pattern of the name, value, why. The formats' writers set them.
SET_BY_RESHARD: tuple[tuple[re.Pattern[str], Any, str], ...] = (
    (re.compile(r"^args\.no_save_rng$"), True, "Megatron must not look for random states"),
    (re.compile(r"^train\.world_size$"), 0, "OLMo-core must not look for random states"),
)


@dataclass(frozen=True, slots=True)
class FormNames:
    """The names and values of one side as both sides have them.

    Attributes:
        moved: Whether the side has the folder's names.
        parameters: Optimizer -> number -> name, where the file proves it.
    """

    moved: bool = False
    parameters: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def because(self) -> str:
        """What was done to the names, for people; empty where nothing was."""
        changes = ["names as in its one file"] if self.moved else []
        changes += ["numbered states by the names of their parameters"] if self.parameters else []
        return f"{_TRAINER}: {' and '.join(changes)}" if changes else ""

    def name(self, name: str) -> str:
        """Return the name under which both sides have a tensor or value."""
        if self.moved:
            for pattern, new in _MOVES:
                name = pattern.sub(new, name)
        state_match = _STATE.match(name) if self.parameters else None
        if state_match is None:
            return name
        parameter = self.parameters.get(state_match["optimizer"], {}).get(state_match["number"])
        return name if parameter is None else f"{state_match['head']}{parameter}{state_match['rest']}"

    def value(self, name: str, value: Any) -> Any:
        """Return a plain value under its common name: a parameter's number becomes its name."""
        match = _LISTED.match(name) if self.parameters and type(value) is int else None
        return self.parameters.get(match["optimizer"], {}).get(str(value), value) if match else value


AS_STORED = FormNames()


def common_names(a: Manifest, b: Manifest) -> tuple[FormNames, FormNames]:
    """Return how the names of two checkpoints become the same; `AS_STORED` twice where they need nothing.

    Both must be of one trainer. Where both have one form, only states that one numbers and the other names
    are moved.
    """
    if not all(any(b.key == _MARKER for b in manifest.blobs) for manifest in (a, b)):
        return AS_STORED, AS_STORED
    sharded, numbers = [_is_sharded(a), _is_sharded(b)], [_numbers(a), _numbers(b)]
    of_a, of_b = (
        FormNames(sharded[side] and not sharded[other], {} if numbers[other] else numbers[side])
        for side, other in ((0, 1), (1, 0))
    )
    return (of_a, of_b) if all(map(_distinct, (of_a, of_b), (a, b))) else (AS_STORED, AS_STORED)


def set_by_reshard(name: str, values: Sequence[Any]) -> str:
    """Return why a reshard has set a plain value to this; empty for any other value."""
    rows = (row for row in SET_BY_RESHARD if row[0].match(name) and list(values) == [row[1]])
    return next((why for _, value, why in rows if type(values[0]) is type(value)), "")


def _is_sharded(manifest: Manifest) -> bool:
    bare = _has(_MODEL, manifest) and not _has(_SINGLE, manifest)
    return bare or _has(_SHARDED, manifest)


def _distinct(names: FormNames, manifest: Manifest) -> bool:
    stored = [t.fqn for t in manifest.tensors]
    return len(set(map(names.name, stored))) == len(stored)


def _names(manifest: Manifest) -> Iterable[str]:
    yield from (t.fqn for t in manifest.tensors)
    yield from (b.key for b in manifest.blobs)


def _has(pattern: re.Pattern[str], manifest: Manifest) -> bool:
    return any(map(pattern.match, _names(manifest)))


def _numbers(manifest: Manifest) -> Mapping[str, Mapping[str, str]]:
    """Return optimizer -> number -> name of a file that numbers states and proves what they belong to."""
    parameters = manifest.origin.get(_FACTS, {}).get("parameters", {})
    return parameters if isinstance(parameters, dict) and _has(_STATE, manifest) else {}
