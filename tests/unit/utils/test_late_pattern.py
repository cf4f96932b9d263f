"""Expressions are compiled for their first match, and all of them can be."""

from __future__ import annotations

import copy
import importlib
import pkgutil
import re
import sys

import pytest

import ckptcore
from ckptcore.utils.late_pattern import late_pattern


def test_it_matches_as_a_compiled_expression() -> None:
    late, now = late_pattern(r"(?P<n>\d+)\.X", re.IGNORECASE), re.compile(r"(?P<n>\d+)\.X", re.IGNORECASE)
    for text in ("12.x", "a12.X", "12.y", ""):
        for name in ("match", "search", "fullmatch"):
            one, other = getattr(late, name)(text), getattr(now, name)(text)
            assert (one and one.groupdict()) == (other and other.groupdict())
    assert late.sub(r"\g<n>", "1.x 2.x") == "1 2"
    assert (late.pattern, late.flags) == (now.pattern, now.flags)


def test_it_is_compiled_when_it_is_used() -> None:
    late = late_pattern("(")
    with pytest.raises(re.error):
        late.match("")


def test_every_expression_of_a_module_is_valid() -> None:
    for module in pkgutil.walk_packages(ckptcore.__path__, "ckptcore."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found = [
        value
        for name, module in list(sys.modules.items())
        if name.startswith("ckptcore.")
        for value in vars(module).values()
        if type(value) is late_pattern
    ]
    assert len(found) > 30
    for late in found:
        assert isinstance(late.pattern, (str, bytes))


def test_a_copy_matches() -> None:
    assert copy.deepcopy(late_pattern("a")).match("a")
