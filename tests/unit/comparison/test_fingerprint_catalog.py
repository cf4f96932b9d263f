"""Test that the catalog finds every copy by its fingerprint, and that the command line reports it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import warm

from ckptcore import Settings, api
from ckptcore.catalog import open_catalog
from ckptcore.errors import UsageError
from ckptcore.fingerprints.sums import map_digest

NOTHING_DONE = map_digest([], [], [])


@pytest.fixture
def state() -> dict[str, Any]:
    import torch

    torch.manual_seed(4)
    return {
        "embed.weight": torch.randn(31, 64),
        "layers.0.wq.weight": torch.randn(64, 9).to(torch.bfloat16),
        "layers.0.norm.weight": torch.randn(64),
        "layers.0.bias": torch.randn(67).to(torch.bfloat16),
        "step": torch.tensor(7),
    }


@pytest.fixture
def source(tmp_path: Path, state: dict[str, Any]) -> Path:
    from safetensors.torch import save_file

    folder = tmp_path / "source"
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    return folder


def convert(source: str, destination: str, **options: Any) -> Any:
    return api.convert(source, destination, settings=Settings(fingerprint=True), **options)


def test_the_catalog_finds_every_copy(source: Path, tmp_path: Path) -> None:
    url = str(tmp_path / "catalog.sqlite")
    first = convert(str(source), str(tmp_path / "a.pt"), catalog=url)
    convert(str(tmp_path / "a.pt"), str(tmp_path / "b"), verb="reshard", mesh="fsdp=2", catalog=url)
    cast = convert(str(source), str(tmp_path / "c"), dtype="bf16", catalog=url)
    renamed = convert(str(source), str(tmp_path / "d"), rename=[("embed.", "tok.")], catalog=url)
    part = convert(str(source), str(tmp_path / "e"), exclude=["step"], catalog=url)
    with open_catalog(url) as catalog:
        assert first.fingerprint is not None
        found = catalog.copies(first.fingerprint)
        assert {o.checkpoint.uri for o in found} == {
            str(p) for p in (source, tmp_path / "a.pt", tmp_path / "b")
        }
        assert catalog.copies(first.fingerprint[:12]) == found
        detail = catalog.show(str(source))
        known = {t.fqn: t.fingerprint for t in detail.tensors}  # type: ignore[union-attr]
        assert known == {fqn: each for fqn, *_, each in first.fingerprints}
        # What was cast holds other numbers, but for the tensors that were not.
        row = catalog.show(str(tmp_path / "c"))
        assert row.checkpoint.fingerprint is None  # type: ignore[union-attr]
        bare = {t.fqn for t in row.tensors if t.fingerprint is None}  # type: ignore[union-attr]
        assert bare == {"embed.weight", "layers.0.norm.weight"}
        made = catalog.show(str(cast.conversion)).conversion  # type: ignore[union-attr]
        assert (made.fingerprint, made.map_digest) == (first.fingerprint, NOTHING_DONE)
        assert renamed.fingerprint is not None
        assert {o.checkpoint.uri for o in catalog.copies(renamed.fingerprint)} == {str(tmp_path / "d")}
        assert part.fingerprint is not None
        assert len(catalog.copies(part.fingerprint)) == 1
        one = known["layers.0.bias"]
        assert one is not None
        holders = {source, *(tmp_path / name for name in ("a.pt", "b", "c", "d", "e"))}
        assert {o.checkpoint.uri for o in catalog.copies(one)} == set(map(str, holders))
        for nothing in ("0" * 64, "model.safetensors"):
            with pytest.raises(UsageError):
                catalog.copies(nothing)


def test_a_source_that_changed_has_another(source: Path, tmp_path: Path, state: dict[str, Any]) -> None:
    """The row of a source without digests has its latest fingerprint."""
    from safetensors.torch import save_file

    url = str(tmp_path / "catalog.sqlite")
    convert(str(source), str(tmp_path / "a"), catalog=url)
    save_file({**state, "step": state["step"] + 1}, source / "model.safetensors")
    second = convert(str(source), str(tmp_path / "b"), catalog=url)
    with open_catalog(url) as catalog:
        assert second.fingerprint is not None
        uris = {o.checkpoint.uri for o in catalog.copies(second.fingerprint)}
        assert uris == {str(source), str(tmp_path / "b")}
        detail = catalog.show(str(source))
        known = {t.fqn: t.fingerprint for t in detail.tensors}  # type: ignore[union-attr]
        assert known == {fqn: each for fqn, *_, each in second.fingerprints}


def run(*argv: object) -> subprocess.CompletedProcess[str]:
    arguments = [str(a) for a in argv]
    done = subprocess.run([*warm.command(), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_the_command_line(source: Path, tmp_path: Path) -> None:
    url = str(tmp_path / "catalog.sqlite")
    made = run("consolidate", source, tmp_path / "out", "--fingerprint", "--catalog", url, "--output", "json")
    answer = json.loads(made.stdout)
    assert answer["map_digest"] == NOTHING_DONE
    assert "sums" not in answer["files"][0]
    copy = tmp_path / "elsewhere"
    (tmp_path / "out").rename(copy)
    text = run("fingerprint", copy, "--catalog", url).stdout
    assert text.splitlines()[0] == answer["fingerprint"]
    form = json.loads(run("fingerprint", copy, "--no-catalog", "--output", "json").stdout)
    assert form["fingerprint"] == answer["fingerprint"]
    assert {t["fqn"] for t in form["tensors"]} == {t.fqn for t in api.open(str(source)).tensors}
    for verb in (("find",), ("catalog", "find")):
        found = json.loads(
            run(*verb, answer["fingerprint"], "--fingerprint", "--catalog", url, "--output", "json").stdout
        )
        assert {o["checkpoint"]["uri"] for o in found} == {str(source), str(tmp_path / "out"), str(copy)}
