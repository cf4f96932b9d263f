"""Code uses public interfaces of libraries; DESIGN.md names every other part, with its reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from paths import ROOT

FOLDERS = ("ckptcore", "tasks", "flows", "deployments")
PUBLIC = {
    "_replace",
    "_asdict",
    "_fields",
    "_exit",
}  # of named tuples and of `os`: the library's pages describe them


def trees() -> dict[Path, ast.Module]:
    files = (file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py")))
    return {file: ast.parse(file.read_text()) for file in files}


def is_private(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"_[a-z]\w*", name) is not None


def defined(tree: ast.AST) -> Iterator[str]:
    """Yield the names that the project itself defines in a file."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.alias(asname=str(name)):
                yield name


def used(tree: ast.AST) -> Iterator[str]:
    """Yield the private names that a file asks of anything."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) if is_private(name):
                yield name
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=name), *_]
            ) if is_private(name):
                yield name
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] not in FOLDERS:
                yield from (alias.name for alias in names if is_private(alias.name))


def test_private_parts_of_libraries_are_those_that_the_design_names() -> None:
    files = trees().values()
    foreign = {name for tree in files for name in used(tree)} - {n for tree in files for n in defined(tree)}
    section = (ROOT / "DESIGN.md").read_text().split("## Private parts of libraries")[1].split("\n## ")[0]
    assert foreign - PUBLIC == set(re.findall(r"`(_\w+)`", section))
