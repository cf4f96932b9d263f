"""Serve S3 from memory, with little work for each byte, so that it is not what a benchmark measures.

    python s3_server.py [--latency SECONDS]        prints its port

It has what copying and converting need: ranges, conditions, uploads in parts, listings. It proves nothing:
no signatures, no checksums (tests/helpers/fault_s3.py has those). ``GET /-/count`` returns the requests so
far as JSON. ``PUT /-/latency`` with a number changes the wait before every answer, and ``PUT /-/load/PREFIX``
with a folder's path makes objects of its files. ``DELETE /-/out`` removes all objects but those below a
``src`` folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

_BLOCK = 1 << 20
_REASONS = {
    200: "OK",
    204: "No Content",
    206: "Partial Content",
    404: "Not Found",
    412: "Precondition Failed",
}
_PAGE = 1000
_PLAIN = 8 << 20  # clients upload larger files in parts


@dataclass(slots=True)
class Object:
    """Bytes in pieces, as they were uploaded."""

    pieces: list[bytearray]
    meta: dict[str, str] = field(default_factory=dict)
    etag: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def nbytes(self) -> int:
        """Count them."""
        return sum(map(len, self.pieces))

    def views(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes of a range."""
        at = 0
        for piece in self.pieces:
            a, b = max(start - at, 0), min(stop - at, len(piece))
            if a < b:
                yield memoryview(piece)[a:b]
            at += len(piece)


def _plain(data: bytearray, meta: dict[str, str] | None = None) -> Object:
    """Return an object; the ETag of what one request wrote is its MD5, as S3 has it."""
    made = Object([data], meta or {})
    if len(data) <= _PLAIN:
        made.etag = hashlib.md5(data, usedforsecurity=False).hexdigest()
    return made


class Answer(Exception):
    """What is sent back."""

    def __init__(self, status: int = 200, body: bytes = b"", **headers: str) -> None:
        self.status, self.body, self.headers = status, body, headers
        self.views: Iterator[memoryview] | None = None


def _xml(text: str) -> Answer:
    return Answer(
        200, f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode(), Content_Type="application/xml"
    )


def _error(status: int, code: str) -> Answer:
    answer = _xml(f"<Error><Code>{code}</Code><Message>{code}</Message></Error>")
    answer.status = status
    return answer


