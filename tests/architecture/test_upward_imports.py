"""Check that no module inside ckptcore imports from `ckptcore`, the public surface above all of them.

The contracts in pyproject.toml check modules: there, `from ckptcore import api` imports `ckptcore.api`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from paths import ROOT

PACKAGE = ROOT / "ckptcore"
MAY_IMPORT = re.compile(r"\bckptcore\s+import\b|\bimport\b[^\n]*\bckptcore\b(?!\.)")


def upward(text: str) -> Iterator[int]:
    """Yield the lines of a module that import from the package itself, also inside of functions."""
    if not MAY_IMPORT.search(text):  # a parse is slow
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            imported = [node.module]
        else:
            imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if "ckptcore" in imported:
            yield node.lineno


def test_no_module_imports_from_the_public_surface() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line in upward(path.read_text(encoding="utf-8"))
    ]
    assert found == [], "import from the module that defines it"


def test_every_spelling_is_found() -> None:
    assert list(upward("from ckptcore import api\n")) == [1]
    assert list(upward("def f():\n    from ckptcore import __version__\n")) == [2]
    assert list(upward("import ckptcore\n")) == [1]
    assert list(upward("from ckptcore.api import read\nimport ckptcore.api\n")) == []
