"""Compare places: whether two URLs refer to the same storage, or one is inside the other.

A URL is a spelling. A place is the storage it refers to, as far as that is known without asking a server:
the family of its scheme, the endpoint, the bucket, the key; on this machine the real path, the mount, and
(device, inode) of every folder above. Spellings that any client could confuse count as one place: a wrongly
refused conversion costs a new name, but one that replaces its own source costs the checkpoint.
"""

from __future__ import annotations

import functools
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import unquote

from ckptcore.store import local_path
from ckptcore.store.options import configured
from ckptcore.utils.foreign_text import InvalidText, parse_url
from ckptcore.utils.merged_url import roots_of

_FAMILIES = {
    "s3": "s3",
    "s3a": "s3",
    "s3n": "s3",
    "gs": "gs",
    "gcs": "gs",
    "az": "az",
    "abfs": "az",
    "abfss": "az",
    "adl": "az",
    "wasb": "az",
    "wasbs": "az",
    "http": "http",
    "https": "http",
    "ssh": "ssh",
    "sftp": "ssh",
    "memory": "memory",
    "oss": "oss",
    "cos": "cos",
    "cosn": "cos",
    "obs": "obs",
    "tos": "tos",
    "r2": "s3",
}
# Families that an HTTP server may serve as https://host/bucket/key and https://bucket.host/key.
_BUCKETS = frozenset({"s3", "gs", "az", "oss", "cos", "obs", "tos"})
_ANY = "*"  # a bucket behind an alias: it can be any
_ALIAS = re.compile(r"arn:|.*-s3alias$")
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0", "host.docker.internal"})
_DECODINGS = 3  # levels of percent-encoding that are considered


class Relation(StrEnum):
    """How one place relates to another."""

    APART = "apart"
    SAME = "same"
    INSIDE = "inside"
    AROUND = "around"


@dataclass(frozen=True, slots=True)
class Location:
    """The storage that a URL refers to.

    Attributes:
        url: The spelling.
        family: Schemes that reach the same storage.
        endpoint: The server, "" if unknown.
        spots: (bucket or device, path in it), once for each way to read the spelling.
        trail: (device, inode) of the place itself, where it exists, and of the existing folders above it,
            nearest first. Remote places have none.
        exists: Whether ``trail`` begins with the place itself.
        parts: The places of a merged source, which has no spots of its own.
    """

    url: str
    family: str
    endpoint: str
    spots: frozenset[tuple[str, tuple[str, ...]]]
    trail: tuple[tuple[int, int], ...] = ()
    exists: bool = False
    parts: tuple[Location, ...] = ()

    @property
    def is_bucket(self) -> bool:
        """Report whether it is a complete bucket, under any reading."""
        return self.family in _BUCKETS and any(not path for _, path in self.spots)


def identify(url: str) -> Location:
    """Return the place of a path or URL; for a chain (``simplecache::s3://...``), the storage at its end.

    Nothing has to exist; no server is asked.

    Raises:
        UsageError: It is not a URL.
    """
    return _identified(url, _Look())


def relation(a: Location, b: Location) -> Relation:
    """Return how ``a`` relates to ``b``: SAME, INSIDE it, AROUND it, or APART where none is possible.

    A merged source relates as the first of its places that does.
    """
    if a.parts or b.parts:
        # One part that overlaps is enough: the merged source is read from all of them.
        part_relations = (relation(x, y) for x in a.parts or (a,) for y in b.parts or (b,))
        return next((r for r in part_relations if r is not Relation.APART), Relation.APART)
    # Each reading of one spelling against each of the other: a client may take any of them.
    relations = {_of_paths(x[1], y[1]) for x in a.spots for y in b.spots if _may_meet(a, b, x[0], y[0])}
    # Names say where a place should be, inodes what it is: a bind mount or a second link has another name.
    if a.exists and b.exists and a.trail[0] == b.trail[0]:
        relations.add(Relation.SAME)
    if b.exists and b.trail[0] in a.trail:
        relations.add(Relation.INSIDE)
    if a.exists and a.trail[0] in b.trail:
        relations.add(Relation.AROUND)
    # The strictest first: to be the same place, or around it, costs most if it is written.
    order = (Relation.SAME, Relation.AROUND, Relation.INSIDE)
    return next((r for r in order if r in relations), Relation.APART)


def overlaps(a: Location, b: Location) -> bool:
    """Report whether the two are one place, or one of them is inside the other."""
    return relation(a, b) is not Relation.APART


