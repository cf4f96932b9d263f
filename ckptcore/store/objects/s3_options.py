"""Read the options of S3 as s3fs does, without importing it: with asyncio and aiohttp it takes 0.3 s.

Most commands need no more of s3fs than its conventions. Options of its constructor that are not known here,
and what another implementation of ``s3`` takes, are read by that file system itself.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from ckptcore.errors import MissingDependency, UsageError
from ckptcore.redaction import bare_url, redacted_of
from ckptcore.store.options import configured
from ckptcore.utils.dataclass import dataclass

_SCHEMES = ("s3", "s3a")
_KNOWN = frozenset(
    {
        "anon",
        "client_kwargs",
        "config_kwargs",
        "endpoint_url",
        "key",
        "password",
        "profile",
        "requester_pays",
        "s3_additional_kwargs",
        "secret",
        "token",
        "use_ssl",
        "username",
    }
)


@dataclass(frozen=True, slots=True)
class S3Options:
    """Options with the names that `s3fs.S3FileSystem` keeps them under, which can be used in its place.

    Attributes:
        storage_options: All, as given.
        anon: Send no credentials.
        endpoint_url: The server; None for Amazon's.
        key: Access key.
        secret: Secret key.
        token: Session token.
        use_ssl: Whether a server without a scheme is asked over TLS.
        client_kwargs: Further arguments of botocore's client.
        config_kwargs: Further settings of botocore.
        s3_additional_kwargs: Further parameters of all requests that know them.
        req_kw: The parameters with which the requester pays.
        kwargs: Arguments of botocore's session.
        connect_timeout: Seconds.
    """

    storage_options: Mapping[str, Any] = field(repr=False)
    anon: Any
    endpoint_url: Any
    key: Any = field(repr=False)
    secret: Any = field(repr=False)
    token: Any = field(repr=False)
    use_ssl: Any
    client_kwargs: Mapping[str, Any] = field(repr=False)
    config_kwargs: Mapping[str, Any]
    s3_additional_kwargs: Mapping[str, Any] = field(repr=False)
    req_kw: Mapping[str, Any]
    kwargs: Mapping[str, Any]
    connect_timeout: float = 5

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> S3Options:
        """Read options as the constructor of `S3FileSystem` does; two of one meaning are a `KeyError`."""
        for one, other in (("key", "username"), ("secret", "password")):
            if given.get(one) and given.get(other):
                raise KeyError(f"Supply either {one} or {other}, not both")
        return cls(
            given,
            given.get("anon", False),
            given.get("endpoint_url"),
            given.get("username") or given.get("key"),
            given.get("password") or given.get("secret"),
            given.get("token"),
            given.get("use_ssl", True),
            given.get("client_kwargs") or {},
            given.get("config_kwargs") or {},
            given.get("s3_additional_kwargs") or {},
            {"RequestPayer": "requester"} if given.get("requester_pays") else {},
            {name: given[name] for name in ("profile",) if name in given},
        )


_made: dict[str, S3Options] = {}
_lock = threading.Lock()


def open_file_system(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the options of a URL's file system, or s3fs's file system itself, and the path in it.

    Nothing is sent. Equal options have the same object.

    Raises:
        MissingDependency: s3fs is needed, and is not installed.
        UsageError: The URL or an option is wrong.
    """
    given = {name: value for scheme in _SCHEMES for name, value in configured(scheme).items()}
    given |= options
    try:
        if not _is_plain(url) or not given.keys() <= _KNOWN:
            return _file_system(url, options)
        root = url.partition("://")[2].rstrip("/")
        with _lock:
            known = repr(sorted(given.items()))
            return _made.get(known) or _made.setdefault(known, S3Options.of(given)), root
    except ImportError as error:
        raise MissingDependency(f"cannot open {bare_url(url)}: {error}", hint="pip install s3fs") from error
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(redacted_of(f"cannot open {bare_url(url)}: {error}", url)) from error


def _is_plain(url: str) -> bool:
    """Report whether a URL says no more than bucket and key, and the program uses no s3fs of its own."""
    return (
        url.startswith(tuple(f"{scheme}://" for scheme in _SCHEMES))
        and "::" not in url
        and "?" not in url
        and not _is_loaded()
    )


def _is_loaded() -> bool:
    """Report whether this program has made file systems of S3 itself: those are used then."""
    registry = sys.modules.get("fsspec.registry")
    if registry is None:
        return False
    known = registry.known_implementations
    return any(
        scheme in registry.registry or known.get(scheme, {}).get("class") != "s3fs.S3FileSystem"
        for scheme in _SCHEMES
    )


def _file_system(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    import fsspec

    found: tuple[Any, str] = fsspec.url_to_fs(url, use_listings_cache=False, **options)
    return found
