"""Test that an output that is read later is the row that its conversion recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from paths import FIXTURES

from ckptcore import api
from ckptcore.catalog import open_catalog
from ckptcore.cli.main import run
from ckptcore.errors import CkptError
from ckptcore.formats import FORMATS

SUFFIX = {"torch_save": ".pt"}
WRITTEN = [f.name for f in FORMATS if f.writer is not None]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from torch.distributed import checkpoint as dcp

    folder = tmp_path_factory.mktemp("llama") / "step-10"
    dcp.save(
        {"model.embed.weight": torch.randn(6, 4), "step": torch.tensor(3)}, checkpoint_id=folder, no_dist=True
    )
    return folder


def written(source: Path, folder: Path, name: str, **more: Any) -> tuple[Any, Path]:
    """A conversion into a format; mesh formats are written for two ranks."""
    target = folder / f"out{SUFFIX.get(name, '')}"
    try:
        return api.convert(str(source), str(target), to=name, **more), target
    except CkptError:
        return api.convert(str(source), str(target), to=name, verb="reshard", mesh="fsdp=2", **more), target


@pytest.mark.parametrize("name", WRITTEN)
def test_the_written_output_is_read(name: str, source: Path, tmp_path: Path) -> None:
    try:
        result, target = written(source, tmp_path, name)
    except CkptError as error:
        pytest.skip(f"not from this source: {error.message}")
    assert result.manifest_digest == api.open(str(target)).digest


def test_a_file_without_a_mark_is_registered_as_readers_see_it(tmp_path: Path) -> None:
    """Fabric's one file names no writer: it is registered once, as the torch.save file that readers see."""
    ckpt = FIXTURES / "torch" / "lightning_fabric_mp_nested_2r" / "ckpt"
    url, target = str(tmp_path / "catalog.sqlite"), tmp_path / "out.ckpt"
    result = api.convert(str(ckpt), str(target), to="lightning", catalog=url)
    found = api.open(str(target))
    assert (result.format, found.format) == ("lightning", "torch_save")
    assert result.manifest_digest == found.digest
    assert run(["validate", str(target), "--catalog", url]) == 0
    with open_catalog(url) as catalog:
        assert [row.uri for row in catalog.list()].count(str(target)) == 1


def test_a_chain_of_conversions_is_one_line(source: Path, tmp_path: Path) -> None:
    url, places = (
        str(tmp_path / "catalog.sqlite"),
        [tmp_path / "a" / "20", tmp_path / "b" / "30.pt", tmp_path / "c"],
    )
    for read, made in zip([source, *places], places, strict=False):
        api.convert(str(read), str(made), catalog=url)
    with open_catalog(url) as catalog:
        found = catalog.lineage(str(places[-1])).ancestors
        assert [step.source.uri for step in found] == [str(p) for p in (places[1], places[0], source)]
        rows = catalog.list()
    assert [row.state for row in rows] == ["present"] * 4
    # The names of destinations look like steps of runs; what is made of a run's step is of that run.
    assert {(row.run, row.step) for row in rows} == {(source.parent.name, 10)}
