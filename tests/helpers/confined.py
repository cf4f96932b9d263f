"""A process that may write below one folder only, and that has no network.

`confine` is an audit hook: Python asks it before it opens, makes, moves or removes anything. What would leave
the folder ends the process with `ESCAPED` and the name, before it is done. What C code does by itself is not
seen: a test looks at its canaries, too.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

ESCAPED = 97  # exit code
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_Place = tuple[Any, int]  # a path, and the descriptor of the folder that it starts from, or -1

# What an event changes, of its arguments: https://docs.python.org/3/library/audit_events.html
CHANGED: Mapping[str, Callable[[tuple[Any, ...]], tuple[_Place, ...]]] = {
    "open": lambda a: ((a[0], -1),) if a[2] & WRITING else (),
    "os.chmod": lambda a: ((a[0], a[2]),),
    "os.chown": lambda a: ((a[0], a[3]),),
    "os.link": lambda a: ((a[0], a[2]), (a[1], a[3])),  # a second name is a way to write to the first
    "os.mkdir": lambda a: ((a[0], a[2]),),
    "os.remove": lambda a: ((a[0], a[1]),),
    "os.rename": lambda a: ((a[0], a[2]), (a[1], a[3])),
    "os.rmdir": lambda a: ((a[0], a[1]),),
    "os.removexattr": lambda a: ((a[0], -1),),
    "os.setxattr": lambda a: ((a[0], -1),),
    "os.symlink": lambda a: ((a[1], a[2]),),
    "os.truncate": lambda a: ((a[0], -1),),
    "os.utime": lambda a: ((a[0], a[3]),),
    "shutil.rmtree": lambda a: ((a[0], -1),),
}
ELSEWHERE = (os.devnull,)
_MARKS = ("/dev/shm/.ckptcore-process-", "/tmp/.ckptcore-process-")  # see `ckptcore.utils.processes`


def confine(folder: str) -> None:
    """Confines this process, for ever, to a folder. TMPDIR should be in it."""
    root = os.path.realpath(folder)
    sys.dont_write_bytecode = True
    tempfile.tempdir = None  # what the environment says now

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("socket.connect", "socket.sendto"):
            raise OSError(errno.ENETUNREACH, "this process has no network")
        if event == "socket.getaddrinfo":
            raise socket.gaierror(socket.EAI_NONAME, "this process has no network")
        if event in CHANGED:
            for path in _places(CHANGED[event](arguments)):
                if not path.startswith((root + "/", *_MARKS)) and path not in (root, *ELSEWHERE):
                    _end(event, path)

    sys.addaudithook(hook)


def _places(given: tuple[_Place, ...]) -> Iterator[str]:
    """Absolute paths: the folders' links are followed, the last name is as it is."""
    for path, folder in given:
        if isinstance(path, int) or path is None:  # what is open already
            continue
        text = os.fsdecode(path)
        above = os.getcwd() if folder is None or folder < 0 else os.readlink(f"/proc/self/fd/{folder}")
        head, name = os.path.split(os.path.join(above, text))
        if "\0" in text:  # no file is called so
            continue
        try:
            yield os.path.normpath(os.path.join(os.path.realpath(head), name))
        except UnicodeEncodeError:
            continue


def _end(event: str, path: str) -> NoReturn:
    os.write(2, f"ESCAPED: {event} {path!r}\n".encode("utf-8", "backslashreplace"))
    os._exit(ESCAPED)
