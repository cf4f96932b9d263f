"""Hold code, tests and pages to the project's vocabulary.

    python tests/architecture/words.py --check     name every line that breaks a rule; exit code 1 if any does
    python tests/architecture/words.py PATH ...    the same for these files and folders only

CONTRIBUTING.md (How we write) gives the rules; the tables below are what a program can hold. `PROSE` covers
comments, docstrings, messages and pages; `PARTS` covers the parts of identifiers.
"""

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rooms import blocks

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("ckptcore", "tasks", "flows", "deployments", "alembic", "changes", "tests", "docs")
PAGES = ("README.md", "CONTRIBUTING.md", "DESIGN.md", "CHANGELOG.md")
# This file names the words; the fixtures are other programs' files.
SKIPPED = ("tests/architecture/words.py", "tests/fixtures/")

# What is not written -> what to write instead.
PROSE = {
    r"told": "reported, given, recorded, passed",
    r"crews?": "thread group",
    r"heed(s|ed)?": "respect, obey",
    r"somebody": "another process, another user",
    r"let(s|ting)? go": "release, delete",
    r"puts? back|putting back": "restore",
    r"stands?|stood": "is, are, exist, is recorded",
    r"lies|lie|lying|lay(?! out)": "is in, is at, is stored",
    r"(is|are|was|were|be|been) had|to be had": "is available",
    r"(tells?|says?|said) of": "reports about, records",
    r"(is|are|was|were|be|not|stays?|left|becomes?) whole": "complete",
    r"whole (checkpoints?|folders?|files?) only": "complete",
    r"in (its|their|our) (own )?words": "as a message",
}
PARTS = {
    "told": "reported, given, stated",
    "words": "text, message, terms",
    "shown": "display, rendered",
    "crew": "threads, group",
    "whole": "complete, full, entire",
    "again": "retry, repeat, rerun",
    "stands": "exists, is_current",
    "lies": "is_inside",
    "lie": "is_inside",
    "held": "in_use, kept, reserved",
    "said": "message, stated",
    "heed": "respect",
    "heeded": "respected",
    "somebody": "other",
}
# Names that hold anything -> how many variables and parameters have one of them, in 1,000 lines.
BINDINGS = {
    "found seen known made kept wanted own one at each given there here begun done about how what other "
    "others more both every": 0.6,
    "result item items data value values obj entry info": 12.7,  # right where a thing is of any kind
}
PRODUCT = ("ckptcore", "tasks", "flows", "deployments")
# (file, what is written there) -> why it stays.
_PLUGINS = "a name of the format API: plug-ins use it"
ALLOWED = {
    ("ckptcore/formats/base.py", "whole"): _PLUGINS,
    ("ckptcore/planning/compose.py", "whole"): _PLUGINS,
}


# Comments, strings and names: `tokenize` takes five times as long to find them.
LEXEMES = re.compile(
    r"""#[^\n]*|(?:\b[rbuf]{1,2})?(?:\"{3}(?:[^\\]|\\.)*?\"{3}|'{3}(?:[^\\]|\\.)*?'{3}"""
    r"""|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|\b[^\W\d]\w*""",
    re.IGNORECASE | re.DOTALL,
)


class Breach(NamedTuple):
    """One line that breaks a rule: where, what was written, and what to write instead."""

    path: str
    line: int
    found: str
    instead: str


def main() -> int:
    """Check the files named on the command line, or all of them, and print what breaks a rule."""
    parser = argparse.ArgumentParser(description="Hold code, tests and pages to the project's vocabulary.")
    parser.add_argument("--check", action="store_true", help="check every file of the project")
    parser.add_argument("paths", nargs="*", help="files and folders, relative to the project")
    parser.add_argument("--count", action="store_true", help="print only how many breaches each file has")
    args = parser.parse_args()
    breaches = [breach for path in _files(args.paths) for breach in check(path)]
    if args.count:
        for path in sorted({breach.path for breach in breaches}):
            print(sum(breach.path == path for breach in breaches), path)
    else:
        for breach in breaches:
            print(f"{breach.path}:{breach.line}: {breach.found!r}: write {breach.instead}")
    if breaches:
        print(f"{len(breaches)} breaches of the vocabulary (CONTRIBUTING.md: How we write)")
    excesses = list(_excesses()) if args.check else []
    for excess in excesses:
        print(excess)
    return int(bool(breaches or excesses))


