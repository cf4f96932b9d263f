"""A detector that is not asked, as a folder lacks the suffixes of its format, would have found nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from part_series import SERIES
from samples import SAMPLES

from ckptcore.core.metadata_budget import metered
from ckptcore.errors import CkptError
from ckptcore.formats import FORMATS, KNOWN, open_source
from ckptcore.formats.base import Format, KnownFormat, Source, possible_formats, suffixes_of


def answer(known: Format | KnownFormat, source: Source) -> object:
    """Return what a detector detects in a source, or the code of its error."""
    try:
        with metered():
            return known.detect(source)
    except CkptError as error:
        return error.code


def require_no_answer(source: Source) -> None:
    """Fail where a format that is not asked recognises a folder, or what is left of it without some files."""
    present = suffixes_of(source.listing)
    for lost in (None, *present):
        left = {p: n for p, n in source.listing.items() if suffixes_of([p]) != {lost}}
        part = replace(source, listing=left)
        possible = {id(f) for f in (*possible_formats(FORMATS, part), *possible_formats(KNOWN, part))}
        others = [f for f in (*FORMATS, *KNOWN) if id(f) not in possible]
        assert others
        assert {f.name: a for f in others if (a := answer(f, part)) is not None} == {}, lost


def test_samples(request: pytest.FixtureRequest) -> None:
    roots = [sample.root for sample in request.config.stash[SAMPLES] if not sample.corpus]
    folders = [folder for root in roots for folder in (root, *root.glob("*/"), *root.glob("*/*/"))]
    assert len(folders) > 200
    for folder in folders:
        require_no_answer(open_source(str(folder)))


@pytest.mark.parametrize("series", SERIES)
def test_series(series: str, tmp_path: Path) -> None:
    SERIES[series](tmp_path)
    require_no_answer(open_source(str(tmp_path)))


def test_a_named_file_is_given_to_all(tmp_path: Path) -> None:
    (tmp_path / "weights.any").write_bytes(b"PK")
    assert possible_formats(FORMATS, open_source(str(tmp_path / "weights.any"))) == list(FORMATS)
