"""Check that each generated table matches the code, and that a drift is detected."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import resumed
import warm

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("readme_tables.py")


@pytest.mark.parametrize(
    ("page", "cell"),
    [
        ("errors", "`destination-exists`"),
        *(pytest.param(*p, marks=pytest.mark.soak) for p in (("formats", "`dcp`"), ("findings", "`hole`"))),
    ],
)
def test_a_drift_is_seen_in_every_table(page: str, cell: str, tmp_path: Path) -> None:
    """And in no other: all other tables agree with the code."""
    shutil.copy(ROOT / "CONTRIBUTING.md", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    changed = tmp_path / f"docs/reference/{page}.md"
    text = changed.read_text(encoding="utf-8")
    assert f"| {cell} |" in text
    changed.write_text(text.replace(f"| {cell} |", "| `other` |"), encoding="utf-8")
    command = [*warm.python(), str(SCRIPT), "--check", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"docs/reference/{page}.md: a generated table drifted; run `make docs`"
    ]


def test_every_row_of_resumed_jobs_is_a_test() -> None:
    for row in resumed.ROWS:
        file, _, name = row.test.partition("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), row.test


def test_it_is_two_screens() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) < 1000


def test_first_screen_has_the_two_commands() -> None:
    first = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:12]
    assert any(line.startswith("make demo") for line in first)
    assert any(line.startswith("make test") for line in first)
