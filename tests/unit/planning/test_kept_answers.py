"""Test when an answer of transformers is kept, and when it is asked for again."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ckptcore.planning import kept_answers, transformers_process
from ckptcore.planning.kept_answers import ask_once


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CKPTCORE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "answers-of-transformers"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the libraries as pip installs them."""
    folder = tmp_path / "site-packages"
    for library in ("transformers", "torch"):
        (folder / library).mkdir(parents=True)
        (folder / library / "__init__.py").write_text("")
        (folder / f"{library}-5.0.dist-info").mkdir()
        monkeypatch.delitem(sys.modules, library, raising=False)
    monkeypatch.syspath_prepend(folder)
    return folder


def answer_to(question: object) -> dict[str, Any]:
    if question == "fail":
        return {"error": "none"}
    return {"class": "Model", "of": question, "broken": ["MemoryError"] if question == "break" else []}


@pytest.fixture
def count(packages: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Ask once more, and return how often transformers was asked in all."""
    asked = []

    def ask(module: str, question: object, *, seconds: float | None) -> dict[str, Any]:
        asked.append(question)
        return answer_to(question)

    monkeypatch.setattr(transformers_process, "ask", ask)

    def counted(question: object = "a", module: str = "m") -> int:
        answer = ask_once(module, question, seconds=1)
        assert answer == answer_to(question)
        return len(asked)

    return counted


def test_an_equal_question_is_asked_once(count: Callable[..., int]) -> None:
    assert [count(), count(), count("b"), count("b"), count("a", "other"), count()] == [1, 1, 2, 2, 3, 3]


def test_failures_are_not_kept(count: Callable[..., int], cache: Path) -> None:
    assert [count("fail"), count("fail")] == [1, 2]
    assert [count("break"), count("break")] == [3, 4]
    assert not cache.exists()


def _install(packages: Path, _: Path) -> None:
    (packages / "another").mkdir()


def _upgrade(packages: Path, _: Path) -> None:
    (packages / "transformers-5.0.dist-info").rename(packages / "transformers-5.1.dist-info")


def _edit(packages: Path, _: Path) -> None:
    os.utime(packages / "torch" / "__init__.py", ns=(1, 1))


def _develop(packages: Path, _: Path) -> None:
    (packages / "transformers-5.0.dist-info").rmdir()


def _cut(_: Path, cache: Path) -> None:
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:-1])


def _alter(_: Path, cache: Path) -> None:
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes().replace(b"Model", b"Other"))


def _open_to_all(_: Path, cache: Path) -> None:
    (file,) = cache.iterdir()
    file.chmod(0o666)


def _open_folder_to_all(_: Path, cache: Path) -> None:
    cache.chmod(0o777)


def _link_folder(_: Path, cache: Path) -> None:
    cache.rename(cache.parent / "elsewhere")
    cache.symlink_to(cache.parent / "elsewhere")


def _link(_: Path, cache: Path) -> None:
    (file,) = cache.iterdir()
    file.rename(cache / "elsewhere")
    file.symlink_to(cache / "elsewhere")


def _pipe(_: Path, cache: Path) -> None:
    (file,) = cache.iterdir()
    file.unlink()
    os.mkfifo(file)


def _grow(_: Path, cache: Path) -> None:
    (file,) = cache.iterdir()
    with file.open("ab") as opened:
        opened.truncate(5 << 20)


@pytest.mark.parametrize(
    "change",
    [
        _install,
        _upgrade,
        _edit,
        _develop,
        _cut,
        _alter,
        _open_to_all,
        _open_folder_to_all,
        _link_folder,
        _link,
        _pipe,
        _grow,
    ],
)
def test_a_change_repeats_the_question(
    change: Callable[[Path, Path], None], count: Callable[..., int], packages: Path, cache: Path
) -> None:
    assert [count(), count()] == [1, 1]
    change(packages, cache)
    assert count() == 2


def test_an_answer_under_the_name_of_another_is_not_read(count: Callable[..., int], cache: Path) -> None:
    assert count("a") == 1
    (answer,) = cache.iterdir()
    assert count("b") == 2
    (other,) = [path for path in cache.iterdir() if path != answer]
    answer.replace(other)
    assert count("b") == 3


def test_nothing_is_removed_behind_a_link(
    count: Callable[..., int], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_answers, "_MOST_FILES", 1)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for digit in "abc":
        (foreign / f"{digit * 64}.json").write_text("{}")
    cache.parent.mkdir()
    cache.symlink_to(foreign)
    assert [count(), count()] == [1, 2]
    assert len(list(foreign.iterdir())) == 3


def test_a_full_disk_leaves_no_draft(
    count: Callable[..., int], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(Path, "replace", full)
    assert [count(), count()] == [1, 2]
    assert list(cache.iterdir()) == []


def test_links_to_nothing_do_not_stop_the_removal(
    count: Callable[..., int], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_answers, "_MOST_FILES", 2)
    cache.mkdir(mode=0o700, parents=True)
    (cache / f"{'a' * 64}.json").symlink_to("nowhere")
    os.utime(cache / f"{'a' * 64}.json", (1, 1), follow_symlinks=False)
    for question in range(4):
        count(question)
    assert len(list(cache.iterdir())) == 2


def test_libraries_that_are_not_imported_as_usual_are_asked(
    count: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))  # without a spec
    assert [count(), count()] == [1, 2]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_not_read(count: Callable[..., int], cache: Path) -> None:
    assert count() == 1
    os.chown(next(cache.iterdir()), 12345, -1)
    assert count() == 2


def test_a_setting_of_transformers_is_part_of_the_question(
    count: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert count() == 1
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "info")
    assert count() == 2
    monkeypatch.setenv("HF_HOME", "/elsewhere")
    assert count() == 3
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    assert count() == 4


def test_changed_code_repeats_the_question(
    count: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planning").mkdir()
    (tmp_path / "naming" / "maps").mkdir(parents=True)
    module = tmp_path / "naming" / "maps" / "numbers.py"
    module.write_text("")
    monkeypatch.setattr(kept_answers, "__file__", str(tmp_path / "planning" / "kept_answers.py"))
    assert [count(), count()] == [1, 1]
    module.write_text("pass")
    assert count() == 2
    (tmp_path / "naming" / "maps" / "numbers.toml").write_text("")
    assert count() == 3


@pytest.mark.parametrize("given", ["", "/dev/null/no"], ids=["off", "no folder"])
def test_without_a_folder_every_question_is_asked(
    given: str, count: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTCORE_CACHE", given)
    assert [count(), count()] == [1, 2]


def test_a_user_without_a_home_keeps_nothing(
    count: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CKPTCORE_CACHE")
    monkeypatch.setattr("platformdirs.user_cache_path", lambda _: Path("~/.cache/ckptcore"))
    assert [count(), count()] == [1, 2]
    assert not (tmp_path / "~").exists()


def test_the_oldest_are_removed_and_no_file_of_others(
    count: Callable[..., int], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_answers, "_MOST_FILES", 3)
    cache.mkdir(parents=True)
    (cache / "notes.json").write_text("{}")
    os.utime(cache / "notes.json", (1, 1))
    count(0)
    os.utime(next(p for p in cache.iterdir() if p.name != "notes.json"), (2, 2))
    for question in range(1, 4):
        count(question)
    assert len(list(cache.iterdir())) == 4
    assert (cache / "notes.json").exists()
    assert count(3) == 4  # kept
    assert count(0) == 5  # removed


def test_long_answers_are_not_kept(
    count: Callable[..., int], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_answers, "_MOST_BYTES", 100)
    assert [count("a" * 100), count("a" * 100)] == [1, 2]
