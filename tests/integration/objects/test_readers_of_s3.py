"""Test what readers of an S3 output find: other libraries, and anybody while it is replaced."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fault_s3
import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import save
from safetensors.torch import load, load_file
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

import ckptcore
from ckptcore.catalog import aliases, open_catalog
from ckptcore.errors import Conflict
from ckptcore.planning.request import Settings

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning"
)  # aiobotocore leaves its session to the exit
PART = 64 << 10
MEANS = Settings(memory=4 << 20, workers=2)
OUT = "s3://bucket/models/out"


@pytest.fixture(scope="module")
def running() -> Iterator[fault_s3.FaultyS3]:
    with pytest.MonkeyPatch.context() as patch, fault_s3.serving(min_part=PART) as server:
        patch.setattr("ckptcore.store.objects.part_plan.PART", PART)
        yield server


@pytest.fixture
def server(running: fault_s3.FaultyS3) -> Iterator[fault_s3.FaultyS3]:
    yield running
    running.calm()
    running.objects.clear()
    assert running.uploads == {}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints of equal names and shapes, so that their outputs have equal names."""
    folder = tmp_path_factory.mktemp("sources")
    torch.manual_seed(11)
    return [save(folder / f"step-{n}", n, **{"layers.0.mlp.weight": torch.randn(200, 210)}) for n in (1, 2)]


def test_torchs_loader_opens_a_folder_on_s3(server: fault_s3.FaultyS3, sources: list[Path]) -> None:
    ckptcore.convert(str(sources[0]), OUT, verb="reshard", mesh="fsdp=2", settings=MEANS, catalog=False)
    loaded: dict[str, torch.Tensor] = {
        "layers.0.weight": torch.zeros(8, 8),
        "scale": torch.zeros(()),
        "layers.0.mlp.weight": torch.zeros(200, 210),
    }
    expected = {name: torch.zeros_like(each) for name, each in loaded.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "assuming the intent is to load in a single process": it is
        dcp.load(loaded, storage_reader=FsspecReader(OUT), no_dist=True)
        dcp.load(expected, checkpoint_id=sources[0], no_dist=True)
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert loaded["layers.0.mlp.weight"].any()


def test_safetensors_opens_what_s3fs_downloads(
    server: fault_s3.FaultyS3, sources: list[Path], tmp_path: Path
) -> None:
    ckptcore.convert(str(sources[0]), OUT, settings=MEANS, catalog=False)
    fsspec.filesystem("s3").get(OUT, str(tmp_path / "near"), recursive=True)
    found = load_file(tmp_path / "near" / "model.safetensors")
    assert sorted(found) == ["layers.0.mlp.weight", "layers.0.weight", "scale"]
    expected = {name: torch.zeros_like(each) for name, each in found.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(expected, checkpoint_id=sources[0], no_dist=True)
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.soak  # transformers takes some seconds to import
def test_transformers_opens_what_s3fs_downloads(server: fault_s3.FaultyS3, tmp_path: Path) -> None:
    import transformers
    from tiny_llama import tiny_llama

    model = tiny_llama()
    model.config.save_pretrained(tmp_path / "config")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(model.state_dict()), checkpoint_id=tmp_path / "source", no_dist=True)
    made = ckptcore.convert(
        str(tmp_path / "source"),
        OUT,
        verb="export",
        config=str(tmp_path / "config"),
        max_file_size=30_000,
        settings=MEANS,
        catalog=False,
    )
    assert len(made.files) > 2
    fsspec.filesystem("s3").get(OUT, str(tmp_path / "near"), recursive=True)
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "near")
    expected, found = model.state_dict(), opened.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def watched(server: fault_s3.FaultyS3, prefix: str, work: Callable[[], object]) -> list[dict[str, bytes]]:
    """Return every state below a prefix that a request of `work` could have met, in order."""
    states = [server.below(prefix)]

    def look() -> None:
        now = server.below(prefix)
        if now != states[-1]:
            states.append(now)

    server.fault("*", action="", times=1_000_000, call=look)
    work()
    server.calm()
    look()
    return states


def test_while_a_folder_is_replaced_in_place(server: fault_s3.FaultyS3, sources: list[Path]) -> None:
    """An index or config is there only with the complete old output or the complete new one."""
    given: dict[str, Any] = {"max_file_size": 100_000, "settings": MEANS, "catalog": False}
    ckptcore.convert(str(sources[0]), OUT, **given)
    given |= {"overwrite": True, "overwrite_in_place": True}
    states = watched(server, "bucket/models/out/", lambda: ckptcore.convert(str(sources[1]), OUT, **given))
    old, new = states[0], states[-1]
    assert sorted(old) == sorted(new)
    assert old != new
    kinds = {
        "old" if state == old else "new" if state == new else "between"
        for state in states
        if "model.safetensors.index.json" in state
    }
    assert kinds == {"old", "new"}
    assert any("model.safetensors.index.json" not in state for state in states)
    # What the page warns of, for a reader that has the old index: new files under old names.
    assert any(s != new and any(n in s and s[n] == new[n] != old[n] for n in new) for s in states)


def test_while_one_object_is_replaced(server: fault_s3.FaultyS3, sources: list[Path]) -> None:
    """A reader finds the old object or the new one at any time."""
    file = "s3://bucket/model.safetensors"
    ckptcore.convert(str(sources[0]), file, settings=MEANS, catalog=False)
    states = watched(
        server,
        "bucket/model.safetensors",
        lambda: ckptcore.convert(str(sources[1]), file, overwrite=True, settings=MEANS, catalog=False),
    )
    assert [sorted(state) for state in states] == [[""], [""]]
    values = [float(load(state[""])["scale"]) for state in states]
    assert values == [1.0, 2.0]


def test_generations_and_an_alias_change_at_once(
    server: fault_s3.FaultyS3, sources: list[Path], tmp_path: Path
) -> None:
    """While the next generation is written, the alias names the complete one before; then it moves once."""
    url = str(tmp_path / "catalog.sqlite")
    generations = [f"s3://bucket/models/llama-{n}" for n in (1, 2)]
    seen: list[str] = []

    def follow() -> None:
        with open_catalog(url) as catalog, catalog.reading() as conn:
            seen.append(aliases.get(conn, "prod").uri)

    ckptcore.convert(str(sources[0]), generations[0], settings=MEANS, catalog=url)
    with open_catalog(url) as catalog:
        with catalog.writing() as conn:
            aliases.set_alias(conn, datetime.now(UTC), "prod", generations[0])
        first = server.below("bucket/models/llama-1/")
        server.fault("POST", action="", times=1_000, call=follow)
        ckptcore.convert(str(sources[1]), generations[1], settings=MEANS, catalog=url)
        server.calm()
        assert len(seen) >= 2
        assert set(seen) == {generations[0]}
        assert server.below("bucket/models/llama-1/") == first
        with catalog.writing() as conn:
            aliases.set_alias(conn, datetime.now(UTC), "prod", generations[1], expect=generations[0])
        with pytest.raises(Conflict), catalog.writing() as conn:
            aliases.set_alias(conn, datetime.now(UTC), "prod", generations[0], expect=generations[0])
        follow()
        assert seen[-1] == generations[1]
