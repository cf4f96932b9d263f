"""Copy the objects of a bucket as other tools do, each in its own process.

    python object_peers.py stream|get|put BUCKET SOURCE TARGET

- ``stream``: obstore, from bucket to bucket, in parts of 16 MiB, four at a time: the least that moving bytes
  costs. It needs obstore, in an environment of its own.
- ``get``, ``put``: s3fs, between the bucket and a folder.

The endpoint and the credentials are in the environment, as for every client of S3.
"""

from __future__ import annotations

import asyncio
import os
import sys

_PART = 16 << 20


def stream(bucket: str, source: str, target: str) -> None:
    """Copy every object below ``source`` to ``target``."""
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        bucket,
        endpoint=os.environ["AWS_ENDPOINT_URL"],
        region=os.environ["AWS_DEFAULT_REGION"],
        access_key_id=os.environ["AWS_ACCESS_KEY_ID"],
        secret_access_key=os.environ["AWS_SECRET_ACCESS_KEY"],
        virtual_hosted_style_request=False,
        client_options={"allow_http": True, "timeout": "10m"},
    )

    async def copy_all() -> None:  # its blocking calls cannot read one stream while they write another
        for row in obstore.list(store, prefix=source).collect():
            body = (await obstore.get_async(store, row["path"])).stream(min_chunk_size=8 << 20)
            name = row["path"].removeprefix(source).lstrip("/")
            await obstore.put_async(store, f"{target}/{name}", body, chunk_size=_PART, max_concurrency=4)

    asyncio.run(copy_all())
    os._exit(0)  # threads of its runtime may abort an interpreter that ends (pyo3-async-runtimes #40)


def get(bucket: str, source: str, target: str) -> None:
    """Download a folder."""
    import s3fs

    s3fs.S3FileSystem().get(f"{bucket}/{source}", target, recursive=True)


def put(bucket: str, source: str, target: str) -> None:
    """Upload a folder."""
    import s3fs

    s3fs.S3FileSystem().put(source, f"{bucket}/{target}", recursive=True)


if __name__ == "__main__":
    {"stream": stream, "get": get, "put": put}[sys.argv[1]](*sys.argv[2:])
