"""Test that retire, killed at any step, on both databases, leaves the source restored or proven elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import signal

import pytest
from retiring import World, on_both, snapshot
from retiring import delete_now as retire

from ckptcore.catalog import obligations, open_catalog
from ckptcore.custody import replacing
from ckptcore.custody import set_aside as aside
from ckptcore.operations.retention import purge
from ckptcore.operations.retention.policy import Policy
from ckptcore.operations.retention.replacement import Allowed


def _is_at(name):
    """Let this process die at the n-th call of a function: (where, attribute, n, after the call)."""
    where, attribute, last, behind = FAULTS[name]
    step, calls = getattr(where, attribute), []

    def dying(*given, **options):
        if attribute == "mkdir" and not str(given[0]).startswith(".step-1."):
            return step(*given, **options)
        calls.append(1)
        if len(calls) == last and not behind:
            os.kill(os.getpid(), signal.SIGKILL)
        result = step(*given, **options)
        if len(calls) == last and behind:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(where, attribute, dying)


FAULTS = {
    "before the folder that it is moved to": (aside.os, "mkdir", 1, False),
    "before its record": (aside.os, "mkdir", 1, True),
    "in its record": (aside.SetAsideRecord, "dump", 1, True),
    "before it is moved": (aside.LocalSetAside, "move_in", 1, False),
    "moved and not committed": (aside.LocalSetAside, "move_in", 1, True),
    "committed": (purge, "_read_child", 1, False),
    "read": (purge, "_read_child", 1, True),
    "its copy has a record": (replacing, "add_obligations", 1, True),
    "obliged and not committed": (obligations, "put", 1, True),
    "before the first name goes": (aside.LocalSetAside, "remove", 1, False),
    "one name gone": (aside, "_unlink", 1, True),
    "two names gone": (aside, "_unlink", 2, True),
    "in a folder below": (aside, "_unlink", 4, True),
    "before the last folder": (aside, "_remove_folder", 2, False),
    "before its record goes": (aside, "_forget", 1, False),
    "removed": (aside.LocalSetAside, "remove", 1, True),
}


def killed(world, name):
    """Retire in a process of its own that is killed."""
    gone = os.fork()
    if not gone:
        try:
            _is_at(name)
            with open_catalog(world.url) as catalog:
                retire(catalog, Policy(1), world.name, yes=True, allowed=Allowed(loss=("notes/*",)))
        finally:
            os._exit(1)  # it was to die before
    assert os.waitpid(gone, 0)[1] == signal.SIGKILL


@pytest.mark.alike(3)
@pytest.mark.parametrize(
    ("shared", "name"),
    on_both(FAULTS, ("moved and not committed", "committed", "one name gone")),
    indirect=["shared"],
)
def test_a_killed_run_leaves_the_source_or_its_proof(name, shared, template, tmp_path):
    world = World(template, *shared, tmp_path, re.sub(r"\W", "-", name)).make()
    (world.source / "notes").mkdir()
    for n in range(3):
        (world.source / "notes" / f"{n}.txt").write_bytes(b"given up")
    before = snapshot(world.source)
    killed(world, name)
    world.holds_all(world.child)
    world.retire(last=3)
    assert world.left == ()
    if world.source.exists():
        assert snapshot(world.source) == before
        world.deletes("notes/*")
    assert sorted(os.listdir(world.source.parent)) == ["step-2"]
    assert world.catalog.show(str(world.source)).checkpoint.state == "deleted"


@pytest.mark.parametrize(
    ("shared", "name"), on_both(["one name gone", "in a folder below"], ()), indirect=["shared"]
)
def test_the_rest_is_kept_without_proof_by_its_child(name, shared, template, tmp_path):
    world = World(template, *shared, tmp_path, "gone-" + name.replace(" ", "-")).make()
    (world.source / "notes").mkdir()
    for n in range(3):
        (world.source / "notes" / f"{n}.txt").write_bytes(b"given up")
    killed(world, name)
    home = next(world.source.parent.glob(".*.ckptcore"))
    rest = snapshot(home)
    file = world.child / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + b"!")
    world.retire(last=3)
    assert (len(world.left), str(home) in world.left[0]) == (1, True)
    assert snapshot(home) == rest
    file.write_bytes(data)
    world.retire(last=3)
    assert (world.left, home.exists()) == ((), False)


@pytest.mark.parametrize("shared", ["sqlite"], indirect=True)
def test_a_foreign_folder_is_not_an_interrupted_deletion(shared, template, tmp_path):
    """Folders named like interrupted deletions: without a record, with a forged one, of another catalog."""
    world = World(template, *shared, tmp_path, "forged").make()
    run = world.source.parent
    for n, record in enumerate(
        (
            None,
            b"{}",
            b"[" * 100_000,
            b'{"version":1,"checkpoint":"x","child":"y","uri":"%s","things":{}}' % bytes(world.source),
        )
    ):
        home = run / f".step-1.retiring-0000000{n}.ckptcore"
        shutil.copytree(template.dcp, home / "step-1")
        if record is not None:
            (home / "record.json").write_bytes(record)
    (run / ".step-1.retiring-0000000b.ckptcore").mkdir()
    (run / ".step-1.retiring-0000000b.ckptcore" / "record.json").write_bytes(b"of another user")
    (run / ".step-1.retiring-0000000a.ckptcore").symlink_to(world.elsewhere)
    before = snapshot(run)
    world.retire(last=3)
    assert len(world.left) == 6
    assert snapshot(run) == before
    shutil.rmtree(run)


@pytest.mark.parametrize("shared", ["sqlite", "postgresql"], indirect=True)
def test_a_run_leaves_alone_what_another_is_deleting(shared, template, tmp_path, monkeypatch):
    world = World(template, *shared, tmp_path, "two-runs").make()
    seen = []

    def other(*_):
        left = retire(world.catalog, Policy(3), world.name, yes=True, purging=True).left
        seen.append((left, world.source.exists()))

    step = purge._read_child
    monkeypatch.setattr(purge, "_read_child", lambda *given: (other(), step(*given))[1])
    world.deletes()
    assert seen == [((), False)]
