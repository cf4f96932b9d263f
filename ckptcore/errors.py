"""Errors: what can go wrong, under which stable code, with which next step, is a retry worthwhile?

A class per thing a caller can act on. The class docstring is the meaning shown in the README's
generated table; `code`, `exit_code`, `transient` and the default `hint` are class attributes.
`Finding` is what a check reports without stopping; every finding code stands in `FINDINGS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from ckptcore.redaction import redacted, redacted_value


class CkptError(Exception):
    """Base of every error that ckptcore raises on purpose.

    Message, hint and values hold no credentials, whatever URL or library they come from: an error goes into
    logs, catalogs and messages to others.
    """

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 4
    transient: ClassVar[bool] = False
    default_hint: ClassVar[str] = ""

    def __init__(self, message: str, *, hint: str | None = None, **values: Any) -> None:
        self.message = redacted(message)
        super().__init__(self.message)
        self.hint = self.default_hint if hint is None else redacted(hint)
        self.values: dict[str, Any] = redacted_value(values)

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process borders (Prefect task runners); keyword-only arguments would be lost.
        return (_rebuild, (type(self), self.message, self.hint, self.values))

    def as_dict(self) -> dict[str, Any]:
        """The JSON face: code, message, hint, values."""
        values = {k: v for k, v in self.values.items() if k != "findings"}
        return {
            "code": self.code,
            "exit_code": self.exit_code,
            "message": self.message,
            "hint": self.hint,
            "values": values,
        }


class DamagedCheckpoint(CkptError):
    """The source has findings: something is missing, torn, altered or contradictory."""

    code, exit_code = "damaged", 1
    default_hint = "run `ckptcore validate SRC --level bytes` for every finding"

    @property
    def findings(self) -> Sequence[Finding]:
        found: Sequence[Finding] = self.values.get("findings", ())
        return found


class UnprovenCheckpoint(DamagedCheckpoint):
    """Nothing is known to be wrong with the source, and nothing proves what has to be known of it."""

    code, exit_code = "unproven", 26
    default_hint = "name what proves it, or take what is there as it is with --recover"


class UnreadablePart(DamagedCheckpoint):
    """A part that was asked for cannot be read; the other parts can."""

    code, exit_code = "unreadable-part", 27
    default_hint = "leave it out by name with --exclude"


class MalformedCheckpoint(DamagedCheckpoint):
    """A header or metadata file of the source cannot be what its format prescribes."""

    code, exit_code = "malformed", 1
    default_hint = "copy the file again from where it was written; if it is the original, report it"


class ChecksumMismatch(MalformedCheckpoint):
    """Stored bytes do not match their stored CRC-32."""

    code = "crc-mismatch"


class UsageError(CkptError):
    """The arguments contradict each other or name something that does not exist."""

    code, exit_code = "usage", 2
    default_hint = "`ckptcore COMMAND --help` lists the arguments"


class NotComplete(CkptError):
    """The checkpoint is still being written, or its save was aborted."""

    code, exit_code, transient = "not-complete", 3, False
    default_hint = "wait until the save has finished, then run the command again"


class UnknownFormat(CkptError):
    """Nothing at the URL is a checkpoint of a known format."""

    code, exit_code = "unknown-format", 4
    default_hint = "`ckptcore formats` lists what can be read and by which files it is recognised"


class UnsupportedFormat(CkptError):
    """The format is recognised, but this version does not read (or write) it."""

    code, exit_code = "unsupported-format", 5
    default_hint = "`ckptcore formats` lists what can be read and written"


class UnsafeContent(CkptError):
    """The source asks for something that is never done: run code, or leave its own folder."""

    code, exit_code = "unsafe", 6
    default_hint = "do not load this checkpoint with other tools either; find out who wrote it"


class DestinationExists(CkptError):
    """The destination is already there."""

    code, exit_code = "destination-exists", 7
    default_hint = "choose another destination, or replace it as a whole with --overwrite"


class SourceUnreadable(CkptError):
    """The source cannot be opened or read: no such path, no permission, no connection."""

    code, exit_code = "source-unreadable", 8
    default_hint = "check the URL, the permissions and the credentials"


class DestinationUnwritable(CkptError):
    """The destination cannot be created or written."""

    code, exit_code = "destination-unwritable", 9
    default_hint = "check the path and its permissions"


class DiskFull(CkptError):
    """There is not enough room for the output."""

    code, exit_code = "disk-full", 10
    default_hint = "free the space named above and run again with --resume: finished files are kept"


class SourceChanged(CkptError):
    """The source is not what the plan was made from."""

    code, exit_code = "source-changed", 11
    default_hint = "make a new plan"


class AmbiguousModel(CkptError):
    """More than one part of the checkpoint, or none, can be the model."""

    code, exit_code = "ambiguous-model", 12
    default_hint = "name the part with --model-prefix"


class NameMismatch(CkptError):
    """Names or shapes do not fit the model that config.json describes, or collide."""

    code, exit_code = "name-mismatch", 13
    default_hint = "rename with --rename, drop with --exclude, or give the right --config"


class UnsupportedDtype(CkptError):
    """A dtype is unknown, or the target format cannot hold it."""

    code, exit_code = "unsupported-dtype", 14
    default_hint = "cast it (--dtype), leave it out (--exclude), or choose another target format"


class BudgetTooSmall(CkptError):
    """The memory budget cannot hold one unit of work."""

    code, exit_code = "budget-too-small", 15
    default_hint = "raise --memory or lower --workers"


class MetadataTooLarge(CkptError):
    """What describes the checkpoint would take more memory than metadata may."""

    code, exit_code = "metadata-budget", 28
    default_hint = "raise CKPTCORE_METADATA_MEMORY if the checkpoint is what you expect"


class CatalogError(CkptError):
    """The catalog database cannot be used as it is."""

    code, exit_code = "catalog", 16
    default_hint = "run `ckptcore catalog upgrade`, or pass --no-catalog"


class CatalogAway(CatalogError):
    """The catalog's database does not answer now: it is away, is starting, or is too busy."""

    code, exit_code, transient = "catalog-away", 24, True
    default_hint = "wait until it is back: what was written is kept"


