"""Writes the tables of the code into README.md and CONTRIBUTING.md, and checks that they agree.

`make docs` writes them between the markers, `make check` compares.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import rooms

import ckptcore
from ckptcore.errors import FINDINGS, error_classes
from ckptcore.formats import FORMATS, KNOWN

ROOT = Path(__file__).parents[2]
SLOT = re.compile(r"(?<=<!-- table: )(\w+)( -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)


def tables() -> dict[str, dict[str, str]]:
    """Every generated table by page, and by the name in its marker."""
    return {
        "README.md": {"formats": formats(), "errors": errors(), "findings": findings()},
        "CONTRIBUTING.md": {"rooms": rooms.table(rooms.measure())},
    }


def formats() -> str:
    """The support matrix, then the names that are recognised only to be refused."""
    rows = [
        (
            f"`{fmt.name}`",
            fmt.title,
            fmt.recognised_by,
            said(fmt.abilities.reads),
            said(fmt.abilities.writes),
            fmt.abilities.checksums,
            said(fmt.abilities.objects),
        )
        for fmt in FORMATS
    ]
    head = ("format", "what it is", "recognised by", "read", "write", "own checksums", "objects")
    refused = "".join(f"- `{known.name}`: {known.title}\n" for known in KNOWN)
    return table(head, rows) + f"\nRecognised by name, and refused with the next step:\n\n{refused}"


def errors() -> str:
    """Every error class in the order of exit codes."""
    # A class may stand beside its one user; it exists once that module is imported.
    for module in pkgutil.walk_packages(ckptcore.__path__, "ckptcore."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    rows = [
        (
            str(cls.exit_code),
            f"`{cls.code}`",
            (cls.__doc__ or "").strip().splitlines()[0],
            said(cls.transient),
            cls.default_hint,
        )
        for cls in error_classes()
    ]
    return table(("exit code", "error", "meaning", "retry", "next step"), rows)


def findings() -> str:
    """Every finding code in the order of the code's table."""
    rows = [(f"`{code}`", severity, meaning, hint) for code, (severity, meaning, hint) in FINDINGS.items()]
    return table(("finding", "severity", "meaning", "next step"), rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A markdown table; a cell's bars are escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(map(escaped, cells)) + " |\n" for cells in lines)


def escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


def said(ability: bool) -> str:
    return "yes" if ability else "no"


def filled(text: str, made: Mapping[str, str]) -> str:
    """The text with every marked table made anew.

    Raises ValueError when a table has no marker or a marker no table.
    """
    marked = [match[1] for match in SLOT.finditer(text)]
    if sorted(marked) != sorted(made):
        raise ValueError(f"the page marks the tables {marked}, the code makes {sorted(made)}")
    return SLOT.sub(lambda match: f"{match[1]}{match[2]}\n{made[match[1]]}\n", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="the folder of the pages")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="fill the tables in")
    action.add_argument("--check", action="store_true", help="exit with 1 when a table drifted")
    arguments = parser.parse_args()
    drifted = 0
    for name, made in tables().items():
        page = arguments.root / name
        text = page.read_text(encoding="utf-8")
        wanted = filled(text, made)
        if wanted == text:
            continue
        if arguments.check:
            print(f"{name}: a generated table drifted; run `make docs`", file=sys.stderr)
            drifted = 1
        else:
            page.write_text(wanted, encoding="utf-8")
    return drifted


if __name__ == "__main__":
    sys.exit(main())
