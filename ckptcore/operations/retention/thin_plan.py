"""Plan what a checkpoint loses in place, and prove what it keeps; nothing is changed here.

A kind of training state goes where evidence says that a name is of it (`ckptcore.naming.training_state`), any
other name where a user says it. A tensor of the model part never goes. Everything else that the checkpoint
holds, by custody's account of it, must be in the thinned one when both are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from blake3 import blake3

from ckptcore.catalog.retirements import GivenUp
from ckptcore.checking.examine import inspect, validate
from ckptcore.checking.verdicts import UNREADABLE_CODES
from ckptcore.comparison.fingerprint import fingerprint
from ckptcore.conversion.staging.staging import THINNING
from ckptcore.core.columnar_file import canonical_json
from ckptcore.core.manifest import Manifest
from ckptcore.core.subset import select
from ckptcore.custody.holdings import inner_path, objects_of, rest_of
from ckptcore.errors import (
    AmbiguousModel,
    CkptError,
    DamagedCheckpoint,
    OutputMismatch,
    UnsupportedFormat,
    UsageError,
)
from ckptcore.fingerprints.holdings import OBJECT, TENSOR, Holding, ids_of, numbered, tensor_holdings
from ckptcore.fingerprints.sums import Fingerprinted
from ckptcore.formats import FilePiece, SourceRange, by_name, open_source
from ckptcore.naming.model_part import find_model
from ckptcore.naming.rename import ModelPart
from ckptcore.naming.training_state import TRAINING_STATE, StoredKinds
from ckptcore.operations.retention.replacement import accepted
from ckptcore.planning.request import Settings
from ckptcore.store import join_url, open_source_store
from ckptcore.store.file_status import FileStatus, NameKind
from ckptcore.store.listing import contents
from ckptcore.utils.isolation import attempt
from ckptcore.utils.text import some

OPTIMIZER = "optimizer"
_BLOCK = 8 << 20
_TORCH_FILES = (".pt", ".pth", ".bin")


@dataclass(frozen=True)
class ThinPlan:
    """What a checkpoint loses in place.

    Attributes:
        uri: Its path or URL.
        manifest: Of it.
        things: Everything at its place.
        files: Path -> pieces of each file of the thinned one.
        changed: The files that change or go.
        goes: Name -> what it is, of tensors, objects and files that go.
        asked: The names that a user said.
    """

    uri: str
    manifest: Manifest
    things: Mapping[str, FileStatus]
    files: Mapping[str, tuple[FilePiece, ...]]
    changed: frozenset[str]
    goes: Mapping[str, str]
    asked: tuple[str, ...]

    @property
    def before(self) -> int:
        """Bytes of its files."""
        return sum(thing.nbytes for thing in self.things.values() if thing.kind is NameKind.FILE)

    @property
    def after(self) -> int:
        """Bytes of the files of the thinned one."""
        return sum(map(size_of, self.files.values()))

    @property
    def given_up(self) -> tuple[GivenUp, ...]:
        """What goes, by name."""
        sizes: dict[str, int | None] = {t.fqn: t.nbytes for t in self.manifest.tensors}
        sizes |= {name: thing.nbytes for name, thing in self.things.items()}
        return tuple(GivenUp(name, kind, sizes.get(name)) for name, kind in self.goes.items())

    @property
    def digest(self) -> str:
        """Return the digest of the change: two runs with the same one write the same files."""
        rows = [
            [
                path,
                [
                    [p.path, p.start, p.nbytes] if isinstance(p, SourceRange) else blake3(p).hexdigest()
                    for p in pieces
                ],
            ]
            for path, pieces in self.files.items()
        ]
        form = {"thin": self.manifest.digest, "files": rows}
        return f"{THINNING}{blake3(canonical_json(form)).hexdigest()}"


@dataclass(frozen=True)
class ProvenThin:
    """A thinned checkpoint that was read.

    Attributes:
        manifest: Of it, where it was read.
        tensors: The fingerprints of its tensors.
        holdings: What it holds of what the source held.
        gone: The names of the source that it does not have, of tensors, objects and whole files.
    """

    manifest: Manifest
    tensors: tuple[Fingerprinted, ...]
    holdings: tuple[Holding, ...]
    gone: frozenset[str] = field(default=frozenset(), repr=False)


def plan_thin(uri: str, asked: Sequence[str]) -> ThinPlan | None:
    """Plan what a checkpoint loses; None if it has nothing of that.

    Args:
        uri: Its path or URL.
        asked: Kinds of training state, and globs on names of tensors, objects and files.

    Raises:
        DamagedCheckpoint: It is damaged or incomplete.
        UnsupportedFormat: Its format, or its files, cannot be thinned.
        UsageError: A name is of the model part, or the place holds more than one checkpoint.
    """
    things = contents(uri)
    manifest = inspect(uri)
    errors = [
        f for f in validate(manifest).findings if f.severity == "error" and f.code not in UNREADABLE_CODES
    ]
    if errors:
        raise DamagedCheckpoint(f"{uri} is not complete: {errors[0].message}", findings=tuple(errors))
    if manifest.origin.get("file") is not None or "" in things:
        raise UnsupportedFormat(
            f"cannot thin {uri}: it is one file",
            hint="`ckptcore consolidate` with --exclude writes what stays to another file",
        )
    if inner_path(manifest, uri):
        raise UsageError(f"cannot thin {uri}: the checkpoint is {manifest.root}", hint="name that folder")
    names = names_to_drop(manifest, asked)
    beside = dict(_beside(manifest, uri, things, asked))
    if not names and not beside:
        return None
    thin = by_name(manifest.format).thin
    if isinstance(thin, str):
        raise UnsupportedFormat(
            f"cannot thin {uri}, a {manifest.format} checkpoint: {thin}",
            hint="`ckptcore export` or `consolidate` writes what stays to another place",
        )
    source = open_source(uri)
    with closing(source.store):
        changed = dict(thin(source, manifest, frozenset(names)).files) if names else {}
    changed |= dict.fromkeys(beside, ())
    if not changed:
        return None
    odd = [name for name, thing in things.items() if thing.kind not in (NameKind.FILE, NameKind.FOLDER)]
    if odd:
        raise UsageError(
            f"cannot thin {uri}: {some(odd)} is a link or no file, and would not be there afterwards",
            hint="move it away, or put a copy in its place",
        )
    files = {
        name: changed.get(name, (SourceRange(name, 0, thing.nbytes),) if thing.nbytes else ())
        for name, thing in things.items()
        if thing.kind is NameKind.FILE and changed.get(name, None) != ()
    }
    return ThinPlan(uri, manifest, things, files, frozenset(changed), {**names, **beside}, tuple(asked))


def names_to_drop(manifest: Manifest, asked: Sequence[str]) -> dict[str, str]:
    """Return the tensors and objects of a checkpoint that are asked for, each with what it is.

    Raises:
        UsageError: A glob is on a tensor of the model part.
        AmbiguousModel: Globs are given, and the model part is not known.
    """
    wanted_kinds = {name for name in asked if name in TRAINING_STATE}
    globs = [name for name in asked if name not in TRAINING_STATE]
    kinds, model = StoredKinds(manifest), _model(manifest, required=bool(globs))
    names: dict[str, str] = {}
    of_model = []
    for name, plain in (
        *((t.fqn, TENSOR) for t in manifest.tensors),
        *((b.key, OBJECT) for b in manifest.blobs),
    ):
        kind, named = kinds.kind_of(name), accepted(name, globs)
        if kind not in wanted_kinds and not named:
            continue
        if plain == TENSOR and model is not None and (model.holds(name) or name in model.strays):
            of_model += [name] if named else []
            continue
        names[name] = kind or plain
    if of_model:
        raise UsageError(f"cannot drop {some(of_model)}: a part of the model is never given up")
    return names


def _model(manifest: Manifest, *, required: bool) -> ModelPart | None:
    try:
        return find_model(manifest)
    except AmbiguousModel:
        if required:
            raise
        return None  # what is known as training state is no model


def _beside(
    manifest: Manifest, uri: str, things: Mapping[str, FileStatus], asked: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yield the files that go as a whole, though the reader of the checkpoint uses none of them.

    Those are torch files that hold only what is asked for, such as the Trainer's optimizer.pt, and files that
    a user named.
    """
    unused = {file.path for file in manifest.beside}
    for name in sorted(unused & things.keys()):
        if accepted(name, asked):
            yield name, "file"
        elif name.endswith(_TORCH_FILES):
            alone = attempt(inspect, join_url(uri, name))
            if isinstance(alone, CkptError) or not alone.tensors:
                continue
            kinds = {StoredKinds(alone).kind_of(each) for each in _names(alone)}
            if len(kinds) == 1 and kinds <= TRAINING_STATE.intersection(asked):
                yield name, str(kinds.pop())


