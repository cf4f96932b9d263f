"""Test that a process is said to have ended only where that is proven."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ckptcore.utils import processes
from ckptcore.utils.processes import has_ended, this_process

PRINT = "import sys; from ckptcore.utils.processes import this_process; print(*this_process(), flush=True); "


def test_a_process_has_ended_when_it_has():
    with subprocess.Popen(
        [sys.executable, "-c", PRINT + "sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        other = tuple(child.stdout.readline().split())
        assert len(other) == len(this_process())
        assert not has_ended(other)
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie, for its parent has not asked
        assert has_ended(other)
        child.wait()
        assert has_ended(other)


def test_a_number_that_is_another_process_now():
    pid, started, *machine = this_process()
    assert has_ended((pid, str(int(started) - 1), *machine))
    assert not has_ended(this_process())


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("given", ["", "another"])
def test_one_of_another_machine_or_an_unknown_one_may_be_alive(at, given):
    ended = [*this_process()]
    ended[1] = "1"
    assert has_ended(ended)
    ended[at] = given
    assert has_ended(ended) is (at == 1 and given == "another")
    assert not has_ended(ended[:3])
    assert not has_ended(())


def test_a_process_that_is_hidden_may_be_alive(monkeypatch):
    """Another user's, where /proc is mounted with hidepid."""

    def refused(_pid, _number):
        raise PermissionError

    pid, _, *machine = this_process()
    monkeypatch.setattr(os, "kill", refused)
    assert has_ended((pid, "1", *machine))
    monkeypatch.setattr(processes, "_read", lambda path: machine[1] if "boot_id" in path else "")
    assert not has_ended((pid, "1", *machine))


def test_where_proc_is_another_namespace_s_nobody_has_ended(monkeypatch):
    """After `unshare --pid` without `--mount-proc`, /proc has other processes at these numbers."""
    ended = (*this_process()[:1], "1", *this_process()[2:])
    assert has_ended(ended)
    follow = os.readlink
    monkeypatch.setattr(os, "readlink", lambda path: "4711" if path == "/proc/self" else follow(path))
    assert this_process()[1] == ""
    assert not has_ended(ended)
