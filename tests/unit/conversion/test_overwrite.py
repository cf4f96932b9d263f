"""Test that overwriting replaces only files that may be removed, whatever their names and their age."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from paths import FIXTURES
from safetensors.torch import save_file

import ckptcore
from ckptcore.conversion import destination
from ckptcore.conversion.staging import local_staging as publishing
from ckptcore.errors import CkptError, DestinationExists, UsageError
from ckptcore.planning.config_folder import Expected
from ckptcore.planning.request import Request

FIXTURES = FIXTURES / "torch"
SAMPLE = FIXTURES / "dcp_torchtitan_like_4r" / "ckpt"
OTHER = FIXTURES / "dcp_stale_4r" / "ckpt"
KINDS = {"device": stat.S_IFCHR, "fifo": stat.S_IFIFO, "socket": stat.S_IFSOCK}
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount and to make devices")


def tree(path: Path) -> dict[str, object]:
    """Everything below a folder: content of files, targets of links, kinds of the rest."""
    found: dict[str, object] = {}
    for each in sorted(path.rglob("*")):
        mode, name = each.lstat().st_mode, str(each.relative_to(path))
        if stat.S_ISLNK(mode):
            found[name] = os.readlink(each)
        else:
            found[name] = each.read_bytes() if stat.S_ISREG(mode) else stat.S_IFMT(mode)
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with config.json and a tokenizer."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "nothing_that_is_known"}\n')
    (path / "tokenizer.json").write_text('{"version": "1.0"}\n')
    return path


def refused(source: Path, dst: Path, *kinds: type[CkptError], **options: object) -> CkptError:
    """Convert with --overwrite, and without; check that it is refused and nothing changed."""
    before = tree(dst.parent)
    plain = {k: v for k, v in options.items() if not k.startswith("overwrite")}
    for given in (plain, {"overwrite": True, **options}):
        with pytest.raises(kinds) as caught:
            ckptcore.convert(str(source), str(dst), **given)  # type: ignore[arg-type]
        assert caught.value.hint
        assert tree(dst.parent) == before, given
    return caught.value


@pytest.mark.alike(4)
@pytest.mark.parametrize("suffix", ["", ".pt", ".safetensors"])
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("word", ["overwrite", "overwrite_foreign"])
def test_special_files_are_never_replaced(kind: str, suffix: str, word: str, tmp_path: Path) -> None:
    if kind == "device" and os.geteuid() != 0:
        pytest.skip("needs root to make a device")
    dst = tmp_path / f"out{suffix}"
    os.mknod(dst, 0o666 | KINDS[kind], os.makedev(1, 3))
    before = dst.lstat()
    for target in (dst, tmp_path / f"link{suffix}"):
        if target != dst:
            target.symlink_to(dst)
        with pytest.raises(UsageError, match="never replaced"):
            ckptcore.convert(str(SAMPLE), str(target), **{word: True})
    assert os.path.samestat(dst.lstat(), before)
    assert {p.name for p in tmp_path.iterdir()} == {dst.name, f"link{suffix}"}


@pytest.mark.parametrize("make", [os.mkfifo, lambda p: os.mknod(p, stat.S_IFSOCK)])
def test_a_folder_with_special_files_is_never_replaced(make: Callable[[Path], None], tmp_path: Path) -> None:
    dst = tmp_path / "out"
    ckptcore.convert(str(SAMPLE), str(dst))
    (dst / "deep").mkdir()
    make(dst / "deep" / "special")
    refused(SAMPLE, dst, UsageError, DestinationExists)
    refused(SAMPLE, dst, UsageError, DestinationExists, overwrite_foreign=True)


@root_only
@pytest.mark.parametrize("bind", [False, True])
def test_mount_points_are_never_replaced(bind: bool, tmp_path: Path) -> None:
    dst, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    ckptcore.convert(str(SAMPLE), str(dst))
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("precious")
    (dst / "mounted").mkdir()
    arguments = ["--bind", str(elsewhere)] if bind else ["-t", "tmpfs", "tmpfs"]
    if subprocess.run(
        ["mount", *arguments, str(dst / "mounted")], capture_output=True, check=False
    ).returncode:
        pytest.skip("cannot mount here")
    try:
        for target in (dst, dst / "mounted"):
            for word in ("overwrite", "overwrite_foreign"):
                with pytest.raises(UsageError, match="mount"):
                    ckptcore.convert(str(SAMPLE), str(target), **{word: True})
    finally:
        subprocess.run(["umount", str(dst / "mounted")], check=True)
    assert (elsewhere / "precious").read_text() == "precious"


STRANGERS = [
    "notes.txt",
    ".ssh/id_rsa",
    ".gitattributes",
    ".cache/huggingface/x.metadata",
    "README.md",
    "metadata.json",
    "__9_0.distcp",
    "model.safetensors.bak",
    "sub/.metadata",
    "x.index.json",
]


@pytest.mark.grid
@pytest.mark.parametrize("name", STRANGERS)
@pytest.mark.parametrize("to", ["safetensors", "dcp"])
def test_strangers_are_listed_and_kept(name: str, to: str, tmp_path: Path) -> None:
    dst = tmp_path / "out"
    options = {"verb": "reshard", "mesh": "fsdp=2", "to": "dcp"} if to == "dcp" else {}
    ckptcore.convert(str(SAMPLE), str(dst), **options)
    (dst / name).parent.mkdir(parents=True, exist_ok=True)
    (dst / name).write_text("precious")
    error = refused(SAMPLE, dst, DestinationExists, **options)
    assert name in error.message
    assert "overwrite_foreign=True" in error.hint
    ckptcore.convert(str(OTHER), str(dst), overwrite_foreign=True, **options)
    assert not (dst / name).exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("of", ["link", "folder-link", "dangling"])
def test_links_in_a_folder_are_strangers_and_never_followed(of: str, tmp_path: Path) -> None:
    dst, away = tmp_path / "out", tmp_path / "away"
    away.mkdir()
    (away / "precious").write_text("precious")
    ckptcore.convert(str(SAMPLE), str(dst))
    aim = {"link": away / "precious", "folder-link": away, "dangling": away / "nothing"}[of]
    (dst / "linked").symlink_to(aim)
    refused(SAMPLE, dst, DestinationExists)
    ckptcore.convert(str(SAMPLE), str(dst), overwrite_foreign=True)
    assert (away / "precious").read_text() == "precious"
    assert not (dst / "linked").is_symlink()


@pytest.mark.alike(3)
@pytest.mark.parametrize("suffix", ["", ".pt"])
@pytest.mark.parametrize("aim", ["file", "folder", "nothing"])
def test_a_link_is_not_replaced(aim: str, suffix: str, tmp_path: Path) -> None:
    dst, away = tmp_path / f"out{suffix}", tmp_path / "away"
    if aim == "file":
        away.write_text("precious")
    elif aim == "folder":
        ckptcore.convert(str(SAMPLE), str(away))
    dst.symlink_to(away)
    refused(SAMPLE, dst, DestinationExists)
    refused(SAMPLE, dst, DestinationExists, overwrite_foreign=True)


OUTPUTS: dict[str, dict[str, object]] = {
    "safetensors": {},
    "shards": {"max_file_size": 2_000},
    "export": {"verb": "export", "max_file_size": 2_000},
    "dcp": {"verb": "reshard", "mesh": "fsdp=2", "to": "dcp"},
    "torch_ranks": {"verb": "reshard", "mesh": "fsdp=2", "to": "torch_ranks"},
    "dcp_safetensors": {"verb": "reshard", "mesh": "fsdp=2", "to": "dcp", "serialization": "safetensors"},
}


@pytest.mark.alike(2)
@pytest.mark.parametrize("second", ["same", "export", "dcp"])
@pytest.mark.parametrize("first", list(OUTPUTS))
def test_what_was_written_here_is_replaced(first: str, second: str, tmp_path: Path) -> None:
    """Also without a catalog: the format's own reader accounts for it."""
    # Of equal depth: a card names a source nearby by its relative path.
    dst, fresh = tmp_path / "replaced" / "out", tmp_path / "fresh" / "out"
    ckptcore.convert(str(SAMPLE), str(dst), **OUTPUTS[first])
    options = OUTPUTS[first if second == "same" else second]
    ckptcore.convert(str(SAMPLE), str(dst), overwrite=True, **options)
    ckptcore.convert(str(SAMPLE), str(fresh), **options)
    assert tree(dst) == tree(fresh)
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.glob("*/*")) == ["fresh/out", "replaced/out"]


