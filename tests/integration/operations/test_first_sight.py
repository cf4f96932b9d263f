"""Test that the files of a source are digested when it is first read, and compared from then on."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save
from fault_s3 import Stored, serving
from retiring import Template, World
from safetensors.torch import save_file
from samples import SAMPLES

from ckptcore.__main__ import main
from ckptcore.catalog import CheckpointDetail, open_catalog
from ckptcore.catalog.catalog import Catalog
from ckptcore.catalog.types import Kind, State
from ckptcore.checking.examine import inspect, validate
from ckptcore.checking.source_stamps import settled_ctimes
from ckptcore.conversion import pipeline
from ckptcore.conversion.pipeline import convert
from ckptcore.errors import CkptError, DamagedCheckpoint
from ckptcore.operations.scrub import scrub
from ckptcore.operations.verify import Proof, prove
from ckptcore.planning.request import Request, Settings
from ckptcore.reading.file_digests import file_digests
from ckptcore.store import open_source_store
from ckptcore.store.local import LocalStore
from ckptcore.utils.part_digest import hasher_like

MEANS = Settings(memory=32 << 20)


Copied = Callable[[str, Path], Path]


@pytest.fixture
def copied(request: pytest.FixtureRequest) -> Copied:
    """Return a function that copies a sample's checkpoint."""

    def copy(name: str, to: Path) -> Path:
        root = next(each.root for each in request.config.stash[SAMPLES] if each.name == name)
        shutil.copytree(root / "ckpt", to)
        return to

    return copy


def converted(source: Path | str, url: str, out: Path, **settings: Any) -> CheckpointDetail:
    """Convert a source, and return it as the catalog has it."""
    convert(Request(str(source), str(out)), Settings(memory=32 << 20, **settings), None, url)
    return known(url, source)


def known(url: str, place: Path | str) -> CheckpointDetail:
    with open_catalog(url) as catalog:
        found = catalog.show(str(place))
    assert isinstance(found, CheckpointDetail)
    return found


def scrubbed(catalog: Catalog, place: Path | str) -> Proof:
    found = scrub(catalog, 1.0)
    return next(each.proven.proof for each in found.looked if each.checkpoint.uri == str(place))


