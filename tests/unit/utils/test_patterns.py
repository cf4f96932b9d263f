"""Expressions of strangers end, whatever they are."""

from __future__ import annotations

import pytest

from ckptcore.utils.patterns import UnusablePattern, full_matches


def test_an_expression_that_never_ends_is_ended() -> None:
    with pytest.raises(UnusablePattern, match="more than 1 s"):
        full_matches([r"(a+)+b"], ["a" * 200], seconds=1)


@pytest.mark.parametrize("pattern", ["(", "a" * 20_000, "(?P<x>a)(?P<x>b)", "(?<=a+)b"])
def test_an_invalid_expression_is_an_error(pattern: str) -> None:
    with pytest.raises(UnusablePattern):
        full_matches([pattern], ["a"])


def test_complete_texts_are_matched() -> None:
    assert full_matches(["a", "a.*"], ["a", "ab"]) == [(True, False), (True, True)]
    assert full_matches([], ["a"]) == []
    assert full_matches(["a"], []) == [()]