def first_overlap(urls: Sequence[str]) -> tuple[str, str] | None:
    """Return the first two of many URLs that overlap, or None; each is compared with few others."""
    look = _Look()
    index = _Index([_identified(url, look) for url in urls])
    for n, place in enumerate(index.places):
        # Of places that share no mark none can overlap, so most pairs are never compared.
        for neighbor in index.near(place):
            # Each pair once.
            if n < neighbor and overlaps(place, index.places[neighbor]):
                return urls[n], urls[neighbor]
    return None


class Spellings:
    """Many URLs, to find those that may lead to one place under other names.

    All of them are compared, by an index of their places: a link may give any place any name. The file
    system is asked once about each of them, when the first place is compared, and about each folder above.
    """

    def __init__(self, urls: Iterable[str]) -> None:
        self._urls = tuple(dict.fromkeys(urls))
        self._look = _Look()

    def of(self, url: str) -> dict[str, Relation]:
        """Return the other URLs that may refer to this place, to a part of it, or around it.

        Args:
            url: The place.

        Returns:
            URL -> how its place relates to that of ``url``, in the order of the URLs.
        """
        if not self._urls or self._urls == (url,):
            return {}
        location = _identified(url, self._look)
        near = ((self._urls[n], self._index.places[n]) for n in self._index.near(location))
        relations = {candidate: relation(place, location) for candidate, place in near if candidate != url}
        return {candidate: kind for candidate, kind in relations.items() if kind is not Relation.APART}

    def inside(self, url: str) -> tuple[str, ...]:
        """Return the URLs inside this place, whatever its name: their folders are compared."""
        location, within = _identified(url, self._look), (Relation.SAME, Relation.INSIDE)
        folders: dict[str, list[str]] = {}
        for candidate in self._urls:
            # The folders above, each once: checkpoints of a run have one
            # folder, and there may be thousands of them.
            for root in roots_of(candidate) or (candidate,):
                folders.setdefault(root.rpartition("/")[0], []).append(candidate)
        url_groups = [
            urls
            for above, urls in folders.items()
            if above and relation(_identified(above, self._look), location) in within
        ]
        return tuple(dict.fromkeys(candidate for urls in url_groups for candidate in urls))

    @functools.cached_property
    def _index(self) -> _Index:
        return _Index([_identified(url, self._look) for url in self._urls])


def perhaps_within(places: Iterable[str], urls: Iterable[str]) -> tuple[str, ...]:
    """Return those of many URLs that may be one of some places or inside it: few, for a comparison of each.

    One question about each local URL, and several about each folder that has some, tell nearly all apart.
    """
    look = _Look()
    identified = [_identified(place, look) for place in places]
    index = _Index([part for location in identified for part in location.parts or (location,)])
    paths = {(bucket, "/".join(("", *path))) for place in index.places for bucket, path in place.spots}
    inodes = {place.trail[0] for place in index.places if place.exists}
    folders: dict[str, tuple[str, str, str] | None] = {}  # -> its real path, device, and path on the device

    def of_folder(above: str) -> tuple[str, str, str] | None:
        """Return where a local folder is; None where all in it may be within."""
        folder = _identified(f"{above}/", look)
        if any(
            relation(folder, index.places[n]) in (Relation.SAME, Relation.INSIDE) for n in index.near(folder)
        ):
            return None
        real = look.real(above or "/")
        return real, *look.on_device(real)

    def apart(candidate: str) -> bool:
        # Remote places and chains are few, and are compared one by one.
        if not candidate.startswith("/") or "::" in candidate:
            return False
        above, _, name = candidate.rpartition("/")
        if above not in folders:
            folders[above] = of_folder(above)
        folder = folders[above]
        if folder is None or name in ("", ".", ".."):
            # Such a last part is no name of an entry: the path is resolved as a whole.
            return False
        real_above, device, inner_above = folder
        real = os.path.join(real_above, name)
        if ("", real) in paths or (device, os.path.join(inner_above, name)) in paths:
            return False
        # Something is mounted there, so the path says nothing about the content.
        if real in look.mount_points:
            return False
        try:
            status = os.lstat(candidate)
        except (OSError, ValueError):
            return True  # its path alone is compared then, as `relation` does
        # A link may lead anywhere, and a file with the same inode is the same file.
        return not stat.S_ISLNK(status.st_mode) and (status.st_dev, status.st_ino) not in inodes

    return tuple(candidate for candidate in urls if not apart(candidate))


def _identified(url: str, look: _Look) -> Location:
    if roots := roots_of(url):
        parts = tuple(_identified(root, look) for root in roots)
        return Location(url, "merged", "", frozenset(), parts=parts)
    last = next((part for part in reversed(url.split("::")) if part), "")
    path = local_path(last)
    scheme, sign, rest = last.partition("://")
    if path is not None or scheme.lower() in ("file", "local"):
        return _local_location(url, os.fspath(path) if path is not None else rest, look)
    assert sign
    scheme = scheme.lower()
    family = _FAMILIES.get(scheme, scheme)
    return Location(url, family, _endpoint(scheme, family, rest), frozenset(_spots(family, rest)))


