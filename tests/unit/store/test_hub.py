"""Read repositories of a small hub: HF_ENDPOINT, HF_TOKEN, revisions, and one commit at a time."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from paths import FIXTURES, ROOT

import ckptcore

SHARDS = FIXTURES / "torch" / "hf_sharded_4r" / "ckpt"
TOKEN = "hf_" + 34 * "t"


class Hub:
    """A hub with one repository, org/model.v1; ``commits`` are its files by commit, ``branch`` its newest."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, bytes]] = {}
        self.branch = ""
        self.log: list[tuple[str, str, str]] = []
        self.moves_to: str | None = None  # the branch's next commit, after the first listing
        self.says_commit = True
        handler = type("Bound", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def commit(self, files: dict[str, bytes]) -> str:
        name = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[name] = files
        return name


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.log.append((self.command, path, self.headers.get("Authorization") or ""))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, b"{}")
        names = path.strip("/").split("/")
        if names[:4] == ["api", "models", "org", "model.v1"]:
            revision = names[5] if len(names) > 5 else "main"
            commit = hub.branch if revision == "main" else revision
            if commit not in hub.commits:
                return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            if names[4:5] == ["tree"]:
                if hub.moves_to is not None:
                    hub.branch = hub.moves_to
                rows = [
                    {"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()}
                    for n, d in sorted(hub.commits[commit].items())
                ]
                return self.answer(200, json.dumps(rows).encode())
            sha = {"sha": commit} if hub.says_commit else {}
            return self.answer(200, json.dumps({"id": "org/model.v1", **sha}).encode())
        if names[:3] == ["org", "model.v1", "resolve"]:
            commit = hub.branch if names[3] == "main" else names[3]
            data = hub.commits[commit].get("/".join(names[4:]))
            if data is None:
                return self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            begin, _, end = (
                (self.headers.get("Range") or f"bytes=0-{len(data)}").partition("=")[2].partition("-")
            )
            return self.answer(
                206, data[int(begin) : int(end) + 1], {"ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
            )
        return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_POST = do_GET

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    yield made
    made.server.shutdown()
    made.server.server_close()


def local(files: dict[str, bytes], folder: Path) -> bytes:
    """Return what a conversion of a local copy gives."""
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    target = folder.with_suffix(".safetensors")
    ckptcore.convert(str(folder), str(target), catalog=False, overwrite=True)
    return target.read_bytes()


def run(hub: Hub, home: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server.server_address[1]}",
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    command = [sys.executable, "-m", "ckptcore", *argv]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)


def consolidated(hub: Hub, out: Path, revision: str = "main") -> subprocess.CompletedProcess[str]:
    source = f"hf://org/model.v1@{revision}"
    return run(hub, out.parent / "home", "consolidate", source, str(out), "--no-catalog")


def test_a_hub_that_names_no_commit_is_refused(hub: Hub, tmp_path: Path):
    hub.branch, hub.says_commit = hub.commit({f.name: f.read_bytes() for f in SHARDS.iterdir()}), False
    done = consolidated(hub, tmp_path / "out.safetensors")
    assert done.returncode == 8
    assert "does not say which commit" in done.stderr
    assert "None" not in done.stderr


def test_one_commit_is_read(hub: Hub, tmp_path: Path):
    files = {f.name: f.read_bytes() for f in SHARDS.iterdir()}
    first = hub.commit(files)
    other = {name: data[:-1] + bytes([data[-1] ^ 1]) for name, data in files.items()}
    hub.branch, hub.moves_to = first, hub.commit(other)
    out = tmp_path / "out.safetensors"
    done = consolidated(hub, out)
    # The branch moved while it was read: what is written is one of the two commits, never a mixture.
    assert done.returncode in (0, 11), done.stderr
    if done.returncode == 0:
        assert out.read_bytes() in (local(files, tmp_path / "first"), local(other, tmp_path / "other"))
        out.unlink()
    hub.moves_to, hub.log[:] = None, []
    done = consolidated(hub, out, first)
    assert done.returncode == 0, done.stderr
    assert {path.split("/")[4] for _, path, _ in hub.log if "/resolve/" in path} == {first}
    assert out.read_bytes() == local(files, tmp_path / "first")
    assert TOKEN not in done.stderr + done.stdout
    done = run(hub, tmp_path / "home", "inspect", "hf://org/model.v1@gone")
    assert done.returncode == 8, done.stderr
