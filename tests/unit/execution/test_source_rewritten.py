"""Rewritten: a source that is rewritten in place, with its size and times restored, is never mixed."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckptcore
from ckptcore.checking import source_stamps as stamps
from ckptcore.conversion import publish as finishing
from ckptcore.conversion import publish as reproof
from ckptcore.conversion.staging.open_staging import open_staging
from ckptcore.errors import CkptError, SourceChanged
from ckptcore.operations.claims import source_digest
from ckptcore.planning.request import Request, Settings
from ckptcore.store import open_store
from ckptcore.store.file_status import YOUNG
from ckptcore.store.listing import stamp_of, survey
from ckptcore.store.local import LocalStore
from ckptcore.utils.workers import ProgressMeter

# By their names in the package, which are those of functions, too.
stages, executing = import_module("ckptcore.conversion.pipeline"), import_module("ckptcore.execution.execute")
examining = import_module("ckptcore.checking.examine")
SMALL = Settings(memory=1 << 20, workers=1)
Write = Callable[[Path, float], Any]
REFUSED = ("source-changed", "damaged")


def raw(path: Path, value: float) -> None:
    save_file({f"layer.{n}.weight": torch.full((90, 1000), value) for n in range(4)}, path)


def zipped(path: Path, value: float) -> None:
    weights = {f"layer.{n}.weight": torch.full((90, 1000), value) for n in range(4)}
    torch.save(weights | {"step": int(value)}, path)


def age(source: Path) -> None:
    """Waits until the ctime tells a later write."""
    for path in [source, *source.rglob("*")]:
        assert stamps.settled_ctimes([path.name], open_store(str(path.parent)))[path.name] != YOUNG


def rewrite(path: Path, value: float, write: Write) -> None:
    """Other content, written in place; only the ctime can tell."""
    before = path.stat()
    other = path.with_name("other") / path.name  # torch writes the file's name into it
    other.parent.mkdir()
    write(other, value)
    data = other.read_bytes()
    other.unlink()
    other.parent.rmdir()
    assert len(data) == before.st_size
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    same = ("st_size", "st_mtime_ns", "st_ino")
    assert [getattr(after, name) for name in same] == [getattr(before, name) for name in same]


def values_in(out: Path) -> set[float]:
    """Every value of the output: one for a model that is not mixed."""
    tensors: dict[str, Any] = {}
    for file in [out] if out.is_file() else sorted(out.glob("*.safetensors")):
        tensors |= torch.load(file) if file.suffix == ".pt" else load_file(file)
    step = {float(tensors.pop("step"))} if "step" in tensors else set()
    return {value for t in tensors.values() for value in t.float().unique().tolist()} | step


# moment -> the function behind whose n-th call it is.
MOMENTS: dict[str, tuple[Any, str, int]] = {
    "listed": (examining, "open_source", 1),
    "header": (examining, "read_manifest", 1),
    "inspected": (stages, "inspect", 1),
    "prepared": (stages, "_prepare", 1),
    "first tile": (ProgressMeter, "add", 1),
    "half": (ProgressMeter, "add", 2),
    "receipt": (executing, "write_receipt", 1),
    "executed": (stages, "_execute", 1),
    "read back": (finishing, "_read_back", 1),
}


def disturbed(moment: str, act: Callable[[], None]) -> Any:
    """A patch that acts at a moment of a conversion."""
    where, name, calls = MOMENTS[moment]
    function, left = getattr(where, name), list(range(calls))

    def then(*given: Any, **more: Any) -> Any:
        found = function(*given, **more)
        if left:
            left.pop()
            if not left:
                act()
        return found

    return mock.patch.object(where, name, then)


@pytest.mark.alike(3)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(("suffix", "write"), [("safetensors", raw), ("pt", zipped)])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_source_rewritten_in_place_is_never_published_mixed(
    tmp_path: Path, moment: str, suffix: str, write: Write, dtype: str | None
) -> None:
    source, out = tmp_path / f"source.{suffix}", tmp_path / f"out.{suffix}"
    write(source, 1.0)
    age(source)
    acted = []

    def act() -> None:
        rewrite(source, 2.0, write)
        acted.append(True)

    options = {"settings": SMALL, "dtype": dtype}
    with disturbed(moment, act):
        try:
            ckptcore.convert(str(source), str(out), **options)
            code = None
        except CkptError as error:
            code = error.code
    assert acted
    assert code in REFUSED if code else len(values_in(out)) == 1
    assert out.exists() == (code is None)
    if code:  # and the next run finds nothing of the old one to go on with
        ckptcore.convert(str(source), str(out), **options)
        assert values_in(out) == {2.0}
    assert sorted(p.name for p in tmp_path.iterdir()) == [out.name, source.name]


def folder(path: Path, value: float) -> None:
    dcp.save(
        {f"layer.{n}.weight": torch.full((90, 1000), value) for n in range(4)} | {"step": int(value)},
        checkpoint_id=path,
        no_dist=True,
    )


@pytest.mark.alike(3)
@pytest.mark.parametrize("moment", [m for m in MOMENTS if m != "receipt"])
@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_plain_values_and_weights_are_of_one_moment(tmp_path: Path, moment: str) -> None:
    source, out, newer = tmp_path / "source", tmp_path / "out.pt", tmp_path / "newer"
    folder(source, 1.0)
    folder(newer, 2.0)
    age(source)

    def act() -> None:
        (path,) = source.glob("*.distcp")
        rewrite(path, 2.0, lambda other, _: shutil.copyfile(newer / path.name, other))

    with disturbed(moment, act):
        try:
            ckptcore.convert(str(source), str(out), settings=SMALL)
            code = None
        except CkptError as error:
            code = error.code
    if code:
        assert code in REFUSED
        ckptcore.convert(str(source), str(out), settings=SMALL)
    assert len(values_in(out)) == 1


class Rereads:
    """Counts how often the source was read again, and does something in the middle of it."""

    def __init__(self, act: Callable[[], None] = lambda: None) -> None:
        self.count, self.act, self.real = 0, act, reproof._compare_files

    def __call__(self, *given: Any) -> None:
        self.count += 1
        self.real(*given)
        self.act()


def touch(source: Path) -> None:
    """What a backup or `chmod -R` does: every ctime is another one, and nothing else."""
    for path in [source] if source.is_file() else sorted(p for p in source.rglob("*") if p.is_file()):
        before = path.stat()
        os.chmod(path, 0o600 if before.st_mode & 0o077 else 0o644)
        assert path.stat().st_ctime_ns != before.st_ctime_ns


TARGETS: dict[str, dict[str, Any]] = {
    "safetensors": {},
    "safetensors of bfloat16": {"dtype": "bfloat16"},
    "dcp": {"to": "dcp"},
    "dcp of safetensors": {"to": "dcp", "serialization": "safetensors"},
    "torch_save": {"to": "torch_save"},
    "zarr": {"to": "zarr"},
    "torch_dist": {"to": "torch_dist"},
    "ranks": {"verb": "reshard", "mesh": "fsdp=2", "to": "torch_ranks"},
    "dcp ranks": {"verb": "reshard", "mesh": "fsdp=3", "to": "dcp"},
}


@pytest.mark.alike(3)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_a_chmod_costs_a_second_look_and_nothing_else(tmp_path: Path, target: str) -> None:
    source, out, quiet = tmp_path / "source", tmp_path / "out", tmp_path / "quiet"
    folder(source, 1.0)
    age(source)
    ckptcore.convert(str(source), str(quiet), **TARGETS[target])
    rereads = Rereads()
    with mock.patch.object(reproof, "_compare_files", rereads), disturbed("executed", lambda: touch(source)):
        ckptcore.convert(str(source), str(out), **TARGETS[target])
    assert rereads.count == 1
    assert bytes_of(out) == bytes_of(quiet)
    with mock.patch.object(reproof, "_compare_files", rereads):
        ckptcore.convert(str(source), str(tmp_path / "again"), **TARGETS[target])
    assert rereads.count == 1  # an undisturbed source is read once


def bytes_of(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}


def test_a_backup_that_comes_by_while_the_source_is_reread(tmp_path: Path) -> None:
    source, out = tmp_path / "source.safetensors", tmp_path / "out.safetensors"
    raw(source, 1.0)
    age(source)
    todo = [touch]
    once = Rereads(lambda: todo.pop()(source) if todo else None)
    with mock.patch.object(reproof, "_compare_files", once), disturbed("executed", lambda: touch(source)):
        ckptcore.convert(str(source), str(out))
    assert once.count == 2
    assert values_in(out) == {1.0}
    always = Rereads(lambda: touch(source))
    with mock.patch.object(reproof, "_compare_files", always), disturbed("executed", lambda: touch(source)):  # noqa: SIM117
        with pytest.raises(SourceChanged, match="keep changing"):
            ckptcore.convert(str(source), str(tmp_path / "other.safetensors"))
    assert always.count == 3
    ckptcore.convert(str(source), str(tmp_path / "other.safetensors"))  # what was written is kept, and proven
    assert values_in(tmp_path / "other.safetensors") == {1.0}


def test_a_write_in_the_tick_of_the_last_one_is_not_missed(tmp_path: Path) -> None:
    source = tmp_path / "source.safetensors"
    raw(source, 1.0)
    now = source.stat().st_ctime_ns
    store = LocalStore(tmp_path)
    with mock.patch.object(time, "time_ns", return_value=now + 1_000_000):
        assert store.ctime(source.name) == YOUNG
        young = stamps.take_ctimes([source.name], store)
    assert not stamps.untouched(young, young)
    assert stamps.digest(young) is None
    with mock.patch.object(
        time, "time_ns", return_value=now - 3600 * 10**9
    ):  # a file server's clock may be ahead
        assert store.ctime(source.name) == now
    with mock.patch.object(time, "time_ns", return_value=now):
        manifest = stages.inspect(str(source))
    assert manifest.stamps[source.name][1] == YOUNG
    rereads = Rereads()
    with (
        mock.patch.object(stages, "inspect", return_value=manifest),
        mock.patch.object(reproof, "_compare_files", rereads),
    ):
        ckptcore.convert(str(source), str(tmp_path / "out.safetensors"))
    assert rereads.count == 1


@pytest.mark.parametrize("changed", [False, True])
def test_a_staging_folder_of_an_older_version_goes_on(tmp_path: Path, changed: bool) -> None:
    source, out = tmp_path / "source.safetensors", tmp_path / "out"
    raw(source, 1.0)
    age(source)
    options: dict[str, Any] = {"max_file_size": 400_000}
    prepared = ckptcore.prepare(str(source), str(out), **options)
    ckptcore.execute(prepared, [0, 1])
    staging = open_staging(str(out))
    assert json.loads(staging.plan.read(stamps.NAME, 0, staging.plan.size(stamps.NAME) or 0)) == {
        source.name: f"{source.stat().st_size} bytes, modified {source.stat().st_mtime_ns}, "
        f"inode {source.stat().st_ino}"
    }
    staging.plan.remove(stamps.CTIMES)
    if changed:
        rewrite(source, 2.0, raw)
    kept = []
    rereads = Rereads()
    with mock.patch.object(reproof, "_compare_files", rereads):
        try:
            result = ckptcore.convert(str(source), str(out), **options)
            kept = [r.reused for r in result.files]
        except SourceChanged:
            assert changed
            ckptcore.convert(str(source), str(out), **options)
    assert rereads.count == 1
    assert values_in(out) == {2.0 if changed else 1.0}
    assert changed or sum(kept) == 2


def test_a_plan_that_lost_its_stamps_is_not_published(tmp_path: Path) -> None:
    raw(tmp_path / "source.safetensors", 1.0)
    prepared = ckptcore.prepare(str(tmp_path / "source.safetensors"), str(tmp_path / "out"))
    ckptcore.execute(prepared)
    open_staging(str(tmp_path / "out")).plan.remove(stamps.NAME)
    with pytest.raises(SourceChanged, match="has no stamps of its source"):
        ckptcore.publish(prepared)
    ckptcore.convert(str(tmp_path / "source.safetensors"), str(tmp_path / "out"))
    assert values_in(tmp_path / "out") == {1.0}


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_no_digest_and_no_claim_rests_on_a_ctime(tmp_path: Path) -> None:
    from blake3 import blake3

    source = tmp_path / "step-1"
    folder(source, 1.0)
    manifest = stages.inspect(str(source))
    claimed, seen = source_digest(manifest), stamp_of(survey(str(source)))
    request = Request(str(source), str(tmp_path / "out"))
    planned = stages.prepare(request).plan_digest
    digest = blake3(manifest.digest.encode())  # as claims of 0.20 have it
    for path in sorted(source.glob("*.distcp")):
        status = path.stat()
        stamp = f"{status.st_size} bytes, modified {status.st_mtime_ns}, inode {status.st_ino}"
        digest.update(f"{path.name}\0{stamp}\n".encode())
    assert claimed == digest.hexdigest()
    age(source)
    touch(source)
    inspected = stages.inspect(str(source))
    assert (inspected.digest, source_digest(inspected), stamp_of(survey(str(source)))) == (
        manifest.digest,
        claimed,
        seen,
    )
    kept = open_staging(request.destination).plan.read(stamps.CTIMES, 0, 10)
    assert stages.prepare(request).plan_digest == planned
    # The plan goes on with the ctimes of its first look: what was written since rests on them.
    assert open_staging(request.destination).plan.read(stamps.CTIMES, 0, 10) == kept


def test_a_write_through_a_memory_map_is_seen(tmp_path: Path) -> None:
    source, out = tmp_path / "source.safetensors", tmp_path / "out.safetensors"
    raw(source, 1.0)
    age(source)
    before = source.stat()
    header = 8 + int.from_bytes(source.read_bytes()[:8], "little")
    with source.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:

        def act() -> None:
            for at in (header, len(mapped) - 4):
                mapped[at : at + 4] = torch.tensor([2.0]).numpy().tobytes()
            os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))

        with disturbed("half", act), pytest.raises(SourceChanged):
            ckptcore.convert(str(source), str(out), settings=SMALL)
        ckptcore.convert(str(source), str(out), settings=SMALL)
    assert values_in(out) == {1.0, 2.0}


@pytest.mark.parametrize("moment", ["listed", "header", "inspected", "prepared", "half", "read back"])
def test_an_object_that_is_replaced_while_it_is_read(tmp_path: Path, moment: str) -> None:
    fs = fsspec.filesystem("memory")
    source, out = f"memory://rewritten-{moment.replace(' ', '-')}", tmp_path / "out"
    objects = {}
    for value in (1.0, 2.0):
        raw(tmp_path / "made", value)
        objects[value] = (tmp_path / "made").read_bytes()
    fs.pipe_file(f"{source}/model.safetensors", objects[1.0])
    time.sleep(0.01)
    with disturbed(moment, lambda: fs.pipe_file(f"{source}/model.safetensors", objects[2.0])):
        try:
            ckptcore.convert(source, str(out), settings=SMALL)
        except SourceChanged:
            ckptcore.convert(source, str(out), settings=SMALL)
    assert values_in(out) == {2.0}


@pytest.mark.soak
def test_rewriting_at_any_moment(tmp_path: Path) -> None:
    published = 0
    for n in range(60):
        source, out = tmp_path / f"{n}.safetensors", tmp_path / f"out-{n}.safetensors"
        raw(source, 1.0)
        age(source)
        writer = threading.Timer(0.002 * (n % 30), rewrite, (source, 2.0, raw))
        writer.start()
        try:
            ckptcore.convert(str(source), str(out), settings=SMALL)
            published += 1
        except CkptError as error:
            assert error.code in REFUSED, error  # noqa: PT017  either way is right
        writer.join()
        assert not out.exists() or len(values_in(out)) == 1
    assert published
