"""A small Hugging Face hub on loopback: one repository, with branches, tags, commits and large files.

It speaks what huggingface_hub sends and asks: references, trees, commits, the upload of large files by their
SHA-256, and reads. It checks what it is sent as the hub does: a token, the parent of a commit, and that a
large file is what its name says. Faults are functions that see each request first, and may answer it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

REPOSITORY = "org/model.v1"
TOKEN = "hf_" + 34 * "t"
_LARGE = re.compile(r".*\.(safetensors|bin|large)")
_ATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"


@dataclass
class Asked:
    """One request. path: without the query."""

    method: str
    path: str
    body: bytes
    authorization: str


@dataclass
class Answer:
    """An answer; status 0 closes the connection without one, after the request was done or not."""

    status: int
    body: bytes = b"{}"
    headers: dict[str, str] = field(default_factory=dict)
    is_done: bool = False  # whether the request has its effect all the same


Fault = Callable[[Asked], Answer | None]


class FakeHub:
    """A hub with one repository.

    Attributes:
        commits: Commit -> name -> content.
        parents: Commit -> its parent.
        branches: Branch -> commit.
        tags: Tag -> commit.
        large: SHA-256 -> content of the large files that arrived.
        asked: Every request.
        fault: Sees each request first.
    """

    def __init__(self, repository: str = REPOSITORY) -> None:
        self.repository, self.exists, self.lock = repository, True, threading.RLock()
        self.commits: dict[str, dict[str, bytes]] = {}
        self.parents: dict[str, str | None] = {}
        self.branches: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.large: dict[str, bytes] = {}
        self.asked: list[Asked] = []
        self.fault: Fault = lambda _: None
        self.says_commit = True
        self.branches["main"] = self.commit({".gitattributes": _ATTRIBUTES}, None)
        handler = type("Bound", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def commit(self, files: dict[str, bytes], parent: str | None = None) -> str:
        name = hashlib.sha1(repr((sorted(files.items()), parent)).encode()).hexdigest()
        self.commits[name], self.parents[name] = files, parent
        return name

    def environment(self, home: str) -> dict[str, str]:
        """Return the variables that bring huggingface_hub here, in another process."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_TOKEN": TOKEN,
            "HF_HOME": home,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
        }

    def at(self, revision: str) -> dict[str, bytes]:
        """Return the files of a branch or tag without the hub's own."""
        files = self.commits[self.branches.get(revision) or self.tags[revision]]
        return {name: data for name, data in files.items() if name != ".gitattributes"}

    def uploads(self) -> list[str]:
        """Return the SHA-256 of every large file that was sent, as often as it was."""
        return [a.path.rpartition("/")[2] for a in self.asked if a.method == "PUT"]

    def resolve(self, revision: str) -> str | None:
        commit = self.branches.get(revision) or self.tags.get(revision) or revision
        return commit if commit in self.commits else None

    def history(self, commit: str | None) -> Iterator[str]:
        while commit is not None:
            yield commit
            commit = self.parents[commit]


@contextmanager
def fake_hub(repository: str = REPOSITORY) -> Iterator[FakeHub]:
    hub = FakeHub(repository)
    try:
        yield hub
    finally:
        hub.close()


