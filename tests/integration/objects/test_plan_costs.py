"""What `plan` reports about a conversion on S3: requests, bytes, their price, and refusals."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import pytest
from fault_s3 import FaultyS3, Stored, serving
from paths import FIXTURES

from ckptcore.cli.main import run

DCP = FIXTURES / "torch" / "dcp_torchtitan_like_4r" / "ckpt"
SOURCE, OUT = "s3://b/run/step-3", "s3://b/out/model.safetensors"


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyS3]:
    with serving() as made:
        for file in DCP.iterdir():
            data = file.read_bytes()
            made.objects[f"b/run/step-3/{file.name}"] = Stored(data, hashlib.md5(data).hexdigest())
        yield made


def planned(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> dict:
    assert run(["plan", *argv, "--output", "json"]) == code
    return json.loads(capsys.readouterr().out)


def test_requests_bytes_and_price(
    server: FaultyS3, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CKPTCORE_REQUEST_PRICES", "get=1,put=10")
    costs = planned(capsys, SOURCE, OUT)["store_requests"]
    plan_bytes = planned(capsys, SOURCE, OUT)["bytes_out"]
    assert costs["put_bytes"] == plan_bytes
    assert costs["get_bytes"] >= plan_bytes
    priced = costs["get"] + 10 * (costs["put"] + costs["list"])
    assert costs["dollars"] == pytest.approx(priced / 1000)
    server.log.clear()
    assert run(["consolidate", SOURCE, OUT, "--no-catalog"]) == 0
    out = [(m, q) for m, path, q, _, _ in server.log if path == "b/out/model.safetensors"]
    sent = [m for m, q in out if m in ("PUT", "POST")]
    assert len(sent) == costs["put"]
    del server.objects["b/out/model.safetensors"]


def test_one_folder_of_two_on_s3(server: FaultyS3, tmp_path, capsys: pytest.CaptureFixture[str]):
    files = sorted(DCP.glob("*.distcp"))
    for file in (DCP / ".metadata", *files[:2]):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for file in files[2:]:
        server.objects[f"b/node1/{file.name}"] = Stored(file.read_bytes(), file.name)
    costs = planned(capsys, str(tmp_path), "s3://b/node1", OUT)["store_requests"]
    assert 0 < costs["get_bytes"] <= sum(f.stat().st_size for f in files[2:])


def test_refusals(server: FaultyS3, capsys: pytest.CaptureFixture[str]):
    server.objects["b/there/config.json"] = Stored(b"{}", "e")
    refused = planned(capsys, SOURCE, "s3://b/there", "--overwrite", code=7)
    assert "--overwrite-in-place" in refused["error"]["hint"]
    planned(capsys, SOURCE, "s3://b/there", code=7)
    refused = planned(capsys, SOURCE, OUT, "--memory", "1MiB", "--workers", "4", code=15)
    assert "--max-file-size" in refused["error"]["hint"]
