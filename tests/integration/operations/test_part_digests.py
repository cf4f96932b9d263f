"""Test that outputs with digests of their parts are proven by whatever proves outputs: on S3, and as a copy.

Files are uploaded in parts of 64 KiB, so that the catalog has a ``blake3-parts`` digest of each output.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fault_s3
import fsspec
import pytest
import torch
from checkpoints import save
from retiring import delete_now as retire

import ckptcore
from ckptcore.catalog import CheckpointDetail, open_catalog
from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.catalog import Catalog
from ckptcore.checking.export_proof import NOT_DONE, VALUES
from ckptcore.cli.main import run
from ckptcore.errors import CkptError, DestinationExists
from ckptcore.operations.rebuild_catalog import rebuild
from ckptcore.operations.retention.policy import Policy
from ckptcore.operations.retention.replacement import Allowed
from ckptcore.operations.scrub import scrub
from ckptcore.planning.request import Settings

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning"
)  # aiobotocore leaves its session to the exit
PART = 64 << 10
MEANS = Settings(memory=4 << 20, workers=2, fingerprint=True)
SOURCE, OUT = "s3://bucket/runs/llama/step-1", "s3://bucket/models/out"
FILE = "bucket/models/out/model.safetensors"


@pytest.fixture(scope="module")
def running() -> Iterator[fault_s3.FaultyS3]:
    with pytest.MonkeyPatch.context() as patch, fault_s3.serving(min_part=PART) as server:
        patch.setattr("ckptcore.store.objects.part_plan.PART", PART)
        patch.setenv("CKPTCORE_REQUEST_DEADLINE", "4")
        yield server


@dataclass(frozen=True)
class Made:
    """Two equal sources on S3, and an output of one, in a catalog. digest: of its file of seven parts."""

    objects: dict[str, fault_s3.Stored]
    catalog: Path
    result: ckptcore.Result
    digest: str


@pytest.fixture(scope="module")
def once(running: fault_s3.FaultyS3, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("once")
    torch.manual_seed(5)
    source = save(folder / "step-1", 1, **{"layers.0.mlp.weight": torch.randn(330, 330)})
    for step in (1, 2):
        fs, path = fsspec.url_to_fs(f"s3://bucket/runs/llama/step-{step}")
        for file in source.iterdir():
            fs.pipe_file(f"{path}/{file.name}", file.read_bytes())
    catalog = folder / "catalog.sqlite"
    result = ckptcore.convert(SOURCE, OUT, verb="export", settings=MEANS, catalog=str(catalog))
    (receipt,) = result.files
    assert receipt.digest is not None
    assert receipt.digest.startswith(f"blake3-parts-{PART}:")
    return Made(dict(running.objects), catalog, result, receipt.digest)


@pytest.fixture
def made(once: Made, server: fault_s3.FaultyS3, url: str) -> Made:
    """The sources and the output, with a catalog of the test's own."""
    server.objects.update({name: replace(o) for name, o in once.objects.items()})
    shutil.copy(once.catalog, url)
    return once


@pytest.fixture
def server(running: fault_s3.FaultyS3) -> Iterator[fault_s3.FaultyS3]:
    yield running
    running.calm()
    running.objects.clear()
    assert running.uploads == {}


def download(server: fault_s3.FaultyS3, folder: Path) -> Path:
    """Copy the output to a local folder, as any client would."""
    folder.mkdir()
    for name, data in server.below("bucket/models/out/").items():
        (folder / name).write_bytes(data)
    return folder


def flip(server: fault_s3.FaultyS3, at: int) -> None:
    """Change a byte of the output behind the store's back: ETag and checksum stay."""
    data = bytearray(server.objects[FILE].data)
    data[at] ^= 1
    server.objects[FILE].data, server.objects[FILE].crc32 = bytes(data), None


def content(catalog: Catalog, uri: str) -> tuple[str, str | None, list[tuple[str, int, str | None]]]:
    """Return id, content digest and files of what is recorded at a place."""
    found = catalog.at(uri)
    assert found is not None
    return found[0].id, found[0].content_digest, sorted((f.path, f.nbytes, f.digest) for f in found[1])