class _Index:
    """Places by where they are, and by all that is around them."""

    def __init__(self, places: Sequence[Location]) -> None:
        self.places = places
        self._at: dict[Any, list[int]] = {}
        self._below: dict[Any, list[int]] = {}
        self._anywhere: list[int] = []
        for n, place in enumerate(places):
            itself, above, anywhere = _marks(place)
            for mark in itself:
                self._at.setdefault(mark, []).append(n)
            # A place is also below itself, so that equal places meet.
            for mark in itself | above:
                self._below.setdefault(mark, []).append(n)
            if anywhere:
                self._anywhere.append(n)

    def near(self, location: Location) -> list[int]:
        """Return the positions of all places that may relate to one, and of few others."""
        itself, above, anywhere = _marks(location)
        # An alias of a bucket may be any bucket: it is compared with all.
        if anywhere:
            return list(range(len(self.places)))
        numbers = set(self._anywhere)
        for mark in itself:
            numbers.update(self._below.get(mark, ()))
        for mark in itself | above:
            numbers.update(self._at.get(mark, ()))
        return sorted(numbers)


def _marks(place: Location) -> tuple[set[Any], set[Any], bool]:
    """Return marks of a place itself, those of all that is around it, and whether its bucket is unknown.

    Two places relate only if a mark of one itself is among all marks of the other.
    """
    itself, above, anywhere = set[Any](), set[Any](), False
    if place.parts:
        for part in place.parts:
            of_itself, around, unknown = _marks(part)
            itself |= of_itself
            above |= around
            anywhere = anywhere or unknown
        return itself, above, anywhere
    for bucket, path in place.spots:
        itself.add((bucket, path))
        above.update((bucket, path[:n]) for n in range(len(path)))
        anywhere = anywhere or bucket == _ANY
    itself.update(place.trail[: int(place.exists)])
    above.update(place.trail)
    return itself, above, anywhere


class _Look:
    """One look at the file system: a folder that many places share is asked about once."""

    def __init__(self) -> None:
        self._real = {"/": "/"}
        self._trails: dict[str, tuple[tuple[int, int], ...]] = {}
        self._exists: dict[str, bool] = {}
        self._devices: dict[str, tuple[str, str]] = {}

    @functools.cached_property
    def mount_points(self) -> dict[str, tuple[str, str]]:
        """Mount point -> (device, folder of its file system); the last one of a point counts."""
        return {point: (device, os.path.normpath(root)) for device, root, point in mounts()}

    def real(self, path: str) -> str:
        """Return the real path, as `os.path.realpath` does."""
        # A path that is not in its normal form is left to the library: '..' after a link depends on the link.
        if not path.startswith("/") or path.startswith("//") or os.path.normpath(path) != path:
            return os.path.realpath(path)
        for folder in _until(path, self._real):
            full = os.path.join(self._real[os.path.dirname(folder)], os.path.basename(folder))
            try:
                linked = stat.S_ISLNK(os.lstat(full).st_mode)
            except (OSError, ValueError):  # missing, or not accessible: the path itself is compared
                linked = False
            self._real[folder] = os.path.realpath(full) if linked else full
        return self._real[path]

    def trail(self, real: str) -> tuple[tuple[tuple[int, int], ...], bool]:
        """Return (device, inode) of a real path and of the folders above; whether the first is its own."""
        for folder in _until(real, self._trails):
            above = self._trails[os.path.dirname(folder)] if folder != "/" else ()
            try:
                status = os.stat(folder)
            except (OSError, ValueError):
                self._trails[folder], self._exists[folder] = above, False
            else:
                self._trails[folder], self._exists[folder] = ((status.st_dev, status.st_ino), *above), True
        return self._trails[real], self._exists[real]

    def on_device(self, real: str) -> tuple[str, str]:
        """Return (device, path in its file system) of a real path: the same for all mounts of it."""
        for folder in _until(real, self._devices):
            device, inner = self.mount_points.get(folder) or ("", "/")
            if folder not in self.mount_points and folder != "/":
                device, inner = self._devices[os.path.dirname(folder)]
                inner = os.path.join(inner, os.path.basename(folder))
            self._devices[folder] = device, inner
        device, inner = self._devices[real]
        return f"device {device}", inner


def _until(path: str, cache: Mapping[str, object]) -> list[str]:
    """Return a path and the folders above it up to a known one, outermost first."""
    folders = []
    while path not in cache:
        folders.append(path)
        if path == "/":
            break
        path = os.path.dirname(path)
    return folders[::-1]


