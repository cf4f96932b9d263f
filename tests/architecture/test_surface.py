"""Check the public names of `import ckptcore`, whatever was imported before."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import ckptcore
import ckptcore.formats

VERBS = ("open", "read", "load_into", "check", "plan", "execute", "convert")
EVERY_MODULE = """
import importlib, pkgutil, ckptcore
for module in pkgutil.walk_packages(ckptcore.__path__, "ckptcore."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


@pytest.mark.parametrize(
    "before",
    ["import ckptcore", pytest.param(EVERY_MODULE, marks=pytest.mark.soak)],
    ids=["first", "after all"],
)
def test_verbs_are_functions(before: str) -> None:
    code = f"{before}\nprint(*(type(getattr(ckptcore, v)).__name__ for v in {VERBS}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["function"] * len(VERBS)


def test_no_module_takes_the_place_of_a_public_name() -> None:
    # The import system binds a module in its package: a room called `diff` would hide the function.
    for package in (ckptcore, ckptcore.formats):
        modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
        assert modules.isdisjoint(package.__all__)
    # Nor does a name in a package hide a module: `import ckptcore.formats.dcp.format as f` goes by names.
    for module in pkgutil.walk_packages(ckptcore.formats.__path__, "ckptcore.formats."):
        found = pkgutil.resolve_name(module.name)
        assert found.__name__ == module.name


def test_every_public_name_is_there() -> None:
    assert set(ckptcore.__all__) <= set(dir(ckptcore))
    assert set(VERBS) <= set(ckptcore.__all__)
    assert [name for name in ckptcore.__all__ if not hasattr(ckptcore, name)] == []
