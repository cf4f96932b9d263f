"""A conversion compares its source with the fingerprint that the job sent, and publishes no other."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import torch
import torch.distributed.checkpoint as dcp
from driver import Cli
from safetensors.torch import save_file
from tiny_llama import tiny_llama

import ckptcore
from ckptcore.catalog import open_catalog
from ckptcore.catalog.catalog import Catalog
from ckptcore.catalog.training import ANNOUNCED, read_facts
from ckptcore.conversion.pipeline import Result, convert
from ckptcore.conversion.registration import Announcement
from ckptcore.errors import DamagedCheckpoint
from ckptcore.planning.request import Request

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
EQUAL = "equals what the job had in memory"
Saved = tuple[Path, dict[str, str]]


def save(folder: Path, seed: int = 0) -> dict[str, str]:
    """Save a model with its optimizer, and return the facts that the job sends: of all, and of the model."""
    model = tiny_llama(seed)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(4)[None]).logits.sum().backward()
    optimizer.step()
    moments = {f"{n}.{k}": v for n, s in optimizer.state_dict()["state"].items() for k, v in s.items()}
    state: dict[str, Any] = {"model": model.state_dict(), "optim": {"state": moments}, "step": 10}
    live = ckptcore.fingerprint_state(state)
    dcp.save(state, checkpoint_id=folder)
    (folder / "config.json").write_text(model.config.to_json_string(use_diff=False))
    return live.as_facts() | live.below("model.").as_facts(model=True)


@pytest.fixture(scope="module")
def _saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved") / "step-10"
    return folder, save(folder)


@pytest.fixture
def saved(_saved: Saved, tmp_path: Path) -> Saved:
    """A copy of the folder, and the facts."""
    folder, facts = _saved
    place = tmp_path / "runs" / "step-10"
    place.mkdir(parents=True)
    for path in folder.iterdir():
        (place / path.name).write_bytes(path.read_bytes())
    return place, facts


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The URL of an empty catalog."""
    return str(tmp_path / "catalog.sqlite")


@pytest.fixture
def catalog(url: str) -> Iterator[Catalog]:
    with open_catalog(url) as opened:
        yield opened


def run(url: str, source: Path, meta: Any, verb: str = "consolidate", **options: Any) -> Result:
    request = Request(str(source), str(source.parents[1] / f"out-{verb}"), verb=verb, **options)
    announcement = Announcement("llama", 10, meta, ANNOUNCED)
    return convert(request, catalog_url=url, announcement=announcement)


def plain(folder: Path, seed: int = 0) -> dict[str, str]:
    """Save a model as safetensors, which have no checksums; return the facts that the job sends."""
    state = {n: t for n, t in tiny_llama(seed).state_dict().items() if n != "lm_head.weight"}
    folder.mkdir(parents=True)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return ckptcore.fingerprint_state(state).as_facts()