@pytest.mark.alike(1)
@pytest.mark.parametrize("at", [0, PART, -1], ids=["first", "second", "last"])
def test_scrub_and_validate(
    at: int, made: Made, server: fault_s3.FaultyS3, catalog: Catalog, url: str
) -> None:
    """Equal bytes are proven, and a flipped bit in any part is found."""
    assert scrub(catalog, share=1).counts == {"proven": 2}
    manifest = ckptcore.open(OUT)
    assert _validated(url) == (True, set())
    if at == 0:  # the length of the header: nothing opens
        at = 8 + int.from_bytes(server.objects[FILE].data[:8], "little")
    flip(server, at)
    assert _validated(url) == (False, {"digest-mismatch"})
    found = scrub(catalog, share=1)
    assert found.counts == {"proven": 1, "damaged": 1}
    detail = catalog.show(OUT)
    assert isinstance(detail, CheckpointDetail)
    assert {f.code for f in detail.findings} == {"digest-mismatch"}
    assert manifest.nbytes == ckptcore.open(OUT).nbytes


def _validated(url: str) -> tuple[bool, set[str]]:
    from ckptcore.operations.registered_files import against_catalog

    manifest = ckptcore.open(OUT)
    report = against_catalog(manifest, ckptcore.check(manifest, "bytes"), OUT, url)
    return report.ok, {f.code for f in report.findings}


def test_a_file_is_found_by_its_digest_and_by_a_copy(
    made: Made, server: fault_s3.FaultyS3, catalog: Catalog, url: str, tmp_path: Path
) -> None:
    """Both kinds of digests lead to the file, and a copy leads to the outputs of both kinds."""
    digest = made.digest
    copy = download(server, tmp_path / "copy") / "model.safetensors"
    for what in (digest, digest.upper(), digest[:40], f"s3://{FILE}", str(copy)):
        (origin,) = catalog.which(what)
        assert (origin.checkpoint.uri, origin.file and origin.file.digest) == (OUT, digest)
        assert [row.uri for row in origin.sources] == [SOURCE]
    near = ckptcore.convert(SOURCE, str(tmp_path / "near"), verb="export", settings=MEANS, catalog=url)
    assert near.files[0].digest != digest
    assert {o.checkpoint.uri for o in catalog.which(str(copy))} == {OUT, str(tmp_path / "near")}
    assert run(["catalog", "find", str(copy), "--catalog", url]) == 0
    with copy.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    with pytest.raises(CkptError, match="cannot find"):
        catalog.which(str(copy))


def test_fingerprints_and_differences(made: Made, server: fault_s3.FaultyS3, tmp_path: Path) -> None:
    copy = str(download(server, tmp_path / "copy"))
    for one in (SOURCE, OUT, copy):
        assert ckptcore.fingerprint(ckptcore.open(one), settings=MEANS).fingerprint == made.result.fingerprint
        assert ckptcore.diff(OUT, one, settings=MEANS).equal


def test_a_resumed_upload_has_the_same_digest(made: Made, server: fault_s3.FaultyS3, url: str) -> None:
    second = "s3://bucket/models/second"
    server.fault("PUT", query="partNumber", skip=2, times=999, status=403, code="AccessDenied")
    with pytest.raises(CkptError):
        ckptcore.convert(SOURCE, second, verb="export", settings=MEANS, catalog=url)
    server.calm()
    resumed = ckptcore.convert(SOURCE, second, verb="export", settings=MEANS, catalog=url)
    assert server.count("PUT", "partNumber") < 7
    assert [(f.path, f.digest) for f in resumed.files] == [(f.path, f.digest) for f in made.result.files]
    assert server.uploads == {}


