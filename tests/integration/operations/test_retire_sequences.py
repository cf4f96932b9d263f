"""Test retire against links, mounts, moves, new saves, clocks and edited rows, on both databases.

Each sequence ends with a complete source at its place, or with one whose every byte is proven elsewhere.
"""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest
from retire_sequences import NO_DIGESTS, data_of, move, rewrite, run_sequence
from retiring import MEANS, on_both, snapshot

from ckptcore.conversion.pipeline import convert
from ckptcore.planning.request import Request

SEQUENCES = {}


def sequence(function):
    """Add a sequence to the table."""
    SEQUENCES[function.__name__] = function
    return function


# What is no attack at all must still be deleted: else all that follows proves nothing.


@sequence
def nothing_happens(w):
    w.make().deletes()


@sequence
def moved_away_and_back(w):
    w.make()
    move(w.source, w.elsewhere / "x")
    move(w.elsewhere / "x", w.source)
    w.deletes()


@sequence
def child_moved_with_a_link_left(w):
    w.make()
    move(w.child, w.elsewhere / "archive")
    w.child.symlink_to(w.elsewhere / "archive")
    w.deletes()


@sequence
def child_restored_from_a_backup(w):
    w.make()
    shutil.copytree(w.child, w.elsewhere / "backup")
    shutil.rmtree(w.child)
    move(w.elsewhere / "backup", w.child)
    w.deletes()


@sequence
def a_file_the_child_has_under_another_name(w):
    """Its digest is known in the child, and proven there."""
    w.make()
    name = "model.safetensors"
    shutil.copy(w.child / name, w.source / "export-of-it.bin")
    w.deletes()


# The child's path leads to the source: the source proves itself.


@sequence
def child_is_a_link_to_the_source(w):
    w.make("plain")
    shutil.rmtree(w.child)
    w.child.symlink_to(w.source)
    w.keeps("both names lead to")
    w.keeps("both names lead to", take=True)


@sequence
def folder_above_the_child_is_a_link(w):
    w.make("plain")
    shutil.rmtree(w.child.parent)
    w.child.parent.symlink_to(w.source.parent)
    w.keeps("both names lead to", take=True)


@sequence
def child_without_digests_is_a_link(w):
    w.make("plain", settings=NO_DIGESTS)
    shutil.rmtree(w.child)
    w.child.symlink_to(w.source)
    w.keeps("both names lead to", take=True)


@sequence
def child_is_a_chain_of_links_through_dots(w):
    w.make("plain")
    shutil.rmtree(w.child)
    (w.elsewhere / "one").symlink_to(w.source.parent / ".." / w.run / "step-1")
    w.child.symlink_to(w.elsewhere / ".." / "elsewhere" / "one")
    w.keeps("both names lead to")


@sequence
def child_file_is_a_hard_link(w):
    w.make("plain")
    (w.child / "model.safetensors").unlink()
    os.link(w.source / "model.safetensors", w.child / "model.safetensors")
    w.keeps("are one file", str(w.child / "model.safetensors"), str(w.source / "model.safetensors"))
    w.keeps("are one file", take=True)


@sequence
def child_file_is_a_link(w):
    w.make("plain")
    (w.child / "model.safetensors").unlink()
    (w.child / "model.safetensors").symlink_to(w.source / "model.safetensors")
    w.keeps()
    w.keeps(take=True)


@sequence
def child_is_a_mount_of_the_source(w):
    w.make("plain")
    w.mount(w.source, w.child)
    w.keeps("both names lead to")
    w.keeps("both names lead to", take=True)


@sequence
def folder_above_the_child_is_a_mount(w):
    w.make("plain")
    w.mount(w.source.parent, w.child.parent)
    w.keeps("both names lead to", take=True)


@sequence
def source_is_a_mount_of_the_child(w):
    w.make("plain")
    w.mount(w.child, w.source)
    w.keeps(take=True)
    w.unmount()
    assert snapshot(w.child)


