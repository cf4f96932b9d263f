"""Test that publishing to object stores changes only recorded objects, wherever a run is killed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import save_file

import ckptcore
from ckptcore.conversion.staging import remote_publication as remotepublishing
from ckptcore.conversion.staging import staging as publications
from ckptcore.conversion.staging.remote_publication import ObjectStaging
from ckptcore.conversion.staging.staging import PUBLISHING, Staging
from ckptcore.errors import CkptError, DestinationExists, UsageError
from ckptcore.planning.config_folder import Expected
from ckptcore.store import open_store
from ckptcore.store.objects.client import S3Client
from ckptcore.store.remote import FsspecStore

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning"
)  # aiobotocore leaves its session to the exit


def content(url: str) -> dict[str, bytes]:
    """Every object below a URL by its exact key."""
    fs, path = fsspec.url_to_fs(url, use_listings_cache=False)
    fs.invalidate_cache()
    return {name[len(path) + 1 :]: fs.cat_file(name) for name in fs.find(path)}


def put(url: str, data: bytes = b"precious") -> None:
    fs, path = fsspec.url_to_fs(url)
    fs.pipe_file(path, data)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with config.json and a tokenizer; transformers is not used."""
    monkeypatch.setattr("ckptcore.planning.compose.check_names", lambda *_: Expected(()))
    monkeypatch.setattr("ckptcore.planning.live_maps.family_of_config", lambda *_: None)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "tokenizer.json").write_text('{"version": "1.0"}')
    return str(tmp_path / "model")