@pytest.mark.parametrize("lost", [False, True], ids=["over-the-catalog", "catalog-lost"])
def test_rebuild_records_the_same_content(lost: bool, made: Made, catalog: Catalog, tmp_path: Path) -> None:
    """The same bytes are the same content: ids, tags and lineage stay."""
    before = content(catalog, OUT)
    assert before[1] is not None
    catalog.tag(OUT, "eval", "1")
    if lost:
        with open_catalog(str(tmp_path / "new.sqlite")) as other:
            rebuild(other, ["s3://bucket/runs"], output_roots=[OUT], digests=True, fingerprint_settings=MEANS)
            assert content(other, OUT)[1:] == before[1:]
            assert scrub(other, share=1).counts == {"proven": 3}
        return
    rebuild(catalog, ["s3://bucket/runs"], output_roots=[OUT], digests=True)
    assert content(catalog, OUT) == before
    detail = catalog.show(OUT)
    assert isinstance(detail, CheckpointDetail)
    assert detail.tags == {"eval": "1"}
    assert len(detail.written_by) == 1


def test_an_export_whose_source_is_gone_is_compared_with_its_record(
    made: Made, server: fault_s3.FaultyS3, url: str
) -> None:
    for name in server.below("bucket/runs/"):
        del server.objects[f"bucket/runs/{name}"]
    for verdict, unchanged in ((NOT_DONE, 1), ("failed", 0)):
        checks = ckptcore.verify_export(OUT, catalog=url, settings=MEANS).checks
        (found,) = [c for c in checks if c.name == VALUES]
        assert (found.verdict, dict(found.values)["files_unchanged"]) == (verdict, unchanged)
        flip(server, -1)


def test_replacing_in_place_accounts_for_files_by_their_digests(
    made: Made, server: fault_s3.FaultyS3, url: str
) -> None:
    """No reader opens the old output any more: the catalog alone knows its files."""
    options: dict[str, Any] = {"verb": "reshard", "mesh": "fsdp=1", "settings": MEANS, "catalog": url}
    other = "s3://bucket/models/two"
    first = ckptcore.convert(SOURCE, other, **options)
    (large,) = (f for f in first.files if (f.digest or "").startswith("blake3-parts"))
    del server.objects["bucket/models/two/.metadata"]
    kept = f"bucket/models/two/{large.path}"
    right = server.objects[kept]
    server.objects[kept] = fault_s3.Stored(right.data[:-1] + b"?", "x")
    options |= {"overwrite": True, "overwrite_in_place": True}
    with pytest.raises(DestinationExists, match=re.escape(large.path)):
        ckptcore.convert(SOURCE, other, **options)
    server.objects[kept] = right
    second = ckptcore.convert(SOURCE, other, **options)
    assert [(f.path, f.digest) for f in second.files] == [(f.path, f.digest) for f in first.files]


@pytest.mark.parametrize("form", ["same", "cast"])
def test_retire_proves_a_source_by_such_an_output(
    form: str, made: Made, server: fault_s3.FaultyS3, catalog: Catalog, url: str
) -> None:
    """An output with a flipped bit proves nothing; the right one does, and a file that it has is not lost."""
    if form == "cast":
        ckptcore.convert(
            SOURCE, OUT, overwrite=True, overwrite_in_place=True, dtype="float16", settings=MEANS, catalog=url
        )
    with catalog.writing() as conn:
        roots.add(conn, datetime.now(UTC), "r", "s3://bucket/runs")
    ckptcore.convert("s3://bucket/runs/llama/step-2", "s3://bucket/models/two", settings=MEANS, catalog=url)
    right = fault_s3.Stored(server.objects[FILE].data, server.objects[FILE].etag)
    # A user copied the output beside its source: by its digest, the copy is not lost.
    server.objects["bucket/runs/llama/step-1/notes/copy.bin"] = right
    allowed = Allowed.of(["cast"])
    flip(server, -1)
    found = retire(catalog, Policy(1), yes=True, allowed=allowed)
    assert found.counts == {"unsafe": 1, "kept": 1}, [i.why for i in found.items]
    server.objects[FILE] = right
    found = retire(catalog, Policy(1), yes=True, allowed=allowed)
    assert found.counts == {"deleted": 1, "kept": 1}, [i.why for i in found.items]
    assert sorted(server.below("bucket/runs/llama/")) == ["step-2/.metadata", "step-2/__0_0.distcp"]
    assert server.objects[FILE].data == right.data
