"""Retired sources on object stores stay until they are purged, hidden where the bucket keeps versions."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import fsspec
import pytest
from paths import FIXTURES

from ckptcore.catalog import open_catalog
from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.catalog import Catalog
from ckptcore.conversion.pipeline import convert, inspect
from ckptcore.conversion.registration import facts
from ckptcore.errors import SourceChanged
from ckptcore.operations.retention.policy import Policy
from ckptcore.operations.retention.purge import purge, restore
from ckptcore.operations.retention.retire import retire
from ckptcore.planning.request import Request, Settings
from ckptcore.store.objects.shared_clients import client_of
from ckptcore.store.objects.versions import object_versions

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
SAMPLE = FIXTURES / "torch" / "dcp_torchtitan_like_4r" / "ckpt"
MEANS = Settings(memory=32 << 20, workers=1, fingerprint=True)


class Bucket:
    """A watched run of two steps in a bucket, the first of which is proven elsewhere."""

    def __init__(self, catalog: Catalog, url: str, root: str, tmp: Path, versions: bool) -> None:
        self.catalog, self.root = catalog, root
        self.fs, self.path = fsspec.url_to_fs(root)
        self.client = client_of(f"{root}/x")
        status = "Enabled" if versions else "Suspended"
        self.client.ask("put_bucket_versioning", "", VersioningConfiguration={"Status": status})
        self.old, self.child = f"{root}/runs/step-3", tmp / "child"
        for step in (3, 4):
            self.save(step)
        with catalog.writing() as conn:
            roots.add(conn, datetime.now(UTC), "r", f"{root}/runs")
        convert(Request(self.old, str(self.child)), MEANS, None, url)
        new = f"{root}/runs/step-4"
        catalog.record_validation(facts(inspect(new), new), ())

    def save(self, step: int) -> None:
        for file in SAMPLE.iterdir():
            self.fs.pipe_file(f"{self.path}/runs/step-{step}/{file.name}", file.read_bytes())

    def names(self) -> list[str]:
        self.fs.invalidate_cache()
        return sorted(name.rpartition("/")[2] for name in self.fs.find(f"{self.path}/runs/step-3"))

    def versions(self) -> list[Any]:
        return list(object_versions(self.client, f"{self.path.partition('/')[2]}/runs/step-3/"))

    def state(self) -> str:
        row: Any = self.catalog.show(self.old)
        return str(row.checkpoint.state)

    def retire(self) -> None:
        (item,) = (i for i in retire(self.catalog, Policy(1), "r", yes=True).items if i.source.step == 3)
        assert item.fate.value == "retired", item.why

    def purge(self) -> list[str]:
        due = datetime.now(UTC) + timedelta(days=8)
        return [each.fate for each in purge(self.catalog, MEANS, None, due=due)]


@pytest.fixture(params=[True, False], ids=["versions", "no versions"])
def bucket(request: pytest.FixtureRequest, s3: str, tmp_path: Path) -> Iterator[Bucket]:
    url = str(tmp_path / "catalog.sqlite")
    root = f"{s3}/{request.node.name.replace('[', '-').replace(']', '').replace(' ', '-')}"
    with open_catalog(url) as catalog:
        yield Bucket(catalog, url, root, tmp_path, request.param)


@pytest.mark.alike(1)
def test_a_retired_source_is_purged_later(bucket: Bucket, request: pytest.FixtureRequest) -> None:
    names = bucket.names()
    bucket.retire()
    hides = "no versions" not in request.node.name
    assert bucket.names() == ([] if hides else names)
    assert bucket.state() == "retired"
    assert [each.fate for each in retire(bucket.catalog, Policy(1), "r", purging=True).set_aside] == [
        "waiting"
    ]
    assert bucket.purge() == ["purged"]
    assert (bucket.names(), bucket.state()) == ([], "deleted")
    assert hides <= (bucket.versions() == [])
    assert bucket.purge() == []


@pytest.mark.alike(1)
def test_a_retired_source_is_restored(bucket: Bucket) -> None:
    names, digest = bucket.names(), inspect(bucket.old).digest
    bucket.retire()
    assert restore(bucket.catalog, bucket.old) == bucket.old
    assert (bucket.names(), bucket.state(), inspect(bucket.old).digest) == (names, "present", digest)
    bucket.retire()
    assert bucket.purge() == ["purged"]


@pytest.mark.alike(1)
def test_a_step_that_the_trainer_saves_anew_is_kept(bucket: Bucket) -> None:
    bucket.retire()
    name = bucket.fs.find(f"{bucket.path}/runs")[0]
    bucket.fs.pipe_file(f"{bucket.path}/runs/step-3/.metadata", b"saved again")
    with pytest.raises(SourceChanged):
        restore(bucket.catalog, bucket.old)
    assert bucket.purge() == ["kept"]
    assert ".metadata" in bucket.names(), name
    assert bucket.fs.cat_file(f"{bucket.path}/runs/step-3/.metadata") == b"saved again"