def test_files_of_the_catalog_are_accounted_for(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small file is known by its digest as soon as the catalog records it."""
    monkeypatch.setattr("ckptcore.planning.compose.check_names", lambda *_: Expected(()))
    monkeypatch.setattr("ckptcore.planning.live_maps.family_of_config", lambda *_: None)
    dst, catalog = tmp_path / "models" / "out", str(tmp_path / "catalog.sqlite")
    options = {"verb": "export", "config": str(model), "catalog": catalog}
    ckptcore.convert(str(SAMPLE), str(dst), **options)
    (model / "tokenizer.json").write_text('{"version": "2.0"}\n')
    with mock.patch("ckptcore.conversion.foreign_files._recorded") as recorded:
        from blake3 import blake3

        recorded.return_value = [
            (p.name, p.stat().st_size, blake3(p.read_bytes()).hexdigest()) for p in dst.iterdir()
        ]
        (dst / "config.json").write_text("{}")
        error = refused(SAMPLE, dst, DestinationExists, **options)
        assert error.values["strangers"] == ["config.json"]
        shutil.copy(model / "config.json", dst)  # what is about to be put there is no loss either
        ckptcore.convert(str(SAMPLE), str(dst), overwrite=True, **options)
    assert "2.0" in (dst / "tokenizer.json").read_text()


def test_an_edited_card_is_a_stranger(tmp_path: Path) -> None:
    dst = tmp_path / "out"
    ckptcore.convert(str(SAMPLE), str(dst), verb="export")
    ckptcore.convert(str(OTHER), str(dst), verb="export", overwrite=True)  # as it was written: no loss
    card = dst / "README.md"
    for text in (
        card.read_text() + "\n## Evaluation\n",
        "# My model\n",
        card.read_text().replace("# out", "# x"),
    ):
        card.write_text(text)
        error = refused(SAMPLE, dst, DestinationExists, verb="export")
        assert error.values["strangers"] == ["README.md"]


@pytest.mark.parametrize("name", ["notes.txt", "bashrc", "out.pt"])
def test_a_regular_file_is_replaced(name: str, tmp_path: Path) -> None:
    dst = tmp_path / name
    dst.write_text("old")
    ckptcore.convert(str(SAMPLE), str(dst), overwrite=True)
    assert ckptcore.open(str(dst)).tensors
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("word", ["overwrite", "overwrite_foreign"])
def test_what_the_process_runs_from_is_never_replaced(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, here = tmp_path / "home", tmp_path / "work"
    catalog, other = tmp_path / "db" / "catalog.sqlite", tmp_path / "other.sqlite"
    (here / "deep").mkdir(parents=True)
    home.mkdir()
    ckptcore.convert(str(SAMPLE), str(tmp_path / "one"), catalog=str(catalog))
    ckptcore.convert(str(SAMPLE), str(tmp_path / "two"), catalog=str(other))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("CKPTCORE_CATALOG_URL", f"sqlite:///{catalog}")
    monkeypatch.chdir(here / "deep")
    (home / "file").write_text("precious")
    before = tree(tmp_path)
    for dst in (
        home,
        here,
        here / "deep",
        catalog,
        catalog.parent,
        other,
        Path("."),
        Path(".."),
        Path("../deep"),
        tmp_path,
    ):
        with pytest.raises(UsageError):
            ckptcore.convert(str(SAMPLE), str(dst), catalog=False, **{word: True})
        assert tree(tmp_path) == before, dst
    with pytest.raises(UsageError, match="catalog"):
        ckptcore.convert(str(SAMPLE), str(other), catalog=str(other), **{word: True})


@pytest.mark.parametrize("word", ["overwrite", "overwrite_foreign"])
@pytest.mark.parametrize("place", ["etc", "", "etc/app", "etc/app.conf", "etc/model", "srv", "people/anna"])
def test_the_systems_folders_are_never_replaced(
    word: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A machine in a folder: no test names a real system folder as a destination.
    machine = tmp_path / "machine"
    for folder in ("etc/app", "srv", "people/anna"):
        (machine / folder).mkdir(parents=True)
        (machine / folder / "settings").write_text("x")
    (machine / "etc" / "app.conf").write_text("x")
    save_file({"w": torch.zeros(4)}, tmp_path / "source.safetensors")
    save_file({"w": torch.ones(4)}, machine / "etc" / "model")
    monkeypatch.setattr(destination, "SYSTEM_TREES", (str(machine / "etc"),))
    monkeypatch.setattr(destination, "SYSTEM_FOLDERS", (str(machine / "srv"),))
    monkeypatch.setattr(destination, "_homes", lambda: iter([str(machine / "people" / "anna")]))
    before = tree(machine)
    with pytest.raises(UsageError, match=r"system|home"):
        ckptcore.convert(str(tmp_path / "source.safetensors"), str(machine / place), **{word: True})
    assert tree(machine) == before


def test_an_invalid_place_is_refused_before_any_work() -> None:
    # Judged without converting: these are real places.
    for place in ("/", "///", ".", "..", "memory://", "s3://", "file:///", "s3://bucket"):
        with pytest.raises(UsageError):
            destination.require_place(place, str(SAMPLE))


@pytest.mark.parametrize("word", ["overwrite", "overwrite_foreign"])
def test_hard_links_of_the_source_are_never_replaced(word: str, tmp_path: Path) -> None:
    source, dst = tmp_path / "source", tmp_path / "linked"
    shutil.copytree(SAMPLE, source)
    shutil.copytree(source, dst, copy_function=os.link)
    one = tmp_path / "one.pt"
    os.link(source / ".metadata", one)
    for target in (dst, one):
        with pytest.raises(UsageError, match="under another name"):
            ckptcore.convert(str(source), str(target), **{word: True})
    assert tree(dst) == tree(source)


@pytest.mark.parametrize(("name", "view"), [("blobs", "snapshots/main"), ("step_10", "best")])
def test_targets_of_a_link_farm_are_never_replaced(name: str, view: str, tmp_path: Path) -> None:
    """A cache of models: links to files in a folder beside them; and a folder of links to another one's."""
    blobs, source = tmp_path / name, tmp_path / view
    shutil.copytree(SAMPLE, blobs)
    source.mkdir(parents=True)
    for each in blobs.iterdir():
        (source / each.name).symlink_to(os.path.relpath(each, source))
    with pytest.raises(UsageError, match="under another name"):
        ckptcore.convert(str(source), str(blobs), overwrite_foreign=True)
    assert tree(blobs) == tree(SAMPLE)


def _appear(dst: Path) -> None:
    (dst / "precious").write_text("precious")


def _change(dst: Path) -> None:
    (next(iter(dst.glob("*.safetensors")))).write_bytes(b"precious")


def _swap(dst: Path) -> None:
    shutil.rmtree(dst)
    dst.mkdir()
    (dst / "precious").write_text("precious")


@pytest.mark.alike(1)
@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("when", ["before", "in the moment"])
@pytest.mark.parametrize("how", [_appear, _change, _swap])
def test_files_that_appear_meanwhile_are_kept(
    how: Callable[[Path], None], when: str, exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that appear between the check and the publication: refused, and restored to their place."""
    dst = tmp_path / "out"
    ckptcore.convert(str(SAMPLE), str(dst))
    prepared = ckptcore.prepare(str(OTHER), str(dst), overwrite=True)
    ckptcore.execute(prepared)
    real = publishing._exchange
    monkeypatch.setattr(publishing, "_exchange", lambda a, b: exchange and real(a, b))
    if when == "before":
        how(dst)
        after = tree(dst)
    else:
        move, done = publishing.list_destination_at, []

        def take(spot: object) -> object:
            found = move(spot)
            if not done:  # right behind the last look before the move
                done.append(1)
                how(dst)
                done.append(tree(dst))
            return found

        monkeypatch.setattr(publishing, "list_destination_at", take)
        after = {}
    with pytest.raises(DestinationExists):
        ckptcore.publish(prepared)
    monkeypatch.undo()
    assert tree(dst) == (after or done[1])
    with pytest.raises(DestinationExists):
        ckptcore.convert(str(OTHER), str(dst), overwrite=True)
    ckptcore.convert(str(OTHER), str(dst), overwrite_foreign=True)
    ckptcore.convert(str(OTHER), str(tmp_path / "fresh"))
    assert tree(dst) == tree(tmp_path / "fresh")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fresh", "out"]


class Killed(BaseException):
    """A simulated kill: nothing may handle it."""


@pytest.mark.grid
@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.soak)])
def test_killed_at_every_step_of_replacing(
    every: int, single: bool, exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every call that changes something, by default at each third: a rerun ends as an undisturbed run, and
    at every moment the old or the new output is complete, in its place or beside it."""
    name = "out.safetensors" if single else "out"
    source = tmp_path / "source.safetensors"
    save_file({"weight": torch.arange(6.0)}, source)
    save_file({"weight": torch.zeros(3)}, tmp_path / "old.safetensors")
    ckptcore.convert(str(source), str(tmp_path / "fresh" / name))
    ckptcore.convert(str(tmp_path / "old.safetensors"), str(tmp_path / "old" / name))
    fresh, steps = tree(tmp_path / "fresh"), 0
    real_exchange = publishing._exchange

    def attempt(here: Path, stop: int) -> bool:
        """Return whether it ran to its end."""
        calls: list[int] = []

        def counted(real: Callable[..., object]) -> Callable[..., object]:
            def call(*args: object, **kwargs: object) -> object:
                if len(calls) == stop:
                    raise Killed
                calls.append(1)
                return real(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(publishing, "_exchange", counted(lambda a, b: exchange and real_exchange(a, b)))
            for each in ("note", "rename_new"):
                patch.setattr(publishing, each, counted(getattr(publishing, each)))
            for change in ("rename", "unlink", "rmdir", "link"):
                patch.setattr(publishing.os, change, counted(getattr(os, change)))
            try:
                ckptcore.convert(str(source), str(here / name), overwrite=True)
            except Killed:
                return False
        return True

    for stop in range(0, 60, every):
        here = tmp_path / f"try-{stop}"
        shutil.copytree(tmp_path / "old", here)
        done = attempt(here, stop)
        assert (here / name).exists() or list(here.glob(".*.ckptcore/replaced")), stop
        if done:
            steps = stop
            break
        ckptcore.convert(str(source), str(here / name), overwrite=True)
        assert tree(here) == fresh, stop
    assert steps > 5


def test_a_failed_move_restores_the_old_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dst = tmp_path / "out"
    ckptcore.convert(str(SAMPLE), str(dst))
    before = tree(dst)

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(publishing, "_exchange", lambda a, b: False)
    monkeypatch.setattr(publishing, "_move_to_free", fail)
    with pytest.raises(CkptError):
        ckptcore.convert(str(OTHER), str(dst), overwrite=True)
    assert tree(dst) == before


def test_a_request_without_overwrite_foreign_is_read() -> None:
    """Requests of targets name what they set."""
    form = Request("/a", "/b", "export", dtype="bf16", overwrite=True).as_dict()
    form.pop("overwrite_foreign")
    assert Request.from_dict(form).overwrite
    assert not Request.from_dict(form).overwrite_foreign
