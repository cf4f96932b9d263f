"""Sizes and lengths of time: what people, and attackers, write for them."""

from __future__ import annotations

import pytest

from ckptcore.errors import UsageError
from ckptcore.utils.units import parse_duration, parse_size

HUGE = ("9" * 400, "9" * 5000, f"{'9' * 400}GiB", f"{'9' * 400}d", "8388608TiB", "1e400", "9" * 20 + "d")


@pytest.mark.parametrize(
    "text", [*HUGE, "", "nan", "inf", "-1", "+1", "\u0663", "1\0", "\udc80", "1 x", "0x1"]
)
@pytest.mark.parametrize("parse", [parse_size, parse_duration])
def test_what_is_no_quantity_is_refused(parse: object, text: str) -> None:
    assert callable(parse)
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("text", ["5", "007", "1.5", "1023"])
def test_a_small_size_without_a_unit_is_one_whose_unit_was_left_out(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text)
    assert caught.value.hint == f"try {text}GB, {text}GiB or {text}B"


def test_what_is_one() -> None:
    assert (parse_size("8388607TiB"), parse_size(" 1.5 kib "), parse_size("007b")) == (8388607 << 40, 1536, 7)
    assert (parse_size("0"), parse_size("1024"), parse_size("1B")) == (0, 1024, 1)
    assert (parse_duration("36525d"), parse_duration("0"), parse_duration(" 1.5 h")) == (
        36525 * 86400,
        0,
        5400,
    )
