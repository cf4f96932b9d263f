"""Define the errors and findings: their stable codes, exit codes, next steps, and whether a retry helps.

There is a class for each thing that a caller can act on. The class docstring is the meaning in the generated
table of errors; `code`, `exit_code`, `transient` and the default `hint` are class attributes. `Finding` is
what a check reports without stopping; `FINDINGS` has every finding code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from ckptcore.redaction import redacted, redacted_value

# The check levels, shallowest first: each includes those before it.
LEVELS = ("files", "coverage", "bytes", "values")


class CkptError(Exception):
    """Base of every error that ckptcore raises on purpose.

    Message, hint and values hold no credentials, whatever URL or library they come from: errors go into
    logs, catalogs and webhooks.

    Attributes:
        code: The stable name of the error.
        exit_code: The exit code of a command that ends with it.
        transient: Whether the same command may succeed when it is run again.
        hint: The next step; by default the class's `default_hint`.
        values: Facts for programs, as JSON values; ``findings`` holds those of a damaged checkpoint.
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
        """Return the JSON form: code, exit code, message, hint and values."""
        values = {k: v for k, v in self.values.items() if k != "findings"}
        return {
            "code": self.code,
            "exit_code": self.exit_code,
            "message": self.message,
            "hint": self.hint,
            "values": values,
        }


class DamagedCheckpoint(CkptError):
    """The source has findings: something is missing, truncated, altered or contradictory."""

    code, exit_code = "damaged", 1
    default_hint = "run `ckptcore validate SRC --level bytes` for every finding"

    @property
    def findings(self) -> Sequence[Finding]:
        """The findings that the error was raised for."""
        stored: Sequence[Finding] = self.values.get("findings", ())
        return stored


class UnprovenCheckpoint(DamagedCheckpoint):
    """Nothing is known to be wrong with the source, but nothing proves that it is complete."""

    code, exit_code = "unproven", 26
    default_hint = "name what proves it, or accept what is there with --allow-incomplete"


class UnreadablePart(DamagedCheckpoint):
    """A requested part cannot be read; the other parts can."""

    code, exit_code = "unreadable-part", 27
    default_hint = "leave it out by name with --exclude"


class MalformedCheckpoint(DamagedCheckpoint):
    """A header or metadata file of the source violates its format."""

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
    default_hint = "`ckptcore formats` lists the formats that can be read, and the files that identify them"


class UnsupportedFormat(CkptError):
    """The format is recognised, but this version does not read (or write) it."""

    code, exit_code = "unsupported-format", 5
    default_hint = "`ckptcore formats` lists the formats that can be read and written"


class UnsafeContent(CkptError):
    """Reading the source would run code or leave its folder, which ckptcore never does."""

    code, exit_code = "unsafe", 6
    default_hint = "do not load this checkpoint with other tools either; find out who wrote it"


class DestinationExists(CkptError):
    """The destination already exists."""

    code, exit_code = "destination-exists", 7
    default_hint = "choose another destination, or replace this one completely with --overwrite"


class SourceUnreadable(CkptError):
    """The source cannot be opened or read: no such path, no permission, no connection."""

    code, exit_code = "source-unreadable", 8
    default_hint = "check the URL, the permissions and the credentials"


class DestinationUnwritable(CkptError):
    """The destination cannot be created or written."""

    code, exit_code = "destination-unwritable", 9
    default_hint = "check the path and its permissions"


class DiskFull(CkptError):
    """There is not enough free space for the output."""

    code, exit_code = "disk-full", 10
    default_hint = "free space there and run the command again: finished files are kept"


class SourceChanged(CkptError):
    """The source has changed since the plan was made."""

    code, exit_code = "source-changed", 11
    default_hint = "make a new plan"


class AmbiguousModel(CkptError):
    """No part of the checkpoint, or more than one, can be the model."""

    code, exit_code = "ambiguous-model", 12
    default_hint = "name the part with --model-prefix"


class NameMismatch(CkptError):
    """Names or shapes do not match the model that config.json describes, or names collide."""

    code, exit_code = "name-mismatch", 13
    default_hint = "rename with --rename, drop with --exclude, or give the right --config"


class UnsupportedDtype(CkptError):
    """A dtype is unknown, or the target format cannot hold it."""

    code, exit_code = "unsupported-dtype", 14
    default_hint = "leave it out (--exclude), or choose another target format; --dtype casts floats only"


class BudgetTooSmall(CkptError):
    """The memory budget cannot hold one unit of work."""

    code, exit_code = "budget-too-small", 15
    default_hint = "raise --memory or lower --workers"