def spellings(url: str) -> list[str]:
    """The same place under other names."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    found = [
        url,
        f"{url}/",
        f"{scheme}://{bucket}//{key}",
        f"{scheme}://{bucket}/./{key}",
        f"simplecache::{url}",
    ]
    return found + (
        [f"s3a://{rest}", f"s3://me:pw@{rest}", f"s3a://{bucket}//{key}"] if scheme == "s3" else []
    )


@pytest.mark.parametrize("root", ["memory", pytest.param("s3", marks=pytest.mark.soak)], indirect=True)
def test_overlap_is_refused_both_ways_under_every_name(root: str, model: str, tmp_path: Path) -> None:
    source = f"{root}/source/step-3"
    put(f"{root}/source/step-2/precious")
    put(f"{root}/config/config.json", b"{}")
    before = content(root)
    verbs: list[dict[str, object]] = [{}, {"verb": "export"}, {"verb": "reshard", "mesh": "fsdp=2"}]
    for m, where in enumerate((source, f"{root}/source", root, f"{source}/deep/out")):
        for n, dst in enumerate(spellings(where)):
            word = ("overwrite", "overwrite_foreign")[(m + n) % 2]
            with pytest.raises(UsageError) as caught:
                ckptcore.convert(source, dst, **verbs[n % 3], **{word: True, "overwrite_in_place": True})  # type: ignore[arg-type]
            assert caught.value.hint
            assert content(root) == before, dst
    for dst in (f"{root}/config", f"{root}//config/"):
        with pytest.raises(UsageError, match="config"):
            ckptcore.convert(
                source, dst, verb="export", config=f"{root}/config", overwrite=True, overwrite_in_place=True
            )
    with pytest.raises(UsageError, match="staging folder"):
        ckptcore.convert(
            f"{root}/.out.ckptcore/files", f"{root}/out", overwrite=True, overwrite_in_place=True
        )
    assert content(root) == before


def test_overlap_on_this_machine(tmp_path: Path, model: str) -> None:
    run, source = tmp_path / "run", tmp_path / "run" / "step-1.safetensors"
    run.mkdir()
    save_file({"weight": torch.arange(6.0)}, source)
    (tmp_path / "link").symlink_to(run)
    for dst in (run, tmp_path / "link", f"file://{run}", run / "step-1.safetensors", f"{run}/../run"):
        with pytest.raises((UsageError, DestinationExists)):
            ckptcore.convert(str(source), str(dst), overwrite_foreign=True, overwrite_in_place=True)
    for dst in (model, f"{model}/config.json", str(Path(model).parent)):
        with pytest.raises(UsageError):
            ckptcore.convert(
                str(source), dst, verb="export", config=model, overwrite_foreign=True, overwrite_in_place=True
            )
    assert sorted(p.name for p in run.iterdir()) == ["step-1.safetensors"]
    assert sorted(p.name for p in Path(model).iterdir()) == ["config.json", "tokenizer.json"]


def test_a_plan_is_saved_apart(tmp_path: Path) -> None:
    from ckptcore.conversion.staging.staged_plan import load_request, plan_into
    from ckptcore.planning.request import Request

    source, dst = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    save_file({"weight": torch.arange(6.0)}, source / "model.safetensors")
    request = Request(str(source), str(dst), overwrite_foreign=True, overwrite_in_place=True)
    for folder in (source / "plan", dst, dst / "plan", tmp_path):
        with pytest.raises(UsageError):
            plan_into(folder, request, ckptcore.open(str(source)))
    plan_into(tmp_path / "plan", request, ckptcore.open(str(source)))
    assert load_request(tmp_path / "plan") == request
    dst.mkdir()
    (tmp_path / "plan").rename(dst / "plan")
    with pytest.raises(UsageError, match="saved plan"):
        load_request(dst / "plan")


# Many runs: against a server in the long tier.
many = pytest.mark.parametrize("root", ["memory", pytest.param("s3", marks=pytest.mark.soak)], indirect=True)

# At every fifth change in the short tier; five is odd, so that every other one is killed twice.
changes = pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.soak)])

STRANGERS = ["precious", "x/precious", "/precious", "model.safetensors.bak", ".cache/x", "README.md"]


@pytest.mark.alike(3)
@many
@pytest.mark.parametrize("stranger", STRANGERS)
def test_strangers_are_listed_and_kept(stranger: str, root: str) -> None:
    source, dst = f"{root}/source/step-3", f"{root}/out"
    ckptcore.convert(source, dst, verb="export")
    put(f"{dst}/{stranger}")
    before = content(root)
    if stranger == "/precious" and "/precious" not in content(dst):
        pytest.skip("this store folds slashes")
    with pytest.raises(DestinationExists, match="nothing accounts for 1 ") as caught:
        ckptcore.convert(
            source, dst, verb="export", max_file_size=2_000, overwrite=True, overwrite_in_place=True
        )
    assert "overwrite_foreign=True" in caught.value.hint
    assert {k: v for k, v in content(root).items() if not k.startswith(".out.ckptcore")} == before
    ckptcore.convert(
        source, dst, verb="export", max_file_size=2_000, overwrite_foreign=True, overwrite_in_place=True
    )
    assert content(dst).keys() == {"model.safetensors.index.json", "README.md", *content(dst)}
    assert content(dst).get(stranger) != b"precious"


@pytest.mark.alike(1)
def test_an_object_and_a_folder_replace_each_other(root: str) -> None:
    source = f"{root}/source/step-3"
    ckptcore.convert(source, f"{root}/fresh")
    put(f"{root}/out")
    with pytest.raises(DestinationExists):
        ckptcore.convert(source, f"{root}/out")
    ckptcore.convert(source, f"{root}/out", overwrite=True, overwrite_in_place=True)
    assert content(f"{root}/out") == content(f"{root}/fresh")
    put(f"{root}/one.pt")
    ckptcore.convert(source, f"{root}/one.pt", overwrite=True, overwrite_in_place=True)
    assert ckptcore.open(f"{root}/one.pt").tensors


class Killed(BaseException):
    """A simulated kill: nothing may handle it."""


def killed_at(stop: int, patch: pytest.MonkeyPatch, work: Callable[[], object]) -> bool:
    """Run until the n-th change of an object store; return whether it ran to its end."""
    calls: list[int] = []

    def counted(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            if len(calls) == stop:
                raise Killed
            calls.append(1)
            return real(*args, **kwargs)

        return call

    with patch.context() as inner:
        for name in ("remove", "copy_to", "put"):
            inner.setattr(FsspecStore, name, counted(getattr(FsspecStore, name)))
        for name in ("put", "copy", "delete", "begin", "complete", "abort"):
            inner.setattr(S3Client, name, counted(getattr(S3Client, name)))
        inner.setattr(FsspecStore, "remove_all", lambda self: [self.remove(n) for n in _names(self)])
        try:
            work()
        except Killed:
            return False
    return True


def _names(store: FsspecStore) -> list[str]:
    try:
        return list(store.list())
    except CkptError:
        return []


@pytest.mark.alike(1)
@many
@changes
@pytest.mark.parametrize("first", ["nothing", "shards", pytest.param("dcp", marks=pytest.mark.soak)])
def test_a_rerun_after_a_kill_at_every_change(
    first: str, every: int, root: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rerun ends as an undisturbed run; siblings and new objects beside them are unchanged."""
    save_file({"weight": torch.arange(600.0), "bias": torch.ones(500)}, tmp_path / "new.safetensors")
    save_file({"weight": torch.zeros(300), "other": torch.ones(400)}, tmp_path / "old.safetensors")
    for name in ("new", "old"):
        put(f"{root}/{name}/model.safetensors", (tmp_path / f"{name}.safetensors").read_bytes())
    options = {"verb": "export", "config": model, "max_file_size": 3_000}
    old: dict[str, object] = {"verb": "export", "max_file_size": 2_000}
    if first == "dcp":
        old = {"verb": "reshard", "mesh": "fsdp=2"}

    def begin(place: str) -> None:
        open_store(place).remove_all()
        put(f"{place}/out-2/precious")
        put(f"{place}/out.pt")
        if first != "nothing":
            ckptcore.convert(f"{root}/old", f"{place}/out", **old)

    def work(place: str) -> object:
        return ckptcore.convert(
            f"{root}/new", f"{place}/out", overwrite=True, overwrite_in_place=True, **options
        )  # type: ignore[arg-type]

    begin(f"{root}/fresh")
    work(f"{root}/fresh")
    fresh = content(f"{root}/fresh")
    assert "out/config.json" in fresh
    place, total = f"{root}/try", 0
    for stop in range(0, 200, every):
        begin(place)
        if killed_at(stop, monkeypatch, lambda: work(place)):
            total = stop
            break
        if stop % 2:  # killed a second time, soon
            killed_at(2, monkeypatch, lambda: work(place))
        work(place)
        assert content(place) == fresh, stop
    assert total > 15


