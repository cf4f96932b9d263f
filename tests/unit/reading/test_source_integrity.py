"""Trust: no bit that a checksum covers goes by, and no output mixes two sources, whatever the layout."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckptcore
from ckptcore.errors import CkptError, DamagedCheckpoint, DestinationExists, SourceChanged, UnreadablePart


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def payload(path: Path, name: str = "data/0") -> tuple[int, int]:
    """(first byte, length) of the largest storage record of a torch zip (or of a file that is one)."""
    with zipfile.ZipFile(path) as archive:
        entry = max((e for e in archive.infolist() if "/data/" in e.filename), key=lambda e: e.file_size)
        with path.open("rb") as file:
            file.seek(entry.header_offset + 26)
            lengths = file.read(4)
    start = entry.header_offset + 30 + int.from_bytes(lengths[:2], "little")
    return start + int.from_bytes(lengths[2:], "little"), entry.file_size


@pytest.mark.parametrize("order", [(1, 0), (0, 1), (2, 0, 1), (1, 2, 0)])
@pytest.mark.parametrize("memory", [1 << 20, 1 << 30])
@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_a_flip_in_any_layout_stops_the_conversion(
    tmp_path: Path, order: tuple[int, ...], memory: int
) -> None:
    shape = (195, 139, 26)[: len(order)] if len(order) == 3 else (700, 300)
    dcp.save({"w": torch.randn(shape).permute(order)}, checkpoint_id=tmp_path / "ckpt")
    (file,) = (tmp_path / "ckpt").glob("*.distcp")
    flip(file, file.stat().st_size // 2)
    settings = ckptcore.Settings(memory=memory, workers=2)
    with pytest.raises(DamagedCheckpoint) as caught:
        ckptcore.convert(str(tmp_path / "ckpt"), str(tmp_path / "out"), settings=settings)
    assert caught.value.findings[0].code == "crc-mismatch"
    assert not (tmp_path / "out").exists()


VIEWS: dict[str, Any] = {
    "a view beside its whole": lambda b: {"full": b, "part": b[100:]},
    "a transpose beside its whole": lambda b: {"w": b.view(2000, 300), "t": b.view(2000, 300).t()},
    "a view with gaps": lambda b: {"gaps": b.view(2000, 300)[:, :5]},
    "an expanded element": lambda b: {"all": b, "one": b[:1].expand(50)},
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("target", ["out.pt", "out.safetensors"])
def test_shared_storages_are_right_or_refused(tmp_path: Path, name: str, target: str) -> None:
    truth = VIEWS[name](torch.randn(600_000))
    source = tmp_path / "a.pt"
    torch.save(truth, source)
    done = tmp_path / target
    ckptcore.convert(str(source), str(done))
    found = torch.load(done) if target.endswith(".pt") else load_file(done)
    assert all(torch.equal(found[n], t) for n, t in truth.items())
    start, length = payload(source)
    flip(source, start + length - 3)  # also where no view looks
    done.unlink()
    with pytest.raises(DamagedCheckpoint):
        ckptcore.convert(str(source), str(done))
    assert not done.exists()


def two_shards(folder: Path, value: float) -> Path:
    source = folder / "source.safetensors"
    save_file({n: torch.full((1000,), value) for n in "ab"}, source)
    return source


def test_a_resume_does_not_mix_two_sources(tmp_path: Path) -> None:
    source = two_shards(tmp_path, 1.0)
    options = {"max_file_size": 4000}
    prepared = ckptcore.prepare(str(source), str(tmp_path / "out"), **options)
    ckptcore.execute(prepared, [0])
    two_shards(tmp_path, 2.0)
    with pytest.raises(SourceChanged):
        ckptcore.execute(prepared, [1])
    ckptcore.convert(str(source), str(tmp_path / "out"), **options)
    found: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(file)
    assert all((t == 2).all() for t in found.values())


def test_a_source_that_changed_behind_the_last_read_is_not_published(tmp_path: Path) -> None:
    source = two_shards(tmp_path, 1.0)
    prepared = ckptcore.prepare(str(source), str(tmp_path / "out"))
    ckptcore.execute(prepared)
    os.utime(source, ns=(1, 1))
    with pytest.raises(SourceChanged):
        ckptcore.publish(prepared)
    assert not (tmp_path / "out").exists()


def test_the_api_goes_from_plan_to_output(tmp_path: Path) -> None:
    source = two_shards(tmp_path, 3.0)
    prepared = ckptcore.prepare(str(source), str(tmp_path / "out"), max_file_size=4000)
    receipts = ckptcore.execute(prepared, [f.index for f in prepared.files])
    reused = ckptcore.execute(prepared)
    assert [r.reused for r in receipts] == [False] * 3
    assert [r.reused for r in reused] == [True] * 3
    assert ckptcore.publish(prepared).destination == str(tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source.safetensors"]


@pytest.mark.parametrize("change", ["flip", "drop", "replace"])
def test_what_was_published_is_rechecked_after_a_kill(tmp_path: Path, change: str) -> None:
    from ckptcore.conversion.pipeline import finish

    source = two_shards(tmp_path, 1.0)
    options = {"max_file_size": 4000}
    prepared = ckptcore.prepare(str(source), str(tmp_path / "out"), **options)
    ckptcore.execute(prepared)
    finish(prepared.plan_uri)  # a run that is killed here has published, and not cleaned up
    shard = next((tmp_path / "out").glob("model-00001*"))
    if change == "flip":
        flip(shard, shard.stat().st_size - 1)
    elif change == "drop":
        shard.unlink()
    else:
        shutil.rmtree(tmp_path / "out")
        (tmp_path / "out").mkdir()
        save_file({"x": torch.zeros(3)}, tmp_path / "out" / "model.safetensors")
    with pytest.raises(CkptError) as caught:
        ckptcore.convert(str(source), str(tmp_path / "out"), **options)
    assert isinstance(caught.value, (DestinationExists, DamagedCheckpoint))


def test_tensors_in_objects_that_are_not_built_stop_the_conversion(tmp_path: Path) -> None:
    inner = UserDict(layer={"w": torch.ones(5)})
    torch.save({"a": torch.zeros(3), "model": inner}, tmp_path / "a.pt")
    with pytest.raises(UnreadablePart, match=r"IterableUserDict, and 20 bytes of tensors inside"):
        ckptcore.convert(str(tmp_path / "a.pt"), str(tmp_path / "out"))


class Opaque:
    def __init__(self) -> None:
        self.hidden = torch.ones(7)


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_opaque_objects_with_tensors_are_left_out_by_name_only(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3), "thing": Opaque()}, checkpoint_id=tmp_path / "ckpt")
    with pytest.raises(DamagedCheckpoint) as caught:
        ckptcore.convert(str(tmp_path / "ckpt"), str(tmp_path / "out"))
    assert caught.value.findings[0].code == "refused-tensors"
    ckptcore.convert(str(tmp_path / "ckpt"), str(tmp_path / "out"), exclude=["thing*"])
    assert list(load_file(tmp_path / "out" / "model.safetensors")) == ["w"]


@pytest.mark.parametrize("name", ["[/red]x", "a[bold]b", "tab\tand\x1b[31m", "häß漢字", "with space"])
def test_hostile_names_are_displayed_escaped(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from ckptcore.__main__ import main

    save_file({name: torch.ones(2)}, tmp_path / "a.safetensors")
    out = tmp_path / f"out{name.replace('/', '')}.safetensors"
    assert main(["inspect", str(tmp_path / "a.safetensors")]) == 0
    assert main(["consolidate", str(tmp_path / "a.safetensors"), str(out), "--no-catalog"]) == 0
    output = capsys.readouterr().out
    assert "\x1b[31m" not in output
    assert list(load_file(out)) == [name]


@pytest.mark.parametrize("layout", ["gaps", "transposed", "expanded"])
def test_values_are_counted_in_any_layout(tmp_path: Path, layout: str) -> None:
    full = torch.zeros(40, 30)
    full[:, 20:] = float("nan")
    view = {"gaps": full[:, :20], "transposed": full.t(), "expanded": full[0, 25:26].expand(100)}[layout]
    torch.save({"t": view}, tmp_path / "a.pt")
    report = ckptcore.check(ckptcore.open(str(tmp_path / "a.pt")), "values")
    messages = [f.message for f in report.findings if f.code == "not-finite"]
    want = {
        "gaps": [],
        "transposed": ["t: 400 NaN and 0 Inf of 1200 elements"],
        "expanded": ["t: 100 NaN and 0 Inf of 100 elements"],
    }[layout]
    assert messages == want
    assert report.ok
