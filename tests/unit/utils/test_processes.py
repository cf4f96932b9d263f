"""Test that a process is said to have ended only where that is proven."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

import pytest

from ckptcore.utils import processes
from ckptcore.utils.processes import forget, has_ended, is_running, is_this, this_process

PRINT = (
    "import sys; from ckptcore.utils import processes; processes._FOLDERS = (sys.argv[1],); "
    "print(*processes.this_process(), flush=True); "
)


def test_a_process_has_ended_when_it_has(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", PRINT + "sys.stdin.read()", str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        other = tuple(child.stdout.readline().split())
        assert len(other) == len(this_process())
        assert not has_ended(other)
        assert is_running(other)
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie, for its parent has not asked
        assert has_ended(other)
        assert not is_running(other)
        child.wait()
        assert has_ended(other)


def test_the_file_of_marks_goes_with_the_last_mark(tmp_path):
    first, second = this_process(), this_process()
    (file,) = tmp_path.iterdir()
    forget(first)
    assert is_this(second)
    assert file.exists()
    forget(second)
    assert not list(tmp_path.iterdir())
    forget(second)
    third = this_process()
    assert is_this(third)
    assert not has_ended(third)


def ended(*given: str) -> tuple[str, ...]:
    """A process that had this one's number before, and has ended; ``given`` replaces (mark,) or nothing."""
    pid, _, namespaces, _ = processes._this_identity()
    boot = processes._this_identity()[3]
    path = processes._paths(pid, "1")[0]
    with open(path, "a") as file:
        file.write("the-mark\n")
    return pid, "1", namespaces, f"{boot}:{given[0] if given else 'the-mark'}"


@pytest.fixture(autouse=True)
def _no_marks(tmp_path, monkeypatch):
    """Marks in a folder of this test."""
    monkeypatch.setattr(processes, "_FOLDERS", (str(tmp_path),))
    monkeypatch.setattr(processes, "_MARKS", processes._Marks())


def test_a_number_that_is_another_process_now():
    assert has_ended(ended())
    assert not has_ended(this_process())


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("given", ["", "another"])
def test_one_of_another_machine_or_an_unknown_one_may_be_alive(at, given):
    process = [*ended()]
    assert has_ended(process)
    process[at] = given
    assert not has_ended(process)
    assert not has_ended(process[:3])
    assert not has_ended(())


@pytest.mark.parametrize("at", range(4))
def test_only_one_that_is_seen_here_is_running(at):
    process = [*this_process()]
    assert is_running(process)
    assert is_running([*process[:3], process[3].partition(":")[0] + ":of a clone"])
    assert not is_running(ended())
    for given in ("", "another"):
        assert not is_running([*process[:at], given, *process[at + 1 :]])
    assert not is_running(process[:3])
    assert not is_running(())


def test_a_process_of_a_clone_of_this_machine_may_be_alive():
    """Boot id, pids and start times are those of the snapshot; what was marked since then is not."""
    assert has_ended(ended())
    assert not has_ended(ended("a mark that another machine has made since the snapshot"))
    assert not has_ended(ended(""))


def test_each_lease_has_its_own_mark_and_this_process_knows_all_of_them():
    first, second = this_process(), this_process()
    assert first[:3] == second[:3]
    assert first[3] != second[3]
    assert first[3].partition(":")[0] == second[3].partition(":")[0]
    assert is_this(first)
    assert is_this(second)
    assert not is_this((*first[:3], f"{first[3]}0"))
    assert not is_this(ended())