@sequence
def child_is_inside_the_source(w):
    w.make()
    move(w.child, w.source / "export")
    w.child.symlink_to(w.source / "export")
    w.keeps("is inside")
    w.keeps("is inside", take=True)


@sequence
def child_is_inside_the_source_by_a_mount(w):
    w.make()
    move(w.child, w.source / "export")
    w.mount(w.source / "export", w.child)
    w.keeps("is inside", take=True)


# What is not part of what was read goes by name only.


@sequence
def names_that_look_like_descriptions(w):
    w.make()
    names = [
        "tokenizer/common.pt",
        "eval/metadata.json",
        "faiss.index.json",
        "old/.metadata",
        "metadata.json",
    ]
    for name in names:
        (w.source / name).parent.mkdir(exist_ok=True)
        (w.source / name).write_bytes(b"{}")
    w.keeps(*names)
    w.keeps(*names, take=True)
    w.deletes(*names)


@sequence
def links_and_pipes(w):
    w.make()
    (w.elsewhere / "tokenizer.json").write_bytes(b"only copy")
    (w.source / "tokenizer.json").symlink_to(w.elsewhere / "tokenizer.json")
    (w.source / "folder").symlink_to(w.elsewhere)
    (w.source / "nowhere").symlink_to("gone")
    os.mkfifo(w.source / "pipe")
    (w.source / "logs" / "deep").mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as bound:
        there = os.getcwd()
        os.chdir(w.source)  # the path of a socket is short
        bound.bind("socket")
        os.chdir(there)
    found = w.keeps()
    kinds = {
        ("tokenizer.json", "link"),
        ("folder", "link"),
        ("nowhere", "link"),
        ("pipe", "FIFO"),
        ("logs/deep/", "empty folder"),
        ("socket", "socket"),
    }
    assert set(found.unproven) == kinds
    w.deletes(*(name for name, _ in kinds))
    assert (w.elsewhere / "tokenizer.json").read_bytes() == b"only copy"


@sequence
def shard_is_a_link_into_another_folder_of_its_own(w):
    w.make()
    data = data_of(w.source)
    (w.source / "blobs").mkdir()
    move(data, w.source / "blobs" / data.name)
    data.symlink_to(Path("blobs") / data.name)
    w.keeps(f"blobs/{data.name}", "link", take=True)


@sequence
def another_save_in_the_folder(w):
    w.make()
    shutil.copytree(w.template.other_step, w.source / "step-0")
    w.keeps("step-0/.metadata", take=True)


@sequence
def an_object_that_the_child_changed(w):
    """An object beside tensors is proven by its value, not by its name."""
    import torch

    w.make()
    shutil.rmtree(w.source)
    shutil.rmtree(w.child)
    w.source.mkdir()
    file, one = w.source / "pytorch_model.bin", w.child.with_suffix(".pt")
    torch.save({**w.template.tensors, "where": Path("/data")}, file)
    convert(Request(str(w.source), str(one)), MEANS, None, w.url)
    w.child = one
    w.keeps("where")
    w.deletes("where")


@sequence
def cast_child(w):
    w.make(dtype="bfloat16")
    w.keeps("--accept-loss cast")
    w.keeps("--accept-loss cast", take=True)
    found = w.retire("*")
    assert (found.fate.value, w.source.exists()) == ("unsafe", True)
    assert w.retire(cast=True).fate.value == "deleted"


# Saved again since, and clocks that say otherwise.


@sequence
def resaved_with_sizes_and_times_restored(w):
    w.make()
    rewrite(data_of(w.source), data_of(w.template.other_step).read_bytes())
    w.keeps("--fingerprint")
    w.keeps(take=True)


@sequence
def resaved_while_the_converters_clock_was_ahead(w):
    w.make()
    w.sql("UPDATE conversion SET started_at = :at", at="2099-01-01 00:00:00")
    rewrite(data_of(w.source), data_of(w.template.other_step).read_bytes(), restore=False)
    w.keeps("since it was converted")


