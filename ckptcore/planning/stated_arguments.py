"""State numbers for a trainer's loader, and compare what is written for it with the model's config."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptcore.errors import Finding, NameMismatch, UsageError, finding
from ckptcore.naming.maps.agreement import agreed, agreement
from ckptcore.naming.maps.hub_config import TEXT, field_of
from ckptcore.naming.maps.hyperparameters import NUMBERS, Config, hub_places
from ckptcore.naming.worlds import HUB
from ckptcore.planning.name_maps import NameMap
from ckptcore.utils.text import listed

# Fields that differ in nothing where attention sees all tokens, as a trainer's does without a window.
_OF_WINDOW = {"sliding_window", "use_sliding_window", "layer_types", "max_window_layers"}


def stated_numbers(naming: NameMap, place: str, *names: str) -> dict[str, int | float]:
    """Return the numbers that configs, names and shapes state.

    Args:
        naming: How the tensors got the trainer's names.
        place: Where the numbers are to be written, for messages.
        *names: Those that must be there.

    Raises:
        UsageError: One of them is not.
    """
    numbers = {name: value for name, (value, _) in {**agreed(naming.configs), **naming.numbers}.items()}
    if lacking := [name for name in names if name not in numbers]:
        raise UsageError(
            f"cannot write {place}: no config says {listed(lacking, 12)}",
            hint="add --config with the model's config.json, or write the weights alone: --to dcp",
        )
    return numbers


def unstated(
    naming: NameMap, written: Config, place: str, stated_as_is: Sequence[str] = ()
) -> Iterator[Finding]:
    """Compare a trainer's config with the model's, as that of a training is; yield what it does not say.

    Args:
        naming: How the tensors got the trainer's names.
        written: The trainer's config.
        place: Where it is written, for messages.
        stated_as_is: Fields of the model's config that it says as they are, with those below them.

    Raises:
        NameMismatch: It would say something else than the model's config.
    """
    config = next((c for c in naming.configs if c.world == HUB), None)
    if config is None or config.fields is None:
        return
    comparison = agreement(config, [written])
    for contradiction in comparison.contradictions:
        raise NameMismatch(
            f"nothing in {place} says what the config does: {contradiction.text}",
            hint="try --to dcp, which has the weights alone",
        )
    fields = config.fields
    equal = {"model_type"} | {
        field_of(key.partition(" ")[0])
        for number, (value, key) in config.numbers.items()
        if written.numbers.get(number, (None,))[0] == value
    }
    # Sizes that the config's class does not have are compared, too: its model may read them.
    equal |= {
        name
        for number in NUMBERS & written.numbers.keys()
        for name in hub_places(number)
        if (size := fields.get(name)) is not None and size.value == written.numbers[number][0]
    }
    if not config.numbers.get("window", (0, ""))[0]:
        equal |= _OF_WINDOW
    stated = {f for f in comparison.unconfirmed if (s := fields.get(f)) is not None and s.value is not None}
    stated = {f for f in stated if not any(f == name or f.startswith(f"{name}.") for name in stated_as_is)}
    if lacking := sorted(f for f in stated if equal.isdisjoint((f, f.removeprefix(f"{TEXT}.")))):
        message = f"{place} does not say {listed(lacking, 12)} of {config.name}"
        yield finding("unstated-arguments", "coverage", message)
