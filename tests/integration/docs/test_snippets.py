"""Run the commands of tutorial and how-to pages in their order; `doc_pages` says how.

In `make test`, the programs are forks of processes that have imported what they need. Soaks, and
`test_first_hours` of the tutorial, start them as users do.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import warm
from doc_pages import DOCS, SANDBOX, run

PAGES = sorted(p for p in DOCS.rglob("*.md") if SANDBOX.search(p.read_text(encoding="utf-8")))
# The tutorial and one page in every run, the others in soak.
_ALWAYS = {"tutorial.md", "how-to/reshard.md"}
_CASES = [
    pytest.param(p, id=(name := str(p.relative_to(DOCS))), marks=[] if name in _ALWAYS else pytest.mark.soak)
    for p in PAGES
]


@pytest.mark.parametrize("page", _CASES)
def test_page(
    page: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> None:
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "CKPTCORE_CATALOG_URL": f"sqlite:///{tmp_path}/catalog.sqlite",
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
    }
    if str(page.relative_to(DOCS)) in _ALWAYS:
        programs = warm.programs(tmp_path_factory.mktemp("bin"))
        # The second is what torchrun starts.
        env |= {"PATH": f"{programs}:{env['PATH']}", "PYTHON_EXEC": str(programs / "python")}
    run(page, tmp_path, env, request.config.rootpath / ".pytest_cache/samples")
