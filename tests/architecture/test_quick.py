"""Check that `make quick` covers every room and every folder of tests, and starts no server."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

import pytest
from paths import ROOT

LINES = (ROOT / "tests" / "quick.txt").read_text(encoding="utf-8").splitlines()
# Where a room is tested that has no folder below tests/unit.
ELSEWHERE = {
    "catalog": "tests/integration/catalog",
    "checking": "tests/conformance",
    "fingerprints": "tests/property",
    "formats": "tests/formats",
    "operations": "tests/integration/operations",
    "page": "tests/integration/page",
}
SERVERS = ("postgres", "prefect_api", "stack", "s3")  # fixtures that start one


def without_a_line(folders: Iterable[str]) -> list[str]:
    """What is to be done for each folder of tests that is not there or of which `make quick` has nothing."""
    out = []
    for folder in folders:
        if not (ROOT / folder).is_dir():
            out.append(f"{folder}: make it, with a test")
        elif not any(line == folder or line.startswith(f"{folder}/") for line in LINES):
            out.append(f"{folder}: name a file of it, or a test or two, in tests/quick.txt")
    return out


def test_lines_are_sorted_and_name_what_there_is() -> None:
    assert sorted(set(LINES)) == LINES, "sort tests/quick.txt; each line once"
    for line in LINES:
        path, _, test = line.partition("::")
        assert (ROOT / path).exists(), line
        if test:
            text = (ROOT / path).read_text(encoding="utf-8")
            assert re.search(rf"^ *def {test.partition('[')[0]}\(", text, re.MULTILINE), line


def test_every_room_is_tested_by_name_and_quickly() -> None:
    rooms = [path.parent.name for path in (ROOT / "ckptcore").glob("*/__init__.py")]
    assert rooms
    # A room that is tested in a folder of another name has its row in ELSEWHERE, and in CONTRIBUTING.md.
    assert without_a_line(ELSEWHERE.get(room, f"tests/unit/{room}") for room in rooms) == []
    families = [path.parent.name for path in (ROOT / "ckptcore" / "formats").glob("*/__init__.py")]
    assert without_a_line(f"tests/formats/{family}" for family in families) == []


@pytest.mark.parametrize("top", ["conformance", "formats", "integration", "property", "unit"])
def test_every_folder_of_tests_has_a_line(top: str) -> None:
    holding = {path.parent for path in (ROOT / "tests" / top).rglob("test_*.py")}
    names = sorted(str(path.relative_to(ROOT)) for path in holding)
    names = [name for name in names if name != "tests/integration/deployments/local"]  # all servers
    assert names
    assert without_a_line(names) == []


def test_no_server_is_started() -> None:
    """By fixtures of whole files; the other lines were chosen, and PostgreSQL's are left out by name."""
    asking = re.compile(rf"^def test_\w+\([^)]*\b({'|'.join(SERVERS)})\b", re.MULTILINE)
    full_files = [ROOT / line for line in LINES if line.endswith(".py")]
    assert [str(path) for path in full_files if asking.search(path.read_text(encoding="utf-8"))] == []


def test_no_two_test_files_have_one_name() -> None:
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, times in names.items() if times > 1] == []


@pytest.mark.xdist_group("alone")
def test_groups_reach_the_scheduler(request: pytest.FixtureRequest) -> None:
    """pytest-xdist sends a group behind the name of its test; where it cannot, all groups are torn apart, and
    every worker starts servers and jobs of its own."""
    grouped = hasattr(request.config, "workerinput")
    assert request.node.nodeid.endswith("@alone") == grouped
