"""Send exports to the Hugging Face hub, one branch or tag a step.

1. `objections` of the catalog decide whether an output may be shown to others, as for an alias.
2. Every file is read once: it must have the digest that the catalog recorded when it was written. The same
   read gives the digests by which the hub stores files.
3. What the branch has already is not sent; a branch with anything else is refused. Large files arrive before
   the commit, so a killed run leaves no half of a model, and the next one finds what arrived.
4. The files must not have changed meanwhile. One commit makes the branch hold exactly this folder.
5. The commit is listed and compared with the files: sizes and digests.

The catalog has each push as a conversion that reads the output: while it runs, nothing purges the files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptcore.catalog import aliases
from ckptcore.catalog.conversions import unfinished_requests
from ckptcore.catalog.types import FileRow, State
from ckptcore.conversion.source_digests import differs
from ckptcore.errors import (
    CkptError,
    Conflict,
    DamagedCheckpoint,
    DestinationExists,
    DestinationUnwritable,
    Finding,
    NotComplete,
    OutputMismatch,
    SourceChanged,
    StorageTrouble,
    UnprovenCheckpoint,
    UsageError,
)
from ckptcore.operations.recorded_run import recorded_run
from ckptcore.operations.registered_files import UnchangedFiles, listing_findings, require_recorded
from ckptcore.reading.file_digests import digests_of
from ckptcore.store import Store, local_path, open_store
from ckptcore.store.hub_repository import HubFile, HubPlace, HubRefs, HubRepository, hub_place, is_of_hub
from ckptcore.utils.foreign_text import InvalidText, decoded
from ckptcore.utils.isolation import attempt
from ckptcore.utils.part_digest import Hasher, hasher_like
from ckptcore.utils.text import count, listed
from ckptcore.utils.units import show_size
from ckptcore.utils.version import __version__
from ckptcore.utils.workers import Progress, ProgressMeter

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog

VERB = "push"
STEP = "{step}"  # in a URL: the step of each output
CARD = "README.md"
_ERROR_OF_STATE: Mapping[str, type[CkptError]] = {
    State.DAMAGED: DamagedCheckpoint,
    State.INCOMPLETE: NotComplete,
}
_MOST_CARD = 1 << 20  # bytes
_NOT_SENT = "nothing was sent"
_BEGINS = "begins_at"  # in the request of a push that creates the branch: the commit that it begins with


class FileFate(StrEnum):
    """What becomes of a file.

    same: the branch has it. new: it is sent. changed: the branch has another one of that name. removed: the
    branch has it, and the output does not.
    """

    SAME = "same"
    NEW = "new"
    CHANGED = "changed"
    REMOVED = "removed"


class PushOutcome(StrEnum):
    """What becomes of an output. present: the branch or tag has all of it."""

    PUSHED = "pushed"
    PRESENT = "present"
    PLANNED = "would-push"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class PushRules:
    """How outputs are sent.

    Attributes:
        tag: Name each commit by a tag in place of a branch.
        overwrite: Let a branch or tag that holds something else hold the output from now on.
        create: Create the repository, private, where there is none.
        card: File to send as the model card in place of the output's own.
        accept: Codes of alarms that do not stop it.
        dry_run: Read and compare, and send nothing.
    """

    tag: bool = False
    overwrite: bool = False
    create: bool = False
    card: Path | None = None
    accept: Collection[str] = ()
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file of an output. sha256, blob: see `HubFile`; empty before it was read."""

    content: Path | bytes
    nbytes: int
    sha256: str = ""
    blob: str = ""

    def equals(self, file: HubFile) -> bool:
        """Report whether the hub has the same file, as far as this one was read."""
        if self.nbytes != file.nbytes:
            return False
        return not self.sha256 or (self.sha256 == file.sha256 if file.sha256 else self.blob == file.blob)


@dataclass(frozen=True, slots=True)
class PushedFile:
    """A file, its SHA-256 (empty if it is removed) and what becomes of it."""

    path: str
    nbytes: int
    sha256: str
    fate: FileFate