class MetadataTooLarge(CkptError):
    """The checkpoint's metadata needs more memory than its limit."""

    code, exit_code = "metadata-budget", 28
    default_hint = "raise CKPTCORE_METADATA_MEMORY if the checkpoint is what you expect"


class CatalogError(CkptError):
    """The catalog database cannot be used in its present state."""

    code, exit_code = "catalog", 16
    default_hint = "run `ckptcore catalog upgrade`, or pass --no-catalog"


class CatalogUnavailable(CatalogError):
    """The catalog's database does not answer: it is unreachable, starting or overloaded."""

    code, exit_code, transient = "catalog-away", 24, True
    default_hint = "wait until it answers again: finished files are kept"


class Conflict(CkptError):
    """The catalog entry changed since it was read."""

    code, exit_code = "conflict", 23
    default_hint = "check its value, then retry"


class Busy(CkptError):
    """Another process is writing the same destination."""

    code, exit_code, transient = "busy", 17, True
    default_hint = "wait for the other run, or stop it; its finished files will be reused"


class StorageTrouble(CkptError):
    """A read or write failed temporarily: connection reset, throttling or time-out."""

    code, exit_code, transient = "storage-trouble", 18, True
    default_hint = "run the command again: finished files are kept"


class AlteredInTransit(StorageTrouble):
    """Bytes changed between the store and this machine, each time that they were sent."""

    code, exit_code = "altered-in-transit", 29
    default_hint = "run again from another machine, over https; check this one's memory and network"


class WorkerLost(CkptError):
    """The workers that wrote some files were lost more than once."""

    code, exit_code, transient = "worker-lost", 22, True
    default_hint = "check the workers' logs and memory, then run the command again: finished files are kept"


class OutputMismatch(CkptError):
    """The output differs from its plan; nothing was published, unless the message says so."""

    code, exit_code = "output-mismatch", 21
    default_hint = "run again with --no-resume; if that fails too, it is a defect: please report it"


class StagingForeign(CkptError):
    """A staging folder or its content belongs to another user, or was not written by ckptcore."""

    code, exit_code = "staging-foreign", 25
    default_hint = "it was not changed: find out who made it, then remove it and run the command again"


class InternalError(CkptError):
    """An unforeseen error occurred."""

    code, exit_code = "internal", 70
    default_hint = "this is a defect; please report it with the traceback that CKPTCORE_TRACEBACK=1 prints"


class MissingDependency(CkptError):
    """An optional package that this step needs is not installed."""

    code, exit_code = "missing-dependency", 19


class DeviceUnavailable(CkptError):
    """The requested device is not available."""

    code, exit_code = "device-unavailable", 20
    default_hint = "run with --device cpu: the bytes are the same"


class Interrupted(CkptError):
    """The run was stopped by the user."""

    code, exit_code = "interrupted", 130
    default_hint = "run the same command again: finished files are kept"


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check.

    Attributes:
        code: A key of `FINDINGS`.
        level: The check level that found it: files, coverage, bytes or values; history for an alarm.
        message: What is wrong, with the values.
        fqn: The tensor or object concerned, or None.
        file: The file concerned, relative to the checkpoint's root, or None.
        hint: The next step.
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
        """Return the JSON form, whose keys are the arguments of `Finding`."""
        return asdict(self)


