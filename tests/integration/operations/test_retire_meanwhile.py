"""Test retire against changes after each of its steps, on both databases."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from retire_sequences import data_of, move, rewrite, run_sequence
from retiring import MEANS, on_both, snapshot

from ckptcore.conversion.pipeline import convert
from ckptcore.custody import set_aside as aside
from ckptcore.errors import UsageError
from ckptcore.operations.retention import purge, setting_aside
from ckptcore.planning.request import Request

SEQUENCES = {}


def sequence(function):
    """Add a sequence to the table."""
    SEQUENCES[function.__name__] = function
    return function


# While it runs. Hooks: (module, name) -> what happens behind its first call.


def behind(w, where, name, happens, *, before=False):
    """Run a function once, after (or before) a step."""
    step, once = getattr(where, name), []

    def meanwhile(*given, **options):
        if before and not once:
            once.append(happens(*given))
        result = step(*given, **options)
        if not once:
            once.append(happens(*given))
        return result

    w.monkeypatch.setattr(where, name, meanwhile)


@sequence
def child_rewritten_behind_its_proof(w):
    w.make()
    file = w.child / "model.safetensors"
    behind(w, purge, "_read_child", lambda *_: rewrite(file, bytes(8) * 4))
    w.keeps("while this ran")


@sequence
def child_exchanged_while_the_source_is_away(w):
    w.make()
    other = w.tmp / "o2"
    convert(Request(str(w.template.other_step), str(other)), MEANS, None, False)

    def exchanged(*_):
        shutil.rmtree(w.child)
        move(other, w.child)

    behind(w, aside.LocalSetAside, "move_in", exchanged)
    w.keeps("has other tensors")
    assert w.catalog.show(str(w.source)).checkpoint.state == "present"


@sequence
def child_deleted_while_the_source_is_away(w):
    w.make()
    behind(w, aside.LocalSetAside, "move_in", lambda *_: shutil.rmtree(w.child))
    w.keeps("does not exist")


@sequence
def child_becomes_a_link_to_where_the_source_is_kept(w):
    w.make("plain")

    def linked(away):
        shutil.rmtree(w.child)
        w.child.symlink_to(Path(away.home, w.source.name))

    behind(w, aside.LocalSetAside, "move_in", linked)
    w.keeps("both names lead to one place")


@sequence
def source_exchanged_for_a_link(w):
    w.make()
    for before in (False, True):

        def linked(*_):
            move(w.source, w.elsewhere / "step-1")
            w.source.symlink_to(w.elsewhere / "step-1")

        before_link = snapshot(w.source)
        behind(w, setting_aside, "_mark_retired", linked, before=before)
        assert w.retire().fate.value in ("unsafe", "kept")
        assert snapshot(w.elsewhere / "step-1") == before_link
        w.source.unlink()
        move(w.elsewhere / "step-1", w.source)
        w.monkeypatch.undo()


@sequence
def source_exchanged_for_another_folder(w):
    """Equal in every byte, but it was not read."""
    w.make()

    def copied(*_):
        move(w.source, w.elsewhere / "step-1")
        shutil.copytree(w.elsewhere / "step-1", w.source)

    behind(w, setting_aside, "_mark_retired", copied)
    w.keeps("while this ran")


@sequence
def file_comes_while_the_source_is_moved(w):
    w.make()

    def late(away):
        Path(away.home, w.source.name, "late.pt").write_bytes(b"only copy")

    behind(w, aside.LocalSetAside, "move_in", late)
    assert "while this ran" in w.retire().why[0]
    assert (w.source / "late.pt").read_bytes() == b"only copy"
    w.holds_all(w.source)


@sequence
def file_comes_while_the_source_is_removed(w):
    w.make()

    def late(*_):
        home = next(w.source.parent.glob(".*.ckptcore"))
        (home / "step-1" / "late.pt").write_bytes(b"only copy")

    behind(w, aside, "_unlink", late)
    found = w.retire()
    assert found.fate.value == "deleted"
    assert "late.pt" in found.why[-1]
    assert snapshot(w.source).keys() == {"late.pt"}
    w.holds_all(w.child)


@sequence
def file_changes_while_the_source_is_removed(w):
    w.make()
    name = data_of(w.source).name

    def rewritten(*_):
        home = next(w.source.parent.glob(".*.ckptcore"))
        if (home / "step-1" / name).exists():
            rewrite(home / "step-1" / name, b"new")

    behind(w, aside, "_remove_approved", rewritten, before=True)
    assert w.retire().fate.value == "deleted"
    assert (w.source / name).read_bytes()[-3:] == b"new"


@sequence
def the_system_refuses_to_remove_a_name(w):
    w.make()
    unlink = os.unlink

    def refused(name, **options):
        if str(name).endswith(".distcp"):
            raise PermissionError(1, "Operation not permitted")
        unlink(name, **options)

    w.monkeypatch.setattr(aside.os, "unlink", refused)
    found = w.retire()
    w.monkeypatch.undo()
    assert (found.fate.value, "the next run resumes" in found.why[-1]) == ("deleted", True)
    assert not w.source.exists()  # no reader sees half of it
    w.retire(last=3)
    assert w.left == ()
    if w.source.exists():  # it was the first name of all: the source came back
        w.holds_all(w.source)
        w.deletes()
    assert sorted(os.listdir(w.source.parent)) == ["step-2"]
    w.holds_all(w.child)


@sequence
def saved_anew_while_the_source_is_away_and_the_child_fails(w):
    w.make()
    old = snapshot(w.source)

    def anew(*_):
        shutil.copytree(w.template.other_step, w.source)
        shutil.rmtree(w.child)

    behind(w, aside.LocalSetAside, "move_in", anew)
    found = w.retire()
    assert found.fate.value == "unsafe"
    assert snapshot(w.source) == snapshot(w.template.other_step)
    home = next(w.source.parent.glob(".*.ckptcore"))
    assert snapshot(home / "step-1") == old
    w.retire(last=3)  # it must not be removed, and is reported
    assert (len(w.left), str(home) in w.left[0]) == (1, True)
    with pytest.raises(UsageError, match="something else is there now"):
        purge.restore(w.catalog, str(w.source))
    shutil.rmtree(w.source)
    assert purge.restore(w.catalog, str(w.source)) == str(w.source)
    w.retire(last=3)
    assert (snapshot(w.source), w.left) == (old, ())
    assert w.catalog.show(str(w.source)).checkpoint.state == "present"


@sequence
def status_changes_while_it_runs(w):
    w.make()
    behind(w, setting_aside, "_require_same", lambda *_: data_of(w.source).chmod(0o600))
    w.keeps("while this ran")
    w.monkeypatch.undo()
    behind(w, aside.LocalSetAside, "move_in", lambda away: os.utime(data_of(Path(away.home, "step-1"))))
    w.keeps("while this ran", take=True)


# What rows say, and what a transaction leaves.
ROWS = (
    "source_exchanged_for_a_link",
    "child_deleted_while_the_source_is_away",
    "saved_anew_while_the_source_is_away_and_the_child_fails",
)


@pytest.mark.parametrize(("shared", "name"), on_both(SEQUENCES, ROWS), indirect=["shared"])
def test_nothing_that_happens_meanwhile_deletes_an_unproven_byte(
    name, shared, template, tmp_path, monkeypatch
):
    run_sequence(SEQUENCES[name], template, shared, tmp_path, monkeypatch)