class Conflict(CkptError):
    """What was expected to stand in the catalog does not stand there: somebody else was faster."""

    code, exit_code = "conflict", 23
    default_hint = "look at what stands there now, and decide again"


class Busy(CkptError):
    """Another process is writing the same destination now."""

    code, exit_code, transient = "busy", 17, True
    default_hint = "wait for the other run, or stop it; its finished files will be reused"


class StorageTrouble(CkptError):
    """A read or write failed in a way that often passes: connection reset, throttling, time-out."""

    code, exit_code, transient = "storage-trouble", 18, True
    default_hint = "run again: finished files are kept"


class WorkerLost(CkptError):
    """The machines that wrote some files went away, more than once."""

    code, exit_code, transient = "worker-lost", 22, True
    default_hint = "look at the workers' logs (memory?), then run again: finished files are kept"


class OutputMismatch(CkptError):
    """What was written is not what was planned; nothing was published, unless the message says so."""

    code, exit_code = "output-mismatch", 21
    default_hint = "run again with --no-resume; if it happens again it is a defect, please report it"


class StagingForeign(CkptError):
    """A staging folder, or what lies in it, is another user's, or is nothing that ckptcore puts there."""

    code, exit_code = "staging-foreign", 25
    default_hint = "it was left as it is: find out who put it there, then remove it and run again"


class InternalError(CkptError):
    """Something happened that ckptcore does not foresee."""

    code, exit_code = "internal", 70
    default_hint = "this is a defect; please report it with the traceback that CKPTCORE_TRACEBACK=1 shows"


class MissingDependency(CkptError):
    """An optional package that this step needs is not installed."""

    code, exit_code = "missing-dependency", 19


class DeviceUnavailable(CkptError):
    """The device asked for is not there."""

    code, exit_code = "device-unavailable", 20
    default_hint = "run with --device cpu: the bytes are the same"


