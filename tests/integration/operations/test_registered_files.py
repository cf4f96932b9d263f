"""Test that config, tokenizer, index and card of an output are recorded, verified, and missed."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from blake3 import blake3
from safetensors.torch import save_file

import ckptcore
from ckptcore.__main__ import main
from ckptcore.catalog import CheckpointDetail, open_catalog
from ckptcore.catalog.migrate import migrating
from ckptcore.conversion.staging.open_staging import open_staging
from ckptcore.errors import OutputMismatch
from ckptcore.operations.rebuild_catalog import rebuild
from ckptcore.operations.scrub import Scrubbed, scrub
from ckptcore.planning.config_folder import Expected

CONFIG = {"architectures": ["Nobody"], "model_type": "nobody", "hidden_size": 4}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "catalog.sqlite")


@pytest.fixture
def exported(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An export of two files, with config, tokenizer, index and card."""
    # Asking transformers for the names takes seconds, and is not what this is about.
    monkeypatch.setattr(
        import_module("ckptcore.planning.compose"), "check_names", lambda *_: Expected((), ())
    )
    monkeypatch.setattr("ckptcore.planning.live_maps.family_of_config", lambda *_: None)
    source, config, out = tmp_path / "step-1.safetensors", tmp_path / "config", tmp_path / "out"
    save_file({f"model.layers.{n}.w": torch.randn(30, 4) for n in range(2)}, source)
    config.mkdir()
    (config / "config.json").write_text(json.dumps(CONFIG))
    (config / "tokenizer.json").write_text('{"version": "1.0"}')
    ckptcore.convert(str(source), str(out), verb="export", config=str(config), max_file_size=500, catalog=url)
    return out


def recorded(url: str, place: Path | str) -> CheckpointDetail:
    with open_catalog(url) as catalog:
        found = catalog.show(str(place))
    assert isinstance(found, CheckpointDetail)
    return found


def scrubbed(url: str, place: Path) -> tuple[Scrubbed, Any]:
    """Return the scrub of everything, and its result for a place."""
    with open_catalog(url) as catalog:
        found = scrub(catalog, 1.0)
    return found, next(each.proven for each in found.looked if each.checkpoint.uri == str(place))