@sequence
def resaved_by_a_machine_whose_clock_was_behind(w):
    w.make()
    data = data_of(w.source)
    data.unlink()
    shutil.copy(data_of(w.template.other_step), data)
    os.utime(data, (1, 1))
    w.keeps("since it was converted")


@sequence
def replaced_by_a_copy_of_another_step(w):
    w.make()
    seen = data_of(w.source).stat()
    shutil.rmtree(w.source)
    shutil.copytree(w.template.other_step, w.source)
    os.utime(data_of(w.source), ns=(seen.st_atime_ns, seen.st_mtime_ns))
    w.keeps()
    w.keeps(take=True)


@sequence
def status_changed_alone(w):
    w.make()
    data_of(w.source).chmod(0o640)
    w.keeps("status", "--fingerprint")
    w.deletes(take=True)


# Out of the root.


@sequence
def run_moved_away_with_a_link_left(w):
    w.make()
    move(w.source.parent, w.elsewhere / "archive")
    w.source.parent.symlink_to(w.elsewhere / "archive")
    w.keeps("a link", kept=w.elsewhere)
    w.keeps("a link", kept=w.elsewhere, take=True)


@sequence
def source_moved_away_with_a_link_left(w):
    w.make()
    move(w.source, w.elsewhere / "step-1")
    w.source.symlink_to(w.elsewhere / "step-1")
    w.keeps("link", kept=w.elsewhere, take=True)
    assert w.source.is_symlink()


@sequence
def root_moved_away_with_a_link_left(w):
    w.make()
    move(w.root, w.elsewhere / "runs")
    w.root.symlink_to(w.elsewhere / "runs")
    w.keeps("through a link", kept=w.elsewhere, take=True)


@sequence
def row_that_climbs_out_of_the_root(w):
    w.make()
    move(w.source, w.elsewhere / "step-1")
    out = f"{w.root}/{w.run}/../../elsewhere/step-1"
    w.sql("UPDATE checkpoint SET uri = :out WHERE uri = :uri", out=out, uri=str(w.source))
    w.keeps("is not below", kept=w.elsewhere)
    w.keeps("is not below", kept=w.elsewhere, take=True)


@sequence
def something_mounted_below_the_source(w):
    w.make()
    (w.elsewhere / "shared").mkdir()
    (w.elsewhere / "shared" / "a").write_bytes(b"of others")
    w.mount(w.elsewhere / "shared", w.source / "shared")
    found = w.retire("*", take=True)
    assert (found.fate.value, "mounted" in found.why[0]) == ("unsafe", True)
    assert (w.elsewhere / "shared" / "a").exists()


@sequence
def another_file_system_below_the_source(w):
    w.make()
    w.mount("none", w.source / "scratch", "-t", "tmpfs")
    (w.source / "scratch" / "a").write_bytes(b"of others")
    found = w.retire("*")
    assert (found.fate.value, "another folder is mounted at" in found.why[0]) == ("unsafe", True)
    assert (w.source / "scratch" / "a").exists()


# Rows that a user edited.


@sequence
def child_with_less_and_an_edited_fingerprint(w):
    w.make(exclude=("scale",))
    mine = "SELECT fingerprint FROM conversion WHERE source_uri = :uri"
    w.keeps()
    full = Request(str(w.source), str(w.elsewhere / "whole"))
    convert(full, MEANS, None, w.url)  # so that the source's own is known
    shutil.rmtree(w.elsewhere / "whole")
    w.sql(
        f"UPDATE checkpoint SET fingerprint = ({mine} ORDER BY id DESC LIMIT 1) WHERE uri = :child",
        uri=str(w.source),
        child=str(w.child),
    )
    w.keeps()
    w.keeps(take=True)


@sequence
def source_with_an_edited_fingerprint(w):
    w.make(exclude=("scale",))
    theirs = "SELECT fingerprint FROM conversion WHERE source_uri = :uri"
    w.sql(f"UPDATE checkpoint SET fingerprint = ({theirs}) WHERE uri = :uri", uri=str(w.source))
    w.keeps("does not match those of its tensors")
    w.keeps(take=True)


