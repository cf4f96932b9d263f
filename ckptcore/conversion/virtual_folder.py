"""Open a checkpoint as the folder that `export` would write, without writing it.

The plan of the export says where every byte of its files comes from. Sizes and small files are known when the
folder is opened; tensors are read, cast and verified when their bytes are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

from blake3 import blake3

from ckptcore.conversion.pinned_source import inspected, pinned
from ckptcore.errors import Finding, UsageError
from ckptcore.execution.virtual_files import VirtualFiles
from ckptcore.planning.compose import compose
from ckptcore.planning.request import Request, Settings


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
