"""The files of an export are served from the checkpoint: byte for byte, in any range, and never mixed."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from email import message_from_bytes
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from tiny_llama import tiny_llama

import ckptcore
from ckptcore.conversion.virtual_folder import VirtualFolder, open_virtual
from ckptcore.errors import CkptError, DamagedCheckpoint, SourceChanged
from ckptcore.execution import virtual_files
from ckptcore.page.file_server import FileServer
from ckptcore.planning.request import Request, Settings

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
OPTIONS: dict[str, Any] = {"dtype": "bfloat16", "max_file_size": 30000}
SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, kept_answers: None) -> Path:
    """A DCP folder with a model's config."""
    folder = tmp_path_factory.mktemp("saved") / "step-10"
    model = tiny_llama()
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    (folder / "config.json").write_text(model.config.to_json_string(use_diff=False))
    return folder


@pytest.fixture
def source(saved: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    place = tmp_path / "step-10"
    place.mkdir()
    for path in saved.iterdir():
        (place / path.name).write_bytes(path.read_bytes())
    return place


@pytest.fixture
def exported(source: Path, tmp_path: Path) -> Path:
    out = tmp_path / "out"
    ckptcore.convert(str(source), str(out), verb="export", catalog=False, **OPTIONS)
    return out


@contextmanager
def opened(source: Path, **settings: Any) -> Iterator[VirtualFolder]:
    means = Settings(**({"memory": 4 << 20, "workers": 2} | settings))
    with open_virtual(
        Request(str(source), str(source.with_name("out")), verb="export", **OPTIONS), means
    ) as folder:
        yield folder


def asked(folder: VirtualFolder, *requests: tuple[str, str, dict[str, str]]) -> list[httpx.Response]:
    """Send requests to the application, without a network."""

    async def send() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=FileServer(folder, ["localhost"], 2), raise_app_exceptions=False)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [await client.request(method, path, headers=headers) for method, path, headers in requests]

    return asyncio.run(send())


def test_ranges_of_any_kind(source: Path, exported: Path) -> None:
    data = (exported / SHARD).read_bytes()
    size, path = len(data), f"/{SHARD}"
    expected = {
        "bytes=0-9": (206, data[:10], f"bytes 0-9/{size}"),
        "bytes=7-": (206, data[7:], f"bytes 7-{size - 1}/{size}"),
        "bytes=-5": (206, data[-5:], f"bytes {size - 5}-{size - 1}/{size}"),
        f"bytes=10-{size * 2}": (206, data[10:], f"bytes 10-{size - 1}/{size}"),
        f"bytes=-{size * 2}": (206, data, f"bytes 0-{size - 1}/{size}"),
        "bytes=3-3,": (206, data[3:4], f"bytes 3-3/{size}"),
        f"bytes={size}-": (416, b"", f"bytes */{size}"),
        "bytes=-0": (416, b"", f"bytes */{size}"),
        "bytes=" + "0-1," * 65: (416, b"", f"bytes */{size}"),
        "bytes=9-2": (200, data, None),
        "bytes=a-b": (200, data, None),
        "bytes=-": (200, data, None),
        "bytes=": (200, data, None),
        "lines=1-2": (200, data, None),
    }
    with opened(source) as folder:
        answers = asked(folder, *(("GET", path, {"range": text}) for text in expected))
        for answer, (text, (status, body, span)) in zip(answers, expected.items(), strict=True):
            found = answer.status_code, answer.content, answer.headers.get("content-range")
            assert found == (status, body, span), text
        (several,) = asked(folder, ("GET", path, {"range": "bytes=0-1, 100-199, -3"}))
        assert several.status_code == 206
        head = f"content-type: {several.headers['content-type']}\r\n\r\n".encode()
        parts: Any = message_from_bytes(head + several.content).get_payload()
        assert [p["content-range"] for p in parts] == [
            f"bytes {a}-{b}/{size}" for a, b in ((0, 1), (100, 199), (size - 3, size - 1))
        ]
        bodies = several.content.split(b"\r\n\r\n")[1:]
        assert bodies[0].startswith(data[:2])
        assert b"\r\n\r\n" + data[100:200] + b"\r\n--" in several.content
        assert int(several.headers["content-length"]) == len(several.content)


