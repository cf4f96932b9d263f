"""The version: that of the build, or in a checkout that of the commit which is checked out.

A build writes `ckptcore/utils/_version.py` with what git says then. A checkout, which an editable install
points to, changes without a build: there the commit is read from git's files when something asks for the
version. Running git would cost every conversion 10 ms.
"""

from __future__ import annotations

from pathlib import Path

NEXT = "0.2.0.dev0"  # also in pyproject.toml, for builds without git


def _version(package: Path) -> str:
    """Return the version of the package in this folder."""
    root = package.parent
    if (root / "alembic" / "env.py").is_file():  # a checkout, or an archive of one: a wheel has it elsewhere
        commit = checked_out(root / ".git")
        return f"{NEXT}+g{commit[:9]}" if commit else NEXT
    try:
        from ckptcore.utils._version import __version__ as built
    except ModuleNotFoundError:  # copied by hand
        return NEXT
    return built


def checked_out(git: Path) -> str | None:
    """Return the hash of the commit that is checked out, or None if git's files do not say.

    git: The folder ``.git``, or in a second worktree the file that names one.
    """
    try:
        if git.is_file():
            git = git.parent / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref:"):
            return _hash(head)
        branch = head.removeprefix("ref:").strip()
        shared = git / "commondir"
        common = git / shared.read_text(encoding="utf-8").strip() if shared.is_file() else git
        if (common / branch).is_file():
            return _hash((common / branch).read_text(encoding="utf-8").strip())
        for line in (common / "packed-refs").read_text(encoding="utf-8").splitlines():
            commit, _, name = line.partition(" ")
            if name == branch:
                return _hash(commit)
    except (OSError, UnicodeDecodeError):  # no git, or another user's
        pass
    return None


def _hash(text: str) -> str | None:
    return text if len(text) in (40, 64) and set(text) <= set("0123456789abcdef") else None


__version__ = _version(Path(__file__).resolve().parents[1])
