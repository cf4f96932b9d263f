"""Check that the documentation site builds without a warning, and is complete in itself."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import warm
from chromium import CHROMIUM, DESK, PHONE, browsing
from paths import ROOT

from ckptcore.cli.main import COMMANDS

# What a browser would fetch from another host to show the page: scripts, styles, fonts, pictures, frames.
FETCHED = re.compile(
    r"""<(?:script|img|iframe|link(?![^>]*rel="(?:canonical|prev|next)"))[^>]*(?:src|href)="(?:https?:)?//"""
)
FETCHED_BY_STYLE = re.compile(r"""(?:url\(|@import\s+)["']?(?:https?:)?//""")


def build(builder: str, target: Path) -> None:
    """Read every page; a page that is in no navigation, and a link that leads nowhere, is a warning."""
    options = ["-q", "-W", "--keep-going", "-b", builder]
    command = [*warm.python(), "-m", "sphinx", *options, "docs", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_page_can_be_built_is_in_the_navigation_and_its_links_are_resolved(tmp_path: Path) -> None:
    build("dummy", tmp_path)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    build("html", target)
    return target


@pytest.mark.soak
@pytest.mark.xdist_group("site")
def test_every_page_is_written(site: Path) -> None:
    pages = {p.relative_to(ROOT / "docs").with_suffix(".html") for p in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if not (site / page).exists()} == set()


@pytest.mark.soak
@pytest.mark.xdist_group("site")
def test_every_page_is_in_the_navigation(site: Path) -> None:
    pages = {str(p.relative_to(ROOT / "docs").with_suffix(".html")) for p in (ROOT / "docs").rglob("*.md")}
    index = (site / "index.html").read_text(encoding="utf-8")
    assert {p for p in pages if f'href="{p}"' not in index} <= {"index.html"}


@pytest.mark.soak
@pytest.mark.xdist_group("site")
def test_nothing_comes_from_another_host(site: Path) -> None:
    pages = [p for p in site.rglob("*.html") if FETCHED.search(p.read_text(encoding="utf-8"))]
    styles = [p for p in site.rglob("*.css") if FETCHED_BY_STYLE.search(p.read_text(encoding="utf-8"))]
    assert not pages
    assert not styles


@pytest.mark.soak
@pytest.mark.xdist_group("site")
def test_the_command_line_is_there_with_every_option(site: Path) -> None:
    listed = (site / "reference/cli.html").read_text(encoding="utf-8")
    for verb in COMMANDS:
        page = (site / f"reference/cli/{verb}.html").read_text(encoding="utf-8")
        assert f"ckptcore {verb}" in page
        assert f'href="cli/{verb}.html"' in listed
    for verb, text in (
        ("export", "--max-file-size"),
        ("catalog", "ckptcore catalog alias set"),
        ("retire", "--keep-every"),
        ("export", "base-model"),  # of its example
    ):
        assert text in (site / f"reference/cli/{verb}.html").read_text(encoding="utf-8")


@pytest.mark.soak
@pytest.mark.xdist_group("site")
def test_search_knows_a_finding(site: Path) -> None:
    assert "truncat" in (site / "searchindex.js").read_text(encoding="utf-8")


def test_no_page_talks_of_the_machine_or_of_test_files() -> None:
    """The family table is for users; a page for contributors may name tests."""
    page = (ROOT / "docs/reference/families.md").read_text(encoding="utf-8")
    assert "tests/" not in page


# What people type, and the page that answers it; none of the first results says what changed, or why.
SEARCHES = {
    "reshard": "how-to/reshard",
    "install": "how-to/install",
    "vllm": "how-to/engines",
    "webhook": "how-to/webhooks",
    "resume": "how-to/resume",
    "retire": "how-to/retention",
    "diff": "reference/cli/diff",
    "exit+code": "reference/errors",
}


# Blocks of code with a letter below their button.
COVERED = """
[...document.querySelectorAll('div.highlight')].filter(block => {
  const button = block.querySelector('button.copy').getBoundingClientRect(), text = document.createRange();
  text.selectNodeContents(block.querySelector('pre'));
  return [...text.getClientRects()].some(line => line.width && line.right > button.left + 1
    && line.left < button.right && line.bottom > button.top && line.top < button.bottom);
}).length
"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        """Log no request."""


@pytest.fixture(scope="module")
def served(site: Path) -> Iterator[str]:
    handler = partial(_Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.soak
@pytest.mark.skipif(CHROMIUM is None, reason="needs the Debian package chromium")
@pytest.mark.xdist_group("site")
def test_a_search_finds_the_page_that_says_how(served: str, tmp_path: Path) -> None:
    found: dict[str, list[str]] = {}
    with browsing(tmp_path) as browser:
        for text in SEARCHES:
            browser.open(f"{served}/search.html?q={text}")
            browser.ask("new Promise(done => setTimeout(done, 3000))")
            links = "[...document.querySelectorAll('ul.search li > a')].map(a => a.getAttribute('href'))"
            found[text] = [link.partition(".html")[0] for link in browser.ask(links)]
    for text, page in SEARCHES.items():
        assert page in found[text][:3], (text, found[text][:6])
        assert not [p for p in found[text][:3] if p.startswith(("changelog", "explanation/decisions"))]


@pytest.mark.soak
@pytest.mark.skipif(CHROMIUM is None, reason="needs the Debian package chromium")
@pytest.mark.xdist_group("site")
def test_pages_fit_a_phone_and_a_desk_and_code_can_be_copied(served: str, tmp_path: Path) -> None:
    wrong = {}
    with browsing(tmp_path) as browser:
        for page in ("index", "tutorial", "how-to/reshard", "reference/cli/export", "reference/catalog"):
            for width in (PHONE, DESK):
                for dark in (False, True):
                    browser.open(f"{served}/{page}.html", width=width, dark=dark)
                    if browser.ask("document.documentElement.scrollWidth > innerWidth + 1"):
                        wrong[page] = width
                    assert browser.ask(COVERED) == 0, (page, width)
        browser.open(f"{served}/tutorial.html")
        code = "[...document.querySelectorAll('div.highlight > pre')]"
        assert browser.ask(f"{code}.filter(e => e.scrollWidth > e.clientWidth + 1).length") == 0
        assert browser.ask(f"{code}.length === document.querySelectorAll('button.copy').length")
    assert wrong == {}