@dataclass(frozen=True, slots=True)
class Pushed:
    """What became of one output.

    Attributes:
        uri: The output.
        url: The branch or tag.
        outcome: What became of it.
        commit: The commit that holds it; None in a dry run that found none.
        files: Its files, and those that the branch loses.
        conversion: Id in the catalog.
        error: Why it failed.
    """

    uri: str
    url: str
    outcome: PushOutcome
    commit: str | None = None
    files: tuple[PushedFile, ...] = field(default=(), repr=False)
    conversion: str | None = None
    error: CkptError | None = None

    @property
    def sent(self) -> tuple[PushedFile, ...]:
        """The files that the branch did not have."""
        return tuple(file for file in self.files if file.fate in (FileFate.NEW, FileFate.CHANGED))

    @property
    def sent_bytes(self) -> int:
        """Their bytes. The hub may have had some of them, and was sent fewer."""
        return sum(file.nbytes for file in self.sent)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        form = {name: getattr(self, name) for name in ("uri", "url", "commit", "conversion")}
        return form | {
            "outcome": self.outcome.value,
            "files": [
                {"path": f.path, "bytes": f.nbytes, "sha256": f.sha256 or None, "fate": f.fate.value}
                for f in self.files
            ],
            "sent_files": len(self.sent),
            "sent_bytes": self.sent_bytes,
            "error": None if self.error is None else self.error.as_dict(),
        }


@dataclass(frozen=True, slots=True)
class _Export:
    """An output that may be sent: its row, its files, and its step."""

    uri: str
    id: str
    files: tuple[FileRow, ...]
    step: int | None


@dataclass(frozen=True, slots=True)
class _Target:
    """What the hub has at a place.

    Attributes:
        place: The branch or tag.
        commit: Its commit; None if there is none.
        files: The files of that commit.
        blank: Whether nothing of anybody is there.
        branch: The branch that takes the commit: that one, or one for the time until the tag names it.
        parent: The commit that the branch is at; None if the branch must be created.
        start: The commit that a new branch begins with; None if there is no commit yet.
        base: The files of the parent, or of that commit.
        is_blank_branch: Whether nothing of anybody is on the branch.
    """

    place: HubPlace
    commit: str | None
    files: Mapping[str, HubFile]
    blank: bool
    branch: str
    parent: str | None
    start: str | None
    base: Mapping[str, HubFile]
    is_blank_branch: bool


def require_hub_url(url: str) -> None:
    """Raise `UsageError` if a URL, with or without `STEP`, names no branch or tag of a repository."""
    hub_place(url.replace(STEP, "0"))


def push_each(
    catalog: Catalog,
    folders: Sequence[str],
    url: str,
    rules: PushRules,
    progress: Progress | None = None,
    on_item: Callable[[Pushed], None] = lambda _: None,
) -> tuple[Pushed, ...]:
    """Send outputs. One that fails does not keep the others from being sent.

    Args:
        catalog: The catalog.
        folders: Outputs, by path.
        url: ``hf://ORG/NAME@BRANCH``; ``{step}`` in it is the step of each output.
        rules: How they are sent.
        progress: Called with the stage and bytes.
        on_item: Called for each output.

    Raises:
        CkptError: The error of the output, if there is one only.
        UsageError: Two outputs would go to one place, or the URL names none.
    """
    if len(folders) == 1:
        only = push(catalog, folders[0], url, rules, progress)
        on_item(only)
        return (only,)
    if STEP not in url:
        raise UsageError(
            f"{count(len(folders), 'output')} cannot go to {url!r}: it needs {STEP}",
            hint=f"hf://ORG/NAME@step-{STEP}",
        )
    places: dict[str, str] = {}
    results = []
    with catalog.kept_open():
        for folder in folders:
            item = attempt(_push_apart, catalog, folder, url, rules, progress, places)
            if isinstance(item, CkptError):
                item = Pushed(folder, places.get(folder, url), PushOutcome.FAILED, error=item)
            results.append(item)
            on_item(item)
    return tuple(results)


