"""Run the commands of tutorial and how-to pages in their order, and compare the output that the page shows.

A page with ``<!-- sandbox: PLACE=SAMPLE ... -->`` is run in an empty folder with copies of these samples
(below ``tests/fixtures``; `empty` is none). ``sh`` and ``python`` blocks are run; a ``text`` block right
after one is what it prints, where ``...`` is anything. A command followed by ``# exit code N`` must end with
N. A ``toml`` block whose first line is ``# NAME`` becomes the file NAME.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, OutputChecker
from pathlib import Path

import pytest
from paths import ROOT
from samples import ARCHIVES, FIXTURES, unpack

DOCS = ROOT / "docs"
FENCE = re.compile(r"^```(sh|python|toml|text)\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
SANDBOX = re.compile(r"<!-- sandbox: (.*?) -->", re.DOTALL)
ENDS_WITH = re.compile(r"^(.*?)\s+# exit code (\d+)$", re.MULTILINE)
PAGES = sorted(p for p in DOCS.rglob("*.md") if SANDBOX.search(p.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Step:
    """One block of a page, and the output shown behind it."""

    language: str
    code: str
    output: str | None


def steps_of(text: str) -> list[Step]:
    """The blocks that are run, each with the ``text`` block that follows it directly."""
    blocks = list(FENCE.finditer(text))
    found = []
    for at, block in enumerate(blocks):
        if block[1] == "text" or block.start() < SANDBOX.search(text).start():  # type: ignore[union-attr]
            continue
        after = blocks[at + 1] if at + 1 < len(blocks) else None
        adjacent = after and after[1] == "text" and not text[block.end() : after.start()].strip()
        found.append(Step(block[1], block[2], after[2] if after and adjacent else None))
    return found


def script_of(steps: list[Step]) -> str:
    """One bash script, with a line between the outputs of the steps."""
    lines = ["set -euo pipefail"]
    for step in steps:
        if step.language == "toml":
            name = step.code.partition("\n")[0].removeprefix("#").strip()
            lines.append(f"cat > {name} <<'END_OF_FILE'\n{step.code}END_OF_FILE")
        elif step.language == "python":
            lines.append(f"python - <<'END_OF_CODE'\n{step.code}END_OF_CODE")
        else:
            lines.append(ENDS_WITH.sub(r"status=0; \1 || status=$?; [ $status = \2 ]", step.code))
        lines.append("echo; echo @@end-of-step")
    return "\n".join(lines)


def sample_folder(unpacked: Path, sample: str) -> Path:
    """The folder `NAME/PART` of a sample, which is in the repository or in one of its archives."""
    archives = (unpack(unpacked, archive) for archive in [*ARCHIVES, FIXTURES / "maps/truths.tar.zst"])
    for origin in [*(p for p in FIXTURES.iterdir() if p.is_dir()), *archives]:
        if (origin / sample).is_dir():
            return origin / sample
    raise FileNotFoundError(sample)


# The tutorial and one page in every run, the others in soak.
_ALWAYS = {"tutorial.md", "how-to/retention.md"}
_CASES = [
    pytest.param(p, id=(name := str(p.relative_to(DOCS))), marks=[] if name in _ALWAYS else pytest.mark.soak)
    for p in PAGES
]


@pytest.mark.parametrize("page", _CASES)
def test_page(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    unpacked = request.config.rootpath / ".pytest_cache/samples"
    text = page.read_text(encoding="utf-8")
    for pair in SANDBOX.search(text)[1].split():  # type: ignore[index]
        if pair == "empty":
            continue
        place, _, sample = pair.partition("=")
        target = tmp_path / place
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(sample_folder(unpacked, sample), target, symlinks=True)
    for file in (DOCS / "snippets").iterdir():
        shutil.copy(file, tmp_path)
    steps = steps_of(text)
    assert steps, "a page with a sandbox and without a command"
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "CKPTCORE_CATALOG_URL": f"sqlite:///{tmp_path}/catalog.sqlite",
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
    }
    run = subprocess.run(
        ["bash", "-c", script_of(steps)], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    outputs = run.stdout.split("\n@@end-of-step\n")
    done = len(outputs) - 1
    assert run.returncode == 0, (
        f"{steps[min(done, len(steps) - 1)].code}\n{outputs[-1]}\n{run.stderr[-3000:]}"
    )
    for step, output in zip(steps, outputs, strict=False):
        if step.output is not None:
            same = OutputChecker().check_output(
                step.output.strip() + "\n", output.strip() + "\n", ELLIPSIS | NORMALIZE_WHITESPACE
            )
            assert same, f"{step.code}\nshown:\n{step.output}\nprinted:\n{output}"