def check(path: Path) -> Iterator[Breach]:
    """Yield every breach in one file, in the order of its lines."""
    name = path.relative_to(ROOT).as_posix()
    text = path.read_text()
    rows = _page(text) if path.suffix == ".md" else _module(text)
    yield from (Breach(name, *row) for row in rows if (name, row[1].lower()) not in ALLOWED)


def _files(named: list[str]) -> list[Path]:
    listed = subprocess.run(
        [
            "git",
            "ls-files",
            "--cached",
            "--others",
            "--exclude-standard",
            "--",
            *(named or [*FOLDERS, *PAGES]),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return [
        ROOT / name
        for name in sorted(set(listed))
        if name.endswith((".py", ".md")) and not name.startswith(SKIPPED) and (ROOT / name).exists()
    ]


def _excesses() -> Iterator[str]:
    """Yield the counts of names that are above their bound."""
    files = [path for path in _files(list(PRODUCT)) if path.suffix == ".py"]
    texts = [path.read_text() for path in files]
    names = Counter(name for text in texts for name in _bound(ast.parse(text)))
    lines = sum(text.count("\n") for text in texts)
    for vague, most in BINDINGS.items():
        counts = {name: names[name] for name in vague.split() if names[name]}
        if sum(counts.values()) * 1000 > most * lines:
            yield f"{counts} bindings in {lines} lines (at most {most} in 1,000): name what they hold"


def _bound(tree: ast.AST) -> Iterator[str]:
    """Yield the name of every variable and parameter that a module binds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def _page(text: str) -> Iterator[tuple[int, str, str]]:
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith(("```", ":::")):
            fenced = not fenced and line.lstrip().startswith("```")
        elif not fenced:
            yield from ((number, found, instead) for found, instead in _prose(re.sub(r"`[^`]*`", "", line)))


def _module(text: str) -> Iterator[tuple[int, str, str]]:
    docstrings = _docstrings(text) if "?" in text else set()
    number, counted = 1, 0
    for token in LEXEMES.finditer(text):
        written = token[0]
        number += text.count("\n", counted, token.start())
        counted = token.start()
        if not (written[0] == "#" or written.endswith(("'", '"'))):
            for part in _parts(written):
                if part in PARTS:
                    yield number, written, PARTS[part]
            continue
        if number in docstrings:
            first = written.strip("rR\"'").strip().split("\n\n")[0]
            if first.rstrip().endswith("?") or re.match(r"[^.]*\?", first.split("\n")[0]):
                yield number, first.split("\n")[0], "what it does, not a question"
        for offset, line in enumerate(written.splitlines()):
            yield from ((number + offset, found, instead) for found, instead in _prose(line))


def _docstrings(text: str) -> set[int]:
    """Return the lines at which docstrings begin."""
    return {
        node.body[0].lineno
        for node in blocks(ast.parse(text))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)
        and isinstance(node.body[0].value.value, str)
    }


@cache
def _parts(identifier: str) -> list[str]:
    return [part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", identifier)]


def _prose(line: str) -> Iterator[tuple[str, str]]:
    if not _term("|".join(PROSE)).search(line):  # most lines have none
        return
    for pattern, instead in PROSE.items():
        for found in _term(pattern).finditer(line):
            yield found.group(), instead


@cache
def _term(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w`.-])(?:{pattern})(?![\w`-])", re.IGNORECASE)


if __name__ == "__main__":
    sys.exit(main())