def _push_apart(
    catalog: Catalog,
    folder: str,
    url: str,
    rules: PushRules,
    progress: Progress | None,
    places: dict[str, str],
) -> Pushed:
    """Send one of several outputs, to a place that no other one has had. places: folder -> its URL."""
    place = _place_of(_export(catalog, folder, rules), url).url
    # Places are known only with each step: two outputs may turn out to have one.
    sent = next((name for name, taken in places.items() if taken == place), None)
    if sent is not None:
        raise UsageError(f"{folder} and {sent} cannot both go to {place}", hint="push one of them alone")
    places[folder] = place
    return push(catalog, folder, url, rules, progress)


def push(
    catalog: Catalog, folder: str, url: str, rules: PushRules, progress: Progress | None = None
) -> Pushed:
    """Send one output.

    Args:
        catalog: The catalog.
        folder: Its path.
        url: As of `push_each`.
        rules: How it is sent.
        progress: Called with the stage and bytes.

    Raises:
        Conflict: The branch moved meanwhile.
        DamagedCheckpoint: The output is not what was written.
        DestinationExists: The branch or tag holds something else.
        DestinationUnwritable: The hub refuses.
        NotComplete: The output is not complete.
        OutputMismatch: The commit does not hold what was sent.
        SourceChanged: A file changed while it was sent; nothing was committed.
        StorageTrouble: The hub or the network failed for now.
        UnprovenCheckpoint: Nothing has proven the output.
        UsageError: The URL names no branch or tag of a model repository, or the output is no local folder.
    """
    export = _export(catalog, folder, rules)
    # Before the hub is asked: a wrong URL or output sends no request.
    place = _place_of(export, url)
    repository = HubRepository(place.repository)
    named = _named_files(export, rules.card)
    target = _target(catalog, repository, _refs(repository, place, rules), place, rules)
    _require_free(target, named, rules)  # before any work: sizes tell most of what is something else
    _require_own_branch(target, named, rules)
    request: dict[str, Any] = {"repository": place.repository, "revision": place.revision, "tag": rules.tag}
    if target.parent is None:
        # Recorded before the branch exists, so that the next run knows it as its own.
        request[_BEGINS] = target.start
    recording = recorded_run(catalog, VERB, export.uri, place.url, request)
    # A dry run records nothing, and a push is on record before it reads: nothing purges the files meanwhile.
    with nullcontext("") if rules.dry_run else recording as conversion, closing(open_store(folder)) as store:
        unchanged = UnchangedFiles(
            store, [name for name, file in named.items() if isinstance(file.content, Path)]
        )
        local = _read(export, store, named, progress)
        # Digests are of files that did not change while they were read.
        unchanged.require()
        # Asked a second time, now with digests instead of sizes.
        _require_free(target, local, rules)
        _require_own_branch(target, local, rules)
        commit = target.commit if _is_equal(local, target.files) else None  # that has all of it
        outcome = PushOutcome.PLANNED if commit is None else PushOutcome.PRESENT
        files = _fates(local, target.base if commit is None else target.files)
        if rules.dry_run:
            return Pushed(export.uri, place.url, outcome, commit, files)
        if commit is None:
            # The last look at the files is right before the commit.
            outcome, commit = PushOutcome.PUSHED, _send(repository, target, local, files, unchanged)
            # What the hub lists is compared: an answer alone proves nothing.
            _require_listed(repository, target, commit, local)
        if rules.tag:
            _tag(repository, target, commit)
        pushed = Pushed(export.uri, place.url, outcome, commit, files, conversion)
        nbytes = sum(file.nbytes for file in local.values())
        catalog.pushed(conversion, export.id, commit, bytes_in=nbytes, bytes_out=pushed.sent_bytes)
    return pushed


