"""PostgreSQL's server on this machine: its programs, the user who may run it, and whether it answers.

A module of its own for `make up` and for the servers of the tests.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from pathlib import Path

from ckptcore.errors import MissingDependency

DEBIAN = Path("/usr/lib/postgresql")


def programs() -> Path:
    """Return the folder of the newest server: Debian's is outside PATH. Raises `MissingDependency`."""
    newest = sorted(DEBIAN.glob("*/bin"), key=lambda path: -int(path.parent.name))
    for folder in (*newest, Path(os.path.realpath(shutil.which("initdb") or "")).parent):
        if os.access(folder / "initdb", os.X_OK):
            return folder
    raise MissingDependency("PostgreSQL's server is not installed", hint="run apt-get install postgresql")


def account() -> pwd.struct_passwd:
    """Return who runs it: this user, or for root, whom it refuses, ``postgres``, else ``nobody``."""
    if os.geteuid() != 0:
        return pwd.getpwuid(os.geteuid())
    return pwd.getpwnam("postgres" if any(u.pw_name == "postgres" for u in pwd.getpwall()) else "nobody")


def answers(port: int) -> bool:
    """Return whether a server on a port of the loopback address takes connections."""
    command = [str(programs() / "pg_isready"), "--quiet", "--host=127.0.0.1", f"--port={port}"]
    return subprocess.run(command, check=False).returncode == 0
