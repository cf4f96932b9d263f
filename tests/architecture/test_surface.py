"""Surface: are the names of `import ckptcore` what they are said to be, whatever was imported before?"""

from __future__ import annotations

import subprocess
import sys

import pytest

VERBS = ("open", "read", "load_into", "check", "plan", "execute", "convert")
EVERY_MODULE = """
import importlib, pkgutil, ckptcore
for module in pkgutil.walk_packages(ckptcore.__path__, "ckptcore."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


@pytest.mark.parametrize("before", ["import ckptcore", EVERY_MODULE], ids=["first", "after all"])
def test_verbs_are_functions(before: str) -> None:
    # A module of the same name (ckptcore/checking/check.py) takes the package's attribute when imported.
    code = f"{before}\nprint(*(type(getattr(ckptcore, v)).__name__ for v in {VERBS}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["function"] * len(VERBS)


def test_every_public_name_is_there() -> None:
    import ckptcore

    assert set(VERBS) <= set(ckptcore.__all__)
    assert [name for name in ckptcore.__all__ if not hasattr(ckptcore, name)] == []