def _names(manifest: Manifest) -> list[str]:
    return [*(t.fqn for t in manifest.tensors), *(b.key for b in manifest.blobs)]


def prove_thin(plan: ThinPlan, url: str, settings: Settings) -> ProvenThin:
    """Read a thinned checkpoint and its source, and prove that only what was asked for is gone.

    Args:
        plan: The plan.
        url: Path or URL of the thinned one.
        settings: Memory and threads for reading.

    Returns:
        What was read.

    Raises:
        OutputMismatch: It lacks something else, or holds something more.
        AmbiguousModel: Only what is gone tells which part is the model.
        DamagedCheckpoint: A checksum does not match.
    """
    manifest = inspect(url)
    errors = [f for f in validate(manifest).findings if f.severity == "error"]
    if errors:
        raise OutputMismatch(f"the thinned {plan.uri} does not open: {errors[0].message}")
    gone = frozenset(_names(plan.manifest)) - frozenset(_names(manifest))
    new = frozenset(_names(manifest)) - frozenset(_names(plan.manifest))
    if not gone <= plan.goes.keys() or new:
        odd = sorted(new or gone - plan.goes.keys())
        raise OutputMismatch(f"the thinned {plan.uri} {'has' if new else 'lacks'} {some(odd)}")
    _require_same_model(plan, manifest)
    rows = [n for n, t in enumerate(plan.manifest.tensors) if t.fqn not in gone]
    part = select(plan.manifest, rows)
    sums = fingerprint(manifest, settings).tensors if manifest.tensors else ()
    source_sums = fingerprint(part, settings).tensors if rows else ()
    if sorted(sums) != sorted(source_sums):
        differing = sorted({row[0] for row in {*sums} ^ {*source_sums}})
        raise OutputMismatch(f"tensors of the thinned {plan.uri} differ from its source: {some(differing)}")
    tensors = numbered(tensor_holdings(sums, {t.fqn: t.nbytes for t in manifest.tensors}))
    things = contents(url)
    theirs = (*tensors, *objects_of(manifest), *rest_of(manifest, url, things))
    stays = (h for h in objects_of(plan.manifest) if h.name not in gone)
    rest = (h for h in rest_of(plan.manifest, plan.uri, plan.things) if h.name not in plan.goes)
    ids, unnamed = ids_of(theirs), {(h.kind, h.name) for h in theirs if h.id is None}
    lacking = sorted(
        {h.name for h in (*stays, *rest) if h.id not in ids and (h.id or (h.kind, h.name) not in unnamed)}
    )
    lost = [
        name
        for name in lacking
        if not accepted(name, plan.asked) and not _same_bytes(plan.manifest, manifest, name)
    ]
    if lost:
        raise OutputMismatch(f"the thinned {plan.uri} lacks {some(lost)}")
    files_gone = frozenset(plan.goes.keys() & plan.changed)
    identified = tuple(holding for holding in theirs if holding.id is not None)
    return ProvenThin(manifest, tuple(sums), identified, gone | files_gone)