def _export(catalog: Catalog, folder: str, rules: PushRules) -> _Export:
    """Return an output that the catalog knows, and that others may see."""
    path = local_path(folder)
    if path is None or not path.is_dir():
        raise UsageError(f"cannot push {folder}: it is no local folder", hint="name a folder of this machine")
    registered = catalog.at(folder)
    if registered is None:
        raise UnprovenCheckpoint(
            f"cannot push {folder}: the catalog does not know it",
            hint="record it: ckptcore catalog rebuild --made FOLDER --digests; then ckptcore verify-export",
        )
    row, files = registered
    with catalog.reading() as conn:
        objection = aliases.objections(conn, {row.id: folder}, rules.accept).get(row.id)
    if objection is not None:
        kind = _ERROR_OF_STATE.get(row.state, UnprovenCheckpoint)
        raise kind(f"cannot push {folder}: {objection.reason}", hint=objection.step)
    undigested = [file.path for file in files if file.digest is None]
    if undigested or not files:
        raise UnprovenCheckpoint(
            f"cannot push {folder}: the catalog has no digest of {listed(undigested) or 'its files'}",
            hint=f"record them: ckptcore catalog rebuild --made {folder} --digests",
        )
    return _Export(row.uri, row.id, files, row.step)


def _place_of(export: _Export, url: str) -> HubPlace:
    if STEP in url and export.step is None:
        raise UsageError(f"cannot push {export.uri} to {url!r}: the catalog knows no step of it")
    return hub_place(url.replace(STEP, str(export.step)))


def _named_files(export: _Export, card: Path | None) -> dict[str, LocalFile]:
    """Return the files of an output by name, unread. card: the file to send as the model card.

    Raises:
        DamagedCheckpoint: They are not those that were recorded, by name and size.
        UsageError: The hub takes no files of these names.
    """
    reserved = [file.path for file in export.files if is_of_hub(file.path)]
    if reserved:
        raise UsageError(
            f"cannot push {export.uri}: {listed(reserved)} would be git's own in a repository",
            hint=f"remove it, and record the rest: ckptcore catalog rebuild --made {export.uri} --digests",
        )
    other_size = () if card is None else (CARD,)
    require_recorded(export.uri, listing_findings(export.uri, export.files, other_size), _NOT_SENT)
    folder = Path(export.uri)
    files = {file.path: LocalFile(folder / file.path, file.nbytes) for file in export.files}
    if card is not None:
        files[CARD] = _card(card)
    return dict(sorted(files.items()))


def _card(path: Path) -> LocalFile:
    try:
        with path.open("rb") as file:  # a pipe has a card, too, and a device may have no end
            data = file.read(_MOST_CARD + 1)
    except OSError as error:
        raise UsageError(f"cannot read --card {path}: {error.strerror}") from error
    if len(data) > _MOST_CARD:
        raise UsageError(f"cannot send --card {path}: it has more than {show_size(_MOST_CARD)}")
    try:
        decoded(data)
    except InvalidText as error:
        raise UsageError(f"cannot send --card {path}: {error}", hint="name a Markdown file") from error
    sha256, blob = _hub_hashers(len(data))
    for hasher in (sha256, blob):
        hasher.update(data)
    return LocalFile(data, len(data), sha256.hexdigest(), blob.hexdigest())


def _hub_hashers(nbytes: int) -> tuple[Hasher, Hasher]:
    """Return hashers for the two digests by which the hub stores a file: SHA-256, and git's of a blob."""
    return hashlib.sha256(), hashlib.sha1(b"blob %d\0" % nbytes, usedforsecurity=False)


