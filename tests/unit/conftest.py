"""Remote stores for tests: one in this process's memory, and an S3 server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import fsspec
import pytest
from paths import FIXTURES

from ckptcore.store import open_store

SAMPLE = FIXTURES / "torch" / "dcp_torchtitan_like_4r" / "ckpt"


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A bucket of an S3 server in this process."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(
        ip_address="127.0.0.1", port=0, verbose=False
    )
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        # One that another test made asks another server, or with other credentials.
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        with contextlib.suppress(FileExistsError):  # all servers of a process share what they hold
            fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket"
        fsspec.filesystem("s3").clear_instance_cache()
        server.stop()


@pytest.fixture(params=["memory", "s3"])
def root(request: pytest.FixtureRequest) -> Iterator[str]:
    """An empty place on a remote store, with the sample below ``source/step-3``."""
    url = f"{request.getfixturevalue('s3')}/{request.node.name}" if request.param == "s3" else "memory://test"
    fs, path = fsspec.url_to_fs(url)
    for file in SAMPLE.iterdir():
        fs.pipe_file(f"{path}/source/step-3/{file.name}", file.read_bytes())
    yield url
    open_store(url).remove_all()
