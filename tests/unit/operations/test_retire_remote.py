"""Test that retire on object stores, killed midway, is resumed with the recorded names and no others."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fsspec
import pytest
from paths import FIXTURES
from retiring import delete_now as retire

from ckptcore.catalog import open_catalog
from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.catalog import Catalog
from ckptcore.conversion.pipeline import convert, inspect
from ckptcore.conversion.registration import facts
from ckptcore.operations.retention.policy import Policy
from ckptcore.operations.retention.replacement import Allowed
from ckptcore.planning.request import Request, Settings
from ckptcore.store.remote import FsspecStore
from ckptcore.store.s3 import S3Store

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning"
)  # aiobotocore leaves its session to the exit
SAMPLE = FIXTURES / "torch" / "dcp_torchtitan_like_4r" / "ckpt"
# Against a server in the long tier.
many = pytest.mark.parametrize("root", ["memory", pytest.param("s3", marks=pytest.mark.soak)], indirect=True)
MEANS = Settings(memory=32 << 20, workers=1, fingerprint=True)


class Killed(BaseException):
    """A simulated kill: nothing may handle it."""


class World:
    """A watched root of two steps on a store, the first of which is proven elsewhere."""

    def __init__(self, catalog: Catalog, url: str, root: str, tmp: Path, **options: Any) -> None:
        self.catalog, self.root = catalog, root
        self.fs, self.path = fsspec.url_to_fs(root)
        self.old, self.new, self.child = f"{root}/runs/step-3", f"{root}/runs/step-4", tmp / "child"
        for step in (3, 4):
            for file in SAMPLE.iterdir():
                self.fs.pipe_file(f"{self.path}/runs/step-{step}/{file.name}", file.read_bytes())
        with catalog.writing() as conn:
            roots.add(conn, datetime.now(UTC), "r", f"{root}/runs")
        convert(Request(self.old, str(self.child), **options), MEANS, None, url)
        catalog.record_validation(facts(inspect(self.new), self.new), ())

    def there(self) -> dict[str, bytes]:
        """Every object below the root by its name."""
        self.fs.invalidate_cache()
        found = self.fs.find(f"{self.path}/runs")
        return {name.partition("/runs/")[2]: self.fs.cat_file(name) for name in found}

    def kill(self, stop: int, allowed: Allowed | None = None) -> bool:
        """Retire, and die right before the n-th object is removed; return whether it died."""
        kind = S3Store if self.root.startswith("s3://") else FsspecStore
        remove, calls = kind.remove, []

        def dying(store: Any, path: str) -> None:
            calls.append(path)
            if len(calls) == stop + 1:
                raise Killed
            remove(store, path)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind, "remove", dying)
            try:
                retire(self.catalog, Policy(1), "r", yes=True, allowed=allowed)
            except Killed:
                return True
        return False

    def resume(self) -> tuple[str, ...]:
        """Return the messages of a later run that deletes nothing else."""
        return retire(self.catalog, Policy(9), "r", yes=True, purging=True, verify_settings=MEANS).left

    def state(self) -> str:
        row: Any = self.catalog.show(self.old)
        return str(row.checkpoint.state)


@pytest.fixture
def world(root: str, tmp_path: Path) -> Iterator[World]:
    url = str(tmp_path / "catalog.sqlite")
    with open_catalog(url) as catalog:
        yield World(catalog, url, root, tmp_path)


def of(step: int, there: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in there.items() if name.startswith(f"step-{step}/")}


@pytest.mark.alike(1)
@pytest.mark.parametrize("stop", [0, 3, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 5))])
def test_a_killed_deletion_is_resumed(stop: int, world: World) -> None:
    before = world.there()
    assert world.kill(stop)
    assert of(4, world.there()) == of(4, before)
    assert world.resume() == ()
    assert world.there() == of(4, before)
    assert world.state() == "deleted"
    assert world.resume() == ()


@pytest.mark.alike(1)
def test_a_killed_deletion_is_resumed_with_the_proof_of_its_model_part(root: str, tmp_path: Path) -> None:
    url = str(tmp_path / "catalog.sqlite")
    with open_catalog(url) as catalog:
        world = World(catalog, url, root, tmp_path, verb="export", names="stored")
        before = world.there()
        assert not world.kill(0)
        assert world.there() == before
        assert world.kill(2, Allowed.of(["optimizer"]))
        (name,) = (n for n in world.there() if n.endswith("record.json"))
        rest, data = world.there(), world.there()[name]
        forged = json.dumps(json.loads(data) | {"child": "0" * 32}).encode()
        world.fs.pipe_file(f"{world.path}/runs/{name}", forged)
        assert len(world.resume()) == 1
        assert world.there() == rest | {name: forged}
        world.fs.pipe_file(f"{world.path}/runs/{name}", data)
        assert world.resume() == ()
        assert world.there() == of(4, before)
        assert world.state() == "deleted"


@pytest.mark.alike(1)
def test_changed_and_new_objects_are_kept_and_listed(world: World) -> None:
    before = world.there()
    assert world.kill(2)
    rest = sorted(of(3, world.there()))
    world.fs.pipe_file(f"{world.path}/runs/{rest[0]}", b"saved again")
    time.sleep(1.1)  # S3 counts in seconds
    world.fs.pipe_file(f"{world.path}/runs/{rest[1]}", before[rest[1]])
    world.fs.pipe_file(f"{world.path}/runs/step-3/precious", b"mine")
    left = world.resume()
    assert len(left) == 1
    assert rest[0].partition("/")[2] in left[0]
    assert "precious" in left[0]
    assert world.there() == {
        **of(4, before),
        rest[0]: b"saved again",
        rest[1]: before[rest[1]],
        "step-3/precious": b"mine",
    }
    assert world.resume() == ()


@many
def test_nothing_is_deleted_without_proof_by_the_child(world: World) -> None:
    assert world.kill(2)
    before, file = world.there(), next(iter(world.child.glob("*.safetensors")))
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    for _ in range(2):
        assert len(world.resume()) == 1
        assert world.there() == before
    file.write_bytes(data)
    assert world.resume() == ()
    assert not of(3, world.there())


@pytest.mark.alike(3)
@many
@pytest.mark.parametrize(
    "forged", ["another's place", "another's name", "no record", "too deep", "unknown", "another child"]
)
def test_an_invalid_record_removes_nothing(forged: str, world: World) -> None:
    assert world.kill(2)
    name = next(n for n in world.there() if n.endswith("record.json"))
    data = world.there()[name]
    form = json.loads(data)
    if forged == "another's place":
        form["uri"] = world.new
    elif forged == "another's name":
        world.fs.pipe_file(f"{world.path}/runs/{name.replace('.step-3.', '.step-4.')}", data)
        world.fs.rm_file(f"{world.path}/runs/{name}")
    elif forged == "another child":
        form["child"] = world.catalog.show(world.new).checkpoint.id
    elif forged == "unknown":
        form["checkpoint"] = "00000000-0000-0000-0000-000000000000"
    text = {"no record": b"{}", "too deep": b"[" * 100_000}.get(forged, json.dumps(form).encode())
    if forged != "another's name":
        world.fs.pipe_file(f"{world.path}/runs/{name}", text)
    before = world.there()
    assert len(world.resume()) == 1
    assert world.there() == before


@many
def test_a_source_that_was_not_deleted_loses_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between the record and the commit."""
    before = world.there()

    def dying(self: FsspecStore, path: str, data: bytes) -> None:
        put(self, path, data)
        if path.endswith("record.json"):
            raise Killed

    put = FsspecStore.put
    with monkeypatch.context() as patch:
        patch.setattr(FsspecStore, "put", dying)
        with pytest.raises(Killed):
            retire(world.catalog, Policy(1), "r", yes=True)
    assert world.state() == "present"
    assert world.resume() == ()
    assert world.there() == before
    assert not world.kill(99)
    assert world.there() == of(4, before)
