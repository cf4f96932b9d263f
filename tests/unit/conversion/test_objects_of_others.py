"""Test that publishing keeps what another program writes between a look at a key and the next request."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import fault_s3
import numpy as np
import pytest
from safetensors.numpy import save_file

import ckptcore
from ckptcore.errors import DestinationExists

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # aiobotocore leaves its session
OUT = "bucket/models/out/"
INDEX, SHARD = "model.safetensors.index.json", "model-00001-of-00002.safetensors"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[fault_s3.FaultyS3]:
    monkeypatch.setenv("CKPTCORE_REQUEST_DEADLINE", "4")
    with fault_s3.serving() as running:
        yield running


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("source")
    tensors = {f"layers.{n}.weight": np.full((60, 100), n, np.float32) for n in range(3)}
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def convert(source: str, destination: str = "s3://bucket/models/out", **given: object) -> ckptcore.Result:
    options: dict[str, object] = {"verb": "export", "max_file_size": 50_000, "catalog": False}
    return ckptcore.convert(source, destination, **{**options, **given})  # type: ignore[arg-type]


def writing(server: fault_s3.FaultyS3, path: str) -> Callable[[], object]:
    """Return what another program does right before a request is carried out."""
    return lambda: server.put(path, b"precious")


@pytest.mark.parametrize("name", ["README.md", INDEX, SHARD])
def test_an_object_that_appears(server: fault_s3.FaultyS3, source: str, name: str) -> None:
    method = "POST" if name == SHARD else "PUT"
    query = "uploadId" if name == SHARD else ""
    server.fault(method, path=f"out/{name}$", query=query, action="", call=writing(server, OUT + name))
    for _ in range(2):
        with pytest.raises(DestinationExists, match=f"{name} (was written|appeared) meanwhile"):
            convert(source)
        assert server.objects[OUT + name].data == b"precious"
    del server.objects[OUT + name]
    convert(source)
    assert set(server.below(OUT)) == {"README.md", INDEX, SHARD, SHARD.replace("00001", "00002", 1)}
    assert server.uploads == {}


@pytest.mark.parametrize(
    ("method", "query", "name"),
    [("PUT", "", "README.md"), ("POST", "uploadId", SHARD), ("DELETE", "", INDEX)],
)
def test_an_old_object_that_is_written_meanwhile(
    server: fault_s3.FaultyS3, source: str, method: str, query: str, name: str
) -> None:
    convert(source)
    server.put(OUT + "README.md", b"older")  # else the new one is its equal, and not written
    call = writing(server, OUT + name)
    server.fault(method, path=f"out/{name}$", query=query, action="", call=call)
    given = {"overwrite_foreign": True, "overwrite_in_place": True, "max_file_size": 50_001}
    with pytest.raises(DestinationExists, match=f"{name} (was written|appeared) meanwhile"):
        convert(source, **given)
    assert server.objects[OUT + name].data == b"precious"
    del server.objects[OUT + name]
    convert(source, **given)
    assert ckptcore.check(ckptcore.open("s3://bucket/models/out"), "bytes").ok


def test_one_file_that_is_replaced_meanwhile(server: fault_s3.FaultyS3, source: str) -> None:
    convert(source, "s3://bucket/model.pt", verb="consolidate")
    call = writing(server, "bucket/model.pt")
    server.fault("POST", path="model.pt$", query="uploadId", action="", call=call)
    with pytest.raises(DestinationExists, match="meanwhile"):
        convert(source, "s3://bucket/model.pt", verb="consolidate", overwrite=True)
    assert server.objects["bucket/model.pt"].data == b"precious"


@pytest.mark.parametrize("name", ["README.md", INDEX])
def test_a_lost_reply_is_no_other_program(server: fault_s3.FaultyS3, source: str, name: str) -> None:
    server.fault("PUT", path=f"out/{name}$", action="lost", times=2)
    convert(source)
    assert name in server.below(OUT)


@pytest.mark.parametrize("habits", [{}, {"creates": "put"}])
def test_an_old_object_that_is_removed_meanwhile(source: str, habits: dict[str, object]) -> None:
    """Then the name is free, and the new one is created."""
    with fault_s3.serving(**habits) as server:
        convert(source)
        server.put(OUT + "README.md", b"older")
        for method, query, name in (("PUT", "", "README.md"), ("POST", "uploadId", SHARD)):
            path = OUT + name
            server.fault(
                method,
                path=f"out/{name}$",
                query=query,
                action="",
                call=lambda path=path: server.objects.pop(path, None),
            )
        convert(source, overwrite_foreign=True, overwrite_in_place=True, max_file_size=50_001)
        assert ckptcore.check(ckptcore.open("s3://bucket/models/out"), "bytes").ok