class Interrupted(CkptError):
    """The run was stopped by the user."""

    code, exit_code = "interrupted", 130
    default_hint = "run the same command again: finished files are kept"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check found.

    code: a key of `FINDINGS`.
    level: the check level that found it: files, cover, bytes or values.
    message: what is wrong, with the values.
    fqn: the tensor or object concerned, or None.
    file: the file concerned, relative to the checkpoint's root, or None.
    hint: the next step.
    severity: ``error`` makes the checkpoint not ok; ``warning`` and ``info`` do not.
    """

    code: str
    level: str
    message: str
    fqn: str | None = None
    file: str | None = None
    hint: str = ""
    severity: str = "error"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


# code: (severity, meaning, default next step)
FINDINGS: dict[str, tuple[str, str, str]] = {
    "missing-file": (
        "error",
        "a file that the metadata names is not there",
        "copy the file from the rank that wrote it",
    ),
    "truncated-file": (
        "error",
        "a file is shorter than the metadata says",
        "copy the file again; a torn overwrite cannot be repaired",
    ),
    "oversized-file": (
        "error",
        "a file is longer than everything the metadata places in it",
        "the file may be from another save: check its date and rank",
    ),
    "stray-file": (
        "warning",
        "a data file that no metadata refers to; it is ignored",
        "a leftover of an earlier save; delete it when the checkpoint is proven",
    ),
    "empty-file": ("info", "a rank wrote an empty file that nothing refers to: normal", ""),
    "stale-file": (
        "warning",
        "a file beside the index that a loader could prefer to it",
        "remove the stale file",
    ),
    "missing-rank": ("error", "no metadata of a rank that must have taken part", "copy that rank's files"),
    "bad-path": (
        "error",
        "the metadata names a file outside the checkpoint's folder",
        "do not load this checkpoint",
    ),
    "unsafe-item": (
        "error",
        "a stored item is a pickle that asks for more than plain values",
        "do not load this checkpoint",
    ),
    "hole": (
        "error",
        "elements of a tensor that no file holds",
        "find the rank that should have written them",
    ),
    "overlap": (
        "error",
        "two chunks hold the same elements without being replicas",
        "the metadata is damaged or mixes two saves",
    ),
    "out-of-bounds": ("error", "a chunk lies outside its tensor", "the metadata is damaged"),
    "no-place": ("error", "a chunk has no place in any file", "the metadata is damaged"),
    "unlisted-item": (
        "error",
        "bytes are stored for a tensor or chunk that the metadata does not list",
        "the metadata is damaged: something was taken out of it",
    ),
    "no-tensors": ("error", "the checkpoint names no tensor and no object", "the metadata is damaged"),
    "rank-object": (
        "warning",
        "ranks hold different values of one object; one of them, or each, is kept",
        "look at the ranks' own files if the others matter",
    ),
    "item-overlap": ("error", "two items share bytes of a file", "the metadata is damaged"),
    "length-mismatch": (
        "error",
        "an item cannot hold as many bytes as its chunk has",
        "the metadata is damaged or from another save",
    ),
    "item-mismatch": (
        "error",
        "what is stored is not what the metadata says: dtype, shape or name",
        "the file is from another step, world size or save",
    ),
    "malformed-item": ("error", "an item in a file is not what its format prescribes", "copy the file again"),
    "malformed-metadata": ("error", "the metadata file cannot be parsed", "copy the file again"),
    "crc-mismatch": (
        "error",
        "stored bytes do not match their stored CRC-32",
        "copy the file again from where it was written",
    ),
    "digest-mismatch": (
        "error",
        "a file's digest is not the one that the checkpoint, or the catalog, tells",
        "copy the file again from where it was written",
    ),
    "replica-mismatch": (
        "error",
        "two copies of the same elements differ",
        "nothing in the checkpoint says which is right: find out, and move the other away",
    ),
    "no-checksum": ("info", "the format carries no checksum here: bytes cannot be proven", ""),
    "unproven": (
        "info",
        "neither format, store nor catalog proves the bytes of a file",
        "compare it with a copy; what is recorded with digests can be proven from then on",
    ),
    "not-registered": (
        "warning",
        "the catalog knows another checkpoint at this place",
        "record what is there now: ckptcore catalog rebuild",
    ),
    "refused-global": (
        "warning",
        "an object names classes that are not on the allow-list; it is kept out",
        "it cannot be carried over; other objects and tensors are not affected",
    ),
    "unusual-layout": (
        "warning",
        "an array is laid out as its writer never does it, or not as others are",
        "compare what describes it with another copy of the checkpoint",
    ),
    "total-mismatch": (
        "warning",
        "the files hold another number of bytes than their index tells",
        "compare dtypes and shapes with the model's config, and the files with their source",
    ),
    "unlisted-tensor": (
        "warning",
        "a file holds a tensor that the index does not list; it is taken along",
        "compare the index with the files",
    ),
    "refused-tensors": (
        "error",
        "an object that is kept out holds tensors",
        "leave it out by name with --exclude, or save its tensors by themselves",
    ),
    "unreadable-part": (
        "error",
        "a tensor of a kind that is not read: by its dtype, layout or codec",
        "leave it out by name with --exclude; everything else can be converted",
    ),
    "unused-rule": (
        "warning",
        "a rule of --sharding decides on no parameter",
        "mind its globs and its place among the rules, or let it stand for other models",
    ),
    "unmerged-tensor": (
        "error",
        "no rule tells how a tensor is cut over the ranks; it is kept rank by rank",
        "leave it out by name with --exclude",
    ),
    "flat-buffers": (
        "warning",
        "optimizer state stays as ranks have it: nothing tells its parameters apart",
        "it is carried as it is; save with --dist-ckpt-optim-fully-reshardable",
    ),
    "alignment-gap": ("info", "padding between the parameters of a flat buffer is left out", ""),
    "not-finite": ("warning", "a tensor holds NaN or Inf", "look at the training run"),
    "lost-at-save": ("error", "the writer lost data when it saved", "no tool can bring it back"),
    "names-unchecked": (
        "warning",
        "names and shapes were not compared with the model class",
        "open the result with transformers",
    ),
    "assumed-size": (
        "warning",
        "a map of names took a size for granted that neither a config nor a shape tells",
        "name the model's folder with --config",
    ),
    "fused-names": (
        "warning",
        "parameters are as the live model has them, not in pieces as in hub files",
        "transformers 5 opens both; other readers, and transformers 4, may start them at random",
    ),
    "not-loadable": (
        "warning",
        "an export has no config.json: transformers will not open it",
        "name the model's with --config DIR or FILE, and export again",
    ),
    "left-beside": (
        "warning",
        "files that belong beside the weights are not written: the output is one file, or they are too large",
        "name a folder to have them, or copy them; a config still checks the names",
    ),
    "found-files": (
        "info",
        "files that go beside the weights were found in the source",
        "name others with --config and --tokenizer",
    ),
    "other-part": (
        "warning",
        "another part of the checkpoint could be the model, too; it is left out",
        "name it with --model-prefix to export it instead",
    ),
    "unnamed-states": (
        "info",
        "an optimizer's states are numbered, and nothing proves what the numbers mean",
        "they are carried as numbers; an optimizer made of named_parameters() tells names",
    ),
    "shape-lost": (
        "warning",
        "optimizer state is stored flattened and nothing tells its own shape",
        "convert it with the weights beside it, or leave it out with --exclude",
    ),
    "missing-part": (
        "warning",
        "a part that such a checkpoint has is not there; what is there is read",
        "copy it from where it was written if it matters",
    ),
    "unproven-shape": (
        "error",
        "nothing stored proves that the last part of a tensor is there",
        "put its index or config.json beside it, export it with --config, or --recover it",
    ),
    "unfit-quantization": (
        "error",
        "a quantised tensor and its scales do not fit their formula",
        "carry the stored values with --keep-quantized",
    ),
    "consolidated-differs": (
        "warning",
        "whole files beside shards are not what the shards hold",
        "do not use the whole files; the shards are what was saved",
    ),
    "mixed-saves": (
        "error",
        "files of one checkpoint tell of different steps or world sizes",
        "find out which files belong together; nothing else tells",
    ),
    "not-complete": ("error", "the save did not finish", "wait, or recover on request with --recover"),
}


def finding(
    code: str,
    level: str,
    message: str,
    *,
    fqn: str | None = None,
    file: str | None = None,
    hint: str | None = None,
) -> Finding:
    """A `Finding` with the severity and, unless given, the next step of its code."""
    severity, _, default = FINDINGS[code]
    return Finding(code, level, redacted(message), fqn, file, default if hint is None else hint, severity)


def error_classes() -> list[type[CkptError]]:
    """Every error class, in the order of exit codes."""
    found: list[type[CkptError]] = []
    queue = list(CkptError.__subclasses__())
    while queue:
        cls = queue.pop(0)
        found.append(cls)
        queue += cls.__subclasses__()
    return sorted(found, key=lambda c: (c.exit_code, c.code))


def ended_by(error: BaseException) -> CkptError:
    """What is recorded of whatever ended a piece of work.

    A process that is told to end says so in its own ways: none of them is an error code of ours.

    >>> ended_by(SystemExit(1)).code, ended_by(KeyboardInterrupt()).code, ended_by(ValueError("x")).code
    ('worker-lost', 'interrupted', 'internal')
    """
    if isinstance(error, CkptError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Interrupted("stopped by the user")
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, Exception):
        return InternalError(said)
    return WorkerLost(f"the process that was at work was ended ({said})")


def _rebuild(cls: type[CkptError], message: str, hint: str, values: dict[str, Any]) -> CkptError:
    return cls(message, hint=hint, **values)
