"""Arguments of a command line mean the same without pydantic, and wrong ones have typer's messages."""

from enum import StrEnum
from typing import Annotated, Any, Literal

import pytest
import typer

from ckptcore.cli import plain_values
from ckptcore.cli.options import group


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


def _even(text: str) -> int:
    if int(text) % 2:
        raise ValueError("must be even")
    return int(text)


def _program(*, plain: bool) -> Any:
    """A command with a parameter of every kind; it returns what it was given."""
    program = group("help") if plain else typer.Typer(add_completion=False)

    @program.command()
    def show(
        word: str,
        *,
        texts: Annotated[list[str] | None, typer.Option("--texts")] = None,
        number: Annotated[int | None, typer.Option("--number", min=1, max=9)] = None,
        share: float = 0.5,
        colour: Colour = Colour.RED,
        kind: Literal["a", "b"] = "a",
        even: Annotated[int, typer.Option("--even", parser=_even)] = 2,
        flag: bool = False,
        env: Annotated[str, typer.Option("--env", envvar="PLAIN_VALUES_ENV")] = "none",
    ) -> dict[str, object]:
        return dict(locals())

    @program.command()
    def other() -> None:
        """Make it a group."""

    return program


def _answer(arguments: list[str], *, plain: bool) -> Any:
    try:
        return _program(plain=plain)(args=["show", *arguments], standalone_mode=False)
    except typer.TyperException as error:
        return type(error).__name__, error.format_message()


GIVEN = [
    ["x"],
    ["é"],
    ["\udc80"],
    [],
    ["x", "--texts", "a", "--texts", "b"],
    ["x", "--texts", "\udc80"],
    ["x", "--number", "3"],
    ["x", "--number", "0"],
    ["x", "--number", "10"],
    ["x", "--number", "-1"],
    ["x", "--number", " 3"],
    ["x", "--number", "3.0"],
    ["x", "--number", "1_0"],
    ["x", "--number", "٣"],
    ["x", "--number", "three"],
    ["x", "--share", "0.25"],
    ["x", "--share", "much"],
    ["x", "--colour", "blue"],
    ["x", "--colour", "BLUE"],
    ["x", "--colour", "green"],
    ["x", "--kind", "b"],
    ["x", "--kind", "c"],
    ["x", "--even", "4"],
    ["x", "--even", "3"],
    ["x", "--even", "four"],
    ["x", "--flag"],
    ["x", "--no-flag"],
    ["x", "--env", "here"],
]


@pytest.mark.parametrize("arguments", GIVEN, ids=lambda given: ascii(" ".join(given)))
def test_as_typer_converts_them(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert _answer(arguments, plain=True) == _answer(arguments, plain=False)
    monkeypatch.setenv("PLAIN_VALUES_ENV", "there")
    assert _answer(arguments, plain=True) == _answer(arguments, plain=False)


def test_a_typer_without_that_place_converts_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_values, "_without_adapters", lambda params: params)
    assert _answer(["x", "--number", "3"], plain=True)["number"] == 3
