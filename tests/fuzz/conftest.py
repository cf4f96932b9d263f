"""Which files here are tests? Only test_*.py: the others are programs that import each other as
neighbours, which works where one of them is the script, not where pytest looks for doctests."""

from pathlib import Path

collect_ignore = [
    path.name for path in Path(__file__).parent.glob("*.py") if not path.name.startswith("test_")
]