def test_a_forked_process_has_marks_of_its_own():
    mine = this_process()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, " ".join(this_process()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    other = tuple(os.read(read, 4096).decode().split())
    os.close(read)
    os.close(write)
    assert other[0] == str(child)
    assert has_ended(other)
    assert not has_ended(mine)


def test_where_no_mark_can_be_written_nobody_has_ended(monkeypatch):
    monkeypatch.setattr(processes, "_FOLDERS", ("/nowhere",))
    assert this_process()[3] == ""
    assert not has_ended(this_process())


def test_a_file_that_another_user_has_put_there_is_not_written(tmp_path):
    pid, started, *_ = processes._this_identity()
    target = tmp_path / "precious"
    target.write_text("x")
    os.symlink(target, processes._paths(pid, started)[0])
    assert this_process()[3] == ""
    assert target.read_text() == "x"


def others_first_mark():
    """Do what another process does first: it makes a mark in a file of its own."""
    processes._MARKS.begin()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(processes._paths(*processes._this_identity()[:2])[0])
    return this_process()


def test_a_process_is_proven_to_have_ended_however_long_ago_it_made_its_last_mark():
    """A lease is renewed for hours without another mark."""
    process = ended()
    os.utime(processes._paths(*process[:2])[0], (1, 1))
    others_first_mark()
    assert has_ended(process)
    others_first_mark()
    assert has_ended(process)


def test_marks_are_removed_some_time_after_their_process_was_seen_to_have_ended():
    process = ended()
    path = processes._paths(*process[:2])[0]
    mine = others_first_mark()
    os.utime(path, (1, 1))
    others_first_mark()
    assert not os.path.exists(path)
    assert os.path.exists(processes._paths(*mine[:2])[0])


def test_marks_of_another_namespace_stay_while_their_process_may_be_alive(monkeypatch):
    with monkeypatch.context() as there:
        there.setattr(processes, "_namespaces", lambda: "pid:[1],time:[2]")
        path = processes._paths("1", "1")[0]
    with open(path, "w") as file:
        file.write("mark\n")
    old = time.time() - processes._STRANGE_S
    os.utime(path, (old + 100, old + 100))
    others_first_mark()
    assert os.path.exists(path)
    os.utime(path, (old - 100, old - 100))
    others_first_mark()
    assert not os.path.exists(path)


def test_a_process_whose_marks_were_removed_makes_new_ones():
    first = this_process()
    os.unlink(processes._paths(*first[:2])[0])
    assert is_this(this_process())
    assert not is_this(first)


def test_a_program_that_replaces_another_in_its_process_has_marks(tmp_path, monkeypatch):
    folders = (str(tmp_path), str(tmp_path / "more"))
    os.mkdir(folders[1])
    monkeypatch.setattr(processes, "_FOLDERS", folders)
    first = this_process()
    processes._MARKS.begin()  # as after `exec`
    second = this_process()
    assert second[3]
    assert is_this(first)
    assert is_this(second)


def test_a_mark_behind_one_that_was_cut_is_read():
    process = this_process()
    with open(processes._paths(*process[:2])[0], "a") as file:
        file.write("cut")
    assert is_this(this_process())


def test_marks_can_be_read_by_other_users():
    before = os.umask(0o077)
    try:
        process = this_process()
    finally:
        os.umask(before)
    assert os.stat(processes._paths(*process[:2])[0]).st_mode & 0o777 == 0o644


def test_a_folder_or_a_pipe_in_place_of_marks_proves_nothing_and_stays_closed():
    process = ended()
    path = processes._paths(*process[:2])[0]
    os.unlink(path)
    for make in (os.mkdir, os.mkfifo):
        make(path)
        opened = len(os.listdir("/proc/self/fd"))
        assert not has_ended(process)
        others_first_mark()
        assert len(os.listdir("/proc/self/fd")) == opened
        (os.rmdir if os.path.isdir(path) else os.unlink)(path)


def test_a_process_that_is_hidden_may_be_alive(monkeypatch):
    """Another user's, where /proc is mounted with hidepid."""

    def refused(_pid, _number):
        raise PermissionError

    process, boot = ended(), processes._this_identity()[3]
    monkeypatch.setattr(os, "kill", refused)
    assert has_ended(process)
    read = processes._read
    own = f"/proc/{process[0]}/stat"
    monkeypatch.setattr(processes, "_started", lambda pid: None)
    monkeypatch.setattr(processes, "_this_identity", lambda: (process[0], "2", process[2], boot))
    assert read(own)
    assert not has_ended(process)


def test_where_proc_is_another_namespace_s_nobody_has_ended(monkeypatch):
    """After `unshare --pid` without `--mount-proc`, /proc has other processes at these numbers."""
    process = ended()
    assert has_ended(process)
    follow = os.readlink
    monkeypatch.setattr(os, "readlink", lambda path: "4711" if path == "/proc/self" else follow(path))
    assert this_process()[1] == ""
    assert not has_ended(process)