def flip(folder: Path) -> None:
    """Change one bit of a tensor in the file, with the file's old time."""
    (path,) = folder.glob("*.safetensors")
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-5, os.SEEK_END)
        file.write(bytes([byte ^ 16]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def rows(catalog: Catalog) -> list[tuple[str, str]]:
    with catalog.reading() as conn:
        asked = sa.text("SELECT kind, live_verdict FROM live_fingerprints ORDER BY kind, live_verdict")
        return [tuple(row) for row in conn.execute(asked)]


def show(cli: Cli, url: str, place: Path | str) -> str:
    return str(cli("catalog", "show", str(place), "--catalog", url).stdout)


def test_the_folder_and_the_export_are_what_the_job_had(
    saved: Saved, url: str, catalog: Catalog, cli: Cli
) -> None:
    source, facts = saved
    done = run(url, source, facts)
    assert done.live is not None
    assert (done.live.verdict, done.live.compared) == ("equal", facts["live_fingerprint"])
    assert rows(catalog) == [("derived", "equal"), ("source", "equal")]
    exported = run(url, source, facts, "export", dtype="bfloat16", dtype_for=(("*norm*", "float32"),))
    assert exported.live is not None
    assert exported.live.compared == facts["live_model_fingerprint"]  # the tie, and no optimizer
    for place in (source, done.destination, exported.destination):
        assert EQUAL in show(cli, url, place)


def test_one_flipped_bit_is_named_and_nothing_is_published(
    tmp_path: Path, url: str, catalog: Catalog, cli: Cli
) -> None:
    source = tmp_path / "runs" / "step-10"
    facts = plain(source)
    flip(source)
    with pytest.raises(DamagedCheckpoint) as caught:
        run(url, source, facts)
    (found,) = caught.value.findings
    assert (found.code, found.level, found.severity) == ("live-mismatch", "values", "error")
    assert found.fqn == "model.norm.weight"
    assert facts["live_fingerprint"] in found.message
    assert ckptcore.fingerprint(source).fingerprint in found.message
    assert not (tmp_path / "out-consolidate").exists()
    text = show(cli, url, source)
    assert "differs from what the job had in memory" in text
    assert "damaged" in text
    assert rows(catalog) == [("source", "different")]

    # The checks that read the values find it, too, and an equal file ends it.
    taken = cli("fingerprint", str(source), "--catalog", url, "--output", "json")
    assert (taken.code, taken.json["live"]["verdict"]) == (1, "different")
    checked = cli(
        "validate", str(source), "--level", "values", "--catalog", url, "--output", "json", catalog=True
    )
    assert (checked.code, [f["fqn"] for f in checked.json["findings"] if f["code"] == "live-mismatch"]) == (
        1,
        ["model.norm.weight"],
    )
    flip(source)
    assert EQUAL in cli("fingerprint", str(source), "--catalog", url).stdout
    assert rows(catalog) == [("source", "equal")]
    recorded = catalog.at(str(source))
    assert recorded is not None
    assert recorded[0].state == "present"
    assert cli("validate", str(source), "--level", "values", "--catalog", url, catalog=True).code == 0
    assert run(url, source, {}).live is not None  # by what the catalog has


def test_a_model_that_trained_on_during_its_save_is_found(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = dcp.save

    def later(state: Any, **options: Any) -> None:
        state["model"]["model.norm.weight"].view(torch.int32)[3] ^= 1
        real(state, **options)

    monkeypatch.setattr(dcp, "save", later)
    source = tmp_path / "runs" / "step-10"
    facts = save(source)
    of_model = {name: facts[name] for name in ("live_model_fingerprint", "live_tensors")}
    with pytest.raises(DamagedCheckpoint, match=r"different: model\.model\.norm\.weight$"):
        run(url, source, of_model)
    of_all = {"live_fingerprint": facts["live_fingerprint"]}
    with pytest.raises(DamagedCheckpoint, match=r"the fingerprint of all tensors is .*\(live_fingerprint\)$"):
        run(url, source, of_all)


@pytest.mark.parametrize("value", ["F" * 64, "f" * 63, 3, None, ["f" * 64], "x" * 64, True])
def test_what_is_no_fingerprint_is_left_out(saved: Saved, url: str, value: Any) -> None:
    source, _ = saved
    done = run(url, source, {"live_fingerprint": value})
    assert done.live is None
    assert not [f for f in done.warnings if f.code.startswith("live")]
    facts, left_out = read_facts({"live_fingerprint": value, "user": "ada"})
    assert (facts.live_fingerprint, facts.user) == (None, "ada")
    assert len(left_out) == (0 if value is None else 1)
    assert all("live_fingerprint must be 64 hex digits" in text for text in left_out)


def test_what_was_not_summed_is_not_compared(saved: Saved, url: str, catalog: Catalog, cli: Cli) -> None:
    source, facts = saved
    done = run(url, source, {"live_fingerprint": facts["live_fingerprint"]}, include=("model.*",))
    assert done.live is None
    assert [f.severity for f in done.warnings if f.code == "live-not-compared"] == ["info"]
    assert rows(catalog) == [("derived", "not compared"), ("source", "not compared")]
    assert cli("fingerprint", str(source), "--catalog", url).code == 0
    assert rows(catalog) == [("derived", "not compared"), ("source", "equal")]


def test_a_fingerprint_of_an_earlier_save_says_nothing_of_the_next(tmp_path: Path, url: str) -> None:
    source = tmp_path / "runs" / "last"
    facts = plain(source)
    assert run(url, source, facts).live is not None
    (path,) = source.iterdir()
    path.unlink()
    source.rmdir()
    facts = plain(source, seed=1)
    later = time.time() + 60
    os.utime(path, (later, later))
    done = run(url, source, {}, overwrite=True)
    assert done.live is None
    done = run(url, source, facts, overwrite=True)
    assert done.live is not None
