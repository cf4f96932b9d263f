"""Read the options of S3 as s3fs does, without importing it: with asyncio and aiohttp it takes 0.3 s.

Most commands need no more of s3fs than its conventions. Options of its constructor that are not known here,
and what another implementation of ``s3`` takes, are read by that file system itself.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptcore.errors import MissingDependency, UsageError
from ckptcore.redaction import bare_url, redacted_of
from ckptcore.store.options import configured

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
    def of(cls, options: Mapping[str, Any]) -> S3Options:
        """Read options as the constructor of `S3FileSystem` does; two of one meaning are a `KeyError`."""
        for option, alias in (("key", "username"), ("secret", "password")):
            if options.get(option) and options.get(alias):
                raise KeyError(f"Supply either {option} or {alias}, not both")
        return cls(
            options,
            options.get("anon", False),
            options.get("endpoint_url"),
            options.get("username") or options.get("key"),
            options.get("password") or options.get("secret"),
            options.get("token"),
            options.get("use_ssl", True),
            options.get("client_kwargs") or {},
            options.get("config_kwargs") or {},
            options.get("s3_additional_kwargs") or {},
            {"RequestPayer": "requester"} if options.get("requester_pays") else {},
            {name: options[name] for name in ("profile",) if name in options},
        )


_options: dict[str, S3Options] = {}
_lock = threading.Lock()


def open_file_system(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the options of a URL's file system, or s3fs's file system itself, and the path in it.

    Nothing is sent. Equal options have the same object.

    Raises:
        MissingDependency: s3fs is needed, and is not installed.
        UsageError: The URL or an option is wrong.
    """
    all_options = {name: value for scheme in _SCHEMES for name, value in configured(scheme).items()}
    all_options |= options
    try:
        if not _is_plain(url) or not all_options.keys() <= _KNOWN:
            return _file_system(url, options)
        root = url.partition("://")[2].rstrip("/")
        with _lock:
            cache_key = repr(sorted(all_options.items()))
            return _options.get(cache_key) or _options.setdefault(cache_key, S3Options.of(all_options)), root
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
    implementations = registry.known_implementations
    return any(
        scheme in registry.registry or implementations.get(scheme, {}).get("class") != "s3fs.S3FileSystem"
        for scheme in _SCHEMES
    )


def _file_system(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    import fsspec

    fs_and_path: tuple[Any, str] = fsspec.url_to_fs(url, use_listings_cache=False, **options)
    return fs_and_path
