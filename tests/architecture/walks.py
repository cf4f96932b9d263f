"""Follows one conversion through the code: the way of its request, and the way of one file's bytes.

Runs a real conversion under a profiler hook. A function is a *stay* of a walk when the value that is followed
is among its arguments: the request with what becomes of it (prepared, composed, plan), or a buffer of bytes.
A *crossing* is a step from one file to another between two stays. The figures are printed. `make docs` draws
both walks to `docs/pictures/` and writes the figures into DESIGN.md; `make check` fails when either drifted.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import groupby
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "tests" / "fixtures" / "torch" / "dcp_torchtitan_like_4r" / "ckpt"
# What a request becomes on its way, and what bytes are carried in, by the names of their classes.
FOLLOWED = {
    "request": frozenset(
        {"Request", "ConversionOptions", "Options", "Composed", "Prepared", "Plan", "Result", "Outcome"}
    ),
    "bytes": frozenset({"ndarray", "memoryview", "bytearray", "Buffer"}),
}
ONLY = {"request": (), "bytes": ("--include", "w0")}
STEP, COLUMN, TOP = 9, 46, 190  # pixels of the pictures


@dataclass(frozen=True, slots=True)
class Stay:
    """One call that holds the value. file: below the repository. function: its qualified name."""

    file: str
    function: str


@dataclass(frozen=True, slots=True)
class Walk:
    """All stays of one walk, in the order of the calls of one thread."""

    name: str
    stays: Sequence[Stay]

    @property
    def files(self) -> list[str]:
        """The files in the order in which they are entered; one that is entered again is there again."""
        return [file for file, _ in groupby(self.stays, lambda stay: stay.file)]

    @property
    def counts(self) -> tuple[int, int, int]:
        """Stays, crossings, and the crossings back into a file."""
        return len(self.stays), len(self.files) - 1, len(self.files) - len(set(self.files))

    @property
    def figures(self) -> str:
        """Stays, functions, files and crossings in a sentence."""
        stays, crossings, back = self.counts
        functions, files = len(set(self.stays)), len(set(self.files))
        return (
            f"{stays} stays in {functions} functions of {files} files, "
            f"{crossings} crossings, {back} of them back into a file"
        )


def record(name: str, run: Callable[[], object], package: Path) -> Walk:
    """The walk of a value through one run; of the bytes, in the worker with the most stays."""
    followed = FOLLOWED[name]
    seen: dict[int, list[Stay]] = {}

    def hook(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(package)):
            return
        count = code.co_argcount + code.co_kwonlyargcount
        values = [frame.f_locals.get(argument) for argument in code.co_varnames[:count]]
        if any(type(value).__name__ in followed for value in values):
            file = str(Path(code.co_filename).relative_to(package.parent))
            seen.setdefault(threading.get_ident(), []).append(Stay(file, code.co_qualname))

    threading.setprofile(hook)
    sys.setprofile(hook)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    main = seen.pop(threading.get_ident(), [])
    return Walk(name, tuple(main if name == "request" else max(seen.values(), key=len, default=[])))


def consolidate(name: str, folder: Path) -> None:
    """`ckptcore consolidate` as the command line runs it; for the walk of the bytes, of one tensor alone."""
    from ckptcore.cli.main import program

    catalog = f"sqlite:///{folder / 'catalog.db'}"
    command = ["consolidate", str(SOURCE), str(folder / "model.safetensors"), "--catalog", catalog]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        program()([*command, "--output", "json", *ONLY[name]], standalone_mode=False)


def picture(walk: Walk) -> str:
    """The walk as SVG: a column for each file, top to bottom in the order of the calls."""
    columns = list(dict.fromkeys(walk.files))
    spots = [(60 + COLUMN * columns.index(file), TOP + STEP * n) for n, file in enumerate(walk.files)]
    wide, tall = 180 + COLUMN * len(columns), TOP + STEP * len(spots) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {tall}" font-family="sans-serif">',
        f'<rect width="{wide}" height="{tall}" fill="#ffffff"/>',
        f'<text x="20" y="24" font-size="15" fill="#0f172a">The way of the {walk.name}</text>',
        f'<text x="20" y="42" font-size="11" fill="#475569">{escape(walk.figures)}</text>',
    ]
    for n, file in enumerate(columns):
        x, y = 60 + COLUMN * n, TOP - 14
        label = escape(file.removeprefix("ckptcore/").removesuffix(".py"))
        parts.append(f'<text x="{x}" y="{y}" font-size="11" transform="rotate(-40 {x} {y})">{label}</text>')
        parts.append(f'<path d="M{x},{TOP - 8} V{tall - 16}" stroke="#e2e8f0"/>')
    way = " ".join(f"{x},{y}" for x, y in spots)
    parts.append(f'<polyline points="{way}" fill="none" stroke="#0284c7" stroke-width="1.3"/>')
    parts += [f'<circle cx="{x}" cy="{y}" r="2.4" fill="#0c4a6e"/>' for x, y in spots]
    return "\n".join([*parts, "</svg>"]) + "\n"


def pages(walks: Sequence[Walk], root: Path) -> dict[Path, str]:
    """The files that show the walks, as they should read: both pictures, and DESIGN.md with today's figures.

    Raises ValueError when DESIGN.md has no row, or more than one, for a picture.
    """
    made = {root / "docs" / "pictures" / f"walk-{walk.name}.svg": picture(walk) for walk in walks}
    design = root / "DESIGN.md"
    text = design.read_text(encoding="utf-8")
    for walk, drawn in zip(walks, made, strict=True):
        row = rf"(\({re.escape(str(drawn.relative_to(root)))}\) \|).*"
        text, rows = re.subn(row, rf"\1 {' | '.join(map(str, walk.counts))} |", text)
        if rows != 1:
            raise ValueError(f"{design.name} must have one row for {drawn.name} (got {rows})")
    return {**made, design: text}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="the folder of the pages")
    parser.add_argument("--stays", action="store_true", help="print every stay")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="draw both walks and fill their figures in")
    action.add_argument("--check", action="store_true", help="exit with 1 when a picture or a figure drifted")
    arguments = parser.parse_args()
    walks = []
    for name in FOLLOWED:
        with tempfile.TemporaryDirectory() as folder:
            walks.append(record(name, partial(consolidate, name, Path(folder)), ROOT / "ckptcore"))
    for walk in walks:
        if not arguments.check:
            print(f"{walk.name}: {walk.figures}")
        for stay in walk.stays if arguments.stays else ():
            print(f"  {stay.file}: {stay.function}")
    drifted = 0
    for page, wanted in pages(walks, arguments.root).items() if arguments.write or arguments.check else ():
        if page.read_text(encoding="utf-8") == wanted:
            continue
        if arguments.write:
            page.write_text(wanted, encoding="utf-8")
        else:
            print(f"{page.name}: a walk of a conversion drifted; run `make docs`", file=sys.stderr)
            drifted = 1
    return drifted


if __name__ == "__main__":
    sys.exit(main())
