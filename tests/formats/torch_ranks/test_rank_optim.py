"""Number optimizer states for rank files: what can be numbered, and what stays named."""

from __future__ import annotations

from typing import Any

import pytest

from ckptcore.errors import UnprovenCheckpoint
from ckptcore.formats.torch_ranks.optimizer import numbers_for

PARAMS = (("a", (3, 2)), ("b", (3,)), ("c", (3,)))
A, B, C = {"exp_avg": (3, 2)}, {"exp_avg": (3,)}, {"exp_avg": (3,), "step": 1}


def shape(value: Any) -> Any:
    return value if type(value) is tuple else None


def numbered(state: Any, groups: Any) -> Any:
    return numbers_for({"state": state, "param_groups": groups, "kept": 5}, PARAMS, shape)


def test_names_become_numbers_in_the_order_of_the_groups() -> None:
    found = numbered({"c": C, "a": A, "b": B}, [{"params": ["a", "b"], "lr": 1}, {"params": ["c"], "lr": 2}])
    assert found["state"] == {0: A, 1: B, 2: C}
    assert [g["params"] for g in found["param_groups"]] == [[0, 1], [2]]
    assert [g["lr"] for g in found["param_groups"]] == [1, 2]
    assert found["kept"] == 5


def test_an_unproven_order_is_refused() -> None:
    """Two parameters of one shape, not in the model's order.

    A job that lists them in its model's order would give each the other's moments.
    """
    with pytest.raises(UnprovenCheckpoint, match="lists c where the model has b") as caught:
        numbered({"c": C, "b": B}, [{"params": ["c", "b"]}])
    assert "--exclude" in caught.value.hint
    with pytest.raises(UnprovenCheckpoint, match="x is not in the model"):
        numbered({"a": A, "x": B}, [{"params": ["a", "x"]}])


def test_an_order_recorded_by_the_optimizer_is_kept() -> None:
    found = numbered({"c": C, "b": B}, [{"params": ["c", "b"], "param_names": ["c", "b"]}])
    assert found["state"] == {0: C, 1: B}
    assert found["param_groups"] == [{"params": [0, 1], "param_names": ["c", "b"]}]


FSDP1 = ["embed.w", "norm.w", "head.w", "layers.0.w", "layers.0.b", "layers.1.w", "layers.1.b"]
ORDER = ["embed.w", "layers.0.w", "layers.0.b", "layers.1.w", "layers.1.b", "norm.w", "head.w"]


def listed(names: list[str], order: list[str]) -> Any:
    return numbers_for(
        {"state": {n: {"exp_avg": n} for n in names}, "param_groups": [{"params": names}]}, (), shape, order
    )


def test_fsdp1_lists_wrapped_modules_last() -> None:
    """The root module's parameters come first, although they follow the layers in the model."""
    found = listed(FSDP1, ORDER)
    assert found["state"] == {n: {"exp_avg": name} for n, name in enumerate(ORDER)}
    assert found["param_groups"] == [{"params": [*range(7)], "param_names": ORDER}]


def test_sorted_names_prove_no_order() -> None:
    """A file written from sorted names does not prove the position of the layers in the model."""
    with pytest.raises(UnprovenCheckpoint):
        listed(FSDP1, sorted(ORDER))


@pytest.mark.parametrize(
    "names",
    [
        [*reversed(ORDER)],
        ["embed.w", "norm.w", "head.w", "layers.0.b", "layers.0.w"],
        ["embed.w", "norm.w", "layers.0.w", "head.w", "layers.1.w"],
        ["layers.0.b", "norm.w", "head.w", "layers.0.w"],
    ],
    ids=["reversed", "inside a layer", "between layers", "a torn layer"],
)
def test_other_orders_are_refused(names: list[str]) -> None:
    with pytest.raises(UnprovenCheckpoint):
        listed(names, ORDER)


def test_a_parameter_without_a_state_keeps_its_number() -> None:
    found = numbered({"c": C}, [{"params": ["a", "b", "c"]}])
    assert found["state"] == {2: C}
    assert found["param_groups"][0]["params"] == [0, 1, 2]


def test_numbers_stay_numbers() -> None:
    """A format with names only has turned them into text."""
    found = numbered({"0": A, "1": B}, [{"params": [0, 1]}])
    assert found["state"] == {0: A, 1: B}
    assert found["param_groups"] == [{"params": [0, 1]}]


@pytest.mark.parametrize(
    ("state", "groups"),
    [
        (None, [{"params": ["a"]}]),
        ({"a": A}, []),
        ({"a": A}, {"params": ["a"]}),
        ({"a": A}, [5]),
        ({"a": A}, [{"lr": 1}]),
        ({"a": A}, [{"params": [("a",)]}]),
        ({"a": A}, [{"params": ["a", "a"]}]),
        ({"a": A, "b": B}, [{"params": ["a"]}]),
        ({"a": A}, [{"params": ["a", 1]}]),
    ],
    ids=["no state", "no groups", "a dict", "numbers", "no names", "tuples", "twice", "one more", "mixed"],
)
def test_other_states_stay_as_they_are(state: Any, groups: Any) -> None:
    tree = {"state": state, "param_groups": groups}
    assert numbers_for(tree, PARAMS, shape) is tree
