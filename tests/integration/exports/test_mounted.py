"""The files of an export are mounted as a folder: byte for byte, and an error where the source changed."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import export_results
import fault_s3
import pytest
import torch
import torch.distributed.checkpoint as dcp
from export_results import LOGITS, TENSORS, Cell
from export_sources import WRITERS, Tiny
from safetensors import safe_open
from tiny_llama import tiny_llama

import ckptcore
from ckptcore.conversion.virtual_folder import VirtualFile, VirtualFolder
from ckptcore.errors import UsageError
from ckptcore.page import mounted_folder
from ckptcore.page.mounted_folder import MountedFolder, require_mountable
from ckptcore.planning.request import Request, Settings

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
OPTIONS: dict[str, Any] = {"dtype": "bfloat16", "max_file_size": 30000}
SMALL_FILES = ("--dtype", "bfloat16", "--max-file-size", "30000")
SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, kept_answers: None) -> Path:
    """A DCP folder with a model's config, and the folder that an export of it makes."""
    folder = tmp_path_factory.mktemp("saved")
    model = tiny_llama()
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "step-10")
    (folder / "step-10" / "config.json").write_text(model.config.to_json_string(use_diff=False))
    ckptcore.convert(
        str(folder / "step-10"), str(folder / "out" / "look"), verb="export", catalog=False, **OPTIONS
    )
    return folder