def test_heads_tags_and_refusals(source: Path, exported: Path) -> None:
    path = f"/{SHARD}"
    with opened(source) as folder:
        tag = f'"{folder.files[SHARD].tag}"'
        head, fresh, old, part, complete, listed, page = asked(
            folder,
            ("HEAD", path, {}),
            ("GET", path, {"if-none-match": f'"x", W/{tag}'}),
            ("GET", path, {"if-match": '"x"'}),
            ("GET", path, {"range": "bytes=0-1", "if-range": tag}),
            ("GET", path, {"range": "bytes=0-1", "if-range": '"x"'}),
            ("GET", "/", {"accept": "application/json"}),
            ("GET", "/", {"accept": "text/html"}),
        )
        size = (exported / SHARD).stat().st_size
        assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", str(size))
        assert (head.headers["etag"], head.headers["accept-ranges"]) == (tag, "bytes")
        assert [fresh.status_code, old.status_code, part.status_code, complete.status_code] == [
            304,
            412,
            206,
            200,
        ]
        rows = {row["path"]: row["bytes"] for row in listed.json()["files"]}
        assert rows == {p.name: p.stat().st_size for p in exported.iterdir()}
        assert all(f'href="{name}"' in page.text for name in rows)
        refused = asked(
            folder,
            ("PUT", path, {}),
            ("GET", "/%2e%2e/step-10/config.json", {}),
            ("GET", "/.metadata", {}),
            ("GET", path, {"host": "evil.example"}),
        )
        assert [answer.status_code for answer in refused] == [405, 404, 404, 421]
    with opened(source) as same:
        assert f'"{same.files[SHARD].tag}"' == tag
    for file in source.iterdir():
        os.utime(file)
    with opened(source) as other:
        assert f'"{other.files[SHARD].tag}"' != tag


def test_two_readers_share_what_is_computed_and_memory_is_bounded(
    source: Path, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[tuple[str, int]] = []
    real = virtual_files.VirtualFiles._compute

    def compute(self: Any, file: Any, job: Any) -> Any:
        computed.append((file.plan.path, job.sequence))
        return real(self, file, job)

    monkeypatch.setattr(virtual_files.VirtualFiles, "_compute", compute)
    monkeypatch.setattr("ckptcore.planning.tiles.TILES", 8192)
    data = (exported / SHARD).read_bytes()
    before = sorted(path.name for path in source.parent.iterdir())
    with opened(source) as folder, ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: folder.read(SHARD, 0, len(data)), range(8))) == {data}
        assert len(computed) == len(set(computed)) > 4
        files = folder._tensors
        assert 0 < files._cached_bytes <= 2 << 20
        files._room, files._cached_bytes = 10_000, 0  # of jobs that are computed from now on
        files._cached.clear()
        assert folder.read(SHARD, 0, len(data)) == data == folder.read(SHARD, 0, len(data))
        assert files._cached_bytes <= 10_000
        assert folder.unverified == 0
    assert len(computed) > len(set(computed))
    assert sorted(path.name for path in source.parent.iterdir()) == before  # nothing is written


