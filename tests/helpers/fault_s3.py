"""An S3 server in this process, with faults, and with the habits of stores other than Amazon's.

It keeps objects in memory. Like a real store it compares checksums of what arrives, has part rules, and
answers conditions; each can be switched off. A rule names requests and what befalls them:

    server.fault("PUT", action="reset", times=2)                       the connection is reset
    server.fault("POST", query="uploadId", action="lost")              the reply is lost, the work is done
    server.fault("PUT", query="partNumber", action="flip")             a bit of the body flips on the wire
    server.fault("POST", query="uploadId", action="status", status=503, code="SlowDown")
    server.fault("POST", query="uploadId", action="error200", code="InternalError")
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import socket
import struct
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape


@dataclass
class Stored:
    """An object."""

    data: bytes
    etag: str
    meta: dict[str, str] = field(default_factory=dict)
    crc32: str | None = None
    when: float = field(default_factory=time.time)


@dataclass
class Upload:
    """An upload that is open."""

    key: str
    meta: dict[str, str]
    parts: dict[int, Stored] = field(default_factory=dict)
    when: float = field(default_factory=time.time)


@dataclass
class Fault:
    """What befalls some requests."""

    method: str
    path: str = ""
    query: str = ""
    skip: int = 0
    times: int = 1
    action: str = "status"
    status: int = 503
    code: str = "SlowDown"
    call: Callable[[], object] | None = None


class FaultyS3:
    """The server; a bucket is the first name of a path, and needs not be made.

    Args:
        checks: Compare the checksums of bodies with what arrives.
        keeps: Keep checksums of objects, and answer them.
        creates: Answer create-only conditions: True, False (ignored), or "put" (ignored on Complete).
        equal_parts: Refuse parts of unequal size.
        min_part: Smallest size of a part that is not the last.
        denied: Operations that are refused, as "METHOD query" patterns.
    """

    def __init__(
        self,
        *,
        checks: bool = True,
        keeps: bool = True,
        creates: bool | str = True,
        equal_parts: bool = False,
        min_part: int = 5 << 20,
    ) -> None:
        self.checks, self.keeps, self.creates = checks, keeps, creates
        self.equal_parts, self.min_part = equal_parts, min_part
        self.objects: dict[str, Stored] = {}
        self.uploads: dict[str, Upload] = {}
        self.log: list[tuple[str, str, str, int]] = []
        self.denied: list[tuple[str, str]] = []
        self.lock = threading.RLock()
        self._faults: list[Fault] = []
        handler = type("BoundHandler", (_Handler,), {"store": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        """The endpoint."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs."""
        return {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.url,
        }

    def fault(self, method: str, **given: Any) -> Fault:
        """Add a rule; the first that fits a request befalls it."""
        rule = Fault(method, **given)
        self._faults.append(rule)
        return rule

    def calm(self) -> None:
        """Remove all rules, and forget the log."""
        self._faults.clear()
        self.log.clear()
        self.denied.clear()

    def count(self, method: str, query: str = "") -> int:
        """Count the requests in the log."""
        return sum(m == method and bool(re.search(query, q)) for m, _, q, _ in self.log)

    def pick(self, method: str, path: str, query: str) -> Fault | None:
        """Return the rule for a request."""
        with self.lock:
            for rule in self._faults:
                if rule.times <= 0 or rule.method not in (method, "*"):
                    continue
                if not re.search(rule.path, path) or not re.search(rule.query, query):
                    continue
                if rule.skip > 0:
                    rule.skip -= 1
                    continue
                rule.times -= 1
                return rule
        return None

    def below(self, prefix: str) -> dict[str, bytes]:
        """Return the objects below ``bucket/prefix``, by the rest of their names."""
        with self.lock:
            return {k[len(prefix) :]: o.data for k, o in sorted(self.objects.items()) if k.startswith(prefix)}

    def __enter__(self) -> FaultyS3:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextlib.contextmanager
def serving(**given: Any) -> Iterator[FaultyS3]:
    """Run a server, and point this process's clients to it."""
    import fsspec

    with FaultyS3(**given) as server:
        before = {name: os.environ.get(name) for name in server.environment}
        os.environ.update(server.environment)
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        try:
            yield server
        finally:
            fsspec.get_filesystem_class("s3").clear_instance_cache()
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