def _of_paths(a: tuple[str, ...], b: tuple[str, ...]) -> Relation:
    if a == b:
        return Relation.SAME
    # Components, not texts: "/a/bc" is not inside of "/a/b".
    if a[: len(b)] == b:
        return Relation.INSIDE
    return Relation.AROUND if b[: len(a)] == a else Relation.APART


def _may_meet(a: Location, b: Location, bucket_a: str, bucket_b: str) -> bool:
    families = {a.family, b.family}
    # An HTTP server may serve any bucket; two other families never have one storage.
    same = len(families) == 1 or ("http" in families and families & _BUCKETS)
    # Unknown endpoints count as equal: a refused conversion costs less than a replaced source.
    both_endpoints = len(families) == 1 and a.endpoint and b.endpoint
    return (
        bool(same)
        and not (both_endpoints and a.endpoint != b.endpoint)
        and (bucket_a == bucket_b or _ANY in (bucket_a, bucket_b))
    )


def _local_location(url: str, path: str, look: _Look) -> Location:
    real = look.real(path)
    device, inner = look.on_device(real)
    # Twice: by its path, and by device and path on that device, which is the same for all mounts of it.
    spots = {("", _components(real)), (device, _components(inner))}
    trail, exists = look.trail(real)
    return Location(url, "file", "", frozenset(spots), trail, exists)


def mounts() -> tuple[tuple[str, str, str], ...]:
    """Return (device, folder of its file system, mount point) of every mount, if reported."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            return _mounts_of(file.read())
    except OSError:
        return ()


@functools.lru_cache(maxsize=2)  # asked for every pair of places, and the same text nearly every time
def _mounts_of(mountinfo: str) -> tuple[tuple[str, str, str], ...]:
    rows = (line.split(" ") for line in mountinfo.split("\n"))
    # Fields of a line (proc_pid_mountinfo(5)): 2 is major:minor, 3 the root
    # within the file system, 4 the mount point.
    return tuple((row[2], _unescaped(row[3]), _unescaped(row[4])) for row in rows if len(row) > 4)


def _unescaped(text: str) -> str:
    # Spaces, tabs, newlines and backslashes in mountinfo are octal escapes.
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), text)


def _spots(family: str, rest: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    if family == "memory":
        yield from (("", path) for path in _readings(rest))
        return
    # With and without what some clients read as query or fragment, and others as part of the key.
    bare = re.split(r"[?#]", rest, maxsplit=1)[0]
    for text in {rest, bare}:
        host, _, key = text.lstrip("/").partition("/")
        # abfs://container@account.host/path, but s3://user:password@bucket/key
        bucket = host.partition("@")[0] if family == "az" else host.rpartition("@")[2]
        # Case is ignored: two spellings that some client could confuse count as one place.
        bucket = unquote(bucket).lower()
        for path in _readings(key):
            if family == "http":
                yield bucket.partition(":")[0].partition(".")[0], path
                # The bucket may be in the host name or the first component of the path: both forms are in
                # use.
                yield from ((path[0].lower(), path[1:]),) if path else ()
            yield (_ANY if family == "s3" and _ALIAS.match(bucket) else bucket), path


def _readings(key: str) -> set[tuple[str, ...]]:
    """Return the paths that a key may mean: as written, decoded, with its dots resolved."""
    texts = [key]
    for _ in range(_DECODINGS):
        # Decoded several times over: a proxy and a client may each decode once.
        texts.append(unquote(texts[-1]))
    return {path for text in texts for path in (_components(text), _components(text, dots=True))}


def _components(path: str, *, dots: bool = False) -> tuple[str, ...]:
    components: list[str] = []
    for part in path.split("/"):
        if part in ("", "."):
            continue
        if dots and part == "..":
            components = components[:-1]
        else:
            components.append(part)
    return tuple(components)


def _endpoint(scheme: str, family: str, rest: str) -> str:
    """Return the server in one spelling, "" if it is unknown."""
    if family == "az":
        host = rest.partition("/")[0]
        return host.partition("@")[2].lower()
    if family != "s3":
        return ""
    options = configured(scheme)
    named = options.get("endpoint_url") or (options.get("client_kwargs") or {}).get("endpoint_url")
    named = named or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if not named:
        return ""  # a profile may name one
    try:
        server = parse_url(str(named) if "://" in str(named) else f"//{named}")
    except InvalidText:
        return ""
    host, port = (server.hostname or "").lower().rstrip("."), server.port
    if host.endswith((".amazonaws.com", ".amazonaws.com.cn")):
        return "aws"
    # All names of this machine are one server.
    host = "localhost" if host in _LOOPBACK or host.startswith("127.") else host
    return f"{host}:{port or (80 if server.scheme == 'http' else 443)}"