def test_a_reader_that_goes_on_finds_the_next_job_computed(
    source: Path, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[tuple[int, str]] = []
    real = virtual_files.VirtualFiles._compute

    def compute(self: Any, file: Any, job: Any) -> Any:
        computed.append((job.sequence, threading.current_thread().name))
        return real(self, file, job)

    monkeypatch.setattr(virtual_files.VirtualFiles, "_compute", compute)
    monkeypatch.setattr("ckptcore.planning.tiles.TILES", 8192)
    data = (exported / SHARD).read_bytes()
    with opened(source) as folder:
        assert folder.read(SHARD, 0, 100) == data[:100]
        assert len(computed) == 1  # a reader of the header alone gets no more
        first = folder._tensors._files[SHARD].jobs[1].start
        assert folder.read(SHARD, first, 1) == data[first : first + 1]
        folder._tensors._ahead.submit(lambda: None).result(60)  # behind what was asked of it
        assert sorted(number for number, _ in computed) == [0, 1, 2]
        assert [name.startswith("ahead") for number, name in computed if number == 2] == [True]
        last = folder._tensors._files[SHARD].jobs[-1]
        assert folder.read(SHARD, last.start, last.nbytes) == data[last.start :]
        assert len(computed) == 4  # a jump is no going on
        folder.read(SHARD, 0, len(data))
        assert len(computed) == len(folder._tensors._files[SHARD].jobs)  # none twice


def replace(file: Path) -> None:
    file.write_bytes(bytes(file.read_bytes()))


def rewrite_in_place(file: Path) -> None:
    times = file.stat()
    with file.open("r+b") as opened_file:
        opened_file.write(b"P")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def append(file: Path) -> None:
    with file.open("ab") as opened_file:
        opened_file.write(b"x")


@pytest.mark.parametrize("change", [replace, rewrite_in_place, append])
def test_a_source_that_changes_is_an_error(source: Path, change: Callable[[Path], None]) -> None:
    with opened(source) as folder:
        names = [name for name in folder.files if name.endswith(".safetensors")]
        folder.read(names[0], 0, 10)
        change(next(source.glob("*.distcp")))
        folder._tensors._cached.clear()
        with pytest.raises(SourceChanged):
            folder.read(names[0], 0, 10)
        with pytest.raises(SourceChanged):  # and nothing else is read any more
            folder.read(names[1], 0, 10)
        first, other = asked(folder, *(("GET", f"/{name}", {}) for name in names))
        assert (first.status_code, other.status_code) == (500, 500)
        assert first.json()["error"] == "source-changed"


def test_a_damaged_record_is_an_error_and_stays_one(source: Path) -> None:
    manifest = ckptcore.open(source)
    row = manifest.index["model.model.layers.0.mlp.up_proj.weight"]
    item = manifest.items[next(iter(manifest.chunks_of(row))).item]
    file = next(source.glob("*.distcp"))
    raw = bytearray(file.read_bytes())
    raw[
        raw.index(bytes(tiny_llama().model.layers[0].mlp.up_proj.weight.detach().numpy().tobytes()[:16])) + 3
    ] ^= 1
    assert item.length
    file.write_bytes(raw)
    with opened(source) as folder:
        errors = 0
        for _ in range(2):
            for name, served in folder.files.items():
                try:
                    folder.read(name, 0, served.nbytes)
                except DamagedCheckpoint:
                    errors += 1
        assert errors >= 3


def test_an_incomplete_source_is_refused_before_anything_is_served(source: Path) -> None:
    next(source.glob("*.distcp")).unlink()
    with pytest.raises(CkptError), opened(source):
        pass


def test_the_command_serves_and_ends(source: Path, exported: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ckptcore", "serve", str(source), "--dtype", "bfloat16"]
    command += ["--max-file-size", "30000", "--name", "out", "--port", "0"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving 5 files, ")
        try:
            with httpx.Client(base_url=line.split()[-1], timeout=60) as client:
                for path in exported.iterdir():
                    digest = hashlib.sha256(client.get(f"/{path.name}").content).hexdigest()
                    assert digest == hashlib.sha256(path.read_bytes()).hexdigest(), path.name
                copy = tmp_path / "copy.safetensors"
                copy.write_bytes(client.get(f"/{SHARD}").content)
            with safe_open(copy, "pt") as file, safe_open(exported / SHARD, "pt") as right:
                assert all(torch.equal(file.get_tensor(n), right.get_tensor(n)) for n in right.keys())  # noqa: SIM118
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
