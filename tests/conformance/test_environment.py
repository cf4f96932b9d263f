"""Test the errors of places that cannot be read or written."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from samples import FIXTURES, read_safetensors, tree_digest

if TYPE_CHECKING:
    from driver import Cli, Outcome

SOURCE = FIXTURES / "torch" / "dcp_stale_4r" / "ckpt"
NOBODY = 65534
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user or to mount")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can reach, which pytest's own are not."""
    path = Path(tempfile.mkdtemp(prefix="ckptcore-test-"))
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


def refused(done: Outcome, code: str, exit_code: int) -> dict[str, object]:
    """Check a refusal; return the error."""
    assert done.code == exit_code, done
    assert "Traceback" not in done.stderr, done
    error = done.json["error"]
    assert error["code"] == code, done
    assert error["message"]
    assert error["hint"]
    return dict(error)


@pytest.mark.parametrize("there", ["file", "folder", "empty-folder", "link", "dangling-link"])
@pytest.mark.parametrize("suffix", ["", ".safetensors", ".pt"])
def test_destination_exists(there: str, suffix: str, cli: Cli, tmp_path: Path) -> None:
    """Refused before any work, and left as it was; replaced completely on request."""
    dst = tmp_path / f"out{suffix}"
    other = tmp_path / "other"
    if there == "file":
        dst.write_text("precious")
    elif there == "folder":
        dst.mkdir()
        (dst / "model.safetensors").write_text("precious")
        (dst / "stale.safetensors").write_text("precious")
    elif there == "empty-folder":
        dst.mkdir()
    else:
        dst.symlink_to(other)
        if there == "link":
            other.write_text("precious")
    before = tree_digest(tmp_path)
    if there != "empty-folder" or suffix:  # an empty folder where a folder is wanted is no loss
        done = cli("consolidate", SOURCE, dst, "--output", "json")
        error = refused(done, "destination-exists", 7)
        assert str(dst) in str(error["message"])
        assert tree_digest(tmp_path) == before, "something was done although it was refused"

    done = cli("consolidate", SOURCE, dst, "--overwrite", "--output", "json")
    if done.code:
        refused(done, "destination-exists", 7)  # some things are better not replaced
        assert tree_digest(tmp_path) == before
        return
    if there == "link":
        assert other.read_text() == "precious", "wrote through a link"
    if not suffix:
        assert sorted(p.name for p in dst.iterdir() if "stale" in p.name) == []
    if suffix != ".pt":
        assert "old" not in read_safetensors(dst)


@pytest.mark.parametrize("where", ["the source", "inside", "above"])
def test_destination_touches_the_source(where: str, cli: Cli, tmp_path: Path) -> None:
    """The source is never written to, also not with --overwrite."""
    source = tmp_path / "run" / "ckpt"
    shutil.copytree(SOURCE, source)
    dst = {"the source": source, "inside": source / "out", "above": tmp_path / "run"}[where]
    before = tree_digest(source)
    for flags in ([], ["--overwrite"]):
        done = cli("consolidate", source, dst, "--output", "json", *flags)
        assert done.code != 0, done
        assert "Traceback" not in done.stderr
        assert done.json["error"]["hint"]
        assert tree_digest(source) == before


@root_only
def test_source_without_permission(cli: Cli, open_folder: Path) -> None:
    source = open_folder / "ckpt"
    shutil.copytree(SOURCE, source)
    biggest = max(source.glob("*.distcp"), key=lambda p: p.stat().st_size)
    for locked in (biggest, source / ".metadata", source):
        mode = locked.stat().st_mode
        locked.chmod(0)
        for verb in (["validate", source, "--level", "bytes"], ["consolidate", source, open_folder / "out"]):
            done = cli(*verb, "--output", "json", user=NOBODY)
            refused(done, "source-unreadable", 8)
        locked.chmod(mode)
        assert not (open_folder / "out").exists()


@root_only
def test_destination_without_permission(cli: Cli, open_folder: Path) -> None:
    shut = open_folder / "shut"
    shut.mkdir(mode=0o755)
    for dst in (shut / "out", shut / "out.pt", shut / "deeper" / "out"):
        done = cli("consolidate", SOURCE, dst, "--output", "json", user=NOBODY)
        refused(done, "destination-unwritable", 9)
        assert list(shut.iterdir()) == []