@contextmanager
def altered(path: Path, at: int) -> Iterator[None]:
    """Flip a bit of a file as a disk does: its times stay."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << at % 8)]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    yield
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([byte]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def unseen(path: Path) -> int:
    """The first byte of a file that can change without any checksum noticing."""
    for at in range(path.stat().st_size):
        with altered(path, at), suppress(CkptError):
            if validate(inspect(str(path.parent)), "bytes").ok:
                return at
    raise AssertionError(f"every byte of {path} has a checksum")


def exchange(one: Path, other: Path) -> None:
    assert one.stat().st_size == other.stat().st_size
    assert one.read_bytes() != other.read_bytes()
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


def crc(path: Path) -> str:
    hasher = hasher_like("crc64nvme:")
    hasher.update(path.read_bytes())
    return hasher.hexdigest()


@pytest.mark.parametrize(
    ("level", "every"), [("convert", 1), ("validate", 3), pytest.param("validate", 1, marks=pytest.mark.soak)]
)
def test_every_file_of_every_format_is_digested(
    level: str, every: int, copied: Copied, tmp_path: Path, url: str
) -> None:
    """Samples of all families: the digests are those of the complete files."""
    names = (
        "dcp_dims_4r",
        "dcp_zstd_2r",
        "dcp_safetensors_fmt_2r",
        "legacy_llama_tp2pp2_0.15.3",
        "v01_dtensor_ws4",
        "verl_fsdp2_4r",
        "hf_bugs_0d_4r",
        "lightning_fabric_mp_nested_2r",
        "api_zarr_0.12.3",
        "z1_fp32_ws2",
    )
    for name in names[::every]:
        source = copied(name, tmp_path / name)
        if level == "convert":
            detail = converted(source, url, tmp_path / "out" / name)
        else:
            assert main(["validate", str(source), "--level", "bytes", "--catalog", url]) == 0
            detail = known(url, source)
        root = Path(inspect(str(source)).root)
        wrong = {f.path for f in detail.files if f.digest != crc(root / f.path)}
        assert detail.files, name
        assert not wrong, (name, wrong)
        assert prove(detail).proof in (Proof.PROVEN, Proof.UNPROVEN), name


@pytest.mark.parametrize("count", [40, pytest.param(None, marks=pytest.mark.soak)])
def test_a_flip_at_any_offset_is_found(count: int | None, copied: Copied, tmp_path: Path, url: str) -> None:
    source = copied("dcp_multishard_2r", tmp_path / "step-1")
    detail = converted(source, url, tmp_path / "out")
    assert prove(detail).proof is Proof.PROVEN
    files = sorted(source.glob("*.distcp"))
    offsets = [(path, at) for path in files for at in range(path.stat().st_size)]
    if count is not None:
        offsets = random.Random(36).sample(offsets, count)
    missed = []
    for path, at in offsets:
        with altered(path, at):
            proven = prove(detail)
        codes = {f.code for f in proven.findings if f.file == path.name}
        if proven.proof is not Proof.DAMAGED or "digest-mismatch" not in codes:
            missed.append((path.name, at, proven.proof))
    assert not missed
    assert prove(detail).proof is Proof.PROVEN


EXCHANGED = {
    "legacy_llama_tp2pp2_0.15.3": ("mp_rank_00_000/model_optim_rng.pt", "mp_rank_01_000/model_optim_rng.pt"),
    "api_zarr_0.12.3": (
        "decoder.layers.mlp.linear_fc1.weight/0.0.0",
        "decoder.layers.mlp.linear_fc1.weight/1.0.0",
    ),
    # Ranks of two expert groups.
    "legacy_mixtral_ep2pp2_0.15.3": (
        "mp_rank_00_000_000/model_optim_rng.pt",
        "mp_rank_00_000_001/model_optim_rng.pt",
    ),
}


@pytest.mark.alike(1)
@pytest.mark.parametrize("name", EXCHANGED)
def test_exchanged_files_of_one_size_are_found(
    name: str, copied: Copied, tmp_path: Path, url: str, catalog: Catalog
) -> None:
    source = copied(name, tmp_path / "step-1")
    converted(source, url, tmp_path / "out")
    root = Path(inspect(str(source)).root)
    exchange(*(root / path for path in EXCHANGED[name]))
    assert validate(inspect(str(source)), "bytes").ok  # nothing in the format tells
    assert scrubbed(catalog, source) is Proof.DAMAGED
    with pytest.raises(DamagedCheckpoint, match="is not what the catalog recorded") as caught:
        convert(Request(str(source), str(tmp_path / "again")), MEANS, None, url)
    assert {f.code for f in caught.value.values["findings"]} == {"digest-mismatch"}
    assert not (tmp_path / "again").exists()
    assert scrubbed(catalog, source) is Proof.DAMAGED
    exchange(*(root / path for path in EXCHANGED[name]))
    assert scrubbed(catalog, source) in (Proof.PROVEN, Proof.UNPROVEN)


def test_without_digests_the_tensors_are_proven_and_the_next_scrub_proves_all(
    tmp_path: Path, url: str, catalog: Catalog
) -> None:
    source = save(tmp_path / "step-1", 1)
    assert main(["validate", str(source), "--catalog", url]) == 0
    assert all(f.digest is None for f in known(url, source).files)
    assert scrubbed(catalog, source) is Proof.TENSORS
    assert all(f.digest for f in known(url, source).files)
    assert scrubbed(catalog, source) is Proof.PROVEN


def test_what_was_not_verified_is_no_first_sight(tmp_path: Path, url: str) -> None:
    detail = converted(save(tmp_path / "step-1", 1), url, tmp_path / "out", verify=False)
    assert all(f.digest is None for f in detail.files)


def test_a_file_that_is_read_in_part_has_no_digest(tmp_path: Path, url: str) -> None:
    large = {"optimizer.state": torch.zeros(1 << 16)}
    source = save(tmp_path / "step-1", 1, **large)
    convert(Request(str(source), str(tmp_path / "out"), exclude=("optimizer.*",)), MEANS, None, url)
    digests = {f.path: f.digest for f in known(url, source).files}
    assert digests["__0_0.distcp"] is None
    assert digests[".metadata"] is not None
    assert prove(known(url, source)).proof is Proof.TENSORS
    converted(source, url, tmp_path / "all")  # adds what was not known
    assert all(f.digest for f in known(url, source).files)
    assert prove(known(url, source)).proof is Proof.PROVEN


def test_the_first_digest_stays(copied: Copied, tmp_path: Path, url: str, catalog: Catalog) -> None:
    source = copied("dcp_multishard_2r", tmp_path / "step-1")
    first = converted(source, url, tmp_path / "out")
    path = next(iter(sorted(source.glob("*.distcp"))))
    with altered(path, unseen(path)):
        for _ in range(2):
            assert main(["validate", str(source), "--level", "bytes", "--catalog", url]) == 1
            assert known(url, source).files == first.files
        assert scrubbed(catalog, source) is Proof.DAMAGED
    now = known(url, source)
    assert now.files == first.files
    assert now.checkpoint.id == first.checkpoint.id
    assert {f.code for f in now.findings} >= {"digest-mismatch"}
    assert scrubbed(catalog, source) is Proof.PROVEN
    assert known(url, source).checkpoint.state == State.PRESENT


@pytest.mark.grid
@pytest.mark.parametrize("form", ["dcp", "safetensors"])
@pytest.mark.parametrize("way", ["scrub", "convert", "validate"])
def test_a_step_that_was_resaved_is_another_checkpoint(
    way: str, form: str, tmp_path: Path, url: str, catalog: Catalog
) -> None:
    def write(value: int) -> None:
        if form == "dcp":
            shutil.rmtree(source, ignore_errors=True)
            save(source, value)
        else:
            source.mkdir(exist_ok=True)
            save_file({"w": torch.full((64,), value)}, source / "model.safetensors")

    source = tmp_path / "step-1"
    write(1)
    first = converted(source, url, tmp_path / "out")
    write(2)
    for path in source.iterdir():
        os.utime(path, (first.checkpoint.created_at.timestamp() + 5,) * 2)
    same = inspect(str(source)).digest.endswith(first.checkpoint.manifest_digest)
    assert same == (form == "safetensors")  # each save of DCP has an id of its own
    if way == "scrub":
        assert scrubbed(catalog, source) is Proof.CHANGED
    elif way == "convert":
        converted(source, url, tmp_path / "again")
    else:
        assert main(["validate", str(source), "--level", "bytes", "--catalog", url]) == 0
    now = known(url, source)
    assert now.checkpoint.id != first.checkpoint.id
    assert known(url, first.checkpoint.id).checkpoint.state == State.REPLACED
    if (way, form) == ("scrub", "dcp"):  # of another manifest, only that was read
        assert scrubbed(catalog, source) is Proof.TENSORS
    assert scrubbed(catalog, source) is Proof.PROVEN
    assert all(f.digest for f in known(url, source).files)


def test_an_output_that_is_converted_keeps_the_digests_of_its_writer(tmp_path: Path, url: str) -> None:
    source, middle = save(tmp_path / "step-1", 1), tmp_path / "middle"
    convert(Request(str(source), str(middle), to="dcp"), MEANS, None, url)
    before = known(url, middle)
    after = converted(middle, url, tmp_path / "out")
    assert before.checkpoint.id == after.checkpoint.id
    assert (after.files, after.checkpoint.kind) == (before.files, Kind.DERIVED)
    assert not any((f.digest or "").startswith("crc64nvme:") for f in after.files)
    assert prove(after).proof is Proof.PROVEN


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, below: Path) -> Iterator[Counter[str]]:
    """Count the reads of local files below a folder, and their bytes."""
    found: Counter[str] = Counter()
    read, read_into = LocalStore.read, LocalStore.read_into

    def reads(store: LocalStore, path: str, start: int, length: int) -> bytes:
        if str(store.local).startswith(str(below)):
            found.update(requests=1, bytes=length)
        return read(store, path, start, length)

    def reads_into(store: LocalStore, path: str, start: int, into: memoryview) -> None:
        if str(store.local).startswith(str(below)):
            found.update(requests=1, bytes=len(into))
        read_into(store, path, start, into)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "read", reads)
        patch.setattr(LocalStore, "read_into", reads_into)
        yield found


@pytest.mark.parametrize("name", ["dcp_dims_4r", "legacy_llama_tp2pp2_0.15.3", "hf_sharded_4r"])
def test_nothing_is_read_for_the_digests_but_small_holes(
    name: str, copied: Copied, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = copied(name, tmp_path / "step-1")
    with closing(open_source_store(str(source))) as store:  # a file of this moment is read once more
        settled_ctimes([path.relative_to(source).as_posix() for path in source.rglob("*")], store)
    with counted(monkeypatch, source) as observed:
        converted(source, url, tmp_path / "out")
    monkeypatch.setattr(pipeline, "digests_of_source", lambda _manifest: {})
    with counted(monkeypatch, source) as plain:
        convert(Request(str(source), str(tmp_path / "out2")), MEANS, None, str(tmp_path / "other.sqlite"))
    files = sum(1 for path in source.rglob("*") if path.is_file())
    assert observed["bytes"] - plain["bytes"] <= 8192 * files
    assert observed["requests"] - plain["requests"] <= 8 * files


def test_a_source_on_s3_is_digested_and_compared(tmp_path: Path, url: str, catalog: Catalog) -> None:
    files = {f.name: f.read_bytes() for f in save(tmp_path / "s", 1, more=torch.arange(1 << 18)).iterdir()}
    with serving() as server:
        for name, data in files.items():
            server.objects[f"b/runs/step-1/{name}"] = Stored(data, f"e{name}")
        before = Counter[str]()
        for catalog_url in (None, url):
            server.log.clear()
            place = catalog_url if catalog_url is not None else False
            out = tmp_path / ("out" if catalog_url else "plain")
            convert(Request("s3://b/runs/step-1", str(out)), MEANS, None, place)
            requests = Counter(str(entry).split(" ")[0] for entry in server.log)
            if catalog_url is None:
                before = requests
        detail = known(url, "s3://b/runs/step-1")
        assert {f.path: f.digest for f in detail.files} == {
            name: crc(tmp_path / "s" / name) for name in files
        }
        assert sum(requests.values()) - sum(before.values()) <= 2 * len(files)
        assert prove(detail).proof is Proof.PROVEN
        data = bytearray(files["__0_0.distcp"])
        data[1] ^= 1
        server.objects["b/runs/step-1/__0_0.distcp"] = Stored(bytes(data), "other")
        assert prove(detail).proof in (Proof.DAMAGED, Proof.CHANGED)


def test_bytes_that_came_altered_give_no_digest(tmp_path: Path) -> None:
    manifest = inspect(str(save(tmp_path / "step-1", 1)), observe=True)
    assert validate(manifest, "bytes").ok
    assert manifest.sums is not None
    store = open_source_store(manifest.root, manifest.versions)
    assert set(file_digests(manifest, store)) == {".metadata", "__0_0.distcp"}
    manifest.sums.forget("__0_0.distcp")
    assert set(file_digests(manifest, store)) == {".metadata"}
    manifest.sums.forget(None)
    assert not file_digests(manifest, store)


def test_a_file_that_changed_since_it_was_listed_has_no_digest(tmp_path: Path) -> None:
    source = save(tmp_path / "step-1", 1)
    manifest = inspect(str(source), observe=True)
    assert validate(manifest, "bytes").ok
    os.utime(source / "__0_0.distcp")
    assert set(file_digests(manifest, open_source_store(manifest.root))) == {".metadata"}


def test_retire_that_reads_the_source_compares_its_files(tmp_path: Path, url: str, catalog: Catalog) -> None:
    world = World(Template(tmp_path), catalog, url, tmp_path, "w").make()
    path = next(iter(sorted(world.source.glob("*.distcp"))))
    with altered(path, unseen(path)):
        world.keeps("is not what the catalog recorded", take=True)
    world.deletes(take=True)
