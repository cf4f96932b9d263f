"""Find the checkpoints below a root, by the formats' own evidence.

The root is listed once, on a bucket in one request for 1,000 objects, without checkpoints that the caller
remembers; after that a folder costs only the reads of the formats' detectors, each range once. A folder with
steps in folders below it is not a checkpoint itself, nor is a part inside a checkpoint. Folders whose names
begin with a dot are skipped: staging folders, caches, sources that are being deleted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ckptcore.catalog.normalize import normal_uri
from ckptcore.errors import AmbiguousModel, UnknownFormat, UnsupportedFormat
from ckptcore.formats import detect
from ckptcore.formats.base import Source, natural
from ckptcore.formats.step_roots import located
from ckptcore.store import Store, join_url, local_path, open_store
from ckptcore.store.file_status import FileStatus
from ckptcore.store.listing import stamp_of, survey, survey_around
from ckptcore.store.subfolder import SubStore
from ckptcore.utils.isolation import error_of
from ckptcore.utils.merged_url import is_merged
from ckptcore.utils.step_names import says_step, step_of

MAX_DEPTH = 12
SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")  # of files that are one save each
# Formats that are refused under these names are folders of several checkpoints.
_SEVERAL = ("olmo-steps", "trainer-folder")


@dataclass(frozen=True)
class Candidate:
    """A place that may be a checkpoint.

    Attributes:
        root: The root that was searched.
        path: Below the root.
        name: The last part of the path.
        step: The training step, or None.
        run: The name of the folder that contains its steps.
        format: The recognised format; empty if there is only the evidence of the name.
        because: The evidence for the format.
        files: The files of the place; none of one that is remembered.
        remembered: Whether it is there, and was not looked into.
    """

    root: str
    path: str
    name: str
    step: int | None
    run: str
    format: str
    because: tuple[str, ...]
    files: Mapping[str, FileStatus]
    remembered: bool = False

    @property
    def uri(self) -> str:
        """Its path or URL."""
        return join_url(self.root, self.path)

    @property
    def stamp(self) -> str:
        """A value that changes when one of its files is rewritten."""
        return stamp_of(self.files)


def discover(
    root: str, *, include: Sequence[str] = (), skip: Collection[str] = (), remembered: Collection[str] = ()
) -> tuple[Candidate, ...]:
    """Find the candidates below a root, not the root itself.

    Args:
        root: Path or URL of a folder.
        include: Globs on paths below the root; empty means all.
        skip: URIs that are not sources; nothing below them is either.
        remembered: URIs of checkpoints on object stores that are not to be listed.

    Returns:
        The candidates, the lowest step first.

    Raises:
        CkptError: An error of `survey`.
    """
    root = root.rstrip("/") or root
    outputs, remembered_paths = frozenset(s.rstrip("/") for s in skip), frozenset[str]()
    if local_path(root) is None and not is_merged(root):
        remembered_paths = _paths_below(root, remembered)
        # An output inside a step is among the step's files.
        beside = {p for p in _paths_below(root, outputs) if not any(map(step_of, p.split("/")[:-1]))}
        files, present_paths = survey_around(root, remembered_paths | beside)
        remembered_paths &= present_paths
    else:
        files = survey(root)
    looking = _Looking(root, outputs, remembered_paths)
    looking.into("", files, 0)
    candidates = [c for c in looking.found if matches(c.path, include)]
    return tuple(sorted(candidates, key=lambda c: (c.step is None, c.step or 0, natural(c.path))))


def matches(path: str, include: Sequence[str]) -> bool:
    """Return whether a path below a root matches its globs; no globs match all."""
    return not include or any(fnmatchcase(path, glob) for glob in include)


def step_and_run(root: str, path: str) -> tuple[int | None, str]:
    """Return the step in the nearest part of a path, and the folder that contains the steps.

    >>> step_and_run("/runs", "llama/step-300"), step_and_run("/runs/llama", "step-300/actor")
    ((300, 'llama'), (300, 'llama'))
    """
    parts = path.split("/")
    above = root.rstrip("/").rsplit("/", 1)[-1]
    for position in range(len(parts) - 1, -1, -1):
        step = step_of(parts[position])
        if step is not None:
            return step, parts[position - 1] if position else above
    return None, parts[-2] if len(parts) > 1 else above


class _Once(SubStore):
    """A store that reads each range once: the detectors of several formats ask for the same."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, "")
        self.url, self.local = store.url, store.local
        self._kept: dict[tuple[str, int, int], bytes] = {}

    def forget(self) -> None:
        """Keep nothing of what was read: the next folder is another one."""
        self._kept.clear()

    def read(self, path: str, start: int, length: int) -> bytes:
        """Return exactly ``length`` bytes."""
        byte_range = (path, start, length)
        if byte_range not in self._kept:
            self._kept[byte_range] = super().read(path, start, length)
        return self._kept[byte_range]


