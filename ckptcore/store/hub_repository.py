"""Read repositories of the Hugging Face hub, and write branches, tags, and commits of local files.

Each is read at one commit: a branch that moves while it is read must not mix two of them.

Endpoint and token are those of huggingface_hub (``HF_ENDPOINT``,
``HF_TOKEN``, ``hf auth login``), and so is the way of the bytes: large files go to the hub's store of large
files before the commit, by what they hold, so that another run finds those that arrived. A commit happens
completely or not at all, on the parent that it names. Its answer may be lost: who calls `commit` looks again.

The library logs addresses that let anybody write. It is silent here, and no error keeps a token.
"""

from __future__ import annotations

import json
import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptcore.errors import (
    CkptError,
    Conflict,
    DestinationUnwritable,
    SourceUnreadable,
    StorageTrouble,
    UsageError,
)
from ckptcore.redaction import GONE
from ckptcore.store.remote import FsspecStore, retrying
from ckptcore.utils.extras import needed

MAIN = "main"
# As huggingface_hub's `validate_repo_id` has it; a revision is the name of a branch or tag, without a slash.
_URL = re.compile(
    r"hf://(?P<id>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(?P<revision>[^/]{1,200}))?"
)
_REVISION = re.compile(r"[A-Za-z0-9_][\w.+-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PREFIXES = {"dataset": "datasets/", "space": "spaces/"}
_TYPED = frozenset({"datasets", "spaces", "models", "buckets"})
_OF_HUB = ".gitattributes"  # written by the hub: which files are large
# Status of an answer -> what it means for who writes.
_BUSY = frozenset({408, 429, 500, 502, 503, 504})
_MOVED = frozenset({409, 412})
_LOGIN = "log in (hf auth login, or HF_TOKEN) with a token that may write there"


def is_repository(url: str) -> bool:
    """Report whether a URL names a repository of the hub, or a place in one.

    >>> [*map(is_repository, ("hf://org/model@main/a", "hf://org", "hf://datasets/org", "s3://org/model"))]
    [True, False, False, False]
    """
    scheme, _, path = url.partition("://")
    names = [name for name in path.split("/") if name]
    typed = names[:1] in (["datasets"], ["spaces"], ["models"])
    return scheme == "hf" and "::" not in url and len(names) >= 2 + typed and names[0] != "buckets"


class HubStore(FsspecStore):
    """A repository, or a folder in it, at the commit that its revision names when the store is opened."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._root = retrying(self.url, self._at_commit)

    def _at_commit(self) -> str:
        """Return the path in the file system, with the commit as its revision."""
        from huggingface_hub import HfApi

        repository = self._fs.resolve_path(self._root)
        api = HfApi(endpoint=self._fs.endpoint, token=self._fs.token)
        commit = api.repo_info(
            repository.repo_id, repo_type=repository.repo_type, revision=repository.revision
        ).sha
        if not commit:
            raise SourceUnreadable(
                f"cannot read {self.url}: the hub does not say which commit {repository.revision or 'it'} is",
                hint="name a commit as its revision (hf://USER/NAME@COMMIT)",
            )
        inner = f"/{repository.path_in_repo}" if repository.path_in_repo else ""
        return f"{_PREFIXES.get(repository.repo_type, '')}{repository.repo_id}@{commit}{inner}"


@dataclass(frozen=True, slots=True)
class HubPlace:
    """A branch or tag of a model repository. repository: ``org/name``."""

    repository: str
    revision: str

    @property
    def url(self) -> str:
        """The URL of the place."""
        return f"hf://{self.repository}@{self.revision}"


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a commit, as the hub lists it.

    Attributes:
        nbytes: Its size.
        sha256: Of a large file, the digest by which the hub stores it; else None.
        blob: Of another file, git's digest of its content; else None.
    """

    nbytes: int
    sha256: str | None = None
    blob: str | None = None


@dataclass(frozen=True, slots=True)
class HubRefs:
    """The branches and tags of a repository, each with its commit."""

    branches: Mapping[str, str]
    tags: Mapping[str, str]


def hub_place(url: str) -> HubPlace:
    """Return the place that a URL names; without a revision that is the branch ``main``.

    >>> hub_place("hf://org/model@step-1000"), hub_place("hf://org/model").revision
    (HubPlace(repository='org/model', revision='step-1000'), 'main')

    Raises:
        UsageError: The URL names no branch or tag of a model repository.
    """
    parts = _URL.fullmatch(url)
    if parts is None or parts["id"].partition("/")[0] in _TYPED:
        raise UsageError(
            f"cannot write to {url!r}: it must name a model repository and a branch or tag of it",
            hint="hf://ORG/NAME@BRANCH",
        )
    revision = parts["revision"] or MAIN
    # Forty hex digits are read as a commit by the hub, whatever a branch is called.
    if not _REVISION.fullmatch(revision) or _COMMIT.fullmatch(revision) or ".." in revision:
        raise UsageError(
            f"cannot write to {url!r}: {revision!r} cannot name a branch or tag",
            hint="use letters, digits, '.', '-' and '_'; a commit is never written to",
        )
    return HubPlace(parts["id"], revision)


def is_of_hub(name: str) -> bool:
    """Report whether a file of this name is git's or the hub's own in a repository, and is never sent."""
    return name == _OF_HUB or ".git" in name.split("/")


class HubRepository:
    """A model repository that is written to.

    Every method raises `DestinationUnwritable` where the hub refuses, `Conflict` where the repository changed
    meanwhile, and `StorageTrouble` where the hub or the network failed for now.
    """

    def __init__(self, repository: str) -> None:
        self.repository = repository
        with needed("hub", "write to the Hugging Face hub"):
            from huggingface_hub import HfApi
        # Not at import, as the library has it: a program may set it later.
        self._api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)

    def refs(self) -> HubRefs | None:
        """Return the branches and tags; None where there is no such repository."""
        from huggingface_hub.errors import RepositoryNotFoundError

        with self._call("list the branches of"):
            try:
                refs = self._api.list_repo_refs(self.repository)
            except RepositoryNotFoundError as error:
                if error.response.status_code != 404:  # 401: it may well be there
                    raise
                return None
        return HubRefs(
            {ref.name: ref.target_commit for ref in refs.branches},
            {ref.name: ref.target_commit for ref in refs.tags},
        )

    def create(self) -> None:
        """Create the repository, private, unless it exists."""
        with self._call("create"):
            self._api.create_repo(self.repository, private=True, exist_ok=True)

    def files(self, commit: str) -> dict[str, HubFile]:
        """Return the files of a commit by name, sorted, without those that the hub adds itself."""
        from huggingface_hub.hf_api import RepoFile

        with self._call(f"list commit {commit[:8]} of"):
            # The list is made inside of the block: the library sends requests while it is iterated.
            entries = list(self._api.list_repo_tree(self.repository, revision=commit, recursive=True))
        files = sorted((e for e in entries if isinstance(e, RepoFile)), key=lambda file: file.path)
        return {
            file.path: HubFile(file.size, blob=file.blob_id)
            if file.lfs is None
            else HubFile(file.lfs.size, sha256=file.lfs.sha256)
            for file in files
            if file.path != _OF_HUB
        }

    def first_commit(self) -> str:
        """Return the first commit of the repository: what the hub itself makes is empty."""
        with self._call("list the commits of"):
            # Newest first, as the hub lists them.
            return str(self._api.list_repo_commits(self.repository)[-1].commit_id)

    def create_branch(self, name: str, commit: str) -> None:
        """Create a branch at a commit."""
        with self._call(f"create branch {name} of"):
            self._api.create_branch(self.repository, branch=name, revision=commit)

    def delete_branch(self, name: str) -> None:
        """Delete a branch; its commits stay as far as a tag names them."""
        with self._call(f"delete branch {name} of"):
            self._api.delete_branch(self.repository, branch=name)

    def tag(self, name: str, commit: str, *, replace: bool) -> None:
        """Name a commit by a tag. replace: instead of the one that the tag names now."""
        with self._call(f"tag {name} of"):
            if replace:
                # Two steps: the hub has no request that moves a tag.
                self._api.delete_tag(self.repository, tag=name)
            self._api.create_tag(self.repository, tag=name, revision=commit)

    def send(self, branch: str, files: Mapping[str, Path | bytes]) -> HubUpload:
        """Send the large ones of some files; nothing is visible before `HubUpload.commit`.

        Args:
            branch: The branch that will hold them.
            files: Name in the repository -> local file, or content.
        """
        from huggingface_hub import CommitOperationAdd

        with self._call(f"send files to {branch} of"):
            additions = [
                CommitOperationAdd(path_in_repo=name, path_or_fileobj=content)
                for name, content in files.items()
            ]
            self._api.preupload_lfs_files(
                self.repository, additions=additions, revision=branch, free_memory=False
            )
        return HubUpload(self, branch, additions)

    def _commit(
        self, branch: str, parent: str, additions: Sequence[Any], removed: Sequence[str], message: str
    ) -> str:
        from huggingface_hub import CommitOperationDelete

        deletions = [CommitOperationDelete(path_in_repo=name, is_folder=False) for name in removed]
        with self._call(f"commit to {branch} of"):
            commit = self._api.create_commit(
                self.repository,
                operations=[*additions, *deletions],
                commit_message=message,
                revision=branch,
                parent_commit=parent,
            )
        if not _COMMIT.fullmatch(str(commit.oid)):  # the name of a branch would be another commit tomorrow
            raise _not_of_hub(f"cannot commit to {branch} of hf://{self.repository}", repr(commit.oid))
        return str(commit.oid)

    @contextmanager
    def _call(self, action: str) -> Iterator[None]:
        """Call the library quietly; its errors become this package's, without a token."""
        from huggingface_hub.utils import (
            are_progress_bars_disabled,
            disable_progress_bars,
            enable_progress_bars,
        )

        logger, bars = logging.getLogger("huggingface_hub"), not are_progress_bars_disabled()
        level = logger.level
        logger.setLevel(logging.CRITICAL)
        if bars:
            disable_progress_bars()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the hub on metadata of a card: texts of a stranger
                yield
        except Exception as error:
            raise _trouble(f"cannot {action} hf://{self.repository}", error) from None
        finally:
            logger.setLevel(level)
            if bars:
                enable_progress_bars()


