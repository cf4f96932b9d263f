"""Run the commands of the documentation's pages, and compare what they print with what a page shows.

A page with ``<!-- sandbox: PLACE=SAMPLE ... -->`` is run in a folder with copies of these samples (below
``tests/fixtures``, or a folder of the repository; `empty` is none). A place ``s3://BUCKET/KEY`` is in an S3
server that runs for the page. ``sh`` and ``python`` blocks are run; a ``text`` block right after one is what
it prints, where ``...`` is anything. A command followed by ``# exit code N`` must end with N. A ``toml``
block whose first line is ``# NAME.toml``, or a ``python`` block with ``# NAME.py``, becomes that file; other
``toml`` blocks are only shown. Port 8080 is replaced by a free one. Blocks in an HTML comment are run and not
displayed.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
NAMED_FILE = re.compile(r"# \w+\.(py|toml)\n")


@dataclass(frozen=True)
class Step:
    """One block of a page, and the output that the page shows after it."""

    language: str
    code: str
    output: str | None


def steps_of(text: str) -> list[Step]:
    """Return the blocks that are run, each with the ``text`` block that follows it directly."""
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
    """Return one bash script, with a line between the outputs of the steps, that ends what it started."""
    lines = ["set -euo pipefail", "trap 'kill $(jobs -p) 2> /dev/null || true' EXIT"]
    for step in steps:
        if NAMED_FILE.match(step.code):
            name = step.code.partition("\n")[0].removeprefix("#").strip()
            lines.append(f"cat > {name} <<'END_OF_FILE'\n{step.code}END_OF_FILE")
        elif step.language == "python":
            lines.append(f"python - <<'END_OF_CODE'\n{step.code}END_OF_CODE")
        elif step.language == "toml":
            lines.append(":")
        else:
            lines.append(ENDS_WITH.sub(r"status=0; \1 || status=$?; [ $status = \2 ]", step.code))
        lines.append("echo; echo @@end-of-step")
    return "\n".join(lines)


def sample_folder(unpacked: Path, sample: str) -> Path:
    """Return the folder `NAME/PART` of a sample, from the fixtures, their archives, or the repository."""
    archives = (unpack(unpacked, archive) for archive in [*ARCHIVES, FIXTURES / "maps/truths.tar.zst"])
    for origin in [*(p for p in FIXTURES.iterdir() if p.is_dir()), *archives]:
        if (origin / sample).is_dir():
            return origin / sample
    if (ROOT / sample).is_dir():
        return ROOT / sample
    raise FileNotFoundError(sample)


@contextmanager
def object_store() -> Iterator[dict[str, str]]:
    """Run an S3 server; yield the environment in which commands find it."""
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        }
    finally:
        server.stop()


def upload(url: str, folder: Path | None, env: dict[str, str]) -> None:
    """Make the bucket of ``url`` and copy the files of ``folder`` below it."""
    code = """
import fsspec, pathlib, sys
url, folder = sys.argv[1:]
fs, path = fsspec.url_to_fs(url)
if not fs.exists(path.partition("/")[0]):
    fs.mkdir(path.partition("/")[0])
for file in pathlib.Path(folder).rglob("*") if folder else ():
    if file.is_file():
        fs.pipe_file(f"{path}/{file.relative_to(folder).as_posix()}", file.read_bytes())
"""
    subprocess.run([sys.executable, "-c", code, url, str(folder or "")], env=env, check=True)


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run(page: Path, folder: Path, env: dict[str, str], unpacked: Path) -> None:
    """Run a page in a folder: with its samples, the snippets beside them, and an object store if it has one.

    Args:
        page: The page.
        folder: Where its commands run.
        env: Their environment.
        unpacked: Where samples are unpacked.
    """
    text = page.read_text(encoding="utf-8")
    pairs = [pair.partition("=") for pair in SANDBOX.search(text)[1].split()]  # type: ignore[index]
    for file in (DOCS / "snippets").iterdir():
        shutil.copy(file, folder)
    with object_store() if any(p.startswith("s3://") for p, _, _ in pairs) else nullcontext({}) as remote:
        env = env | remote
        for place, _, sample in pairs:
            source = sample_folder(unpacked, sample) if sample not in ("", "empty") else None
            if place.startswith("s3://"):
                upload(place, source, env)
            elif source is not None:
                (folder / place).parent.mkdir(parents=True, exist_ok=True)
                shutil.copytree(source, folder / place, symlinks=True)
        run_page(text, folder, env)


def run_page(text: str, folder: Path, env: dict[str, str]) -> None:
    """Run the steps of a page in ``folder``, and compare what they print with what the page shows."""
    steps = steps_of(text)
    assert steps, "a page with a sandbox and without a command"
    script = script_of(steps).replace("8080", str(free_port()))
    run = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=env, capture_output=True, text=True, check=False
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
