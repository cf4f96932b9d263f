"""Check that the tables of errors and findings are closed, unambiguous and in use."""

from __future__ import annotations

import ast
import pickle
from collections import Counter
from pathlib import Path

import pytest

from ckptcore.errors import FINDINGS, CkptError, error_classes

ROOT = Path(__file__).parents[2]
CLASSES = error_classes()
DAMAGED = 1  # the exit code that all findings of a source share


def used_findings() -> set[str]:
    """The literal first argument of every call of `finding(...)` in the library."""
    calls = (
        node
        for path in (ROOT / "ckptcore").rglob("*.py")
        if "finding(" in (text := path.read_text(encoding="utf-8"))  # few do, and a parse is slow
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args
    )
    return {
        call.args[0].value
        for call in calls
        if call.func.id == "finding" and isinstance(call.args[0], ast.Constant)
    }


def test_error_codes_and_exit_codes_are_unambiguous() -> None:
    codes = Counter(cls.code for cls in CLASSES)
    assert [code for code, count in codes.items() if count > 1] == []
    exits = Counter(cls.exit_code for cls in CLASSES if cls.exit_code != DAMAGED)
    assert [code for code, count in exits.items() if count > 1] == []
    assert 0 not in exits


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.code)
def test_error_survives_a_process_border(cls: type[CkptError]) -> None:
    error = cls("what, where", hint="what next", path="a/b", nbytes=7)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert copy.as_dict() == error.as_dict()


def test_every_finding_code_in_the_library_is_declared() -> None:
    assert used_findings()
    assert used_findings() - set(FINDINGS) == set()


def test_severities_are_the_three() -> None:
    assert {severity for severity, _, _ in FINDINGS.values()} == {"error", "warning", "info"}