@pytest.mark.soak
@many
@changes
def test_another_run_finishes_a_killed_replacement(
    every: int, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while it removed the old files; then other options, killed at every change, and run again: what
    the first run recorded needs no further option, and nothing of it is left."""
    save_file({"weight": torch.arange(600.0), "bias": torch.ones(500)}, tmp_path / "new.safetensors")
    save_file({"weight": torch.zeros(300), "other": torch.ones(400)}, tmp_path / "old.safetensors")
    for name in ("new", "old"):
        put(f"{root}/{name}/model.safetensors", (tmp_path / f"{name}.safetensors").read_bytes())
    real, calls = remotepublishing._remove, []

    def dying(*given: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise Killed
        real(*given)  # type: ignore[arg-type]

    def work(place: str, nbytes: int) -> object:
        return ckptcore.convert(
            f"{root}/new",
            f"{place}/out",
            verb="export",
            max_file_size=nbytes,
            overwrite=True,
            overwrite_in_place=True,
        )

    def begin(place: str) -> None:
        open_store(place).remove_all()
        calls.clear()
        put(f"{place}/out-2/precious")
        ckptcore.convert(f"{root}/old", f"{place}/out", verb="reshard", mesh="fsdp=3")
        with monkeypatch.context() as patch:
            patch.setattr(remotepublishing, "_remove", dying)
            with pytest.raises(Killed):
                work(place, 3_000)

    place = f"{root}/try"
    begin(place)
    work(place, 9_000)
    fresh = content(place)
    assert sorted(n.partition("/")[0] for n in fresh).count("out-2") == 1
    assert not any("distcp" in name or "ckptcore" in name for name in fresh)
    for stop in range(0, 200, every):
        begin(place)
        if killed_at(stop, monkeypatch, lambda: work(place, 9_000)):
            break
        work(place, 9_000)
        assert content(place) == fresh, stop
    assert stop > 10


@pytest.mark.soak
@many
def test_a_rerun_after_a_kill_in_the_cleanup_deletes_nothing(
    root: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without --overwrite: the published output is only read."""
    source, dst = f"{root}/source/step-3", f"{root}/out"
    ckptcore.convert(source, f"{root}/fresh/out", verb="export", config=model)
    fresh = content(f"{root}/fresh/out")
    real_end, real_remove = ObjectStaging.remove, FsspecStore.remove

    def of_others(store: FsspecStore, name: str) -> None:
        assert not store.url.startswith(dst), f"{name} was removed"
        real_remove(store, name)

    for stop in range(40):
        open_store(dst).remove_all()
        ended: list[bool] = []

        def end(staging: ObjectStaging, stop: int = stop, ended: list[bool] = ended) -> None:
            ended.append(killed_at(stop, monkeypatch, lambda: real_end(staging)))
            if not ended[0]:
                raise Killed

        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(ObjectStaging, "remove", end)
            ckptcore.convert(source, dst, verb="export", config=model)
        if ended[0]:
            break
        recorded = PUBLISHING in content(f"{root}/.out.ckptcore")
        with monkeypatch.context() as patch:
            patch.setattr(FsspecStore, "copy_to", _never)
            patch.setattr(FsspecStore, "remove", of_others)
            with contextlib.nullcontext() if recorded else pytest.raises(DestinationExists):
                ckptcore.convert(source, dst, verb="export", config=model)
        assert content(dst) == fresh, stop
    assert stop > 5


def _never(*_: object) -> None:
    raise AssertionError("something published was changed")


@pytest.mark.alike(1)
def test_a_changed_output_is_not_the_published_one(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, dst = f"{root}/source/step-3", f"{root}/out"
    monkeypatch.setattr(ObjectStaging, "remove", _killed)
    with pytest.raises(Killed):
        ckptcore.convert(source, dst, verb="export")
    monkeypatch.undo()
    data = content(dst)["model.safetensors"]
    put(f"{dst}/model.safetensors", data[:-1] + bytes([data[-1] ^ 1]))
    before = content(dst)
    with pytest.raises(DestinationExists, match="changed since"):
        ckptcore.convert(source, dst, verb="export")
    assert content(dst) == before


def _killed(*_: object) -> None:
    raise Killed


@pytest.mark.grid
@many
@pytest.mark.parametrize("when", ["prepared", "removing", "putting"])
@pytest.mark.parametrize("name", ["precious", "model.safetensors", "old.safetensors"])
def test_objects_that_appear_meanwhile_are_kept(
    name: str, when: str, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, dst = f"{root}/source/step-3", f"{root}/out"
    save_file({"other": torch.arange(600.0)}, tmp_path / "old.safetensors")
    put(f"{dst}/old.safetensors", (tmp_path / "old.safetensors").read_bytes())
    prepared = ckptcore.prepare(source, dst, verb="export", overwrite=True, overwrite_in_place=True)
    ckptcore.execute(prepared)
    if when == "prepared":
        put(f"{dst}/{name}")
    real = remotepublishing.note

    def note(
        staging: Staging, publication: publications.Publication, *before: publications.Publication
    ) -> None:
        real(staging, publication, *before)
        if publication.step == when:
            put(f"{dst}/{name}")

    monkeypatch.setattr(remotepublishing, "note", note)
    with pytest.raises(DestinationExists):
        ckptcore.publish(prepared)
    monkeypatch.undo()
    assert content(dst)[name] == b"precious"
    with pytest.raises(DestinationExists):
        ckptcore.convert(source, dst, verb="export", overwrite=True, overwrite_in_place=True)
    assert content(dst)[name] == b"precious"
    fsspec.url_to_fs(dst)[0].rm_file(fsspec.url_to_fs(f"{dst}/{name}")[1])
    ckptcore.convert(source, dst, verb="export", overwrite=True, overwrite_in_place=True)
    ckptcore.convert(source, f"{root}/fresh/out", verb="export")
    assert content(dst) == content(f"{root}/fresh/out")


def _names_of(staging: Staging) -> list[str]:
    return list(staging.files.list())
