"""The diagram in the catalog's README has each table once, with existing columns."""

from __future__ import annotations

import re
from pathlib import Path

import ckptcore.catalog
from ckptcore.catalog.models import Base

README = (Path(ckptcore.catalog.__file__).parent / "README.md").read_text()
PICTURE = re.findall(r"```mermaid\nerDiagram\n(.*?)```", README, re.DOTALL)[0]
BOXES = re.findall(r"^    (\w+) \{\n(.*?)^    \}", PICTURE, re.DOTALL | re.MULTILINE)
LINES = re.findall(r"^    (\w+) +\S+--\S+ (\w+) *: \"(.*)\"$", PICTURE, re.MULTILINE)


def test_every_table_is_drawn_once() -> None:
    names = [name for name, _ in BOXES]
    assert len(names) == len(set(names))
    drawn = set(names) | {end for left, right, _ in LINES for end in (left, right)}
    assert drawn == set(Base.metadata.tables)


def test_boxes_have_columns_of_the_table() -> None:
    for name, inside in BOXES:
        columns = re.findall(r"^        \w+ (\w+)", inside, re.MULTILINE)
        assert columns
        assert len(columns) == len(set(columns)), name
        assert set(columns) <= set(Base.metadata.tables[name].columns.keys()), name
