"""Test that Dask workers write parts of one file on an object store at the same time."""

from __future__ import annotations

from pathlib import Path

import fault_s3
import pytest
import torch
from safetensors.torch import load, save_file

import ckptcore
from ckptcore.conversion import pipeline
from ckptcore.planning.request import Settings

MEANS = Settings(memory=256 << 20, workers=1, fingerprint=True)


@pytest.mark.soak  # a cluster takes 15 s; flows on Dask write such parts to local files by default
@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # aiobotocore leaves its session to the exit
def test_two_workers_write_parts_of_one_file(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    tensors = {f"w{n}": torch.randn(1000, 1000) for n in range(13)}
    source = tmp_path / "source"
    source.mkdir()
    save_file(tensors, source / "model.safetensors")
    with (
        fault_s3.serving() as server,
        distributed.LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=True,
            host="127.0.0.1",
            dashboard_address=":0",
            local_directory=str(tmp_path / "dask"),
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        prepared = ckptcore.prepare(str(source), "s3://bucket/out", verb="export", settings=MEANS)
        cut = pipeline.parts(prepared.plan_uri, 0, 16 << 20, MEANS)
        assert len(cut) == 4
        workers = sorted(client.scheduler_info()["workers"])
        writing = [
            client.submit(pipeline.execute_part, prepared.plan_uri, part, MEANS, workers=workers[n % 2])
            for n, part in enumerate(reversed(cut))
        ]
        receipts = client.gather(writing)
        assert {r.uploaded.upload_id for r in receipts} == set(server.uploads)
        assert len(server.uploads) == 1
        joined = pipeline.join(prepared.plan_uri, 0)
        result = pipeline.finish(prepared.plan_uri, MEANS)
        assert result.files == (joined,)
        pipeline.remove_staging(prepared.plan_uri)
        found = server.below("bucket/out/")
        assert sorted(server.below("bucket/")) == ["out/README.md", "out/model.safetensors"]
        assert server.uploads == {}
        near = ckptcore.convert(str(source), str(tmp_path / "near"), verb="export", settings=MEANS)
    assert result.fingerprint == near.fingerprint
    assert found["model.safetensors"] == (tmp_path / "near" / "model.safetensors").read_bytes()
    data = load(found["model.safetensors"])
    assert all(torch.equal(data[name], tensors[name]) for name in tensors)
