"""Read repositories of a small hub: HF_ENDPOINT, HF_TOKEN, revisions, and one commit at a time."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import warm
from fake_hub import TOKEN, Answer, Asked, FakeHub, fake_hub
from paths import FIXTURES, ROOT

import ckptcore

SHARDS = FIXTURES / "torch" / "hf_sharded_4r" / "ckpt"


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as hub:
        yield hub


def local(files: dict[str, bytes], folder: Path) -> bytes:
    """Return what a conversion of a local copy gives."""
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    target = folder.with_suffix(".safetensors")
    ckptcore.convert(str(folder), str(target), catalog=False, overwrite=True)
    return target.read_bytes()


def run(hub: FakeHub, home: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | hub.environment(str(home))
    command = [*warm.command(), *argv]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)


def consolidated(hub: FakeHub, out: Path, revision: str = "main") -> subprocess.CompletedProcess[str]:
    source = f"hf://org/model.v1@{revision}"
    return run(hub, out.parent / "home", "consolidate", source, str(out), "--no-catalog")


def test_a_hub_that_names_no_commit_is_refused(hub: FakeHub, tmp_path: Path):
    hub.branches["main"] = hub.commit({f.name: f.read_bytes() for f in SHARDS.iterdir()})
    hub.says_commit = False
    done = consolidated(hub, tmp_path / "out.safetensors")
    assert done.returncode == 8
    assert "does not say which commit" in done.stderr
    assert "None" not in done.stderr


def test_one_commit_is_read(hub: FakeHub, tmp_path: Path):
    files = {f.name: f.read_bytes() for f in SHARDS.iterdir()}
    first = hub.commit(files)
    other = {name: data[:-1] + bytes([data[-1] ^ 1]) for name, data in files.items()}
    second = hub.commit(other)
    hub.branches["main"] = first

    def move(asked: Asked) -> Answer | None:
        if "/tree/" in asked.path:
            hub.branches["main"] = second
        return None

    hub.fault = move
    out = tmp_path / "out.safetensors"
    done = consolidated(hub, out)
    # The branch moved while it was read: what is written is one of the two commits, never a mixture.
    assert done.returncode in (0, 11), done.stderr
    if done.returncode == 0:
        assert out.read_bytes() in (local(files, tmp_path / "first"), local(other, tmp_path / "other"))
        out.unlink()
    hub.fault, hub.asked[:] = lambda _: None, []
    done = consolidated(hub, out, first)
    assert done.returncode == 0, done.stderr
    assert {a.path.split("/")[4] for a in hub.asked if "/resolve/" in a.path} == {first}
    assert out.read_bytes() == local(files, tmp_path / "first")
    assert TOKEN not in done.stderr + done.stdout
    done = run(hub, tmp_path / "home", "inspect", "hf://org/model.v1@gone")
    assert done.returncode == 8, done.stderr