def _require_same_model(plan: ThinPlan, manifest: Manifest) -> None:
    """Require that the model part is found where it was: else an export would give tensors other names."""
    before, after = attempt(find_model, plan.manifest), attempt(find_model, manifest)
    if isinstance(before, CkptError):
        return
    if isinstance(after, CkptError) or after.prefix != before.prefix:
        raise AmbiguousModel(
            f"cannot thin {plan.uri}: without what goes, nothing tells that its model is "
            f"{before.prefix.rstrip('.') or 'at the top level'} ({before.because})",
            hint="export it, and let `ckptcore retire --rest weights` put the export in its place",
            candidates=[before.prefix],
        )


def _same_bytes(before: Manifest, after: Manifest, name: str) -> bool:
    """Return whether an object is stored in equal bytes: a reader may restate one beside what is gone."""
    digests = [_digest_of_object(manifest, name) for manifest in (before, after)]
    return digests[0] is not None and digests[0] == digests[1]


def _digest_of_object(manifest: Manifest, name: str) -> bytes | None:
    """Return the digest of an object's stored bytes; None if it has no item of its own."""
    item = next((blob.item for blob in manifest.blobs if blob.key == name and blob.unread is None), -1)
    if item < 0:
        return None
    stored, hasher = manifest.items[item], blake3()
    with closing(open_source_store(manifest.root, manifest.versions)) as store:
        path, stop = manifest.files[stored.file].path, stored.start + stored.length
        for start in range(stored.start, stop, _BLOCK):
            hasher.update(store.read(path, start, min(_BLOCK, stop - start)))
    return hasher.digest()


def size_of(pieces: Iterable[FilePiece]) -> int:
    """Return the bytes of a file that consists of these pieces."""
    return sum(piece.nbytes if isinstance(piece, SourceRange) else len(piece) for piece in pieces)
