"""A catalog on a full disk, on a read-only file system or in a folder of others: why, and what to do next."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptcore
from ckptcore.catalog import open_catalog, upgrade
from ckptcore.conversion import registration
from ckptcore.errors import CatalogError

_USER = 65534


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mount a small file system, or change its options; skip where that is not permitted."""
    folder = tmp_path / "disk"

    def mounted(options: str) -> Path:
        folder.mkdir(exist_ok=True)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, check=False
        )
        if done.returncode:
            pytest.skip("cannot mount a file system here")
        return folder

    yield mounted
    if os.path.ismount(folder):
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def source(tmp_path: Path) -> str:
    save_file({"w": torch.randn(8, 8)}, tmp_path / "model.safetensors")
    return str(tmp_path / "model.safetensors")


def fill(folder: Path) -> Path:
    filler = folder / "filler"
    with filler.open("wb") as file:
        while True:
            try:
                os.write(file.fileno(), bytes(4096))
            except OSError:
                return filler


def refused(call: Callable[[], object]) -> CatalogError:
    with pytest.raises(CatalogError) as found:
        call()
    assert (found.value.code, found.value.exit_code) == ("catalog", 16)
    return found.value


def test_a_full_disk(disk: Callable[..., Path], source: str, tmp_path: Path) -> None:
    folder = disk("size=2m")
    url, out = str(folder / "c.sqlite"), str(tmp_path / "out")
    fill(folder)
    first = refused(lambda: ckptcore.convert(source, out, catalog=url))  # no catalog is there yet
    (folder / "filler").unlink()
    (folder / "c.sqlite").unlink(missing_ok=True)
    open_catalog(url).close()
    filler = fill(folder)
    later = refused(lambda: ckptcore.convert(source, out, catalog=url))
    reading = refused(lambda: open_catalog(url, create=False))
    for error in (first, later, reading):
        assert error.message.startswith(f"the disk of the catalog {url} is full: 0 bytes are free (")
        assert error.hint.startswith("free space there, then run the command again")
        assert error.values["reason"] == "disk-full"
    assert not Path(out).exists()
    filler.unlink()
    assert ckptcore.convert(source, out, catalog=url).conversion is not None


def test_a_disk_that_fills_before_the_output_is_registered(
    disk: Callable[..., Path], source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = disk("size=2m")
    url, out = str(folder / "c.sqlite"), str(tmp_path / "out")
    made = registration._made

    def late(*arguments: object) -> object:
        fill(folder)
        return made(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(registration, "_made", late)
    error = refused(lambda: ckptcore.convert(source, out, catalog=url))
    assert error.message.startswith(f"{out} is published, but not registered: the disk of the catalog {url}")
    assert "free space there" in error.hint
    assert "the next run with the catalog registers the output" in error.hint
    assert "upgrade" not in error.hint
    monkeypatch.undo()
    (folder / "filler").unlink()
    published = Path(out).stat().st_mtime_ns
    assert ckptcore.convert(source, out, catalog=url).conversion is not None
    assert Path(out).stat().st_mtime_ns == published
    with open_catalog(url, create=False) as catalog:
        assert [row.uri for row in catalog.list(9, kind="derived")] == [out]


def test_a_read_only_file_system(disk: Callable[..., Path], source: str, tmp_path: Path) -> None:
    folder = disk("size=2m")
    url, out = str(folder / "c.sqlite"), str(tmp_path / "out")
    disk("remount,ro")
    missing = refused(lambda: ckptcore.convert(source, out, catalog=url))
    assert missing.message.startswith(
        f"cannot create the catalog {url}: the file system of {folder} is read-only ("
    )
    assert missing.hint.startswith("name another place with CKPTCORE_CATALOG_URL or catalog=")
    disk("remount,rw")
    open_catalog(url).close()
    disk("remount,ro")
    for call in (lambda: open_catalog(url, create=False), lambda: ckptcore.convert(source, out, catalog=url)):
        error = refused(call)
        assert error.message.startswith(
            f"cannot open the catalog {url}: the file system of {folder} is read-only; it is in SQLite's WAL "
            "mode, and even readers need c.sqlite-shm beside it"
        )
        assert error.hint.startswith("copy it, with its -wal file if there is one")
    assert not Path(out).exists()
    copy = str(shutil.copy(url, tmp_path / "copy.sqlite"))  # the step that the error names
    with open_catalog(copy, create=False) as catalog:
        assert not catalog.list(9)


def test_a_read_only_file_system_with_the_files_of_a_writer(
    disk: Callable[..., Path], source: str, tmp_path: Path
) -> None:
    folder = disk("size=2m")
    url = str(folder / "c.sqlite")
    with open_catalog(url) as catalog, catalog.reading():
        for end in ("-wal", "-shm"):
            shutil.copy(url + end, tmp_path / f"beside{end}")
    for end in ("-wal", "-shm"):
        shutil.copy(tmp_path / f"beside{end}", url + end)
    disk("remount,ro")
    with open_catalog(url, create=False) as catalog:
        assert not catalog.list(9)
    error = refused(lambda: ckptcore.convert(source, str(tmp_path / "out"), catalog=url))
    assert error.message.startswith(
        f"cannot write the catalog {url}: the file system of {url} is read-only ("
    )
    assert error.hint.startswith("make the file and its folder writable")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    ("modes", "text"),
    [
        (
            (0o755, 0o644),
            "cannot open the catalog {url}: this user may not create files in {folder}; it is in",
        ),
        ((0o755, 0o600), "this user may not read the catalog {url}"),
        ((0o755, None), "cannot create the catalog {url}: this user may not create files in {folder}"),
    ],
)
def test_another_users_folder(modes: tuple[int, int | None], text: str) -> None:
    folder = Path(subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip())
    url = str(folder / "c.sqlite")
    try:
        open_catalog(url).close()
        if modes[1] is None:
            Path(url).unlink()
        else:
            os.chmod(url, modes[1])
        folder.chmod(modes[0])
        os.seteuid(_USER)
        try:
            error = refused(lambda: open_catalog(url))
        finally:
            os.seteuid(0)
        assert error.message.startswith(text.format(url=url, folder=folder))
    finally:
        shutil.rmtree(folder)


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    error = refused(lambda: upgrade(str(tmp_path / ("c" * 300))))
    assert error.message.startswith("cannot create the catalog ")
    assert "File name too long" in error.message


def test_what_is_no_catalog(tmp_path: Path) -> None:
    (tmp_path / "junk").write_text("x" * 4096)
    error = refused(lambda: open_catalog(str(tmp_path / "junk")))
    assert error.message == f"{tmp_path / 'junk'} is not a SQLite database (file is not a database)"
    (tmp_path / "folder").mkdir()
    assert refused(lambda: open_catalog(str(tmp_path / "folder"))).message == (
        f"{tmp_path / 'folder'} is a folder (unable to open database file)"
    )