class HubUpload:
    """Files that were sent and are in no commit yet."""

    def __init__(self, repository: HubRepository, branch: str, additions: Sequence[Any]) -> None:
        self._repository, self._branch, self._additions = repository, branch, additions

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of each file as the library computed it when it sent the file."""
        return {addition.path_in_repo: addition.upload_info.sha256.hex() for addition in self._additions}

    def commit(self, parent: str, removed: Sequence[str], message: str) -> str:
        """Commit the files; return the commit.

        Args:
            parent: The commit that the branch must be at.
            removed: Names of files that the branch is to lose.
            message: The message of the commit.
        """
        return self._repository._commit(self._branch, parent, self._additions, removed, message)


def _trouble(action: str, error: Exception) -> CkptError:
    """Return this package's error for one of huggingface_hub, or of the client below it."""
    if isinstance(error, CkptError):
        return error
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    answer = _cause(error, HfHubHTTPError)
    # The hub's own answer says more than the library's error about it.
    cause = answer or error.__cause__ or error
    message = _without_token(f"{action}: {' '.join(str(cause or type(cause).__name__).split())}")
    if answer is not None:
        status = answer.response.status_code
        if status in _BUSY:
            return StorageTrouble(message)
        if status in _MOVED:
            return Conflict(message, hint="it changed meanwhile: run the command again")
        # 404 is also what the hub answers for a private repository to those who may not see it.
        return DestinationUnwritable(message, hint=_LOGIN if status in (401, 403, 404) else None)
    if isinstance(error, OfflineModeIsEnabled):
        return DestinationUnwritable(message, hint="unset HF_HUB_OFFLINE")
    if isinstance(error, LocalTokenNotFoundError):
        return DestinationUnwritable(message, hint=_LOGIN)
    if isinstance(error, json.JSONDecodeError):  # which is an OSError, too, with requests
        return _not_of_hub(action, "no JSON")
    # Errors of the client that the library sends by: that of requests, httpx or httpx2, by its version.
    if any(_cause(error, kind) is not None for kind in (*HfHubHTTPError.__bases__, OSError)):
        return StorageTrouble(message)
    if isinstance(error, (LookupError, TypeError, AttributeError)):
        return _not_of_hub(action, f"{type(error).__name__}: {error}")
    if isinstance(error, ValueError):
        return DestinationUnwritable(message, hint="")
    return StorageTrouble(message)


def _not_of_hub(action: str, answer: str) -> StorageTrouble:
    """Return the error for an answer that is not a hub's: a page of a proxy, or of another server."""
    return StorageTrouble(
        f"{action}: the answer is none of a hub ({_without_token(answer)})",
        hint="see whether HF_ENDPOINT names a hub, and whether a proxy answers in its place; then try again",
    )


def _cause(error: BaseException | None, kind: type[Any]) -> Any:
    """Return the first error of a kind among an error and its causes, or None."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__
    return error


def _without_token(text: str) -> str:
    """Return a text without the token that requests carry, whatever it looks like."""
    from huggingface_hub import get_token

    token = get_token()
    return text.replace(token, GONE) if token else text