def test_destination_below_a_file(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    done = cli("consolidate", SOURCE, tmp_path / "file" / "out", "--output", "json")
    refused(done, "destination-unwritable", 9)
    assert (tmp_path / "file").read_text() == "precious"


def test_destination_folder_is_made(cli: Cli, tmp_path: Path) -> None:
    done = cli("consolidate", SOURCE, tmp_path / "a" / "b" / "out", "--output", "json")
    assert done.code == 0, done
    assert read_safetensors(tmp_path / "a" / "b" / "out")


@root_only
@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_disk_full(suffix: str, cli: Cli, tmp_path: Path) -> None:
    """Reported before or during writing; nothing is published, and a run with room finishes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    source = FIXTURES / "torch" / "dcp_dims_4r" / "ckpt"
    size = cli("consolidate", source, tmp_path / f"good{suffix}", "--output", "json").json["nbytes"]
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size // 2 // 4096 * 4096 or 4096}", "tmpfs", str(disk)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk here: {mounted.stderr.strip()}")
    try:
        dst = disk / f"out{suffix}"
        done = cli("consolidate", source, dst, "--output", "json")
        refused(done, "disk-full", 10)
        assert not dst.exists()
        subprocess.run(["mount", "-o", "remount,size=16m", str(disk)], check=True)
        done = cli("consolidate", source, dst, "--output", "json")
        assert done.code == 0, done
        assert tree_digest_of_data(dst) == tree_digest_of_data(tmp_path / f"good{suffix}")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def tree_digest_of_data(path: Path) -> dict[str, bytes]:
    """The bytes of every file of an output, by name; one file under one name."""
    if path.is_file():
        return {"": path.read_bytes()}
    return {p.name: p.read_bytes() for p in path.iterdir() if p.suffix in {".safetensors", ".json"}}


def test_file_size_limit(cli: Cli, tmp_path: Path) -> None:
    """A write that the system truncates is an error with a code, not a short file."""
    source = FIXTURES / "torch" / "dcp_dims_4r" / "ckpt"
    done = cli("consolidate", source, tmp_path / "out", "--output", "json", file_size=4096)
    assert done.code in {9, 10}, done
    assert "Traceback" not in done.stderr, done
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("url", "codes"),
    [
        ("/does/not/exist", {"source-unreadable"}),
        ("file:///does/not/exist", {"source-unreadable"}),
        ("memory://nothing", {"source-unreadable", "unknown-format"}),
        ("nosuch://bucket/x", {"source-unreadable", "usage", "missing-dependency"}),
        ("http://127.0.0.1:1/x", {"source-unreadable", "storage-trouble", "missing-dependency"}),
        ("", {"source-unreadable", "usage"}),
        ("a\x01b", {"source-unreadable"}),
        ("x" * 5000, {"source-unreadable"}),
    ],
)
def test_unreadable_url(url: str, codes: set[str], cli: Cli, tmp_path: Path) -> None:
    for verb in (["inspect", url], ["validate", url], ["consolidate", url, tmp_path / "out"]):
        done = cli(*verb, "--output", "json", seconds=60)
        assert done.code not in {0, 1}, done
        assert "Traceback" not in done.stderr, done
        assert done.json["error"]["code"] in codes, done
        assert done.json["error"]["hint"], done
    assert not (tmp_path / "out").exists()


def test_server_that_hangs_up(cli: Cli, tmp_path: Path) -> None:
    """An object store that closes every connection gives a transient error, in bounded time."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        stop = threading.Event()

        def hang_up() -> None:
            server.settimeout(0.1)
            while not stop.is_set():
                try:
                    server.accept()[0].close()
                except TimeoutError:
                    continue

        thread = threading.Thread(target=hang_up)
        thread.start()
        try:
            env = {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.getsockname()[1]}",
                "AWS_ACCESS_KEY_ID": "x",
                "AWS_SECRET_ACCESS_KEY": "x",
                "AWS_MAX_ATTEMPTS": "1",
                "CKPTCORE_REQUEST_DEADLINE": "1",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
            done = cli("inspect", "s3://bucket/ckpt", "--output", "json", seconds=120, env=env)
        finally:
            stop.set()
            thread.join()
    assert done.code in {8, 18}, done
    assert "Traceback" not in done.stderr, done
    assert done.json["error"]["hint"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--memory", "1KiB"],
        ["--memory", "lots"],
        ["--workers", "0"],
        ["--to", "nosuch"],
        ["--device", "nosuch"],
        ["--dtype", "float7"],
        ["--include", "no.such.tensor"],
        ["--nosuch"],
    ],
)
def test_impossible_options(flags: list[str], cli: Cli, tmp_path: Path) -> None:
    verb = "export" if "--dtype" in flags else "consolidate"
    done = cli(verb, SOURCE, tmp_path / "out", "--output", "json", *flags)
    assert done.code not in {0, 1}, done
    assert "Traceback" not in done.stderr, done
    assert not (tmp_path / "out").exists()
