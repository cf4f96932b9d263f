"""Staging folders of stopped runs, and what others may do to them."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import shutil
import stat
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import FIXTURES
from safetensors.torch import load_file

import ckptcore
from ckptcore.errors import CkptError

SAMPLE = FIXTURES / "torch" / "dcp_dims_4r" / "ckpt"

stages = importlib.import_module("ckptcore.conversion.pipeline")  # `ckptcore.convert` is the verb
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of other users")
MINE, OTHER = 4711, 4712  # users that no machine has


def convert(source: Path, place: Path, **options: Any) -> Any:
    settings = options.pop("settings", ckptcore.Settings(workers=1))
    return ckptcore.convert(
        str(source),
        str(place / "out"),
        settings=settings,
        to="safetensors",
        max_file_size=options.pop("max_file_size", 9_000),
        catalog=False,  # of another user
        **options,
    )


def half_done(source: Path, place: Path, files: int = 2) -> Path:
    """The staging folder of a run that was stopped when some files were finished."""
    ready = ckptcore.prepare(str(source), str(place / "out"), to="safetensors", max_file_size=9_000)
    assert len(ready.files) > files
    ckptcore.execute(ready, range(files), settings=ckptcore.Settings(workers=1))
    return place / ".out.ckptcore"


def copied(left: Path, place: Path) -> Path:
    """The staging folder of a stopped run, for tests in which its files are not kept."""
    return Path(shutil.copytree(left, place / ".out.ckptcore"))


def weights(place: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted((place / "out").glob("*.safetensors")):
        found |= load_file(file)
    return found


def right(source: Path, place: Path) -> bool:
    expected, found = load_file(source), weights(place)
    return sorted(found) == sorted(expected) and all(torch.equal(found[n], expected[n]) for n in found)


def picture(folder: Path) -> dict[str, Any]:
    """Everything that a folder holds: kinds, owners, modes, times and bytes."""
    found = {}
    for path in sorted([folder, *folder.rglob("*")]):
        seen = path.lstat()
        data = (
            path.read_bytes()
            if stat.S_ISREG(seen.st_mode)
            else os.readlink(path)
            if path.is_symlink()
            else ""
        )
        found[str(path)] = (seen.st_mode, seen.st_uid, seen.st_ino, seen.st_mtime_ns, data)
    return found


def refused(call: Callable[[], Any], code: str = "staging-foreign") -> CkptError:
    with pytest.raises(CkptError) as caught:
        call()
    assert caught.value.code == code, caught.value
    assert caught.value.hint
    return caught.value


def precious(tmp_path: Path) -> Path:
    folder = tmp_path / "precious"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "thesis").write_text("years of work")
    (folder / "thesis").write_text("more years of work")
    return folder


def as_user(uid: int, call: Callable[[], Any], **env: str) -> None:
    """Runs a call in a process of another user; fails as it fails."""
    here, there = multiprocessing.Pipe(duplex=False)

    def run() -> None:
        try:
            os.environ.update(env)
            if uid:
                os.setgroups([])
                os.setgid(MINE)
                os.setuid(uid)
            call()
            there.send("")
        except BaseException:
            there.send(traceback.format_exc())

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    found = here.recv() if here.poll(60) else "no answer"
    process.kill()
    process.join()
    assert found == ""
