"""Places: one storage is known under all its names, and two are never taken for one."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest

from ckptcore.errors import UsageError
from ckptcore.store import place
from ckptcore.store.place import Relation, Spellings, identify, overlaps, perhaps_within, relation

SAME = [
    ("s3://b/run", "s3://b/run/"),
    ("s3://b/run", "s3a://b/run"),
    ("s3://b/run", "s3n://b//run"),
    ("s3://b/run", "s3://user:secret@b/run"),
    ("s3://b/run", "s3://user:se@cret@b/run"),
    ("s3://b/run", "S3://B/run"),
    ("s3://b/run", "s3://b/./run"),
    ("s3://b/run", "s3://b/x/../run"),
    ("s3://b/a/b", "s3://b/a%2Fb"),
    ("s3://b/a b", "s3://b/a%20b"),
    ("s3://b/a b", "s3://b/a%2520b"),
    ("s3://b/run", "s3://b/run?versionId=7"),
    ("s3://b/run", "simplecache::s3://b/run"),
    ("s3://b/run", "filecache::simplecache::s3a://b/run"),
    ("s3://b/run", "https://b.s3.eu-central-1.amazonaws.com/run"),
    ("s3://b/run", "http://127.0.0.1:9000/b/run"),
    ("s3://arn:aws:s3:eu-central-1:1:accesspoint/run", "s3://b/run"),
    ("gs://b/run", "gcs://b/run"),
    ("abfs://c@account.dfs.core.windows.net/run", "az://c/run"),
    ("abfss://c@account.dfs.core.windows.net/run", "https://account.blob.core.windows.net/c/run"),
    ("memory://a/b", "memory:///a//b/"),
    ("/tmp/nowhere/x", "file:///tmp/nowhere/../nowhere/x/"),
    ("/tmp/nowhere/x", "local:///tmp//nowhere/./x"),
    ("/tmp/nowhere/x.zip", "zip://inner::file:///tmp/nowhere/x.zip"),
]
APART = [
    ("s3://b/run", "s3://b/run-2"),
    ("s3://b/run/step-1", "s3://b/run/step-10"),
    ("s3://b/run", "s3://c/run"),
    ("s3://b/run", "gs://b/run"),
    ("s3://b/run", "s3://b/Run"),
    ("s3://b/run", "/b/run"),
    ("abfs://c@one.dfs.core.windows.net/run", "abfs://c@two.dfs.core.windows.net/run"),
    ("memory://a/b", "/a/b"),
    ("/tmp/nowhere/x", "/tmp/nowhere/xy"),
]


@pytest.mark.parametrize(("a", "b"), SAME)
def test_spellings_of_one_place(a: str, b: str) -> None:
    one, other = identify(a), identify(b)
    assert relation(one, other) is Relation.SAME
    assert relation(identify(f"{a}/step-1"), other) is Relation.INSIDE or "?" in a or ".zip" in a
    assert relation(other, identify(f"{a}/step-1")) is Relation.AROUND or "?" in a or ".zip" in a


@pytest.mark.parametrize(("a", "b"), APART)
def test_places_apart(a: str, b: str) -> None:
    assert not overlaps(identify(a), identify(b))
    assert not overlaps(identify(b), identify(a))


def test_a_bucket_is_around_all_its_keys() -> None:
    assert relation(identify("s3://b"), identify("s3a://b/a/b")) is Relation.AROUND
    assert identify("s3://b/").is_bucket
    assert identify("s3://b/a/..").is_bucket
    assert not identify("s3://b/a").is_bucket
    assert not identify("memory://").is_bucket


def test_endpoints_part_places_only_where_both_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec.config

    a, b = "s3://b/run", "s3a://b/run"
    monkeypatch.setitem(fsspec.config.conf, "s3a", {"endpoint_url": "http://LOCALHOST:9000/"})
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    assert overlaps(identify(a), identify(b)), "a profile may name the other's"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    assert overlaps(identify(a), identify(b))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://s3.eu-central-1.amazonaws.com")
    assert not overlaps(identify(a), identify(b))


def test_links_lead_to_the_same_place(tmp_path: Path) -> None:
    (tmp_path / "run" / "step-1").mkdir(parents=True)
    (tmp_path / "link").symlink_to("run")
    (tmp_path / "deep").symlink_to("link/step-1")
    run = identify(str(tmp_path / "run"))
    assert relation(identify(str(tmp_path / "link")), run) is Relation.SAME
    assert relation(identify(str(tmp_path / "deep")), run) is Relation.INSIDE
    assert relation(run, identify(f"file://{tmp_path}/deep/new/folder")) is Relation.AROUND
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("x")
    os.link(one, other)
    assert relation(identify(str(one)), identify(str(other))) is Relation.SAME


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_bind_mounts_lead_to_the_same_place(tmp_path: Path) -> None:
    """Also of a folder below, or above: what is mounted elsewhere is followed to its file system."""
    (tmp_path / "run" / "step-1" / "files").mkdir(parents=True)
    (tmp_path / "away").mkdir()
    bind = ["mount", "--bind", str(tmp_path / "run" / "step-1"), str(tmp_path / "away")]
    if subprocess.run(bind, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount here")
    try:
        run, step = identify(str(tmp_path / "run")), identify(str(tmp_path / "run" / "step-1"))
        away, inside = identify(str(tmp_path / "away")), identify(str(tmp_path / "away" / "new" / "out"))
        assert relation(away, step) is Relation.SAME
        assert relation(away, run) is Relation.INSIDE
        assert relation(inside, run) is Relation.INSIDE
        assert relation(identify(str(tmp_path / "run" / "step-1" / "new")), away) is Relation.INSIDE
        assert not overlaps(inside, identify(str(tmp_path / "run" / "step-2")))
    finally:
        subprocess.run(["umount", str(tmp_path / "away")], check=True)


@pytest.mark.parametrize("url", ["", "::", "a\0b", "file://a\0b"])
def test_no_urls(url: str) -> None:
    with pytest.raises(UsageError):
        identify(url)


@pytest.mark.parametrize("url", ["://", "s3://", "a::", "::a", "x://[::1", "s3://%", "file://", "b::c::/d"])
def test_odd_urls_are_places(url: str) -> None:
    assert identify(url).spots


def test_spellings_among_many_urls(tmp_path: Path) -> None:
    """Only what may be the place, inside it or around it is found, and its own URL is not."""
    (tmp_path / "new" / "step-1").mkdir(parents=True)
    (tmp_path / "old").symlink_to("new")
    urls = (
        "s3://b/run/step-1",
        "s3a://b/run/step-1",
        "s3a://b/run",
        "s3://b//run/step%2D1/x",
        "s3://c/run/step-1",
    )
    merged = "merged://[s3a://b/run/step-1,/nowhere/a]"
    known = Spellings([*urls, merged, str(tmp_path / "old/step-1"), str(tmp_path / "new/step-2")])
    assert known.of("s3://b/run/step-1") == {
        "s3a://b/run/step-1": Relation.SAME,
        "s3a://b/run": Relation.AROUND,
        "s3://b//run/step%2D1/x": Relation.INSIDE,
        merged: Relation.SAME,
    }
    assert known.of(str(tmp_path / "new/step-1")) == {str(tmp_path / "old/step-1"): Relation.SAME}
    assert Spellings([]).of("/a") == {}
    assert Spellings(["s3a://b", "/"]).of("s3://b/x") == {"s3a://b": Relation.AROUND}
    (tmp_path / "other").symlink_to("new")
    assert known.inside(str(tmp_path / "other")) == (
        str(tmp_path / "old/step-1"),
        str(tmp_path / "new/step-2"),
    )
    assert Spellings(["a"]).inside("/") == ()


def test_a_link_that_renames_the_place_itself_is_found_among_all(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "best").symlink_to(tmp_path / "step-1")
    spellings = Spellings([str(tmp_path / "best"), str(tmp_path / "other")])
    assert spellings.of(str(tmp_path / "step-1")) == {str(tmp_path / "best"): Relation.SAME}


def test_the_index_finds_what_a_comparison_of_all_finds(tmp_path: Path) -> None:
    (tmp_path / "run/step-1/inner").mkdir(parents=True)
    (tmp_path / "run/loop").symlink_to("loop")
    (tmp_path / "link").symlink_to("run")
    (tmp_path / "latest").symlink_to("link/step-1")
    (tmp_path / "file").write_text("x")
    os.link(tmp_path / "file", tmp_path / "twin")
    names = ["run", "run/step-1", "run/step-1/inner", "link/step-1/inner", "latest", "latest/inner/new", "."]
    names += [
        "file",
        "twin",
        "file/x",
        "run/loop",
        "run/loop/x",
        "run//step-1/",
        "link/../run",
        "run/step-10",
    ]
    urls = [f"{tmp_path}/{name}" for name in names] + [
        os.path.relpath(tmp_path / "latest"),
        "/",
        "~",
        "s3://b",
    ]
    urls += [url for pair in (*SAME, *APART) for url in pair]
    urls += [f"{url}/step-1" for url in urls if "?" not in url]
    urls += [f"merged://[{tmp_path}/latest,s3a://b/run]", f"merged://[{tmp_path}/run,/nowhere]/step-1"]
    random.Random(1).shuffle(urls)
    known, within = Spellings(urls), dict[str, set[str]]()
    for url in urls:
        here = identify(url)
        found = {each: relation(identify(each), here) for each in urls if each != url}
        assert known.of(url) == {each: how for each, how in found.items() if how is not Relation.APART}
        within[url] = {each for each, how in found.items() if how in (Relation.SAME, Relation.INSIDE)}
        assert within[url] <= set(perhaps_within([url], urls))
    for start in range(0, len(urls), 7):
        some = urls[start : start + 7]
        assert set().union(*(within[url] for url in some)) <= set(perhaps_within(some, urls))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_a_part_that_is_mounted_elsewhere_may_be_within(tmp_path: Path) -> None:
    (tmp_path / "step-1/inner/deep").mkdir(parents=True)
    (tmp_path / "elsewhere/best").mkdir(parents=True)
    (tmp_path / "elsewhere/other").mkdir()
    here, best = str(tmp_path / "step-1"), str(tmp_path / "elsewhere/best")
    bind = ["mount", "--bind", str(tmp_path / "step-1/inner"), best]
    if subprocess.run(bind, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount here")
    try:
        (tmp_path / "link").symlink_to("elsewhere")
        linked = (f"{tmp_path}/link/best", f"{tmp_path}/elsewhere/./best", f"{tmp_path}/link/best/deep")
        urls = (f"{tmp_path}/elsewhere/other", best, f"{best}/deep", *linked)
        assert perhaps_within([here], urls) == urls[1:]
        assert Spellings(urls).of(here) == dict.fromkeys(urls[1:], Relation.INSIDE)
    finally:
        subprocess.run(["umount", best], check=True)


def test_one_place_is_compared_with_many_by_a_question_about_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = [f"{tmp_path}/run-{n % 3}/step-{n}" for n in range(200)]
    for url in urls:
        os.makedirs(url)
    asked: list[object] = []
    look, see = os.lstat, os.stat
    monkeypatch.setattr(os, "lstat", lambda path, **more: (asked.append(path), look(path, **more))[1])
    monkeypatch.setattr(os, "stat", lambda path, **more: (asked.append(path), see(path, **more))[1])
    assert perhaps_within([urls[7]], urls) == (urls[7],)
    assert len(asked) <= len(urls) + 50


def test_many_places_of_one_name_are_few_comparisons_and_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = [f"{tmp_path}/run-{n}/step-300" for n in range(200)]
    for url in urls:
        os.makedirs(url)
    counts = dict.fromkeys(("relation", "stat", "lstat", "mounts"), 0)
    for module, name in ((place, "relation"), (place, "mounts"), (os, "stat"), (os, "lstat")):
        original = getattr(module, name)

        def counted(
            *given: object, _name: str = name, _original: object = original, **more: object
        ) -> object:
            counts[_name] += 1
            return _original(*given, **more)  # type: ignore[operator]

        monkeypatch.setattr(module, name, counted)
    known = Spellings(urls)
    for url in urls:
        assert known.of(url) == {}
    assert counts["mounts"] == 1
    assert counts["relation"] <= len(urls)
    assert counts["stat"] <= 2 * len(urls) + 50  # each and its run, once
    assert counts["lstat"] <= 2 * len(urls) + 50


def test_each_of_many_folders_is_compared_with_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of 5,000 folders are 12 million: a source of so many is refused or opened in seconds."""
    urls = [f"/nowhere/node{n:04}/step-10" for n in range(1000)] + [f"s3://b/node{n}" for n in range(1000)]
    compared = []

    def counted(a: place.Location, b: place.Location) -> bool:
        compared.append(a)
        return overlaps(a, b)

    monkeypatch.setattr(place, "overlaps", counted)
    assert place.first_overlap(urls) is None
    assert len(compared) <= len(urls)
    assert place.first_overlap([*urls, "s3://b/node7/part"]) == ("s3://b/node7", "s3://b/node7/part")
    assert place.first_overlap([*urls, "/nowhere/node0003"]) == (
        "/nowhere/node0003/step-10",
        "/nowhere/node0003",
    )
