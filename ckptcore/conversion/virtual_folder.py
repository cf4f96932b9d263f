"""Open a checkpoint as the folder that `export` would write, without writing it.

The plan of the export says where every byte of its files comes from. Sizes and small files are known when the
folder is opened; tensors are read, cast and verified when their bytes are asked for. A conversion proves at
its end that its source did not change meanwhile. A folder that is not written has no such end: the files of
the source are pinned (`pinned`), and one that changes is an error of the next read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

from blake3 import blake3

from ckptcore.checking.source_stamps import digest as stamps_digest
from ckptcore.checking.source_stamps import require_same, settled_ctimes, take_listed, untouched
from ckptcore.conversion.source_digests import inspected
from ckptcore.core.manifest import Manifest
from ckptcore.errors import Finding, SourceChanged, UsageError
from ckptcore.execution.virtual_files import VirtualFiles
from ckptcore.planning.compose import compose
from ckptcore.planning.request import Request, Settings
from ckptcore.store import Store, open_source_store
from ckptcore.store.ahead import ReadsAhead

_HINT = "open it again when nothing writes to the source"


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


@dataclass(frozen=True)
class VirtualFile:
    """A file of the folder. tag: equal for equal bytes, and for no others. nbytes: its size."""

    path: str
    nbytes: int
    tag: str


class VirtualFolder:
    """The files of an export. Safe for threads.

    Attributes:
        files: Its files by path, in natural order.
        warnings: Findings of the plan that do not stop an export.
    """

    def __init__(
        self,
        files: Mapping[str, VirtualFile],
        small: Mapping[str, bytes],
        tensors: VirtualFiles,
        warnings: Sequence[Finding],
    ) -> None:
        self.files, self.warnings = files, tuple(warnings)
        self._small, self._tensors = small, tensors

    @property
    def unverified(self) -> int:
        """Count the stored items that were read, and not compared with a checksum so far."""
        return self._tensors.unverified

    def read(self, path: str, start: int, nbytes: int) -> bytes:
        """Return bytes ``[start, start + nbytes)`` of a file, fewer at its end; see `VirtualFiles.read`."""
        data = self._small.get(path)
        return self._tensors.read(path, start, nbytes) if data is None else data[start : start + nbytes]


@contextmanager
def open_virtual(request: Request, settings: Settings) -> Iterator[VirtualFolder]:
    """Open the folder of an export.

    Args:
        request: The export; nothing is written to its destination.
        settings: Memory, threads and checks.

    Yields:
        The folder.

    Raises:
        CkptError: What `compose` raises: a damaged, incomplete or unmapped source is refused here.
        SourceChanged: The source was rewritten while it was opened.
    """
    if request.verb != "export":
        raise UsageError(f"only an export can be opened without writing it (got {request.verb})")
    manifest = inspected(request)
    composed = compose(request, manifest)
    plans = {plan.path: plan for plan in composed.files}
    with pinned(request, manifest) as source:
        # The plan and the bytes of the source decide every byte of a file.
        seed = f"{composed.plan.digest} {source.identity}"
        files = [VirtualFile(path, plan.nbytes, _tag(seed + path)) for path, plan in plans.items()]
        files += [VirtualFile(path, len(data), _tag(data)) for path, data in composed.extra.items()]
        tensors = VirtualFiles(plans, source.store, composed.plan.items, settings, source.require_same)
        with closing(tensors):
            by_path = {file.path: file for file in sorted(files, key=lambda file: file.path)}
            yield VirtualFolder(by_path, composed.extra, tensors, composed.warnings)


def _tag(content: str | bytes) -> str:
    return blake3(content.encode() if isinstance(content, str) else content).hexdigest(16)
