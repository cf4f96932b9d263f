"""Test that hostile sources and destinations cause no other change, no leak and no hang.

Every case runs the command line on a folder with canaries: files of another user whose bytes, names, modes
and times must not change. The answer comes within ten seconds, with an exit code of the table other than
`internal`, without control characters and without a secret.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from driver import Cli, Outcome
from safetensors.torch import load_file, save_file

from ckptcore.errors import error_classes

SECRET = "s3cr3t-AKIA"
SECONDS = 10.0
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
CODES = {0} | {error.exit_code for error in error_classes()} - {70}


@dataclass(frozen=True)
class World:
    """A folder with a source, canaries, and a folder to write into."""

    root: Path
    source: Path
    canaries: Path
    out: Path


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, tmp_path / "source", tmp_path / "canaries", tmp_path / "out")
    for folder in (made.source, made.canaries / ".ssh", made.canaries / "other", made.out):
        folder.mkdir(parents=True)
    save_file({"w": torch.arange(64.0)}, made.source / "model.safetensors")
    (made.canaries / ".ssh" / "id_ed25519").write_text("key")
    (made.canaries / "notes.txt").write_text("notes")
    save_file({"w": torch.ones(64)}, made.canaries / "other" / "model.safetensors")
    with zipfile.ZipFile(made.canaries / "pack.zip", "w") as pack:
        pack.write(made.canaries / "other" / "model.safetensors", "model.safetensors")
    before = (picture(made.source), picture(made.canaries))
    yield made
    assert (picture(made.source), picture(made.canaries)) == before, "something else was touched"


def picture(folder: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """Everything below a folder: mode, inode, time of change, bytes or target."""
    found = {}
    for path in sorted(folder.rglob("*")):
        seen = path.lstat()
        data = b""
        if stat.S_ISREG(seen.st_mode):
            data = path.read_bytes()
        elif stat.S_ISLNK(seen.st_mode):
            data = os.fsencode(path.readlink())
        changed = 0 if stat.S_ISDIR(seen.st_mode) else seen.st_mtime_ns
        found[str(path.relative_to(folder))] = (seen.st_mode, seen.st_ino, changed, data)
    return found


def check(done: Outcome, *, fine: bool | None = None) -> None:
    """Check the rules of every answer. fine: whether it must succeed or fail; None for either."""
    assert done.code in CODES, done
    assert done.seconds < SECONDS, done
    for text in (done.stdout, done.stderr):
        assert SECRET not in text, done
        assert not CONTROL.search(text), done
    if fine is not None:
        assert (done.code == 0) == fine, done


SOURCES: dict[str, Callable[[World], str]] = {
    "simplecache": lambda w: f"simplecache::file://{w.source}",
    "filecache": lambda w: f"filecache::file://{w.source}",
    "blockcache": lambda w: f"blockcache::file://{w.source}",
    "dir": lambda w: f"dir::file://{w.source}",
    "zip": lambda w: f"zip://*::file://{w.canaries}/pack.zip",
    "zip-inside": lambda w: f"zip://../../etc/passwd::file://{w.canaries}/pack.zip",
    "tar-of-nothing": lambda w: f"tar://x::file://{w.canaries}/notes.txt",
    "reference": lambda w: f"reference::file://{w.canaries}/notes.txt",
    "local": lambda w: f"local://{w.source}",
    "file": lambda w: f"file://{w.source}",
    "file-host": lambda w: f"file://elsewhere{w.source}",
    "dots": lambda w: f"{w.source}/../source/./",
    "memory": lambda w: "memory://nothing",
    "data": lambda w: "data:text/plain;base64,SGVsbG8=",
    "http-nobody": lambda w: f"http://user:{SECRET}@127.0.0.1:1/ckpt?X-Amz-Signature={SECRET}",
    "ftp-nobody": lambda w: f"ftp://user:{SECRET}@127.0.0.1:1/ckpt",
    "unknown-protocol": lambda w: f"nosuch://user:{SECRET}@host/ckpt",
    "chain-of-unknown": lambda w: f"simplecache::nosuch://user:{SECRET}@host/ckpt",
    "many-chains": lambda w: "simplecache::" * 200 + f"file://{w.source}",
    "escape": lambda w: f"{w.source}/\x1b]0;owned\x07\x1b[2J",
    "markup": lambda w: f"{w.source}/[/red][bold]x[/bold][link=http://x]",
    "bidi": lambda w: f"{w.source}/\u202egnp.exe",
    "surrogate": lambda w: f"{w.source}/\udcff\ud800",
    "newline": lambda w: f"{w.source}/a\nb\rc",
    "long": lambda w: f"{w.source}/" + "x" * 5000,
    "device": lambda w: "/dev/zero",
    "tty": lambda w: "/dev/tty",
    "proc": lambda w: "/proc/self/mem",
    "proc-folder": lambda w: "/proc/self/fd",
    "percent": lambda w: f"file://{w.source}/%00%2e%2e%2f",
    "glob": lambda w: f"{w.root}/sour*",
    "braces": lambda w: f"{w.root}/{{source,canaries}}",
    "tilde": lambda w: "~nobody/ckpt",
    "empty": lambda w: "",
    "blank": lambda w: " ",
    "dash": lambda w: "-",
}
VERBS = (("inspect",), ("validate", "--level", "bytes"), ("consolidate",))


@pytest.mark.parametrize("name", SOURCES)
def test_no_source_reads_other_places(name: str, world: World, cli: Cli) -> None:
    source = SOURCES[name](world)
    for verb in VERBS:
        more = [world.out / "made"] if verb[0] == "consolidate" else []
        check(cli(verb[0], source, *more, *verb[1:], seconds=3 * SECONDS))
    made = world.out / "made" / "model.safetensors"
    if made.exists():  # a read through a chain gives the content of its end
        assert made.stat().st_mode & 0o777 == 0o666 & ~umask()
        wanted = load_file(world.source / "model.safetensors")["w"]
        assert any(torch.equal(load_file(made)["w"], t) for t in (wanted, torch.ones(64)))
    assert {p.name for p in world.out.iterdir()} <= {"made"}


def umask() -> int:
    now = os.umask(0o22)
    os.umask(now)
    return now


@pytest.mark.parametrize("kind", ["fifo", "socket", "null", "loop", "dangling"])
@pytest.mark.parametrize("inside", [False, True])
def test_special_files_as_sources_are_not_waited_for(kind: str, inside: bool, world: World, cli: Cli) -> None:
    path = world.out / ("folder/model.safetensors" if inside else "place")
    path.parent.mkdir(exist_ok=True)
    special(kind, path)
    source = path.parent if inside else path
    for verb in VERBS:
        more = [world.root / "made"] if verb[0] == "consolidate" else []
        check(cli(verb[0], source, *more, *verb[1:], seconds=3 * SECONDS), fine=False)
    assert not (world.root / "made").exists()


# None is a real folder of the system: a test that fails must not cost one.
DESTINATIONS: dict[str, Callable[[World], str]] = {
    "canary-folder": lambda w: str(w.canaries),
    "canary-subfolder": lambda w: str(w.canaries / ".ssh"),
    "source": lambda w: str(w.source),
    "source-by-dots": lambda w: f"{w.canaries}/../source",
    "source-by-file-url": lambda w: f"file://{w.source}",
    "source-by-local-url": lambda w: f"local://{w.source}",
    "source-by-chain": lambda w: f"simplecache::file://{w.source}",
    "source-dir-chain": lambda w: f"dir::file://{w.source}",
    "above-the-source": lambda w: str(w.root),
    "inside-the-source": lambda w: str(w.source / "deeper" / "out"),
    "file-of-the-source": lambda w: str(w.source / "model.safetensors"),
    "canary-checkpoint-in-zip": lambda w: f"zip://x::file://{w.canaries}/pack.zip",
    "markup": lambda w: f"{w.out}/[/red]\x1b[31m/x",
    "surrogate": lambda w: f"{w.out}/a\ud800",
    "long": lambda w: f"{w.out}/" + "x" * 300,
    "deep": lambda w: f"{w.out}/" + "x/" * 3000,
    "below-a-file": lambda w: f"{w.canaries}/notes.txt/out",
    "reference": lambda w: f"reference::file://{w.canaries}/notes.txt",
    "http": lambda w: f"http://user:{SECRET}@127.0.0.1:1/out?sig={SECRET}",
    "unknown": lambda w: f"nosuch://user:{SECRET}@host/out",
    "empty": lambda w: "",
    "this-machine": lambda w: f"file://localhost{w.source}",
}


@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)], ids=["new", "overwrite"])
@pytest.mark.parametrize("name", DESTINATIONS)
def test_no_destination_destroys_foreign_files(
    name: str, overwrite: tuple[str, ...], world: World, cli: Cli
) -> None:
    destination = DESTINATIONS[name](world)
    before = {p.name for p in world.root.iterdir()}
    check(cli("consolidate", world.source, destination, *overwrite, seconds=3 * SECONDS))
    assert {p.name for p in world.root.iterdir()} == before


@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)], ids=["new", "overwrite"])
@pytest.mark.parametrize("kind", ["fifo", "socket", "null", "loop", "dangling", "to-canaries", "to-source"])
def test_special_files_are_never_replaced(
    kind: str, overwrite: tuple[str, ...], world: World, cli: Cli
) -> None:
    path = world.out / "place"
    special(kind, path, world)
    was = path.lstat()
    done = cli("consolidate", world.source, path, *overwrite, seconds=3 * SECONDS)
    check(done)
    if kind != "dangling" or done.code:
        now = path.lstat()
        assert (now.st_mode, now.st_ino, now.st_rdev) == (was.st_mode, was.st_ino, was.st_rdev), done
    if kind in ("fifo", "socket", "null", "loop", "to-source"):
        assert done.code, done


def special(kind: str, path: Path, world: World | None = None) -> None:
    """Make a special file; skip the test if that needs more rights."""
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        listening = socket.socket(socket.AF_UNIX)
        with contextlib.chdir(path.parent):  # names of sockets are short
            listening.bind(path.name)
        listening.close()  # its name stays
    elif kind == "null":
        try:
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("making device nodes needs root")
    else:
        assert world is not None or kind in ("loop", "dangling")
        to = {"loop": path, "dangling": path.parent / "nothing" / "there"}
        if world is not None:
            to |= {"to-canaries": world.canaries, "to-source": world.source}
        path.symlink_to(to[kind])
