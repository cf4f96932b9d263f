"""Share one client among all stores of a bucket.

A module of its own, imported where the client is needed: botocore takes long to import.
"""

from __future__ import annotations

import threading

from ckptcore.store.objects.client import S3Client
from ckptcore.store.objects.s3_options import open_file_system

_clients: dict[tuple[int, str], S3Client] = {}
_lock = threading.Lock()


def key_of(url: str) -> str:
    """Return the key of a URL, without slashes at its ends; its bucket is that of the client."""
    root = open_file_system(url, {})[1]
    return root.strip("/").partition("/")[2]


def client_of(url: str) -> S3Client:
    """Return the client of a URL's bucket; stores of one file system share it."""
    client = S3Client(url)
    with _lock:
        return _clients.setdefault((id(client.file_system), client.bucket), client)
