"""A loop over items ends each by itself, whatever it raises: expecting `CkptError` there is not enough."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from paths import ROOT

ROOMS = ("ckptcore/operations", "ckptcore/custody", "deployments", "flows", "tasks")
LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Who expects a `CkptError` below a loop, and why anything else is not the end of the other items.
ALLOWED = {
    "ckptcore/custody/place_contents.py:_opened_at": "a part of one place; the caller isolates the place",
    "ckptcore/custody/holdings.py:_sums_of_readable": "a part of one place; the caller isolates the place",
    "ckptcore/custody/set_aside.py:remove": "one source; a purge isolates it",
    "ckptcore/operations/retention/purge.py:_restore_rest": "one source; the purge isolates it",
    "ckptcore/operations/rebuild_catalog.py:_is_one": "one place; the rebuild isolates it",
    "ckptcore/operations/rebuild_catalog.py:_prints": "one place; the rebuild isolates it",
    "ckptcore/operations/registered_files.py:same_manifest": "ways to read one place",
    "ckptcore/operations/automation/wait.py:wait_until_complete": "looks at one place",
}


def test_an_item_is_not_only_isolated_from_the_errors_that_are_expected() -> None:
    assert {name for room in ROOMS for name in expecting(room)} == set(ALLOWED)


def expecting(room: str) -> Iterator[str]:
    """Yield functions below a loop, or called there by name, that expect `CkptError` and nothing wider."""
    for path in sorted((ROOT / room).rglob("*.py")):
        tree = ast.parse(path.read_text())
        functions = {
            n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        loops = [node for node in ast.walk(tree) if isinstance(node, LOOPS)]
        inside = {id(node) for loop in loops for node in ast.walk(loop)}
        below, waiting = set[str](), called(loops) & functions.keys()
        while waiting:
            below |= waiting
            waiting = (called(functions[name] for name in waiting) & functions.keys()) - below
        for name, function in functions.items():
            for node in ast.walk(function):
                if isinstance(node, ast.Try) and (name in below or id(node) in inside) and is_narrow(node):
                    yield f"{path.relative_to(ROOT).as_posix()}:{name}"


def called(nodes: Iterable[ast.AST]) -> set[str]:
    """Return names of what is called, or handed to what is called, such as `attempt`."""
    calls = (call for node in nodes for call in ast.walk(node) if isinstance(call, ast.Call))
    named = (each for call in calls for each in (call.func, *call.args))
    return {
        e.id if isinstance(e, ast.Name) else e.attr for e in named if isinstance(e, ast.Name | ast.Attribute)
    }


def is_narrow(node: ast.Try) -> bool:
    """Return whether a statement handles `CkptError`, and nothing wider."""
    handled = [ast.unparse(handler.type) if handler.type else "Exception" for handler in node.handlers]
    wide = any(name in ("Exception", "BaseException") for name in handled)
    return not wide and any("CkptError" in name for name in handled)