class _Answer(Exception):
    """An answer that ends a request."""

    def __init__(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.status, self.body, self.headers = status, body, headers or {}


def _error(status: int, code: str) -> _Answer:
    body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'
    return _Answer(status, body.encode(), {"Content-Type": "application/xml"})


def _xml(text: str) -> _Answer:
    head = '<?xml version="1.0" encoding="UTF-8"?>'
    return _Answer(200, (head + text).encode(), {"Content-Type": "application/xml"})


def _crc(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


def _date(when: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(when))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: FaultyS3
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError, ValueError):
            super().handle()

    def do_any(self) -> None:
        url = urlsplit(self.path)
        path, query = unquote(url.path).lstrip("/"), url.query
        rule = self.store.pick(self.command, path, query)
        action = rule.action if rule is not None else ""
        if rule is not None and rule.call is not None:
            rule.call()
        if action == "reset":
            self.store.log.append((self.command, path, query, 0))
            self._reset()
            return
        body = self._body()
        if action == "flip" and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        try:
            self._act(path, query, body, rule)
        except _Answer as answer:
            self.store.log.append((self.command, path, query, answer.status))
            if action == "lost":
                self._reset()
                return
            self._reply(answer, cut=action == "cut", flip=action == "flip" and self.command == "GET")

    def _act(self, path: str, query: str, body: bytes, rule: Fault | None) -> None:
        """Raise the answer to a request."""
        for method, pattern in self.store.denied:
            if method == self.command and re.search(pattern, query):
                raise _error(403, "AccessDenied")
        if rule is not None and rule.action == "status":
            raise _error(rule.status, rule.code)
        if rule is not None and rule.action == "error200":
            raise _Answer(200, _error(200, rule.code).body, {"Content-Type": "application/xml"})
        with self.store.lock:
            self._answer(path, dict(parse_qsl(query, keep_blank_values=True)), body)
        raise _Answer(200)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do_any

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True
        raise ConnectionAbortedError

    def _reply(self, answer: _Answer, *, cut: bool, flip: bool) -> None:
        body = answer.body
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if "Content-Length" not in answer.headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if flip and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.wfile.flush()
            self._reset()

    def _body(self) -> bytes:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "aws-chunked" not in (self.headers.get("Content-Encoding") or ""):
            return raw
        found, at = b"", 0
        while True:
            end = raw.index(b"\r\n", at)
            size = int(raw[at:end].split(b";")[0], 16)
            if not size:
                return found
            found += raw[end + 2 : end + 2 + size]
            at = end + 2 + size + 2

    def _received(self, body: bytes) -> str | None:
        """Compare checksums of a body; return its CRC-32, if the store keeps it."""
        sent = self.headers.get("x-amz-checksum-crc32")
        digest = self.headers.get("x-amz-content-sha256") or ""
        if self.store.checks:
            if sent is not None and sent != _crc(body):
                raise _error(400, "BadDigest")
            if len(digest) == 64 and digest != hashlib.sha256(body).hexdigest():
                raise _error(400, "XAmzContentSHA256Mismatch")
        return sent if self.store.keeps else None

    def _require_conditions(self, path: str, *, complete: bool) -> None:
        there = self.store.objects.get(path)
        if self.store.creates is False or (complete and self.store.creates == "put"):
            return
        if self.headers.get("If-None-Match") == "*" and there is not None:
            raise _error(412, "PreconditionFailed")
        match = self.headers.get("If-Match")
        if match is not None and there is None:
            raise _error(404, "NoSuchKey")
        if match is not None and there is not None and match.strip('"') != there.etag:
            raise _error(412, "PreconditionFailed")

    def _meta(self) -> dict[str, str]:
        return {k.lower(): v for k, v in self.headers.items() if k.lower().startswith("x-amz-meta-")}

    def _answer(self, path: str, query: dict[str, str], body: bytes) -> None:
        bucket, _, key = path.partition("/")
        if not key:
            self._bucket(bucket, query)
        elif self.command == "POST" and "uploads" in query:
            upload_id = uuid.uuid4().hex
            self.store.uploads[upload_id] = Upload(path, self._meta())
            raise _xml(
                f"<InitiateMultipartUploadResult><Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>"
                f"<UploadId>{upload_id}</UploadId></InitiateMultipartUploadResult>"
            )
        elif "uploadId" in query:
            self._upload(path, query, body)
        elif self.command == "PUT":
            self._put(path, body)
        elif self.command == "DELETE":
            self.store.objects.pop(path, None)
            raise _Answer(204)
        else:
            self._get(path)

    def _put(self, path: str, body: bytes) -> None:
        source = self.headers.get("x-amz-copy-source")
        if source is not None:
            there = self.store.objects.get(unquote(source).lstrip("/"))
            if there is None:
                raise _error(404, "NoSuchKey")
            self.store.objects[path] = Stored(there.data, there.etag, dict(there.meta), there.crc32)
            raise _xml(f"<CopyObjectResult><ETag>&quot;{there.etag}&quot;</ETag></CopyObjectResult>")
        crc = self._received(body)
        self._require_conditions(path, complete=False)
        etag = hashlib.md5(body).hexdigest()
        self.store.objects[path] = Stored(body, etag, self._meta(), crc)
        raise _Answer(200, headers={"ETag": f'"{etag}"'})

    def _get(self, path: str) -> None:
        there = self.store.objects.get(path)
        if there is None:
            raise _error(404, "NoSuchKey")
        match = self.headers.get("If-Match")
        if match is not None and match.strip('"') != there.etag:
            raise _error(412, "PreconditionFailed")
        headers = {
            "ETag": f'"{there.etag}"',
            "Last-Modified": formatdate(there.when, usegmt=True),
            "Content-Type": "binary/octet-stream",
            **there.meta,
        }
        if there.crc32 is not None and self.headers.get("x-amz-checksum-mode"):
            headers |= {"x-amz-checksum-crc32": there.crc32, "x-amz-checksum-type": "FULL_OBJECT"}
        wanted = re.match(r"bytes=(\d+)-(\d*)$", self.headers.get("Range") or "")
        if wanted is None:
            if self.command == "HEAD":
                headers["Content-Length"] = str(len(there.data))
            raise _Answer(200, there.data, headers)
        begin = int(wanted[1])
        end = min(int(wanted[2]) + 1 if wanted[2] else len(there.data), len(there.data))
        if begin >= end:
            raise _error(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(there.data)}"
        raise _Answer(206, there.data[begin:end], headers)

    def _bucket(self, bucket: str, query: dict[str, str]) -> None:
        if self.command in ("PUT", "HEAD"):
            raise _Answer(200)
        if "uploads" in query:
            rows = "".join(
                f"<Upload><Key>{escape(u.key.partition('/')[2])}</Key><UploadId>{n}</UploadId>"
                f"<Initiated>{_date(u.when)}</Initiated></Upload>"
                for n, u in self.store.uploads.items()
                if u.key.startswith(f"{bucket}/{query.get('prefix', '')}")
            )
            raise _xml(
                f"<ListMultipartUploadsResult><Bucket>{bucket}</Bucket>{rows}</ListMultipartUploadsResult>"
            )
        prefix, cut = query.get("prefix", ""), query.get("delimiter", "")
        rows, folders = "", dict.fromkeys(())
        for name, there in sorted(self.store.objects.items()):
            inner = name.removeprefix(f"{bucket}/")
            if inner == name or not inner.startswith(prefix):
                continue
            if cut and cut in inner[len(prefix) :]:
                folders[prefix + inner[len(prefix) :].split(cut)[0] + cut] = None
                continue
            rows += (
                f"<Contents><Key>{escape(inner)}</Key><Size>{len(there.data)}</Size>"
                f"<ETag>&quot;{there.etag}&quot;</ETag><LastModified>{_date(there.when)}</LastModified></Contents>"
            )
        rows += "".join(f"<CommonPrefixes><Prefix>{escape(f)}</Prefix></CommonPrefixes>" for f in folders)
        raise _xml(
            f"<ListBucketResult><Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix>"
            f"<IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"
        )

    def _upload(self, path: str, query: dict[str, str], body: bytes) -> None:
        upload = self.store.uploads.get(query["uploadId"])
        if upload is None or upload.key != path:
            raise _error(404, "NoSuchUpload")
        if self.command == "PUT":
            crc = self._received(body)
            number, etag = int(query["partNumber"]), hashlib.md5(body).hexdigest()
            upload.parts[number] = Stored(body, etag, crc32=crc)
            raise _Answer(200, headers={"ETag": f'"{etag}"'})
        if self.command == "DELETE":
            del self.store.uploads[query["uploadId"]]
            raise _Answer(204)
        if self.command == "GET":
            rows = "".join(
                f"<Part><PartNumber>{n}</PartNumber><ETag>&quot;{p.etag}&quot;</ETag><Size>{len(p.data)}</Size>"
                + (f"<ChecksumCRC32>{p.crc32}</ChecksumCRC32>" if p.crc32 else "")
                + "</Part>"
                for n, p in sorted(upload.parts.items())
            )
            raise _xml(f"<ListPartsResult>{rows}</ListPartsResult>")
        self._complete(path, query["uploadId"], upload, body.decode())

    def _complete(self, path: str, upload_id: str, upload: Upload, asked: str) -> None:
        rows = [
            (
                int(re.findall(r"<PartNumber>(\d+)", row)[0]),
                re.findall(r'<ETag>(?:&quot;|")?([^<&"]+)', row)[0],
            )
            for row in re.findall(r"<Part>.*?</Part>", asked, re.DOTALL)
        ]
        numbers = [n for n, _ in rows]
        if numbers != sorted(set(numbers)):
            raise _error(400, "InvalidPartOrder")
        if not rows or any(n not in upload.parts or upload.parts[n].etag != etag for n, etag in rows):
            raise _error(400, "InvalidPart")
        sizes = [len(upload.parts[n].data) for n in numbers]
        if any(size < self.store.min_part for size in sizes[:-1]):
            raise _error(400, "EntityTooSmall")
        if self.store.equal_parts and len(set(sizes[:-1])) > 1:
            raise _error(400, "InvalidPart")
        data = b"".join(upload.parts[n].data for n in numbers)
        sent = self.headers.get("x-amz-checksum-crc32")
        if self.store.checks and self.store.keeps and sent is not None and sent != _crc(data):
            raise _error(400, "BadDigest")
        self._require_conditions(path, complete=True)
        etag = f"{hashlib.md5(data).hexdigest()}-{len(rows)}"
        crc = _crc(data) if self.store.keeps else None
        self.store.objects[path] = Stored(data, etag, upload.meta, crc)
        del self.store.uploads[upload_id]
        raise _xml(
            f"<CompleteMultipartUploadResult><ETag>&quot;{etag}&quot;</ETag></CompleteMultipartUploadResult>"
        )