class _Looking:
    def __init__(self, root: str, skip: frozenset[str], remembered: frozenset[str]) -> None:
        self.root, self._skip, self._remembered = root, skip, remembered
        self._above: dict[str, set[str]] = {}  # folder -> its folders that are remembered, or hold such
        for path in remembered:
            parts = path.split("/")
            for n, name in enumerate(parts):
                self._above.setdefault("/".join(parts[:n]), set()).add(name)
        self._store = _Once(open_store(root))
        self.found: list[Candidate] = []

    def into(self, folder: str, files: Mapping[str, FileStatus], depth: int) -> None:
        """Search a folder for candidates. files: paths relative to it."""
        children, direct_files = self._by_folder(folder, files)
        for name, status in direct_files.items():
            if name.endswith(SUFFIXES) and says_step(name) and not self._skips(_joined_path(folder, name)):
                self._file(folder, name, status)
        for child in sorted(children, key=natural):
            path = _joined_path(folder, child)
            if not child.startswith(".") and not self._skips(path) and depth < MAX_DEPTH:
                self._folder(path, child, children[child], depth + 1)

    def _folder(self, path: str, name: str, files: Mapping[str, FileStatus], depth: int) -> None:
        if path in self._remembered:
            step, run = step_and_run(self.root, path)
            self.found.append(Candidate(self.root, path, name, step, run, "", (), {}, remembered=True))
            return
        visible = {
            p: f for p, f in files.items() if not any(part.startswith(".") for part in p.split("/")[:-1])
        }
        if path in self._above:  # what has checkpoints below it is none
            self.into(path, visible, depth)
            return
        children, direct_files = _by_folder(visible)
        steps = any(step_of(c) is not None for c in children) and step_of(name) is None
        saves = any(n.endswith(SUFFIXES) and says_step(n) for n in direct_files) and step_of(name) is None
        if steps or saves:
            self.into(path, visible, depth)
            return
        recognised, several = self._detect(path, files)
        loose = bool(children) and step_of(name) is None and _is_loose(direct_files)
        if recognised is not None and not loose:
            self._add(path, name, *recognised, files)
            return
        before = len(self.found)
        self.into(path, visible, depth)
        if recognised is not None and not any(c.format for c in self.found[before:]):
            self.found[before:] = []
            self._add(path, name, *recognised, files)
        elif len(self.found) == before and files and (several or step_of(name) is not None):
            self._add(path, name, "", (), files)

    def _detect(
        self, path: str, files: Mapping[str, FileStatus]
    ) -> tuple[tuple[str, tuple[str, ...]] | None, bool]:
        """Return (format and evidence, or None) and whether formats see more than one checkpoint."""
        self._store.forget()
        everything = Source(self._store, None, {f"{path}/{p}": f.nbytes for p, f in files.items()})
        try:
            source, way = located(everything.below(path))
            detected, evidence = detect(source)
        except UnknownFormat:
            return None, False
        except AmbiguousModel:
            return None, True
        except UnsupportedFormat as error:
            name = str(error.values.get("format", ""))
            return (None, True) if name in _SEVERAL else ((name, (error.message,)), False)
        except Exception as error:  # recognised enough to be checked and reported
            return ("", (error_of(error).message,)), False
        return (detected.name, (*way, *evidence.because)), False

    def _file(self, folder: str, name: str, status: FileStatus) -> None:
        path = _joined_path(folder, name)
        self._store.forget()
        try:
            detected, evidence = detect(Source(self._store, path, {path: status.nbytes}))
        except UnknownFormat:
            self._add(path, name, "", (), {name: status})
        except Exception as error:
            ended = error_of(error)
            self._add(path, name, str(ended.values.get("format", "")), (ended.message,), {name: status})
        else:
            self._add(path, name, detected.name, evidence.because, {name: status})

    def _add(
        self, path: str, name: str, form: str, because: tuple[str, ...], files: Mapping[str, FileStatus]
    ) -> None:
        step, run = step_and_run(self.root, path)
        self.found.append(Candidate(self.root, path, name, step, run, form, because, files))

    def _by_folder(
        self, folder: str, files: Mapping[str, FileStatus]
    ) -> tuple[dict[str, dict[str, FileStatus]], dict[str, FileStatus]]:
        children, direct_files = _by_folder(files)
        return {name: {} for name in self._above.get(folder, ())} | children, direct_files

    def _skips(self, path: str) -> bool:
        return join_url(self.root, path) in self._skip


def _paths_below(root: str, uris: Collection[str]) -> frozenset[str]:
    """Return the paths below a root of those URIs that are below it."""
    above = f"{normal_uri(root)}/"
    return frozenset(uri.removeprefix(above) for uri in map(normal_uri, uris) if uri.startswith(above))


def _by_folder(
    files: Mapping[str, FileStatus],
) -> tuple[dict[str, dict[str, FileStatus]], dict[str, FileStatus]]:
    """Return the files in the folders below, by folder, and the files right here."""
    children: dict[str, dict[str, FileStatus]] = {}
    direct_files: dict[str, FileStatus] = {}
    for path, status in files.items():
        top, slash, rest = path.partition("/")
        if slash:
            children.setdefault(top, {})[rest] = status
        else:
            direct_files[path] = status
    return children, direct_files


def _is_loose(direct_files: Collection[str]) -> bool:
    """Return whether a folder has a single file of tensors, such as an average beside its saves."""
    return "config.json" not in direct_files and sum(n.endswith(SUFFIXES) for n in direct_files) == 1


def _joined_path(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