class Server:
    """Objects, open uploads, and the thread of each connection."""

    def __init__(self, latency: float) -> None:
        self.latency, self.counts = latency, Counter[str]()
        self.objects: dict[str, Object] = {}
        self.uploads: dict[str, tuple[str, dict[str, str], dict[int, Object]]] = {}
        self.lock = threading.Lock()
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=256)

    def serve(self) -> None:
        """Accept connections for ever."""
        while True:
            client, _ = self.socket.accept()
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._connection, args=(client,), daemon=True).start()

    def _connection(self, client: socket.socket) -> None:
        with client, suppress(ConnectionError, EOFError):
            source = client.makefile("rb", _BLOCK)
            while True:
                line = source.readline()
                if not line:
                    return
                method, target, _ = line.decode("latin-1").split(" ", 2)
                headers: dict[str, str] = {}
                while (row := source.readline().strip()) and b":" in row:
                    name, _, value = row.decode("latin-1").partition(":")
                    headers[name.lower()] = value.strip()
                if headers.get("expect", "").lower() == "100-continue":
                    client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                body = _received(source, headers)
                try:
                    self._answer(method, target, headers, body)
                except Answer as answer:
                    _send(client, method, answer)

    def _answer(self, method: str, target: str, headers: dict[str, str], body: bytearray) -> None:
        url = urlsplit(target)
        path, query = unquote(url.path).lstrip("/"), dict(parse_qsl(url.query, keep_blank_values=True))
        if path == "-/count":
            raise Answer(200, json.dumps(self.counts).encode())
        if path == "-/latency":
            self.latency = float(body)
            raise Answer
        if path.startswith("-/load/"):
            self._load(path.removeprefix("-/load/"), Path(body.decode()))
            raise Answer
        if path == "-/out":
            self.objects = {p: o for p, o in self.objects.items() if "/src/" in p}
            raise Answer
        if self.latency:
            time.sleep(self.latency)
        kind = "source" if "/src/" in path else "other"
        with self.lock:
            self.counts[f"{method} {kind}"] += 1
        bucket, _, key = path.partition("/")
        if not key:
            self._bucket(method, bucket, query)
        elif "uploads" in query or "uploadId" in query:
            self._upload(method, path, query, headers, body)
        else:
            self._object(method, path, headers, body)

    def _load(self, prefix: str, folder: Path) -> None:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                data = bytearray(file.stat().st_size)
                with file.open("rb") as opened:
                    opened.readinto(data)
                self.objects[f"{prefix}/{file.relative_to(folder)}"] = _plain(data)

    def _object(self, method: str, path: str, headers: dict[str, str], body: bytearray) -> None:
        there = self.objects.get(path)
        if method == "PUT":
            if headers.get("if-none-match") == "*" and there is not None:
                raise _error(412, "PreconditionFailed")
            if "x-amz-copy-source" in headers:
                copied = self.objects[unquote(headers["x-amz-copy-source"]).lstrip("/")]
                new = Object(copied.pieces, dict(copied.meta))
                self.objects[path] = new
                raise _xml(f"<CopyObjectResult><ETag>&quot;{new.etag}&quot;</ETag></CopyObjectResult>")
            new = self.objects[path] = _plain(body, _meta(headers))
            raise Answer(200, ETag=f'"{new.etag}"')
        if method == "DELETE":
            self.objects.pop(path, None)
            raise Answer(204)
        if there is None:
            raise _error(404, "NoSuchKey")
        if "if-match" in headers and headers["if-match"].strip('"') != there.etag:
            raise _error(412, "PreconditionFailed")
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("range", ""))
        start, stop = 0, there.nbytes
        if found is not None:
            start, stop = int(found[1]), min(int(found[2] or stop) + 1, stop)
        answer = Answer(
            206 if found else 200,
            ETag=f'"{there.etag}"',
            Last_Modified=formatdate(0, usegmt=True),
            Content_Length=str(stop - start),
            **{f"x-amz-meta-{k}".replace("-", "_"): v for k, v in there.meta.items()},
        )
        if found is not None:
            answer.headers["Content_Range"] = f"bytes {start}-{stop - 1}/{there.nbytes}"
        answer.views = there.views(start, stop)
        raise answer

    def _upload(
        self, method: str, path: str, query: dict[str, str], headers: dict[str, str], body: bytearray
    ) -> None:
        if "uploads" in query:
            name = uuid.uuid4().hex
            self.uploads[name] = path, _meta(headers), {}
            raise _xml(
                f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId></InitiateMultipartUploadResult>"
            )
        name = query["uploadId"]
        if name not in self.uploads:
            raise _error(404, "NoSuchUpload")
        _, meta, parts = self.uploads[name]
        if method == "PUT":
            part = parts[int(query["partNumber"])] = Object([body])
            raise Answer(200, ETag=f'"{part.etag}"')
        if method == "DELETE":
            del self.uploads[name]
            raise Answer(204)
        if method == "GET":
            rows = "".join(
                f"<Part><PartNumber>{n}</PartNumber><ETag>&quot;{p.etag}&quot;</ETag><Size>{p.nbytes}</Size></Part>"
                for n, p in sorted(parts.items())
            )
            raise _xml(f"<ListPartsResult><IsTruncated>false</IsTruncated>{rows}</ListPartsResult>")
        new = Object([piece for n in sorted(parts) for piece in parts[n].pieces], meta)
        del self.uploads[name]
        self.objects[path] = new
        raise _xml(
            f"<CompleteMultipartUploadResult><ETag>&quot;{new.etag}&quot;</ETag></CompleteMultipartUploadResult>"
        )

    def _bucket(self, method: str, bucket: str, query: dict[str, str]) -> None:
        if method == "PUT":
            raise Answer
        prefix = query.get("prefix", "")
        if "uploads" in query:
            rows = "".join(
                f"<Upload><Key>{escape(path.partition('/')[2])}</Key><UploadId>{name}</UploadId></Upload>"
                for name, (path, _, _) in list(self.uploads.items())
                if path.startswith(f"{bucket}/{prefix}")
            )
            raise _xml(
                f"<ListMultipartUploadsResult><IsTruncated>false</IsTruncated>{rows}</ListMultipartUploadsResult>"
            )
        after = query.get("continuation-token", query.get("start-after", ""))
        objects = dict(self.objects)  # other threads remove some meanwhile
        keys = sorted(path.partition("/")[2] for path in objects if path.startswith(f"{bucket}/{prefix}"))
        rows, folders, delimiter = list[str](), dict[str, None](), query.get("delimiter", "")
        keys = [key for key in keys if key > after]
        for key in keys[:_PAGE]:
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                folders[prefix + rest.partition(delimiter)[0] + delimiter] = None
                continue
            there = objects[f"{bucket}/{key}"]
            rows.append(
                f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                f"<ETag>&quot;{there.etag}&quot;</ETag><Size>{there.nbytes}</Size></Contents>"
            )
        rows += [f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in folders]
        more = len(keys) > _PAGE
        if more:
            rows.append(f"<NextContinuationToken>{escape(keys[_PAGE - 1])}</NextContinuationToken>")
        raise _xml(
            f"<ListBucketResult><Name>{bucket}</Name><KeyCount>{min(len(keys), _PAGE)}</KeyCount>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{''.join(rows)}</ListBucketResult>"
        )


def _meta(headers: dict[str, str]) -> dict[str, str]:
    head = "x-amz-meta-"
    return {name[len(head) :]: value for name, value in headers.items() if name.startswith(head)}


def _received(source, headers: dict[str, str]) -> bytearray:  # type: ignore[no-untyped-def]
    """Return the body of a request."""
    if "aws-chunked" not in headers.get("content-encoding", ""):
        return _exactly(source, int(headers.get("content-length", "0")))
    body = bytearray()
    while count := int(source.readline().partition(b";")[0], 16):
        body += _exactly(source, count)
        source.readline()
    while source.readline().strip():  # trailers
        pass
    return body


def _exactly(source, count: int) -> bytearray:  # type: ignore[no-untyped-def]
    body = bytearray(count)
    view, at = memoryview(body), 0
    while at < count:
        got = source.readinto(view[at:])
        if not got:
            raise EOFError
        at += got
    return body


def _send(client: socket.socket, method: str, answer: Answer) -> None:
    headers = {"Content_Length": str(len(answer.body)), **answer.headers}
    head = [f"HTTP/1.1 {answer.status} {_REASONS.get(answer.status, 'Error')}"]
    head += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    client.sendall(
        "\r\n".join([*head, "", ""]).encode("latin-1") + (b"" if method == "HEAD" else answer.body)
    )
    if method != "HEAD":
        for view in answer.views or ():
            client.sendall(view)


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before every answer")
    server = Server(parser.parse_args().latency)
    print(server.socket.getsockname()[1], flush=True)
    server.serve()


if __name__ == "__main__":
    main()