def _read(
    export: _Export, store: Store, files: Mapping[str, LocalFile], progress: Progress | None
) -> dict[str, LocalFile]:
    """Read every file once; return them with the hub's digests.

    Raises:
        DamagedCheckpoint: A file has other bytes than the catalog recorded.
    """
    meter = ProgressMeter(progress, "read", sum(file.nbytes for file in files.values()))
    recorded, findings, local = (
        {file.path: file for file in export.files},
        list[Finding](),
        dict[str, LocalFile](),
    )
    for name, file in files.items():
        if isinstance(file.content, bytes):  # the card
            local[name] = file
            continue
        record = recorded[name]
        assert record.digest is not None  # `_export` has refused it
        hashers = [hasher_like(record.digest), *_hub_hashers(file.nbytes)]
        digest, sha256, blob = digests_of(store, name, file.nbytes, hashers)
        wrong = differs(record, digest)
        if wrong is not None:
            findings.append(wrong)
        local[name] = replace(file, sha256=sha256, blob=blob)
        meter.add(file.nbytes)
    require_recorded(export.uri, findings, _NOT_SENT)
    return local


def _refs(repository: HubRepository, place: HubPlace, rules: PushRules) -> HubRefs:
    """Return the branches and tags of a repository, which is created if that was asked for."""
    refs = repository.refs()
    if refs is None and not rules.create:
        raise DestinationUnwritable(
            f"cannot push to {place.url}: the hub has no such repository, or hides it from this token",
            hint="--create creates it, private; for one that exists, use a token that may write there",
        )
    if refs is None and not rules.dry_run:
        repository.create()
        refs = repository.refs()
    return refs or HubRefs({}, {})


def _target(
    catalog: Catalog, repository: HubRepository, refs: HubRefs, place: HubPlace, rules: PushRules
) -> _Target:
    """Return what the hub has at a place. A tag is put on a commit of a branch that lasts until then."""
    name = place.revision
    others_names, kind = (refs.branches, "branch") if rules.tag else (refs.tags, "tag")
    if name in others_names:
        raise DestinationExists(
            f"{place.url} is a {kind}",
            hint="name another one" + ("" if rules.tag else ", or compare with the tag: --tag"),
        )
    branch = f"pushing-{name}" if rules.tag else name
    parent = refs.branches.get(branch)
    start = repository.first_commit() if refs.branches else None
    present = parent or start
    base = repository.files(present) if present is not None else {}
    # A killed run leaves the branch that it created where the branch began.
    is_blank = parent is None or not base or parent in _begun(catalog, place)
    if not rules.tag:
        return _Target(place, parent, base, is_blank, branch, parent, start, base, is_blank)
    commit = refs.tags.get(name)
    files = repository.files(commit) if commit is not None else {}
    return _Target(place, commit, files, commit is None, branch, parent, start, base, is_blank)


def _begun(catalog: Catalog, place: HubPlace) -> set[Any]:
    """Return the commits with which pushes to a place began a branch, and did not end."""
    with catalog.reading() as conn:
        return {request.get(_BEGINS) for request in unfinished_requests(conn, VERB, place.url)}


def _require_free(target: _Target, local: Mapping[str, LocalFile], rules: PushRules) -> None:
    """Raise `DestinationExists` if a branch or tag holds something else, unless that may be replaced."""
    if target.blank or rules.overwrite:
        return
    changed = [
        name for name, file in local.items() if name in target.files and not file.equals(target.files[name])
    ]
    foreign = [name for name in target.files if name not in local]
    if changed or foreign:
        differences = [f"{n} (another content)" for n in changed] + [
            f"{n} (not in this output)" for n in foreign
        ]
        raise DestinationExists(
            f"{target.place.url} holds something else: {listed(differences)}",
            hint="name another branch or tag, or replace it with --overwrite; its history stays",
            changed=changed,
            foreign=foreign,
        )


def _require_own_branch(target: _Target, local: Mapping[str, LocalFile], rules: PushRules) -> None:
    """Raise `DestinationExists` if the branch that lasts until the tag exists has another one's content.

    A killed run leaves it where it began, or with this output.
    """
    is_own = target.is_blank_branch or _is_equal(local, target.base)
    if rules.tag and not rules.overwrite and not is_own and not _is_equal(local, target.files):
        place = HubPlace(target.place.repository, target.branch)
        raise DestinationExists(
            f"{place.url} holds something else, and the push of a tag needs this branch for a while",
            hint="name another tag, or delete the branch, or let --overwrite replace and delete it",
        )


