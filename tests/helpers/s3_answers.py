"""What an S3 store answers, over objects in memory; `fault_s3` serves it over HTTP, with faults.

Like a real store it compares checksums of what arrives, has part rules, pages its lists, and answers
conditions. Each of these can be switched off, since stores other than Amazon's have other habits.
"""

from __future__ import annotations

import base64
import hashlib
import re
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from email.message import Message
from email.utils import formatdate
from typing import Any
from urllib.parse import unquote
from xml.sax.saxutils import escape

from awscrt.checksums import crc32c, crc64nvme


@dataclass
class Stored:
    """An object, or a part of an upload."""

    data: bytes
    etag: str
    meta: dict[str, str] = field(default_factory=dict)
    crc32: str | None = None  # of a part, as it was sent
    when: float = field(default_factory=time.time)


@dataclass
class Upload:
    """An upload that is open."""

    key: str
    meta: dict[str, str]
    parts: dict[int, Stored] = field(default_factory=dict)
    when: float = field(default_factory=time.time)
    algorithm: str | None = None


class Answer(Exception):
    """An answer that ends a request."""

    def __init__(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.status, self.body, self.headers = status, body, headers or {}


@dataclass(frozen=True)
class Asked:
    """One request. path: with the bucket. body: without its transfer coding."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Message[str, str]
    body: bytes

    @property
    def operation(self) -> str:
        """The name of S3's operation."""
        return operation(self.method, self.path, self.query, self.headers)


def operation(method: str, path: str, query: Mapping[str, str], headers: Message[str, str]) -> str:
    """Return the name of S3's operation that a request is."""
    key = path.partition("/")[2]
    if not key:
        return "ListMultipartUploads" if "uploads" in query else "ListObjectsV2"
    if "uploadId" in query:
        named = {"PUT": "UploadPart", "DELETE": "AbortMultipartUpload", "GET": "ListParts"}
        return named.get(method, "CompleteMultipartUpload")
    if method == "POST":
        return "CreateMultipartUpload"
    if method == "PUT" and headers.get("x-amz-copy-source"):
        return "CopyObject"
    return {"GET": "GetObject", "HEAD": "HeadObject", "PUT": "PutObject"}.get(method, "DeleteObject")


def error(status: int, code: str) -> Answer:
    body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'
    return Answer(status, body.encode(), {"Content-Type": "application/xml"})


def _number(value: int, width: int) -> str:
    return base64.b64encode(value.to_bytes(width, "big")).decode()


CHECKSUMS: dict[str, Callable[[bytes], str]] = {
    "crc64nvme": lambda data: _number(crc64nvme(data), 8),
    "crc32c": lambda data: _number(crc32c(data), 4),
    "crc32": lambda data: _number(zlib.crc32(data), 4),
    "sha256": lambda data: base64.b64encode(hashlib.sha256(data).digest()).decode(),
}


class S3Answers:
    """Buckets in memory; a bucket is the first name of a path, and needs not be made.

    Args:
        checks: Compare the checksums of bodies with what arrives.
        keeps: A name of `CHECKSUMS` that it keeps of every object and answers, or None.
        creates: Answer the conditions of writes: True, False (ignored), or "put" (ignored on Complete).
        matches: Answer If-Match of reads.
        parts: ETags of `put` are like those of uploads in parts, which prove nothing.
        equal_parts: Refuse parts of unequal size.
        min_part: Smallest size of a part that is not the last.
        page: Rows of one page of a list.
        clock: The time of the store.

    Attributes:
        lag_s: For so long a list has no new object yet.
    """

    def __init__(
        self,
        *,
        checks: bool = True,
        keeps: str | None = "crc32",
        creates: bool | str = True,
        matches: bool = True,
        parts: bool = False,
        equal_parts: bool = False,
        min_part: int = 5 << 20,
        page: int = 1000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.clock, self.lag_s = clock, 0.0
        self.checks, self.keeps, self.creates, self.matches = checks, keeps, creates, matches
        self.parts, self.equal_parts, self.min_part, self.page = parts, equal_parts, min_part, page
        self.objects: dict[str, Stored] = {}
        self.uploads: dict[str, Upload] = {}
        self.denied: list[str] = []  # operations that are refused
        self.lock = threading.RLock()
        self._sums: dict[tuple[str, bytes], str] = {}

    def put(self, path: str, data: bytes) -> Stored:
        """Store an object, and return it."""
        etag = hashlib.md5(data).hexdigest() + ("-1" if self.parts else "")
        self.objects[path] = Stored(data, etag, when=self.clock())
        return self.objects[path]

    def below(self, prefix: str) -> dict[str, bytes]:
        """Return the objects below ``bucket/prefix``, by the rest of their names."""
        with self.lock:
            return {k[len(prefix) :]: o.data for k, o in sorted(self.objects.items()) if k.startswith(prefix)}

    def answer(self, asked: Asked, *, missing: float | None = None) -> None:
        """Raise the answer to a request. missing: the place, from 0 to 1, of a row that a list leaves out."""
        name = asked.operation
        if name in self.denied:
            raise error(403, "AccessDenied")
        with self.lock:
            if name in ("ListObjectsV2", "ListMultipartUploads"):
                self._bucket(asked, missing)
            elif name == "CreateMultipartUpload":
                self._begin(asked)
            elif "uploadId" in asked.query:
                self._upload(asked, missing)
            elif asked.method == "PUT":
                self._put(asked)
            elif asked.method == "DELETE":
                self._require_conditions(asked, complete=False)
                self.objects.pop(asked.path, None)
                raise Answer(204)
            else:
                self._get(asked)
        raise Answer(200)

    def _kept(self, data: bytes) -> str | None:
        if self.keeps is None:
            return None
        known = self._sums.get((self.keeps, data))
        if known is None:
            known = self._sums[self.keeps, data] = CHECKSUMS[self.keeps](data)
        return known

    def _received(self, asked: Asked) -> str | None:
        """Compare checksums of a body; return its CRC-32, if the store keeps it."""
        sent = asked.headers.get("x-amz-checksum-crc32")
        digest = asked.headers.get("x-amz-content-sha256") or ""
        if self.checks:
            if sent is not None and sent != CHECKSUMS["crc32"](asked.body):
                raise error(400, "BadDigest")
            if len(digest) == 64 and digest != hashlib.sha256(asked.body).hexdigest():
                raise error(400, "XAmzContentSHA256Mismatch")
        return sent if self.keeps == "crc32" else None

    def _require_conditions(self, asked: Asked, *, complete: bool) -> None:
        there = self.objects.get(asked.path)
        if self.creates is False or (complete and self.creates == "put"):
            return
        if asked.headers.get("If-None-Match") == "*" and there is not None:
            raise error(412, "PreconditionFailed")
        match = asked.headers.get("If-Match")
        if match is not None and there is None:
            raise error(404, "NoSuchKey")
        if match is not None and there is not None and match.strip('"') != there.etag:
            raise error(412, "PreconditionFailed")

    def _begin(self, asked: Asked) -> None:
        bucket, _, key = asked.path.partition("/")
        upload_id = uuid.uuid4().hex
        algorithm = asked.headers.get("x-amz-checksum-algorithm")
        self.uploads[upload_id] = Upload(asked.path, _meta(asked), when=self.clock(), algorithm=algorithm)
        raise _xml(
            f"<InitiateMultipartUploadResult><Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>"
            f"<UploadId>{upload_id}</UploadId></InitiateMultipartUploadResult>"
        )

    def _put(self, asked: Asked) -> None:
        source = asked.headers.get("x-amz-copy-source")
        if source is not None:
            there = self.objects.get(unquote(source).lstrip("/"))
            if there is None:
                raise error(404, "NoSuchKey")
            match = asked.headers.get("x-amz-copy-source-if-match")
            if self.matches and match is not None and match.strip('"') != there.etag:
                raise error(412, "PreconditionFailed")
            self._require_conditions(asked, complete=False)
            self.objects[asked.path] = Stored(there.data, there.etag, dict(there.meta), when=self.clock())
            raise _xml(f"<CopyObjectResult><ETag>&quot;{there.etag}&quot;</ETag></CopyObjectResult>")
        self._received(asked)
        self._require_conditions(asked, complete=False)
        etag = hashlib.md5(asked.body).hexdigest()
        self.objects[asked.path] = Stored(asked.body, etag, _meta(asked), when=self.clock())
        raise Answer(200, headers={"ETag": f'"{etag}"'})

    def _get(self, asked: Asked) -> None:
        there = self.objects.get(asked.path)
        if there is None:
            # Whoever may not list must not learn that there is none.
            raise error(403, "AccessDenied") if "ListObjectsV2" in self.denied else error(404, "NoSuchKey")
        match = asked.headers.get("If-Match")
        if self.matches and match is not None and match.strip('"') != there.etag:
            raise error(412, "PreconditionFailed")
        headers = {
            "ETag": f'"{there.etag}"',
            "Last-Modified": formatdate(there.when, usegmt=True),
            "Content-Type": "binary/octet-stream",
            **there.meta,
        }
        wanted = re.match(r"bytes=(\d+)-(\d*)$", asked.headers.get("Range") or "")
        if wanted is None:
            kept = self._kept(there.data)
            if kept is not None and asked.headers.get("x-amz-checksum-mode"):
                headers |= {f"x-amz-checksum-{self.keeps}": kept, "x-amz-checksum-type": "FULL_OBJECT"}
            if asked.method == "HEAD":
                headers["Content-Length"] = str(len(there.data))
            raise Answer(200, there.data, headers)
        begin = int(wanted[1])
        end = min(int(wanted[2]) + 1 if wanted[2] else len(there.data), len(there.data))
        if begin >= end:
            raise error(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(there.data)}"
        raise Answer(206, there.data[begin:end], headers)

    def _bucket(self, asked: Asked, missing: float | None) -> None:
        bucket, query = asked.path.partition("/")[0], asked.query
        if asked.method in ("PUT", "HEAD"):
            raise Answer(200)
        prefix = query.get("prefix", "")
        if "uploads" in query:
            open_ones = sorted(
                (u.key.partition("/")[2], n, u.when, u.algorithm)
                for n, u in self.uploads.items()
                if u.key.startswith(f"{bucket}/{prefix}")
            )
            after = (query.get("key-marker", ""), query.get("upload-id-marker", ""))
            rows = [row for row in _without(open_ones, missing) if not after[0] or row[:2] > after]
            page, more = rows[: self.page], len(rows) > self.page
            text = "".join(
                f"<Upload><Key>{escape(key)}</Key><UploadId>{n}</UploadId>"
                + (f"<ChecksumAlgorithm>{algorithm}</ChecksumAlgorithm>" if algorithm else "")
                + f"<Initiated>{_date(when)}</Initiated></Upload>"
                for key, n, when, algorithm in page
            )
            if more:
                text += (
                    f"<NextKeyMarker>{escape(page[-1][0])}</NextKeyMarker>"
                    f"<NextUploadIdMarker>{page[-1][1]}</NextUploadIdMarker>"
                )
            raise _xml(
                f"<ListMultipartUploadsResult><Bucket>{bucket}</Bucket>"
                f"<IsTruncated>{str(more).lower()}</IsTruncated>{text}</ListMultipartUploadsResult>"
            )
        names = _without(list(self._names(bucket, prefix, query.get("delimiter", ""))), missing)
        after_name = query.get("continuation-token", "")
        left = [name for name in names if name > after_name]
        listed, more = left[: self.page], len(left) > self.page
        text = ""
        for name in listed:
            there = self.objects.get(f"{bucket}/{name}")
            if there is None or (query.get("delimiter") and name.endswith(query["delimiter"])):
                text += f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
                continue
            text += (
                f"<Contents><Key>{escape(name)}</Key><Size>{len(there.data)}</Size>"
                f"<ETag>&quot;{there.etag}&quot;</ETag><LastModified>{_date(there.when)}</LastModified></Contents>"
            )
        if more:
            text += f"<NextContinuationToken>{escape(listed[-1])}</NextContinuationToken>"
        raise _xml(
            f"<ListBucketResult><Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{text}</ListBucketResult>"
        )

    def _names(self, bucket: str, prefix: str, cut: str) -> Iterator[str]:
        """Yield the keys below a prefix in order, each deeper than the delimiter as its common prefix."""
        folder = None
        seen_until = self.clock() - self.lag_s if self.lag_s else None
        for path in sorted(self.objects):
            name = path.removeprefix(f"{bucket}/")
            if name == path or not name.startswith(prefix):
                continue
            if seen_until is not None and self.objects[path].when > seen_until:
                continue
            if cut and cut in name[len(prefix) :]:
                name = prefix + name[len(prefix) :].split(cut)[0] + cut
                if name == folder:
                    continue
                folder = name
            yield name

    def _upload(self, asked: Asked, missing: float | None) -> None:
        upload = self.uploads.get(asked.query["uploadId"])
        if upload is None or upload.key != asked.path:
            raise error(404, "NoSuchUpload")
        if asked.method == "PUT":
            crc = self._received(asked)
            number, etag = int(asked.query["partNumber"]), hashlib.md5(asked.body).hexdigest()
            upload.parts[number] = Stored(asked.body, etag, crc32=crc)
            raise Answer(200, headers={"ETag": f'"{etag}"'})
        if asked.method == "DELETE":
            del self.uploads[asked.query["uploadId"]]
            raise Answer(204)
        if asked.method == "GET":
            after = int(asked.query.get("part-number-marker") or 0)
            rows = [row for row in _without(sorted(upload.parts.items()), missing) if row[0] > after]
            page, more = rows[: self.page], len(rows) > self.page
            text = "".join(
                f"<Part><PartNumber>{n}</PartNumber><ETag>&quot;{p.etag}&quot;</ETag><Size>{len(p.data)}</Size>"
                + (f"<ChecksumCRC32>{p.crc32}</ChecksumCRC32>" if p.crc32 else "")
                + "</Part>"
                for n, p in page
            )
            if more:
                text += f"<NextPartNumberMarker>{page[-1][0]}</NextPartNumberMarker>"
            raise _xml(
                f"<ListPartsResult><IsTruncated>{str(more).lower()}</IsTruncated>{text}</ListPartsResult>"
            )
        self._complete(asked, upload)

    def _complete(self, asked: Asked, upload: Upload) -> None:
        rows = [
            (
                int(re.findall(r"<PartNumber>(\d+)", row)[0]),
                re.findall(r'<ETag>(?:&quot;|")?([^<&"]+)', row)[0],
            )
            for row in re.findall(r"<Part>.*?</Part>", asked.body.decode(), re.DOTALL)
        ]
        numbers = [n for n, _ in rows]
        if numbers != sorted(set(numbers)):
            raise error(400, "InvalidPartOrder")
        if not rows or any(n not in upload.parts or upload.parts[n].etag != etag for n, etag in rows):
            raise error(400, "InvalidPart")
        sizes = [len(upload.parts[n].data) for n in numbers]
        if any(size < self.min_part for size in sizes[:-1]):
            raise error(400, "EntityTooSmall")
        if self.equal_parts and len(set(sizes[:-1])) > 1:
            raise error(400, "InvalidPart")
        data = b"".join(upload.parts[n].data for n in numbers)
        sent = asked.headers.get("x-amz-checksum-crc32")
        if self.checks and self.keeps == "crc32" and sent is not None and sent != self._kept(data):
            raise error(400, "BadDigest")
        self._require_conditions(asked, complete=True)
        etag = f"{hashlib.md5(data).hexdigest()}-{len(rows)}"
        self.objects[asked.path] = Stored(data, etag, upload.meta, when=self.clock())
        del self.uploads[asked.query["uploadId"]]
        raise _xml(
            f"<CompleteMultipartUploadResult><ETag>&quot;{etag}&quot;</ETag></CompleteMultipartUploadResult>"
        )


def _without(rows: list[Any], place: float | None) -> list[Any]:
    if place is None or not rows:
        return rows
    at = min(int(place * len(rows)), len(rows) - 1)
    return [*rows[:at], *rows[at + 1 :]]


def _meta(asked: Asked) -> dict[str, str]:
    return {k.lower(): v for k, v in asked.headers.items() if k.lower().startswith("x-amz-meta-")}


def _xml(text: str) -> Answer:
    head = '<?xml version="1.0" encoding="UTF-8"?>'
    return Answer(200, (head + text).encode(), {"Content-Type": "application/xml"})


def _date(when: float) -> str:
    # Up to the millisecond: what a store says about the past must not seem to be earlier than it was.
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(when)) + f".{int(when % 1 * 1000):03d}Z"
