"""Read repositories of the Hugging Face hub, each at one commit.

Of its own because only a hub has commits: a branch that moves while it is read must not mix two of them.
Token and endpoint are those of huggingface_hub (``HF_TOKEN``, ``HF_ENDPOINT``, ``hf auth login``).
"""

from __future__ import annotations

from ckptcore.errors import SourceUnreadable
from ckptcore.store.remote import FsspecStore, retrying

_PREFIXES = {"dataset": "datasets/", "space": "spaces/"}


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
