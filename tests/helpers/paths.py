"""Name the folders of the repository, its fixtures, and the programs that tests start.

A test file names these and not its own place, so that it can move.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HELPERS = ROOT / "tests" / "helpers"
JOBS = ROOT / "tests" / "jobs"
FIXTURES = ROOT / "tests" / "fixtures"