def validated(url: str | None, place: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """Return exit code and answer of `validate --level bytes`. url: None for no catalog."""
    capsys.readouterr()
    means = ["--no-catalog"] if url is None else ["--catalog", url]
    code = main(["validate", str(place), "--level", "bytes", "--output", "json", *means])
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, answer


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def garble(path: Path) -> None:
    path.write_bytes(b"#" * path.stat().st_size)


def test_every_published_file_is_a_row_with_its_digest(url: str, exported: Path) -> None:
    rows = {f.path: f for f in recorded(url, exported).files}
    there = {p.name: p.read_bytes() for p in exported.iterdir()}
    assert {p: (f.nbytes, f.digest) for p, f in rows.items()} == {
        p: (len(data), blake3(data).hexdigest()) for p, data in there.items()
    }
    weights = {p for p in there if p.endswith(".safetensors")}
    assert {p for p, f in rows.items() if f.role == "data"} == weights
    assert {p for p, f in rows.items() if f.role == "extra"} == there.keys() - weights
    assert {"config.json", "tokenizer.json", "README.md", "model.safetensors.index.json"} <= rows.keys()


TARGETS: dict[str, dict[str, Any]] = {
    "safetensors": {},
    "one file": {"out": "out.safetensors"},
    "dcp": {"to": "dcp"},
    "torch_save": {"to": "torch_save"},
    "torch_dist": {"to": "torch_dist"},
    "zarr": {"to": "zarr"},
    "olmo_core": {"to": "olmo_core"},
    "ranks": {"verb": "reshard", "mesh": "fsdp=2", "to": "torch_ranks"},
    "without digests": {"to": "dcp", "settings": ckptcore.Settings(digest=False)},
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_rows_of_every_format_are_the_files(tmp_path: Path, url: str, target: str) -> None:
    dcp.save({"w": torch.randn(30, 4), "step": 3}, checkpoint_id=tmp_path / "source", no_dist=True)
    options = dict(TARGETS[target])
    out = tmp_path / options.pop("out", "out")
    ckptcore.convert(str(tmp_path / "source"), str(out), catalog=url, **options)
    detail = recorded(url, out)
    there = {
        p.relative_to(out if out.is_dir() else tmp_path): p for p in [out, *out.rglob("*")] if p.is_file()
    }
    assert {f.path for f in detail.files} == {str(name) for name in there}
    for file in detail.files:
        digest = blake3(there[Path(file.path)].read_bytes()).hexdigest()
        assert file.digest == digest or (target == "without digests" and file.role == "data"), file
    assert (detail.checkpoint.content_digest is None) == (target == "without digests")
    found, proven = scrubbed(url, out)  # which records digests where none are known
    assert proven.proof == ("tensors proven" if target == "without digests" else "proven"), proven
    assert found.exit_code == 0
    assert recorded(url, out).checkpoint.content_digest is not None


PUBLISHED = (
    "config.json",
    "tokenizer.json",
    "README.md",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
)


@pytest.mark.grid
@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("damage", [flip, garble, Path.unlink])
def test_damage_to_any_file_is_seen(
    url: str, exported: Path, name: str, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert validated(url, exported, capsys)[0] == 0
    damage(exported / name)
    found, proven = scrubbed(url, exported)
    assert proven.proof == "damaged", proven
    assert found.exit_code == 1
    assert recorded(url, exported).checkpoint.state == "damaged"
    code, answer = validated(url, exported, capsys)
    wrong = [f for f in answer["findings"] if f["severity"] == "error"]
    if wrong and wrong[0]["code"] in ("digest-mismatch", "missing-file"):
        assert any(f["file"] == name for f in wrong)
    assert (code, answer["ok"], answer.get("status")) == (1, False, "damaged")


def test_files_with_digests_are_ok_and_others_unproven(
    url: str, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, answer = validated(url, exported, capsys)
    assert (code, answer["ok"], answer["status"], answer["unproven"]) == (0, True, "ok", [])
    assert not {f["code"] for f in answer["findings"]} & {"unproven", "no-checksum"}
    code, answer = validated(None, exported, capsys)
    assert (code, answer["ok"], answer["status"]) == (0, True, "unproven")
    weights = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert {*weights, "config.json", "tokenizer.json", "README.md"} <= set(answer["unproven"])
    (found,) = [f for f in answer["findings"] if f["code"] == "unproven"]
    assert found["message"].startswith("no checksum covers the bytes of README.md, config.json, ")
    assert main(["validate", str(exported), "--level", "bytes", "--no-catalog"]) == 0
    assert capsys.readouterr().out.startswith("unproven at level bytes")
    # A level that does not read the files does not speak of their bytes.
    assert main(["validate", str(exported), "--no-catalog"]) == 0
    assert capsys.readouterr().out.startswith("ok at level coverage")


def test_a_later_file_is_unproven(url: str, exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (exported / "generation_config.json").write_text("{}")
    _, proven = scrubbed(url, exported)
    assert (proven.proof, proven.unproven) == ("unproven", ("generation_config.json",))
    assert proven.message == "no checksum covers the bytes of generation_config.json"
    code, answer = validated(url, exported, capsys)
    assert (code, answer["status"], answer["unproven"]) == (0, "unproven", ["generation_config.json"])


def test_rows_of_an_older_version_report_unproven_files(
    url: str, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with migrating(url) as connection:
        connection.exec_driver_sql("DELETE FROM checkpoint_file WHERE role = 'extra'")
    found, proven = scrubbed(url, exported)
    extras = ("README.md", "config.json", "model.safetensors.index.json", "tokenizer.json")
    assert (proven.proof, proven.unproven, found.exit_code) == ("unproven", extras, 0)
    assert "config.json" in proven.message
    assert {f.code for f in recorded(url, exported).findings} == {"unproven"}
    with open_catalog(url) as catalog:  # and reading them once makes them known
        rebuild(catalog, [], output_roots=[str(exported)], digests=True)
    assert scrubbed(url, exported)[1].proof == "proven"
    assert recorded(url, exported).findings == ()
    garble(exported / "tokenizer.json")
    assert scrubbed(url, exported)[1].proof == "damaged"
    assert validated(url, exported, capsys)[0] == 1


def test_another_checkpoint_at_a_known_place_is_not_damaged(
    tmp_path: Path, url: str, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(exported)
    exported.mkdir()
    save_file({"other": torch.ones(5)}, exported / "model.safetensors")
    code, answer = validated(url, exported, capsys)
    assert (code, answer["status"]) == (0, "unproven")
    (found,) = [f for f in answer["findings"] if f["code"] == "not-registered"]
    assert "the catalog has safetensors with manifest" in found["message"]


def test_a_missing_catalog_is_not_created(
    tmp_path: Path, exported: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ckptcore.operations.registered_files import against_catalog

    monkeypatch.setenv("CKPTCORE_CATALOG_URL", str(tmp_path / "none" / "catalog.sqlite"))
    manifest = ckptcore.open(str(exported))
    report = ckptcore.check(manifest, "bytes")
    assert against_catalog(manifest, report, str(exported), None) == report
    assert not (tmp_path / "none").exists()
    assert validated(None, exported, capsys)[0] == 0
    assert not (tmp_path / "none").exists()


def test_a_staged_file_that_was_swapped_is_not_published(tmp_path: Path, exported: Path) -> None:
    config = tmp_path / "config"
    options = {"verb": "export", "config": str(config), "max_file_size": 500}
    prepared = ckptcore.prepare(str(tmp_path / "step-1.safetensors"), str(tmp_path / "other"), **options)
    ckptcore.execute(prepared)
    open_staging(str(tmp_path / "other")).files.put("config.json", b"{}")
    with pytest.raises(OutputMismatch, match=r"config\.json is not as planned"):
        ckptcore.publish(prepared)
    assert not (tmp_path / "other").exists()


def test_rebuilt_rows_have_every_file(tmp_path: Path, url: str, exported: Path) -> None:
    with open_catalog(str(tmp_path / "new.sqlite")) as catalog:
        rebuild(catalog, [str(tmp_path / "step-1.safetensors")], output_roots=[str(exported)], digests=True)
    new, old = recorded(str(tmp_path / "new.sqlite"), exported), recorded(url, exported)
    assert new.files == old.files
    assert new.checkpoint.content_digest == old.checkpoint.content_digest
    assert [
        f.path for f in recorded(str(tmp_path / "new.sqlite"), tmp_path / "step-1.safetensors").files
    ] == ["step-1.safetensors"]


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_a_source_with_checksums_is_proven_and_files_beside_it_are_listed(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "step-7"
    dcp.save({"w": torch.randn(30, 4)}, checkpoint_id=source, no_dist=True)
    assert validated(url, source, capsys)[1]["status"] == "ok"
    assert scrubbed(url, source)[1].proof == "proven"
    (source / "tokenizer.json").write_text("{}")
    assert validated(url, source, capsys)[1]["unproven"] == ["tokenizer.json"]
    assert scrubbed(url, source)[1].proof == "unproven"


def test_overwriting_an_output_keeps_no_row_of_the_old_files(
    tmp_path: Path, url: str, exported: Path
) -> None:
    source = tmp_path / "step-1.safetensors"
    ckptcore.convert(
        str(source), str(exported), verb="export", max_file_size=500, overwrite=True, catalog=url
    )
    paths = {f.path for f in recorded(url, exported).files}
    assert paths == {p.name for p in exported.iterdir()}
    assert "tokenizer.json" not in paths
    assert scrubbed(url, exported)[1].proof == "proven"


@pytest.mark.parametrize("first", ["bytes", "coverage"])
def test_a_flipped_header_is_damage_and_replaces_no_row(
    first: str, exported: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    known = recorded(url, exported).checkpoint
    (weights, _) = sorted(exported.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[data.index(b".w") + 1] = ord("v")  # the name of a tensor; all sizes are what they were
    weights.write_bytes(data)
    index = exported / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("layers.0.w", "layers.0.v"))
    main(["validate", str(exported), "--level", first, "--catalog", url])
    code, answer = validated(url, exported, capsys)
    assert (code, answer["status"]) == (1, "damaged")
    assert "digest-mismatch" in {f["code"] for f in answer["findings"]}
    assert recorded(url, exported).checkpoint.id == known.id
    assert scrubbed(url, exported)[1].proof.value == "damaged"


@pytest.fixture
def saved(tmp_path: Path, url: str) -> Path:
    """A checkpoint of two files that the catalog has by `rebuild --digests`."""
    place = tmp_path / "runs" / "step-1"
    place.mkdir(parents=True)
    save(place, 1)
    assert main(["catalog", "rebuild", str(place.parent), "--digests", "--catalog", url]) == 0
    return place


def save(place: Path, value: int, after_s: float = -60.0) -> None:
    """Save both files; after_s: their times, from now."""
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    for name, file in files.items():
        save_file({name: torch.full((8,), float(value))}, place / file)
        os.utime(place / file, (time.time() + after_s,) * 2)


def hints(url: str, place: Path, capsys: pytest.CaptureFixture[str]) -> set[str]:
    code, answer = validated(url, place, capsys)
    assert code == 1
    found = {str(f["hint"]) for f in answer["findings"] if f["code"] == "digest-mismatch"}
    scrub_found = {f.hint for f in scrubbed(url, place)[1].findings if f.code == "digest-mismatch"}
    assert found == scrub_found
    return found


def test_a_checkpoint_that_was_saved_a_second_time_has_that_hint(
    url: str, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(saved, 2, after_s=5.0)
    (hint,) = hints(url, saved, capsys)
    assert "if it was saved here a second time, record that with `ckptcore catalog rebuild --digests`" in hint
    assert main(["scrub", "--share", "1", "--catalog", url]) == 1
    assert "  next: every file with tensors was written after" in capsys.readouterr().out
    assert main(["catalog", "rebuild", str(saved.parent), "--digests", "--catalog", url]) == 0
    assert validated(url, saved, capsys)[0] == 0


@pytest.mark.parametrize("kept_times", [True, False])
def test_a_copy_with_a_flipped_bit_has_another_hint(
    url: str, saved: Path, capsys: pytest.CaptureFixture[str], kept_times: bool
) -> None:
    save(saved, 1, after_s=-60.0 if kept_times else 5.0)
    for path in sorted(saved.glob("*.safetensors"))[: 2 if kept_times else 1]:
        flip(path)
        os.utime(path, (time.time() + (-60.0 if kept_times else 5.0),) * 2)
    (hint,) = hints(url, saved, capsys)
    assert hint.startswith("copy it again from where it was written")
