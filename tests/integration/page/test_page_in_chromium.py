"""The page in a real browser: scripts run, the policy refuses nothing of ours, pictures are drawn."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bigcatalog import MEASURED, digest_of, fill_with_training, uuid_of
from chromium import CHROMIUM, DESK, PHONE, Browser, browsing
from paths import ROOT

from ckptcore.catalog import open_catalog
from ckptcore.checking.examine import inspect
from ckptcore.conversion.registration import facts

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(CHROMIUM is None, reason="needs the Debian package chromium"),
]
RED = (0xD9, 0x2D, 0x20)  # of holes, in page.css
# Pages with rows of everything: `bigcatalog` has an even number for what was made, an odd one for its source.
PAGES = (
    "/",
    "/runs/run-2",
    f"/history/{MEASURED}",
    "/checkpoints",
    f"/checkpoints/{uuid_of('c', 2)}",
    f"/checkpoints/{uuid_of('c', 3)}",
    "/conversions",
    f"/conversions/{uuid_of('v', 1)}",
    "/aliases",
    "/aliases/run-2%2Fbest",
    "/roots",
    "/roots/all",
    "/inbox",
    "/outbox",
    "/audit",
    "/retire",
    "/retire?scope=all",
    "/compare",
    f"/compare?left={uuid_of('c', 1)}&right={uuid_of('c', 2)}",
    "/best",
    "/best?metric=loss",
    "/search?q=step",
    f"/search?q={digest_of('file', 4)}",
    "/login",
    "/nothing",
)
# Links and texts of a list that a finger cannot reach without moving the list sideways.
OFF_SCREEN = """
[...document.querySelectorAll('td.to a, td.name')].map(a => a.getBoundingClientRect())
  .filter(box => box.left < 0 || box.right > document.documentElement.clientWidth + 1).length
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The address of a page that listens, and the id of a real checkpoint in it."""
    folder = tmp_path_factory.mktemp("page")
    shutil.copytree(ROOT / "tests" / "fixtures" / "torch" / "dcp_dims_4r" / "ckpt", folder / "step-10")
    _remove_a_chunk(folder / "step-10" / ".metadata")
    with open_catalog(str(folder / "catalog.sqlite")) as catalog:
        manifest = inspect(str(folder / "step-10"))
        ref = catalog.record_validation(facts(manifest, str(folder / "step-10")))
    with listening(folder / "catalog.sqlite") as address:
        yield address, ref


@contextmanager
def listening(catalog: Path) -> Iterator[str]:
    """Serve the page of a catalog, and yield its address."""
    command = [sys.executable, "-m", "ckptcore.page", "--catalog", str(catalog), "--port", "0"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "CKPTCORE_PAGE_TOKEN": "x" * 24},
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1].rstrip("/")
    finally:
        process.terminate()
        process.communicate(timeout=30)
    assert process.returncode == 0


def _remove_a_chunk(path: Path) -> None:
    """Remove the second chunk of w0 from the metadata, as a rank that did not write would leave it."""
    import pickle

    metadata = pickle.loads(path.read_bytes())
    gone = metadata.state_dict_metadata["w0"].chunks.pop(1)
    for key in list(metadata.storage_data):
        if key.fqn == "w0" and tuple(key.offset) == tuple(gone.offsets):
            del metadata.storage_data[key]
    path.write_bytes(pickle.dumps(metadata))


def browse(folder: Path, address: str, *options: str) -> tuple[str, str]:
    """Return the document that a browser made of a page, and what it logged."""
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}",
        "--virtual-time-budget=3000",
        *options,
        address,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def test_pages_run_without_a_refusal(served: tuple[str, str], tmp_path: Path) -> None:
    root, ref = served
    for path in (
        "/",
        "/checkpoints",
        f"/checkpoints/{ref}",
        f"/checkpoints/{ref}/shards?tensor=w0",
        "/login",
        "/search?q=step",
        "/roots",
        "/aliases",
        "/outbox",
        "/compare",
        "/best",
    ):
        document, log = browse(tmp_path, root + path, "--dump-dom")
        assert "Refused" not in log, log
        assert "Uncaught" not in log, log
        assert "ckptcore catalog" in document
    document, _ = browse(tmp_path, f"{root}/checkpoints/{ref}", "--dump-dom")
    button = re.search(r"<button[^>]*data-copy[^>]*>", document)
    assert button is not None
    assert "hidden" not in button[0]  # the script ran


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a page with 40 checkpoints, and rows of everything about them."""
    folder = tmp_path_factory.mktemp("full")
    open_catalog(str(folder / "catalog.sqlite")).close()
    fill_with_training(str(folder / "catalog.sqlite"), 40)
    with listening(folder / "catalog.sqlite") as address:
        yield address


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_everything_is_on_the_screen_and_legible(full: str, tab: Browser, width: int, dark: bool) -> None:
    wrong = {}
    for page in PAGES:
        tab.open(full + page, width=width, dark=dark)
        assert "ckptcore catalog" in tab.ask("document.body.textContent"), page
        seen = tab.look() | {"links": tab.ask(OFF_SCREEN)}
        if any(seen.values()):
            wrong[page] = seen
    assert wrong == {}


def test_what_is_wrong_is_seen(full: str, tab: Browser) -> None:
    """The looks above would fail."""
    tab.open(full, width=PHONE)
    tab.ask("document.querySelector('h1').style.cssText = 'width: 900px; color: #ddd'; 1")
    seen = tab.look()
    assert seen["wide"] > 400
    assert seen["outside"][0].startswith("h1")
    assert [text for text in seen["faint"] if "Training runs" in text]
    tab.ask("document.querySelector('main').innerHTML = '<table><td class=to><a href=x>' + 'x'.repeat(99); 1")
    assert tab.ask(OFF_SCREEN) == 1


@pytest.mark.parametrize("dark", [False, True])
def test_a_hole_is_red(served: tuple[str, str], tmp_path: Path, dark: bool) -> None:
    root, ref = served
    picture = tmp_path / "page.png"
    options = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []
    address = f"{root}/checkpoints/{ref}/shards?tensor=w0"
    browse(tmp_path, address, f"--screenshot={picture}", "--window-size=900,900", *options)
    pixels = decoded(picture.read_bytes())
    red = sum(pixel == RED for row in pixels for pixel in row)
    assert red > 5000  # a quarter of the picture


def decoded(png: bytes) -> list[list[tuple[int, ...]]]:
    """Return the pixels of an 8-bit RGB or RGBA picture."""
    width, height, depth, kind = struct.unpack(">IIBB", png[16:26])
    assert (depth, kind) in ((8, 2), (8, 6))
    size = {2: 3, 6: 4}[kind]
    data, at = b"", 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + length]
        at += 12 + length
    raw, rows, before = zlib.decompress(data), [], bytearray(width * size)
    for y in range(height):
        start = y * (width * size + 1)
        line = bytearray(raw[start + 1 : start + 1 + width * size])
        _unfilter(raw[start], line, before, size)
        rows.append([tuple(line[x : x + 3]) for x in range(0, width * size, size)])
        before = line
    return rows


def _unfilter(kind: int, line: bytearray, before: bytearray, size: int) -> None:
    for x in range(len(line)):
        left = line[x - size] if x >= size else 0
        up, corner = before[x], before[x - size] if x >= size else 0
        guess = left + up - corner
        nearest = min((left, up, corner), key=lambda each: abs(guess - each))
        line[x] = (line[x] + (0, left, up, (left + up) // 2, nearest)[kind]) & 255