def _is_equal(local: Mapping[str, LocalFile], files: Mapping[str, HubFile]) -> bool:
    return local.keys() == files.keys() and all(file.equals(files[name]) for name, file in local.items())


def _fates(local: Mapping[str, LocalFile], files: Mapping[str, HubFile]) -> tuple[PushedFile, ...]:
    """Return what becomes of the files of an output, and of those that a branch has."""
    fates = []
    for name, file in local.items():
        is_same = name in files and file.equals(files[name])
        fate = FileFate.SAME if is_same else FileFate.CHANGED if name in files else FileFate.NEW
        fates.append(PushedFile(name, file.nbytes, file.sha256, fate))
    gone = [PushedFile(n, f.nbytes, "", FileFate.REMOVED) for n, f in files.items() if n not in local]
    return (*fates, *gone)


def _send(
    repository: HubRepository,
    target: _Target,
    local: Mapping[str, LocalFile],
    files: Sequence[PushedFile],
    unchanged: UnchangedFiles,
) -> str:
    """Send what the branch does not have; return the commit that holds all of the output."""
    parent = target.parent
    if parent is None:
        parent = repository.first_commit()
        repository.create_branch(target.branch, parent)
    missing = [file.path for file in files if file.fate in (FileFate.NEW, FileFate.CHANGED)]
    removed = [file.path for file in files if file.fate is FileFate.REMOVED]
    if not missing and not removed:
        return parent
    try:
        upload = repository.send(target.branch, {name: local[name].content for name in missing})
    except Exception:
        unchanged.require()  # a file that changed is the better reason
        raise
    unchanged.require()
    altered = [name for name, digest in upload.digests().items() if digest != local[name].sha256]
    if altered:
        raise SourceChanged(f"{listed(altered)} changed while it was sent", hint="run the command again")
    message = f"{target.place.revision}: {count(len(local), 'file')} exported by ckptcore {__version__}"
    try:
        return upload.commit(parent, removed, message)
    except (Conflict, DestinationUnwritable, StorageTrouble):  # the answer may be lost, and not the commit
        commit = attempt(_committed, repository, target.branch, local)
        if commit is None or isinstance(commit, CkptError):
            raise
        return commit


def _committed(repository: HubRepository, branch: str, local: Mapping[str, LocalFile]) -> str | None:
    """Return the commit of a branch, if it holds all of an output and nothing else."""
    refs = repository.refs()
    commit = None if refs is None else refs.branches.get(branch)
    return commit if commit is not None and _is_equal(local, repository.files(commit)) else None


def _require_listed(
    repository: HubRepository, target: _Target, commit: str, local: Mapping[str, LocalFile]
) -> None:
    """Compare what the hub lists of a commit with the files that were read."""
    listed_files = repository.files(commit)
    wrong = [
        name
        for name, file in local.items()
        if name not in listed_files or not file.equals(listed_files[name])
    ]
    wrong += [name for name in listed_files if name not in local]
    if wrong:
        raise OutputMismatch(
            f"commit {commit} of {target.place.url} does not hold what was sent: {listed(wrong)}",
            hint="it is there already; send it again with --overwrite, and report it if that fails, too",
            commit=commit,
        )


def _tag(repository: HubRepository, target: _Target, commit: str) -> None:
    """Let a tag name the commit, and delete the branch that held it until then.

    Raises:
        Conflict: The tag names another commit than when it was compared.
    """
    refs = repository.refs() or HubRefs({}, {})
    name = target.place.revision
    named = refs.tags.get(name)
    if named not in (commit, target.commit):
        raise Conflict(
            f"{target.place.url} was {'created' if target.commit is None else 'moved'} meanwhile",
            hint="run the command again",
        )
    if named != commit:
        repository.tag(name, commit, replace=named is not None)
    if refs.branches.get(target.branch) == commit:
        repository.delete_branch(target.branch)
