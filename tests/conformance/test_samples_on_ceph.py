"""Test samples of each family, and a file of real parts, against Ceph: a real S3, not an emulation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import ceph
import fsspec
import pytest
import torch
from s3_samples import FORMS, PART, require_alike
from safetensors.torch import save_file
from samples import SAMPLES

import ckptcore
from ckptcore.conversion import pipeline
from ckptcore.errors import DestinationExists
from ckptcore.planning.request import Settings
from ckptcore.store.objects.client import S3Client

pytestmark = [
    pytest.mark.soak,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # aiobotocore leaves its session to the exit
]
SUBSET = (
    "dcp_nested_2r",
    "dcp_torchtitan_like_4r",
    "hf_sharded_4r",
    "lightning_fabric_mp_nested_2r",
    "legacy_llama_tp2pp2_0.15.3",
    "api_torch_dist_0.19.2",
    "z1_fp32_ws2",
    "v01_dtensor_ws4",
)


@pytest.fixture(scope="module")
def gateway() -> Iterator[None]:
    lacking = ceph.missing()
    if lacking:
        pytest.skip(
            f"Ceph's programs are missing: {', '.join(lacking)} (apt-get install radosgw ceph-mon ceph-osd)"
        )
    with ceph.serving(min_part=PART) as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        for bucket in ("samples", "outputs"):
            fsspec.filesystem("s3").mkdir(bucket)
        yield
        fsspec.get_filesystem_class("s3").clear_instance_cache()


def left() -> tuple[list[str], list[str]]:
    """Return the keys of staging prefixes, and those of open uploads."""
    fs = fsspec.filesystem("s3")
    fs.invalidate_cache()
    found = fs.call_s3("list_multipart_uploads", Bucket="outputs")
    return [n for n in fs.find("outputs") if ".ckptcore" in n], [u["Key"] for u in found.get("Uploads", ())]


@pytest.mark.parametrize("name", SUBSET)
def test_every_way_gives_the_same(
    name: str, gateway: None, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptcore.store.objects.part_plan.PART", PART)
    (sample,) = [s for s in request.config.stash[SAMPLES] if s.name == name]
    assert require_alike(sample, tmp_path, FORMS)
    assert left() == ([], [])


def test_a_file_of_parts_is_resumed_and_never_overwritten(
    gateway: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of 16 MiB: a run goes on in the upload that another one has begun."""
    torch.manual_seed(3)
    source, local = tmp_path / "source", tmp_path / "near"
    source.mkdir()
    save_file({f"w{n}": torch.randn(1 << 20) for n in range(11)}, source / "model.safetensors")
    means = Settings(memory=256 << 20, workers=2, fingerprint=True)
    out = "s3://outputs/large"
    prepared = ckptcore.prepare(str(source), out, verb="export", settings=means)
    first, *_ = pipeline.parts(prepared.plan_uri, 0, 16 << 20, means)
    pipeline.execute_part(prepared.plan_uri, first, means)
    assert len(left()[1]) == 1
    sent, send = [], S3Client.start_part
    monkeypatch.setattr(S3Client, "start_part", lambda *given: sent.append(given[3]) or send(*given))
    made = ckptcore.convert(str(source), out, verb="export", settings=means, catalog=False)
    # Where a store keeps no checksums of parts, as Ceph 16, nothing proves the first one: it is sent again.
    assert sent in ([2, 3], [1, 2, 3])
    near = ckptcore.convert(str(source), str(local), verb="export", settings=means, catalog=False)
    assert made.fingerprint == near.fingerprint
    far = fsspec.filesystem("s3").cat_file("outputs/large/model.safetensors")
    assert far == (local / "model.safetensors").read_bytes()
    assert (made.files[0].digest or "").startswith(f"blake3-parts-{16 << 20}:")
    assert left() == ([], [])
    with pytest.raises(DestinationExists):
        ckptcore.convert(str(source), out, verb="export", settings=means, catalog=False)
