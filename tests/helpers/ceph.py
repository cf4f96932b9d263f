"""A private Ceph object gateway for tests: a monitor, a store in memory and a gateway, without systemd.

Its S3 is a real one: signatures are checked, conditional requests are atomic, and parts have rules. Debian
has it (`radosgw`); where it is missing, root installs it once through `.ci/debian`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("radosgw", "ceph-mon", "ceph-osd", "radosgw-admin", "ceph", "monmaptool", "ceph-authtool")
PACKAGES = ("radosgw", "ceph-mon", "ceph-osd")
PATIENCE = 120  # seconds for each step of a start on a busy machine; a quiet one takes 12 for all
INSTALL = Path(__file__).resolve().parents[2] / ".ci" / "debian"
KEY, SECRET = "test", "test-secret"

_CONF = """
[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{mon}
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind msgr1 = false
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
auth allow insecure global id reclaim = false
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon data avail warn = 1
mon data avail crit = 0
mon data = {folder}/mon
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = 2147483648
run dir = {folder}/run
admin socket = {folder}/run/$name.asok
log file = {folder}/log/$name.log
pid file = {folder}/run/$name.pid
keyring = {folder}/keyring
crash dir = {folder}/crash
[client.rgw.a]
rgw data = {folder}/rgw
keyring = {folder}/keyring
rgw frontends = beast endpoint=127.0.0.1:{rgw}
rgw thread pool size = 32
rgw enable usage log = false
rgw gc max objs = 8
rgw multipart min part size = {min_part}
"""


def missing() -> list[str]:
    """Return the programs that are not there, after an attempt to install them."""
    found = [name for name in PROGRAMS if shutil.which(name) is None]
    if found and os.geteuid() == 0 and shutil.which("apt-get") is not None:
        subprocess.run([str(INSTALL), *PACKAGES], capture_output=True, timeout=500)
        found = [name for name in PROGRAMS if shutil.which(name) is None]
    return found


@contextlib.contextmanager
def serving(min_part: int = 5 << 20) -> Iterator[dict[str, str]]:
    """Run a gateway, and yield what clients need in their environment.

    Args:
        min_part: Smallest size of a part that is not the last.
    """
    folder = Path(tempfile.mkdtemp(prefix="ceph-"))
    mon, rgw = free_port(), free_port()
    for name in ("mon", "osd", "run", "log", "rgw", "crash"):
        (folder / name).mkdir()
    (folder / "ceph.conf").write_text(
        _CONF.format(fsid=uuid.uuid4(), mon=mon, rgw=rgw, folder=folder, min_part=min_part)
    )
    daemons: list[subprocess.Popen[bytes]] = []

    def call(program: str, *arguments: str, conf: bool = True) -> None:
        command = [program, *(["-c", str(folder / "ceph.conf")] if conf else []), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=folder)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"

    def start(program: str, *arguments: str) -> None:
        command = [program, "-c", str(folder / "ceph.conf"), "-f", *arguments]
        with (folder / "log" / f"{program}.out").open("wb") as out:
            daemons.append(subprocess.Popen(command, stdout=out, stderr=out, cwd=folder))

    try:
        keyring, monmap = str(folder / "keyring"), str(folder / "monmap")
        all_of = [each for what in ("mon", "osd", "mgr") for each in ("--cap", what, "allow *")]
        call("ceph-authtool", keyring, "-C", "--gen-key", "-n", "mon.", "--cap", "mon", "allow *", conf=False)
        call("ceph-authtool", keyring, "--gen-key", "-n", "client.admin", *all_of, conf=False)
        gateway = ["--cap", "mon", "allow rwx", "--cap", "osd", "allow rwx"]
        call("ceph-authtool", keyring, "--gen-key", "-n", "client.rgw.a", *gateway, conf=False)
        store = [
            "--cap",
            "mon",
            "allow profile osd",
            "--cap",
            "osd",
            "allow *",
            "--cap",
            "mgr",
            "allow profile osd",
        ]
        call("ceph-authtool", keyring, "--gen-key", "-n", "osd.0", *store, conf=False)
        fsid = (folder / "ceph.conf").read_text().split("fsid = ")[1].split()[0]
        call(
            "monmaptool",
            "--create",
            "--fsid",
            fsid,
            "--addv",
            "a",
            f"[v2:127.0.0.1:{mon}]",
            monmap,
            conf=False,
        )
        call("ceph-mon", "-i", "a", "--mkfs", "--monmap", monmap, "--keyring", keyring)
        start("ceph-mon", "-i", "a")
        disk = str(uuid.uuid4())
        call("ceph", "osd", "new", disk)
        call("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk)
        start("ceph-osd", "-i", "0")
        start("radosgw", "-n", "client.rgw.a")
        user = ["--uid=t", "--display-name=t", f"--access-key={KEY}", f"--secret-key={SECRET}"]
        call("radosgw-admin", "user", "create", *user)
        wait_for(rgw)
        yield {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{rgw}",
        }
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(timeout=10)
            daemon.kill()
            daemon.wait()
        shutil.rmtree(folder)


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(port: int) -> None:
    """Wait until a server on this machine answers at a port."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            assert time.monotonic() < until, "the server does not answer"
            time.sleep(0.2)
        else:
            return
