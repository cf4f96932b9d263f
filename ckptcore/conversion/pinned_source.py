"""Pin the files of a source that is read without a conversion: one that changes meanwhile is an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

from ckptcore.checking.examine import inspect
from ckptcore.checking.source_stamps import digest as stamps_digest
from ckptcore.checking.source_stamps import require_same, settled_ctimes, take_listed, untouched
from ckptcore.core.manifest import Manifest
from ckptcore.errors import SourceChanged
from ckptcore.planning.request import Request
from ckptcore.store import Store, open_source_store
from ckptcore.store.ahead import ReadsAhead

_HINT = "open it again when nothing writes to the source"


def inspected(request: Request) -> Manifest:
    """Return the manifest of a request's source, as a conversion reads it."""
    return inspect(request.source, request.recover, request.keep_quantized, request.weights)


@dataclass(frozen=True)
class PinnedSource:
    """The files of a source, as they were when it was opened.

    Attributes:
        store: Reads them.
        stamps: Path -> stamp.
        ctimes: Path -> ctime.
    """

    store: Store
    stamps: Mapping[str, str | None]
    ctimes: Mapping[str, int | None]

    @property
    def identity(self) -> str:
        """Text that is another one for other files."""
        return f"{stamps_digest(self.stamps)} {stamps_digest(self.ctimes)}"

    def require_same(self, paths: Sequence[str] | None = None) -> None:
        """Raise `SourceChanged` for a file that was rewritten, also in place and with its old times.

        Args:
            paths: The files to look at; None: all.
        """
        if isinstance(self.store, ReadsAhead) and self.store.pins:  # each read proves its version
            return
        paths = list(self.stamps) if paths is None else paths
        require_same(self.stamps, self.store, paths)
        before = {path: self.ctimes[path] for path in paths}
        if not untouched(before, {path: self.store.ctime(path) for path in paths}):
            raise SourceChanged(
                f"{self.store.url} changed since it was opened: the ctime of a file is another", hint=_HINT
            )


@contextmanager
def pinned(request: Request, manifest: Manifest) -> Iterator[PinnedSource]:
    """Open the source of a request whose manifest was read a moment ago.

    Yields:
        The source.

    Raises:
        SourceChanged: It was rewritten since the manifest was read.
    """
    with closing(open_source_store(manifest.root)) as source:
        _, stamps, listed = take_listed(manifest, source, just_read=True)
        ctimes = settled_ctimes(stamps, source)
        if not listed and inspected(request).digest != manifest.digest:
            raise SourceChanged(f"{request.source} was rewritten while it was opened", hint=_HINT)
        require_same(stamps, source)
    with closing(open_source_store(manifest.root, stamps)) as source:
        yield PinnedSource(source, stamps, ctimes)
