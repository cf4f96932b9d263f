"""Compare checkpoints of one trainer that has several forms: a table of the forms, and of how names differ.

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


@dataclass(frozen=True, slots=True)
class TrainerForm:
    """The forms of one trainer.

    Attributes:
        trainer: Its name, for people.
        marker: Key of an object that each of its checkpoints has.
        sharded: Matches names that only the folder has.
        model: Matches the model's names in a folder, which has none that ``single`` matches.
        single: Matches the model's names in a file.
        moves: (pattern of the folder's names, replacement): the file's names.
        state: Matches the file's name of a state, with the groups ``optimizer``, ``number`` and ``rest``.
        listed: Matches the path of an entry in a list of parameters, with the group ``optimizer``.
        facts: Key of the origin that has ``parameters``: optimizer -> number -> name.
    """

    trainer: str
    marker: str
    sharded: re.Pattern[str]
    model: re.Pattern[str]
    single: re.Pattern[str]
    moves: tuple[tuple[re.Pattern[str], str], ...]
    state: re.Pattern[str]
    listed: re.Pattern[str]
    facts: str


FORMS = (
    # lightning/pytorch/strategies/fsdp.py and model_parallel.py, save_checkpoint; in one file
    # trainer/connectors/checkpoint_connector.py, dump_checkpoint, whose optimizers are those of torch.
    TrainerForm(
        "Lightning's Trainer",
        "pytorch-lightning_version",
        sharded=re.compile(r"optimizer_\d{1,9}\."),
        model=re.compile(r"model\."),
        single=re.compile(r"state_dict(\.|$)"),
        moves=(
            (re.compile(r"^model\."), "state_dict."),
            (re.compile(r"^optimizer_(\d{1,9})\."), r"optimizer_states.\1."),
        ),
        state=re.compile(
            r"^(?P<head>optimizer_states\.(?P<optimizer>\d+)\.state\.)(?P<number>\d+)(?P<rest>\..+)$"
        ),
        listed=re.compile(r"^optimizer_states\.(?P<optimizer>\d+)\.param_groups\.\d+\.params\.\d+$"),
        facts="lightning",
    ),
)


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
        form: The forms of the trainer, or None to keep everything.
        moved: Whether the side has the folder's names.
        parameters: Optimizer -> number -> name, where the file proves it.
    """

    form: TrainerForm | None = None
    moved: bool = False
    parameters: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def because(self) -> str:
        """What was done to the names, for people; empty where nothing was."""
        if self.form is None:
            return ""
        changes = ["names as in its one file"] if self.moved else []
        changes += ["numbered states by the names of their parameters"] if self.parameters else []
        return f"{self.form.trainer}: {' and '.join(changes)}" if changes else ""

    def name(self, name: str) -> str:
        """Return the name under which both sides have a tensor or value."""
        if self.form is None:
            return name
        if self.moved:
            for pattern, new in self.form.moves:
                name = pattern.sub(new, name)
        state_match = self.form.state.match(name) if self.parameters else None
        if state_match is None:
            return name
        parameter = self.parameters.get(state_match["optimizer"], {}).get(state_match["number"])
        return name if parameter is None else f"{state_match['head']}{parameter}{state_match['rest']}"

    def value(self, name: str, value: Any) -> Any:
        """Return a plain value under its common name: a parameter's number becomes its name."""
        if self.form is None or not self.parameters or type(value) is not int:
            return value
        match = self.form.listed.match(name)
        return self.parameters.get(match["optimizer"], {}).get(str(value), value) if match else value


AS_STORED = FormNames()


def common_names(a: Manifest, b: Manifest) -> tuple[FormNames, FormNames]:
    """Return how the names of two checkpoints become the same; `AS_STORED` twice where they need nothing.

    Both must be of one trainer. Where both have one form, only states that one numbers and the other names
    are moved.
    """
    for form in FORMS:
        if not (_is_of(form, a) and _is_of(form, b)):
            continue
        sharded = _is_sharded(form, a), _is_sharded(form, b)
        numbers = _numbers(form, a), _numbers(form, b)
        names_of_a, names_of_b = (
            FormNames(
                form, sharded[side] and not sharded[opposite], {} if numbers[opposite] else numbers[side]
            )
            for side, opposite in ((0, 1), (1, 0))
        )
        if all(map(_distinct, (names_of_a, names_of_b), (a, b))):
            return names_of_a, names_of_b
    return AS_STORED, AS_STORED


def set_by_reshard(name: str, values: Sequence[Any]) -> str:
    """Return why a reshard has set a plain value to this; empty for any other value."""
    rows = (row for row in SET_BY_RESHARD if row[0].match(name) and list(values) == [row[1]])
    return next((why for _, value, why in rows if type(values[0]) is type(value)), "")


def _is_sharded(form: TrainerForm, manifest: Manifest) -> bool:
    bare = _has(form.model, manifest) and not _has(form.single, manifest)
    return bare or _has(form.sharded, manifest)


def _distinct(names: FormNames, manifest: Manifest) -> bool:
    stored = [t.fqn for t in manifest.tensors]
    return len(set(map(names.name, stored))) == len(stored)


def _is_of(form: TrainerForm, manifest: Manifest) -> bool:
    return any(b.key == form.marker for b in manifest.blobs)


def _names(manifest: Manifest) -> Iterable[str]:
    yield from (t.fqn for t in manifest.tensors)
    yield from (b.key for b in manifest.blobs)


def _has(pattern: re.Pattern[str], manifest: Manifest) -> bool:
    return any(map(pattern.match, _names(manifest)))


def _numbers(form: TrainerForm, manifest: Manifest) -> Mapping[str, Mapping[str, str]]:
    """Return optimizer -> number -> name of a file that numbers states and proves what they belong to."""
    parameters = manifest.origin.get(form.facts, {}).get("parameters", {})
    return parameters if isinstance(parameters, dict) and any(map(form.state.match, _names(manifest))) else {}