@sequence
def row_of_an_older_version(w):
    w.make()
    w.sql("UPDATE conversion SET source_stamp = NULL, source_ctime = NULL")
    w.keeps("is not known", "--fingerprint")
    w.deletes(take=True)


@sequence
def row_without_status_times(w):
    w.make()
    w.sql("UPDATE conversion SET source_ctime = NULL")
    w.keeps("status", "--fingerprint")
    w.deletes(take=True)


@sequence
def lineage_edited_to_another_child(w):
    w.make()
    w.sql("UPDATE checkpoint SET uri = :other WHERE uri = :uri", uri=str(w.child), other=str(w.elsewhere))
    convert(Request(str(w.template.other_step), str(w.tmp / "o2")), MEANS, None, False)
    shutil.copytree(w.tmp / "o2", w.elsewhere, dirs_exist_ok=True)
    w.keeps()
    w.keeps(take=True)


@sequence
def child_overwritten_and_its_digest_edited(w):
    from blake3 import blake3

    w.make()
    other = w.tmp / "o2"
    convert(Request(str(w.template.other_step), str(other)), MEANS, None, False)
    data = (other / "model.safetensors").read_bytes()
    (w.child / "model.safetensors").write_bytes(data)
    w.sql(
        "UPDATE checkpoint_file SET digest = :new WHERE checkpoint_id = "
        "(SELECT id FROM checkpoint WHERE uri = :uri)",
        new=blake3(data).hexdigest(),
        uri=str(w.child),
    )
    w.keeps("has other tensors")


@sequence
def rows_of_the_childs_files_removed(w):
    w.make()
    w.sql(
        "DELETE FROM checkpoint_file WHERE checkpoint_id = (SELECT id FROM checkpoint WHERE uri = :uri)",
        uri=str(w.child),
    )
    w.deletes()  # what the child holds is read, whatever is recorded about its files


@sequence
def child_called_its_own_source(w):
    w.make("plain")
    w.sql(
        "UPDATE conversion_io SET checkpoint_id = (SELECT id FROM checkpoint WHERE uri = :uri) "
        "WHERE direction = 'out' AND checkpoint_id = (SELECT id FROM checkpoint WHERE uri = :child)",
        uri=str(w.source),
        child=str(w.child),
    )
    w.keeps()


@sequence
def two_sources_and_one_child(w):
    """The later conversion replaced what proved the earlier source."""
    w.make()
    newest = w.source.with_name("step-2")
    rewrite(data_of(newest), data_of(w.template.other_step).read_bytes(), restore=False)
    convert(Request(str(newest), str(w.child), overwrite=True), MEANS, None, w.url)
    w.keeps()
    w.keeps(take=True)


MOUNTS = [name for name in SEQUENCES if "mount" in name or "file_system" in name]


@pytest.fixture(scope="module")
def can_mount(tmp_path_factory):
    """Return whether this user can mount on this machine."""
    at = tmp_path_factory.mktemp("mount")
    done = os.geteuid() == 0 and os.system(f"mount --bind {at} {at} 2>/dev/null") == 0
    if done:
        os.system(f"umount {at}")
    return done


# What rows say, and what a transaction leaves.
ROWS = (
    "nothing_happens",
    "row_that_climbs_out_of_the_root",
    "source_with_an_edited_fingerprint",
    "row_of_an_older_version",
    "row_without_status_times",
    "lineage_edited_to_another_child",
    "rows_of_the_childs_files_removed",
    "child_called_its_own_source",
)


@pytest.mark.alike(22)
@pytest.mark.parametrize(("shared", "name"), on_both(SEQUENCES, ROWS), indirect=["shared"])
def test_no_unproven_byte_is_deleted(name, shared, template, can_mount, tmp_path, monkeypatch):
    if name in MOUNTS and not can_mount:
        pytest.skip("needs to mount")
    run_sequence(SEQUENCES[name], template, shared, tmp_path, monkeypatch)