@contextmanager
def mounted(
    source: str, directory: Path, *options: str, where: Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Mount a folder by the command, and unmount it."""
    try:
        import mfusepy  # noqa: F401
    except OSError as error:
        pytest.skip(f"{error}: apt-get install fuse3")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK) or shutil.which("fusermount3") is None:
        pytest.skip("no FUSE on this machine: /dev/fuse or fusermount3 is missing")
    directory.mkdir(parents=True)
    command = [sys.executable, "-m", "ckptcore", "mount", source, str(directory), *options]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=where, **pipes) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line and process.stderr is not None and "fuse" in (why := process.stderr.read()):
                pytest.skip(f"this machine mounts nothing: {why}")
            assert line.startswith("mounted ")
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


@pytest.fixture(scope="module")
def look(saved: Path) -> Iterator[Path]:
    directory = saved / "in" / "look"
    with mounted("step-10", directory, *SMALL_FILES, where=saved) as process:
        yield directory
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert [*directory.iterdir()] == []  # nothing was written there, nor beside
    assert sorted(path.name for path in saved.iterdir()) == ["in", "out", "step-10"]


def test_files_are_those_of_the_export(saved: Path, look: Path) -> None:
    written = {path.name: path.read_bytes() for path in (saved / "out" / "look").iterdir()}
    assert {path.name for path in look.iterdir()} == written.keys()
    with ThreadPoolExecutor(4) as pool:  # several readers at once
        for _ in range(2):
            names = [*written] * 4
            assert [*pool.map(lambda name: (look / name).read_bytes(), names)] == [
                written[name] for name in names
            ]
    for name, data in written.items():
        status = (look / name).stat()
        assert (status.st_size, status.st_mode) == (len(data), stat.S_IFREG | 0o444)
        assert (status.st_uid, status.st_gid) == (os.getuid(), os.getgid())
        descriptor = os.open(look / name, os.O_RDONLY)
        assert os.pread(descriptor, 7, len(data) - 3) == data[-3:]
        os.close(descriptor)
    assert os.statvfs(look).f_bavail == 0


def test_safetensors_and_transformers_open_them(saved: Path, look: Path) -> None:
    with safe_open(look / SHARD, "pt") as file, safe_open(saved / "out" / "look" / SHARD, "pt") as right:
        assert all(torch.equal(file.get_tensor(n), right.get_tensor(n)) for n in right.keys())  # noqa: SIM118
    transformers = pytest.importorskip("transformers")
    tokens = torch.arange(12).reshape(1, 12)
    logits = []
    for folder in (look, saved / "out" / "look"):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            logits.append(model(tokens).logits)
    assert torch.equal(*logits)


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in sorted(files.items())}


@pytest.mark.soak
def test_a_checkpoint_on_s3_with_two_readers(saved: Path, tmp_path: Path) -> None:
    with fault_s3.serving() as server:
        for path in (saved / "step-10").iterdir():
            server.put(f"bucket/step-10/{path.name}", path.read_bytes())
        directory = tmp_path / "look"
        with mounted("s3://bucket/step-10", directory, *SMALL_FILES), ThreadPoolExecutor(2) as pool:
            first, second = pool.map(digests, [directory, directory])
        assert {method for method, *_ in server.log} <= {"GET", "HEAD"}  # nothing is written
        assert server.count("GET", path=r"\.distcp") > 0
    right = digests(saved / "out" / "look")
    assert first == second
    assert {name for name in right if first.get(name) != right[name]} == {"README.md"}  # it names the source
    assert first.keys() == right.keys()


TWELVE = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt_neox", "olmoe", "olmo", "olmo2")
TWELVE += ("gpt2", "gemma3")


def sources_of(family: str) -> dict[str, Cell]:
    """Each source that a family is exported from, in one form."""
    of_family = [cell for cell in export_results.cells() if cell.family == family and cell.source != "peft"]
    results = {cell.source: export_results.declared(family, cell.source).level for cell in of_family}
    return {cell.source: cell for cell in of_family if results[cell.source] in (LOGITS, TENSORS)}


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", TWELVE)
def test_every_file_of_twelve_families(tinies: Callable[[str], Tiny], tmp_path: Path, family: str) -> None:
    tiny, cells = tinies(family), sources_of(family)
    assert {"hf-hub", "hf-live", "verl"} < cells.keys()
    for number, (source, cell) in enumerate(sorted(cells.items())):
        folder = tmp_path / source
        folder.mkdir()
        place = WRITERS[source](tiny, cell.form, folder / "source")
        dtype = "float32" if number % 3 else "bfloat16"
        options: dict[str, Any] = {"config": str(tiny.hub), "max_file_size": 30000, "dtype": dtype}
        ckptcore.convert(str(place), str(folder / "out" / "look"), verb="export", catalog=False, **options)
        files = digests(folder)
        flags = [
            text for name, value in options.items() for text in (f"--{name}".replace("_", "-"), str(value))
        ]
        with mounted(str(place), folder / "in" / "look", *flags):
            assert digests(folder / "in" / "look") == digests(folder / "out" / "look"), cell
        assert digests(folder) == files  # nothing was written


@pytest.mark.soak
def test_the_twelve_families_have_six_formats() -> None:
    assert len(TWELVE) == 12
    assert len({source for family in TWELVE for source in sources_of(family)}) >= 6


def test_nothing_can_be_written(look: Path) -> None:
    for change in (
        lambda: (look / "config.json").write_text("{}"),
        lambda: (look / "other").touch(),
        lambda: (look / SHARD).unlink(),
        lambda: (look / SHARD).chmod(0o600),
        lambda: (look / "folder").mkdir(),
    ):
        with pytest.raises(OSError, match="Read-only file system"):
            change()
    with pytest.raises(FileNotFoundError):
        (look / "other").read_bytes()


def test_a_changed_source_is_an_error_and_a_killed_mount_is_named(saved: Path, tmp_path: Path) -> None:
    source, directory = tmp_path / "step-10", tmp_path / "look"
    shutil.copytree(saved / "step-10", source)
    with mounted(str(source), directory, *SMALL_FILES) as process:
        shards = sorted(path.name for path in directory.glob("*.safetensors"))
        file = next(source.glob("*.distcp"))
        file.write_bytes(file.read_bytes())
        for name in shards:
            with pytest.raises(OSError, match="Input/output error"):
                (directory / name).read_bytes()
        process.kill()
        process.wait(60)
        assert process.stderr is not None
        assert "source-changed: " in process.stderr.read()
        with pytest.raises(UsageError, match=r"cannot mount") as refused:
            require_mountable(str(directory), str(source))
        assert refused.value.hint == f"what mounted it was killed: fusermount3 -u {directory}"
        subprocess.run(["fusermount3", "-u", str(directory)], check=True)
    assert require_mountable(str(directory), str(source)) == directory


def test_places_that_cannot_be_mounted_at(tmp_path: Path) -> None:
    source = tmp_path / "step-10"
    (source / "below").mkdir(parents=True)
    (tmp_path / "file").touch()
    hints = {
        tmp_path / "absent": f"make it first: mkdir {tmp_path / 'absent'}",
        tmp_path: "name an empty folder",
        tmp_path / "file": "name an empty folder",
        source / "below": "name a folder elsewhere",
    }
    for place, hint in hints.items():
        with pytest.raises(UsageError, match="cannot mount at") as caught:
            require_mountable(str(place), str(source))
        assert caught.value.hint == hint
    with pytest.raises(UsageError):
        require_mountable("s3://bucket/folder", str(source))


def test_a_name_that_looks_like_an_option_is_none_for_libfuse(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Libfuse:
        """In place of the module: it keeps what it is called with."""

        @staticmethod
        def FUSE(_: object, place: str, **__: object) -> None:
            places.append(place)

    places: list[str] = []
    (tmp_path / "-oallow_other").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mounted_folder, "_fuse", Libfuse)
    mounted_folder.mount(Request(str(saved / "step-10"), "-oallow_other", verb="export"), Settings())
    assert places == [str(tmp_path / "-oallow_other")]


def test_files_in_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"config.json": b"{}", "1_Pooling/config.json": b"{ }", "a/b/c": b"xyz"}
    files = {path: VirtualFile(path, len(data), "tag") for path, data in small.items()}
    virtual = VirtualFolder(files, small, None, ())  # type: ignore[arg-type]
    folder = MountedFolder(virtual, "mounted", os.stat("."))
    assert folder.readdir("/", 0)[2:] == ["config.json", "1_Pooling", "a"]
    assert (folder.readdir("/1_Pooling", 0)[2:], folder.readdir("/a/b", 0)[2:]) == (["config.json"], ["c"])
    assert stat.S_ISDIR(folder.getattr("/a")["st_mode"])
    assert (folder.getattr("/a/b/c")["st_size"], folder.read("/a/b/c", 2, 1, 0)) == (3, b"yz")
    with pytest.raises(OSError, match="No such file"):
        folder.getattr("/a/d")
    with pytest.raises(OSError, match="Read-only"):
        folder.open("/a/b/c", os.O_RDWR)
