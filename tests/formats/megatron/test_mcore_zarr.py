"""Report a zarr array without its header, and a second checkpoint in the same folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from samples import SAMPLES

import ckptcore
from ckptcore.conversion.pipeline import validate
from ckptcore.errors import AmbiguousModel, MalformedCheckpoint, UnsupportedFormat

DIST, ZARR = "api_torch_dist_0.12.3", "api_zarr_0.12.3"
KEY, LOCKED = "embedding.word_embeddings.weight", "optimizer.state.exp_avg.flat2d_row"
Copy = Callable[[str], Path]


@pytest.fixture
def copy(request: pytest.FixtureRequest, tmp_path: Path) -> Copy:
    """A sample's checkpoint folder, to be changed."""
    found = {s.name: s for s in request.config.stash[SAMPLES]}
    return lambda name: Path(shutil.copytree(found[name].root / "ckpt", tmp_path / name))


def errors(folder: Path) -> set[str]:
    found = validate(ckptcore.open(str(folder)), "coverage").findings
    return {f"{f.code} {f.file}" for f in found if f.severity == "error"}


def test_chunks_without_a_header(copy: Copy) -> None:
    folder = copy(ZARR)
    assert errors(folder) == set()
    (folder / KEY / ".zarray").unlink()
    assert errors(folder) == {f"missing-file {KEY}/.zarray"}


def changed_key(folder: Path, key: str) -> Path:
    """A copy's header, in which the name of a key is another."""
    header = folder / KEY / ".zarray"
    text = header.read_text()
    assert text.count(f'"{key}"') == 1
    header.write_text(text.replace(f'"{key}"', f'"{key[:-1]}~"'))
    return header


@pytest.mark.parametrize("key", ["compressor", "dtype", "fill_value", "filters", "order"])
def test_a_header_with_a_changed_key(key: str, copy: Copy) -> None:
    """The specification requires them all: one tensor cannot be read, and all others can."""
    folder = copy(ZARR)
    changed_key(folder, key)
    findings = validate(ckptcore.open(str(folder)), "coverage").findings
    (finding,) = (f for f in findings if f.severity == "error")
    assert finding.fqn == KEY
    assert f"{KEY}/.zarray has no {key}" in finding.message


@pytest.mark.parametrize("key", ["chunks", "shape", "zarr_format"])
def test_a_header_of_no_array(key: str, copy: Copy) -> None:
    folder = copy(ZARR)
    changed_key(folder, key)
    with pytest.raises((MalformedCheckpoint, UnsupportedFormat), match=r"\.zarray"):
        ckptcore.open(str(folder))


def test_locks_without_their_array(copy: Copy) -> None:
    folder = copy(ZARR)
    shutil.rmtree(folder / LOCKED)
    assert errors(folder) == {f"missing-file {LOCKED}/.zarray"}


def test_chunks_in_subfolders(copy: Copy) -> None:
    folder = copy(ZARR)
    header = json.loads((folder / KEY / ".zarray").read_text())
    for chunk in sorted(p for p in (folder / KEY).iterdir() if p.name != ".zarray"):
        to = folder / KEY / "sub" / chunk.name.replace(".", "/")
        to.parent.mkdir(parents=True, exist_ok=True)
        chunk.rename(to)
    for part in (folder / KEY / "sub").iterdir():
        part.rename(folder / KEY / part.name)
    (folder / KEY / "sub").rmdir()
    (folder / KEY / ".zarray").write_text(json.dumps({**header, "dimension_separator": "/"}))
    assert errors(folder) == set()


def test_two_backends_in_one_folder(copy: Copy) -> None:
    folder, other = copy(ZARR), copy(DIST)
    shutil.copytree(other, folder, dirs_exist_ok=True)  # metadata.json is torch_dist's now
    with pytest.raises(AmbiguousModel, match="json says torch_dist"):
        ckptcore.open(str(folder))