def _blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entry(name: str, data: bytes) -> dict[str, Any]:
    entry = {"type": "file", "path": name, "size": len(data), "oid": _blob(data)}
    if _LARGE.fullmatch(name):
        pointer = b"version https://git-lfs.github.com/spec/v1\n"
        lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return entry | {"oid": _blob(pointer), "lfs": lfs}
    return entry


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits for the acknowledgement of its own head
    hub: FakeHub

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def handle_any(self) -> None:
        # `urlsplit` first: a branch may have an escaped slash.
        path = urlsplit(self.path).path
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        asked = Asked(self.command, path, body, self.headers.get("Authorization") or "")
        self.hub.asked.append(asked)
        answer = self.hub.fault(asked)
        if answer is None or answer.is_done:
            done = self.done(asked)
            answer = done if answer is None else answer
        if not answer.status:
            self.close_connection = True
            return
        self.send_response(answer.status)
        for name, value in {"Content-Type": "application/json", **answer.headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_any

    def done(self, asked: Asked) -> Answer:
        hub, names = self.hub, [unquote(name) for name in asked.path.strip("/").split("/")]
        if names[0] == "large":  # the address itself lets anybody write
            return self.put_large(names[1], asked)
        if asked.authorization != f"Bearer {TOKEN}":
            return Answer(401)
        with hub.lock:
            if names[:2] == ["api", "validate-yaml"]:
                return Answer(200, b'{"warnings": [], "errors": []}')
            if names[:3] == ["api", "repos", "create"]:
                hub.exists = True
                return Answer(200, json.dumps({"url": f"{hub.endpoint}/{hub.repository}"}).encode())
            org, name = hub.repository.split("/")
            if not hub.exists:
                return Answer(404, headers={"X-Error-Code": "RepoNotFound"})
            if names[:4] == ["api", "models", org, name]:
                return self.of_repository(asked, names[4:])
            if names[:2] == [org, f"{name}.git"]:
                return self.batch(asked)
            if names[:3] == [org, name, "resolve"]:
                return self.content(names[3], "/".join(names[4:]))
        return Answer(404, headers={"X-Error-Code": "RepoNotFound"})

    def of_repository(self, asked: Asked, names: list[str]) -> Answer:
        hub = self.hub
        if names == ["refs"]:
            branches, tags = (
                [{"name": n, "ref": f"refs/{kind}/{n}", "targetCommit": c} for n, c in refs.items()]
                for kind, refs in (("heads", hub.branches), ("tags", hub.tags))
            )
            return _json({"branches": branches, "tags": tags, "converts": []})
        kind, revision = names[0] if names else "", names[1] if len(names) > 1 else "main"
        if kind == "branch":
            if asked.method == "DELETE":
                del hub.branches[revision]
                return _json({})
            if revision in hub.branches:
                return Answer(409)
            start = hub.resolve(json.loads(asked.body).get("startingPoint", "main"))
            assert start is not None
            hub.branches[revision] = start
            return _json({})
        if kind == "tag" and asked.method == "DELETE":
            del hub.tags[revision]
            return _json({})
        commit = hub.resolve(revision)
        if commit is None:
            return Answer(404, headers={"X-Error-Code": "RevisionNotFound"})
        if kind == "tag":
            hub.tags[json.loads(asked.body)["tag"]] = commit
            return _json({})
        if kind == "commits":
            rows = hub.history(commit)
            return _json(
                [
                    {"id": c, "authors": [], "date": "2026-01-01T00:00:00.000Z", "title": "", "message": ""}
                    for c in rows
                ]
            )
        if kind == "tree":
            return _json([_entry(n, d) for n, d in sorted(hub.commits[commit].items())])
        if kind == "preupload":
            return _json({"files": [self.mode(file, commit) for file in json.loads(asked.body)["files"]]})
        if kind == "commit":
            return self.add_commit(asked, revision, commit)
        return _json({"id": hub.repository, **({"sha": commit} if hub.says_commit else {})})

    def mode(self, file: dict[str, Any], commit: str) -> dict[str, Any]:
        data = self.hub.commits[commit].get(file["path"])
        oid = None if data is None else _entry(file["path"], data)
        oid = None if oid is None else oid.get("lfs", oid)["oid"]
        mode = "lfs" if _LARGE.fullmatch(file["path"]) else "regular"
        return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid}

    def batch(self, asked: Asked) -> Answer:
        objects = []
        for wanted in json.loads(asked.body)["objects"]:
            actions = {
                "upload": {
                    "href": f"{self.hub.endpoint}/large/{wanted['oid']}?X-Amz-Signature=secretsignature"
                }
            }
            objects.append(wanted | ({} if wanted["oid"] in self.hub.large else {"actions": actions}))
        return _json({"transfer": "basic", "objects": objects})

    def put_large(self, oid: str, asked: Asked) -> Answer:
        if hashlib.sha256(asked.body).hexdigest() != oid:
            return Answer(400)
        self.hub.large[oid] = asked.body
        return Answer(200)

    def add_commit(self, asked: Asked, branch: str, commit: str) -> Answer:
        hub = self.hub
        header, *operations = [json.loads(line) for line in asked.body.splitlines()]
        if header["value"].get("parentCommit", commit) != commit:
            return Answer(412)
        files = dict(hub.commits[commit])
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = hub.large[value["oid"]]
            else:
                del files[value["path"]]
        hub.branches[branch] = hub.commit(files, commit)
        url = f"{hub.endpoint}/{hub.repository}/commit/{hub.branches[branch]}"
        return _json({"commitUrl": url, "commitOid": hub.branches[branch]})

    def content(self, revision: str, name: str) -> Answer:
        commit = self.hub.resolve(revision)
        data = None if commit is None else self.hub.commits[commit].get(name)
        if data is None:
            return Answer(404, headers={"X-Error-Code": "EntryNotFound"})
        begin, _, end = (self.headers.get("Range") or f"bytes=0-{len(data)}").partition("=")[2].partition("-")
        return Answer(206, data[int(begin) : int(end) + 1], {"ETag": f'"{_blob(data)}"'})


def serve(file: str) -> None:
    """Serve until the process ends; write the variables that bring huggingface_hub here to a file."""
    with fake_hub("org/tiny") as hub:
        lines = [f"export {name}={value}" for name, value in hub.environment("hub-home").items()]
        Path(f"{file}.new").write_text("\n".join(lines) + "\n")
        Path(f"{file}.new").rename(file)
        threading.Event().wait()


def _json(value: Any) -> Answer:
    return Answer(200, json.dumps(value).encode())


if __name__ == "__main__":
    serve(sys.argv[1])
