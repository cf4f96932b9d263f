"""Commits, leases, claims and set-aside folders reach what is outside through one module, `utils.host`.

A simulation puts its own clock and file operations there: a call that goes around it would be real.
"""

from __future__ import annotations

import ast
from collections import defaultdict

import pytest
from paths import ROOT

from ckptcore.store.folder_tree import DirEntryAt, exchange, rename_new
from ckptcore.utils import host

ROOMS = ("catalog", "conversion", "custody", "execution", "operations", "store")
OUTSIDE = frozenset(
    {
        *("time.time", "time.time_ns", "time.monotonic", "time.sleep", "datetime.now", "datetime.utcnow"),
        "time.clock_gettime",
        *("os.rename", "os.renames", "os.replace", "os.link", "os.symlink", "os.remove", "os.unlink"),
        *("os.mkdir", "os.makedirs", "os.rmdir", "os.removedirs", "os.fsync", "os.fdatasync", "os.kill"),
        *("fcntl.flock", "fcntl.lockf", "shutil.rmtree", "shutil.move", "S3Client"),
        *("has_ended", "is_running", "is_this", "this_process"),
    }
)
# Who reaches it directly, and why.
DIRECT = {
    "ckptcore/catalog/catalog.py": {"this_process": "a mark of this process, which no rule compares here"},
    "ckptcore/catalog/sqlworker.py": {"time.monotonic": "the limit of a query, in a process of its own"},
    "ckptcore/operations/scrub.py": {"time.monotonic": "its clock is an argument"},
    "ckptcore/store/local.py": {"shutil.rmtree": "a folder that is no staging folder"},
    "ckptcore/store/objects/shared_clients.py": {"S3Client": "the one place that makes a client"},
}


def test_rooms_that_commit_reach_the_outside_through_one_module() -> None:
    direct: dict[str, set[str]] = defaultdict(set)
    for room in ROOMS:
        for path in sorted((ROOT / "ckptcore" / room).rglob("*.py")):
            for name in reached(ast.parse(path.read_text())):
                direct[path.relative_to(ROOT).as_posix()].add(name)
    assert {path: sorted(names) for path, names in direct.items()} == {
        path: sorted(names) for path, names in DIRECT.items()
    }


def reached(tree: ast.AST) -> set[str]:
    """The names of `OUTSIDE` that a module uses, by attribute, by a bare call, or by an import."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names.add(node.func.id)
        elif isinstance(node, ast.ImportFrom) and node.module in ("os", "time", "fcntl", "shutil"):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names & OUTSIDE


@pytest.mark.parametrize(
    ("program", "name"),
    [
        ("import time\ntime.sleep(1)", "time.sleep"),
        ("from os import rename", "os.rename"),
        ("from time import sleep as wait", "time.sleep"),
        ("from ckptcore.utils.processes import has_ended\nhas_ended(())", "has_ended"),
        ("client = S3Client(url)", "S3Client"),
        ("make = time.monotonic", "time.monotonic"),
    ],
)
def test_every_way_around_is_seen(program: str, name: str) -> None:
    assert reached(ast.parse(program)) == {name}


def test_a_simulation_replaces_what_a_move_does(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, ...]] = []

    def renameat2(old_fd: int, old: str, new_fd: int, new: str, flags: int) -> int:
        calls.append((old, new))
        return 0

    monkeypatch.setattr(host, "renameat2", renameat2)
    rename_new(DirEntryAt(-1, "a", "a"), DirEntryAt(-1, "b", "b"))
    assert exchange(DirEntryAt(-1, "a", "a"), DirEntryAt(-1, "b", "b"))
    assert calls == [("a", "b"), ("a", "b")]