# code: (severity, meaning, default next step)
FINDINGS: dict[str, tuple[str, str, str]] = {
    "restated-value": (
        "warning",
        "a value is written in a plain form of the same content, because the output names no class for it",
        "write a format that keeps it, such as dcp or safetensors",
    ),
    "needs-classes": (
        "info",
        "a value keeps its class, so that torch.load opens the output with weights_only=False only",
        "open it with weights_only=False, or leave the value out with --exclude",
    ),
    "unused-rule": (
        "warning",
        "a --sharding rule applies to no parameter",
        "check its globs and its place among the rules; keep it if it is for other models",
    ),
    "lost-content": (
        "warning",
        "contents that were deleted in favour of a copy are in no recorded checkpoint any more",
        "record the copy where it is now (`ckptcore fingerprint COPY`), or restore it from a backup",
    ),
    "unused-bytes": (
        "warning",
        "bytes of a file belong to no tensor, object or structure of its format; they are left out",
        "find out what wrote them before the file is deleted; nothing else depends on them",
    ),
    "odd-value": (
        "warning",
        "a key of a metadata file has a value of another type than its writer gives; it is an object",
        "compare the file with another copy of the checkpoint",
    ),
    "not-finite": ("warning", "a tensor holds NaN or Inf", "check the training run"),
    "step-repeated": (
        "warning",
        "a step has the weights of another step of its run",
        "compare both with the training's log; nothing in them says which one is right",
    ),
    "frozen-changed": (
        "warning",
        "a weight that is not trained changed since the step before",
        "check what the trainer froze, or name what it trains: the fact `frozen` of the run's checkpoints",
    ),
    "trainable-unchanged": (
        "warning",
        "a weight with optimizer state did not change since the step before, while most others did",
        "check its gradient, and whether the step holds it of another step",
    ),
    "expert-died": (
        "warning",
        "an expert of a layer is zero, or does not move while others do",
        "check the router's balance",
    ),
    "norm-jumped": (
        "warning",
        "a weight's norm is ten times, or a tenth of, what it was at the two steps before",
        "check the training's log at this step",
    ),
    "dropped-keys": ("warning", "keys of the source are left out", "use --keep-object, or do not load them"),
    "left-out": (
        "info",
        "other state and files of a source are left out: an export has the model, an average no optimizer",
        "keep the source, or write everything with consolidate or reshard",
    ),
    "of-last-input": (
        "info",
        "an average of checkpoints has these tensors and objects from the last of them",
        "they have no fractions, or are outside of the model: put the checkpoint whose values you want last",
    ),
    "left-out-weights": (
        "warning",
        "an export leaves out tensors that are no training state: averages of weights, or of no known kind",
        "export them with --model-prefix, or leave them out by name with --exclude",
    ),
    "kept-quantized": (
        "warning",
        "a cast leaves quantised values and their scales as they are stored: alone they mean nothing",
        "for other dtypes, dequantise them first, with what made them; `--dtype-for` casts scales",
    ),
    "catalog-row": (
        "error",
        "a row of the catalog holds a value that its column should not have; it is left empty",
        "record it anew: ckptcore catalog rebuild PLACE",
    ),
    "unread-state": (
        "warning",
        "training state beside the weights is not read with them",
        "name its file to read it",
    ),
    "unproven-parts": (
        "error",
        "nothing states how many parts there are, so a missing last part could not be seen",
        "add what states it, or accept what is there with --allow-incomplete",
    ),
    "unproven-whole": (
        "warning",
        "files are read as the complete save; nothing in them proves that no part is missing",
        "put the model's config.json beside them, or compare the names and shapes with the model's",
    ),
    "files-differ": (
        "error",
        "two folders of one source have a file of one name with different bytes",
        "name the folders of one save, or move the file that does not belong to it away",
    ),
    "unused-option": (
        "warning",
        "a glob or rename of a command matches no tensor",
        "check its spelling: `ckptcore inspect SRC` lists the names",
    ),
    "missing-file": (
        "error",
        "a file that the metadata names is not there",
        "copy the file from the rank that wrote it",
    ),
    "bad-signature": (
        "error",
        "a signature is not valid for the key or certificates that verify it, or is none",
        "get the signature, and the key, from its signer again; do not use the files meanwhile",
    ),
    "added-file": (
        "error",
        "a file is beside those that were recorded or signed",
        "remove it, or record or sign the folder anew with it",
    ),
    "truncated-file": (
        "error",
        "a file is shorter than the metadata says",
        "copy the file again; an interrupted overwrite cannot be repaired",
    ),
    "oversized-file": (
        "error",
        "a file is longer than all that the metadata places in it",
        "the file may be from another save: check its date and rank",
    ),
    "stray-file": (
        "warning",
        "a data file that no metadata refers to; it is not read",
        "name it to read it; whether another file has its content is not known",
    ),
    "empty-file": ("info", "a rank wrote an empty file that nothing refers to, which is normal", ""),
    "stale-file": (
        "warning",
        "a loader could prefer a file beside the index to the index",
        "read it by its name, and compare the two before you move one away",
    ),
    "missing-rank": ("error", "the metadata of a rank that took part is missing", "copy that rank's files"),
    "bad-path": (
        "error",
        "the metadata names a file outside the checkpoint's folder",
        "do not load this checkpoint",
    ),
    "unsafe-item": (
        "error",
        "a stored item is a pickle that needs more than plain values",
        "do not load this checkpoint",
    ),
    "hole": (
        "error",
        "no file holds some elements of a tensor",
        "find the rank that should have written them",
    ),
    "overlap": (
        "error",
        "two chunks that are not replicas hold the same elements",
        "the metadata is damaged or mixes two saves",
    ),
    "out-of-bounds": ("error", "a chunk is outside its tensor", "the metadata is damaged"),
    "no-place": ("error", "the metadata places a chunk in no file", "the metadata is damaged"),
    "unlisted-item": (
        "error",
        "bytes are stored for a tensor or chunk that the metadata does not list",
        "the metadata is damaged: an entry was removed from it",
    ),
    "no-tensors": ("error", "the checkpoint names no tensor and no object", "the metadata is damaged"),
    "rank-object": (
        "warning",
        "ranks hold different values of one object; one or all of them are kept",
        "check the ranks' own files if the other values matter",
    ),
    "item-overlap": ("error", "two items share bytes of a file", "the metadata is damaged"),
    "length-mismatch": (
        "error",
        "an item is too short for the bytes of its chunk",
        "the metadata is damaged or from another save",
    ),
    "item-mismatch": (
        "error",
        "the dtype, shape or name in a file differs from the metadata",
        "the file is from another step, world size or save",
    ),
    "malformed-item": ("error", "an item in a file violates its format", "copy the file again"),
    "malformed-metadata": ("error", "the metadata file cannot be parsed", "copy the file again"),
    "crc-mismatch": (
        "error",
        "stored bytes do not match their stored CRC-32",
        "copy the file again from where it was written",
    ),
    "digest-mismatch": (
        "error",
        "a file's digest differs from the one in the checkpoint or the catalog",
        "copy the file again from where it was written",
    ),
    "live-mismatch": (
        "error",
        "the checkpoint is not what the job had in memory when it was saved",
        "`differing` of the job's fingerprints names the tensors; save the step again, or use another one",
    ),
    "live-not-compared": (
        "info",
        "the job sent a fingerprint of its memory, and the checkpoint was not compared with it",
        "`ckptcore fingerprint SRC` reads it and compares",
    ),
    "replica-mismatch": (
        "error",
        "two replicas of the same elements differ",
        "nothing in the checkpoint shows which is right: find out, and move the other away",
    ),
    "no-checksum": ("info", "the format stores no checksum here, so bytes cannot be verified", ""),
    "unproven": (
        "info",
        "neither format, store nor catalog can verify the bytes of a file",
        "compare it with a copy; a checkpoint recorded with digests can be verified from then on",
    ),
    "averaged-copies": (
        "warning",
        "copies of tensors differ between ranks, and their mean is taken, as their trainer's converter does",
        "read the ranks' files one by one if a single rank's values matter",
    ),
    "not-registered": (
        "warning",
        "the catalog has another checkpoint at this place",
        "record it with ckptcore catalog rebuild",
    ),
    "refused-global": (
        "warning",
        "an object names classes that are not on the allow-list; it is left out",
        "it cannot be converted; other objects and tensors are not affected",
    ),
    "unusual-layout": (
        "warning",
        "the layout of an array is unusual for its writer, or differs from that of others",
        "compare its metadata with another copy of the checkpoint",
    ),
    "total-mismatch": (
        "warning",
        "the files hold another number of bytes than their index states",
        "compare dtypes and shapes with the model's config, and the files with their source",
    ),
    "unlisted-tensor": (
        "warning",
        "a file holds a tensor that the index does not list; it is included",
        "compare the index with the files",
    ),
    "refused-tensors": (
        "error",
        "an object that is left out holds tensors",
        "exclude it by name with --exclude, or save its tensors separately",
    ),
    "unreadable-part": (
        "error",
        "the dtype, layout or codec of a tensor is not supported",
        "exclude it by name with --exclude; everything else can be converted",
    ),
    "uneven-mesh": ("warning", "the mesh does not divide the model evenly", "use sizes that divide it"),
    "unmerged-tensor": (
        "error",
        "no rule defines how a tensor is sharded over the ranks; each rank's part is kept",
        "exclude it by name with --exclude",
    ),
    "flat-buffers": (
        "warning",
        "optimizer state is kept rank by rank: nothing separates its parameters",
        "to separate them, save with --dist-ckpt-optim-fully-reshardable",
    ),
    "alignment-gap": ("info", "padding between the parameters of a flat buffer is left out", ""),
    "lost-at-save": ("error", "the writer lost data when it saved", "no tool can recover it"),
    "names-unchecked": (
        "warning",
        "names and shapes were not compared with the model class",
        "open the result with transformers",
    ),
    "config-unconfirmed": (
        "info",
        "no other config says what config.json says in fields that change what the model computes",
        "name the config of the model that was trained; a trainer's own config beside the source confirms it",
    ),
    "config-contradicted": (
        "warning",
        "--config and the config.json beside the checkpoint differ in what changes what the model computes",
        "name the config of the model that was trained",
    ),
    "assumed-size": (
        "warning",
        "a name map assumed a size that neither a config nor a shape states",
        "name the model's folder with --config",
    ),
    "no-optimizer": (
        "info",
        "a trainer that begins from the output finds a model alone: no optimizer, no step, no data loader",
        "",
    ),
    "unstated-arguments": (
        "warning",
        "the arguments beside a trainer's weights do not say what the model's config does",
        "set these fields on the trainer's command line, and compare a step",
    ),
    "untried-map": (
        "warning",
        "no code of the trainer has loaded what the map of names makes",
        "load it with the trainer, and compare a step with one that began with the trainer's own converter",
    ),
    "fused-names": (
        "warning",
        "parameters have names of the live model or of earlier versions, not those of hub files",
        "transformers 5 opens both; transformers 4 and other readers may initialise them randomly",
    ),
    "assumed-class": (
        "warning",
        "a config names no class, and the names and shapes are those of one of several",
        "name the class with --arch, which also shows whether a head is missing",
    ),
    "kept-float32": (
        "info",
        "the model class keeps a tensor in float32 in models of 16 bits, and so does the cast",
        "cast it all the same with --dtype-for",
    ),
    "rounded-float32": (
        "warning",
        "a tensor that most models keep in float32 is rounded, and no config names the model class",
        "name the model's folder with --config, or keep the tensor with --dtype-for NAME=keep",
    ),
    "exact-names": (
        "info",
        "names were changed to those that save_pretrained of the model writes",
        "keep the stored names with --names stored",
    ),
    "not-loadable": (
        "warning",
        "an export has no config.json, so transformers cannot open it",
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
        "choose others with --config and --tokenizer",
    ),
    "other-part": (
        "warning",
        "another part of the checkpoint could also be the model; it is left out",
        "name it with --model-prefix to export it instead",
    ),
    "unnamed-states": (
        "info",
        "an optimizer's states are numbered, and nothing proves which parameters they belong to",
        "they keep their numbers; an optimizer built from named_parameters() stores names",
    ),
    "shape-lost": (
        "warning",
        "optimizer state is stored flattened, and nothing states its shape",
        "convert it together with the weights, or exclude it with --exclude",
    ),
    "missing-part": (
        "warning",
        "a part that such a checkpoint usually has is missing; the rest is read",
        "copy it from where it was written if it matters",
    ),
    "unproven-shape": (
        "error",
        "nothing proves that the last part of a tensor is there",
        "add its index or config.json, export it with --config, or pass --allow-incomplete",
    ),
    "unfit-quantization": (
        "error",
        "a quantised tensor and its scales do not match",
        "keep the stored values with --keep-quantized",
    ),
    "consolidated-differs": (
        "warning",
        "consolidated files beside the shards differ from them",
        "use the shards: they are what was saved",
    ),
    "mixed-saves": (
        "error",
        "files of one checkpoint record different steps or world sizes",
        "find out which files belong together; the checkpoint does not show it",
    ),
    "not-complete": ("error", "the save did not finish", "wait, or accept it with --allow-incomplete"),
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
    """Return a `Finding` with the severity of its code and, where no hint is given, its next step."""
    severity, _, default = FINDINGS[code]
    return Finding(code, level, redacted(message), fqn, file, default if hint is None else hint, severity)


def findings_of(error: CkptError) -> tuple[Finding, ...]:
    """Return the findings of an error; the error itself as one, where it has none."""
    lone = Finding(error.code, "files", error.message, hint=error.hint)
    return tuple(error.values.get("findings", ())) or (lone,)


def error_classes() -> list[type[CkptError]]:
    """Return every error class, in the order of exit codes."""
    classes: list[type[CkptError]] = []
    queue = list(CkptError.__subclasses__())
    while queue:
        cls = queue.pop(0)
        classes.append(cls)
        queue += cls.__subclasses__()
    return sorted(classes, key=lambda c: (c.exit_code, c.code))


def ended_by(error: BaseException) -> CkptError:
    """Return the error to record for the exception that ended a piece of work.

    >>> ended_by(SystemExit(1)).code, ended_by(KeyboardInterrupt()).code, ended_by(ValueError("x")).code
    ('worker-lost', 'interrupted', 'internal')
    """
    if isinstance(error, CkptError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Interrupted("stopped by the user")
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, Exception):
        return InternalError(text)
    if isinstance(error, SystemExit):
        return WorkerLost(f"its worker ended the process before it was done ({text})")
    return WorkerLost(f"the working process was ended ({text})")


def _rebuild(cls: type[CkptError], message: str, hint: str, values: dict[str, Any]) -> CkptError:
    return cls(message, hint=hint, **values)
