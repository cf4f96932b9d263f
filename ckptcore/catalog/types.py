"""The values that the catalog takes and returns.

Plain frozen values: no code outside this package gets a database row.
Ids are UUIDs as text; times are aware and in UTC; sizes are bytes; shapes are tuples of elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from ckptcore.catalog.training import LiveVerdict, Training, TrainingFacts
from ckptcore.errors import LEVELS, Finding


class Kind(StrEnum):
    """source: found, as a training job wrote it. derived: written by a conversion."""

    SOURCE = "source"
    DERIVED = "derived"


class State(StrEnum):
    """The latest known state of a checkpoint.

    present: no open errors. damaged: its open findings include an error.
    incomplete: it is still being written, or its save was aborted.
    replaced: other content is at its URI now. gone: nothing was there at the last check.
    retired: `ckptcore retire` set it aside; it can be restored until it is purged. deleted: it was purged.
    """

    PRESENT = "present"
    DAMAGED = "damaged"
    INCOMPLETE = "incomplete"
    REPLACED = "replaced"
    GONE = "gone"
    RETIRED = "retired"
    DELETED = "deleted"


class Role(StrEnum):
    """The purpose of a file in a checkpoint.

    data: tensors and objects that the manifest names. extra: a file without any: config, tokenizer, index,
    metadata, card; of a source those that its format's reader read.
    """

    DATA = "data"
    EXTRA = "extra"


class Outcome(StrEnum):
    """The state of a conversion."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class Direction(StrEnum):
    """Which side of a conversion a checkpoint is on."""

    IN = "in"
    OUT = "out"


@dataclass(frozen=True, slots=True)
class StatisticsRow:
    """Statistics of the tensors of a checkpoint: packed columns, and sums that SQL can ask for.

    Attributes:
        columns: of each tensor, packed.
        tensors: number of tensors.
        norm: norm of all weights together; None if it is not finite.
        absmax: the largest absolute value of a weight; None if it is not finite.
        nan: NaN in all tensors.
        inf: Inf in all tensors.
        zeros: zeros in weights.
        change: norm of the change of all weights relative to theirs before; None if it was not measured.
        against: public id of the step before, if that was compared.
    """

    columns: bytes
    tensors: int
    norm: float | None
    absmax: float | None
    nan: int
    inf: int
    zeros: int
    change: float | None = None
    against: str | None = None


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """The facts to record about one checkpoint.

    Attributes:
        uri: its folder or file. Local paths are stored absolute, with symbolic links followed.
        format: the name of its on-disk format.
        manifest_digest: digest of its manifest, without a prefix.
        nbytes: the bytes of its tensors.
        tensors: (fqn, dtype, shape, nbytes) of every tensor. FQNs are unique.
        files: (path relative to `uri`, nbytes, digest as in `ckptcore.utils.part_digest` or None) of every
            file with data that the manifest names. Paths are unique.
        step: the training step, if known.
        run: the name of the training run, if known.
        origin: what the checkpoint records about its writer: ranks, mesh, versions. Stored as JSON.
        verified: the check level that this run has proven, or None.
        fingerprint: of the checkpoint's tensors (`ckptcore.fingerprints.sums`), or None.
        fingerprints: the known fingerprints of its tensors, by FQN.
        extra: as `files`, for every other file that was published or found.
        training: (origin, facts) of the training that wrote it, each as `ckptcore.catalog.training`.
        stamp: digest over the identity of its files, right after they were published; None if unknown.
        live: whether it has what its job had in memory, if that was compared.
        statistics: of its tensors, if they were computed.
    """

    uri: str
    format: str
    manifest_digest: str
    nbytes: int
    tensors: Sequence[tuple[str, str, Sequence[int], int]]
    files: Sequence[tuple[str, int, str | None]]
    step: int | None = None
    run: str | None = None
    origin: Mapping[str, Any] = field(default_factory=dict)
    verified: str | None = None
    fingerprint: str | None = None
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    extra: Sequence[tuple[str, int, str | None]] = ()
    training: Sequence[tuple[str, TrainingFacts]] = ()
    stamp: str | None = None
    live: LiveVerdict | None = None
    statistics: StatisticsRow | None = None

    def __post_init__(self) -> None:
        if self.verified is not None and self.verified not in LEVELS:
            raise ValueError(f"verified must be one of {', '.join(LEVELS)} (got {self.verified!r})")


@dataclass(frozen=True, slots=True)
class ConversionStart:
    """What is known of a conversion that starts.

    Attributes:
        request: the options of the conversion, as JSON values.
        source_uri: the URI of the source checkpoint.
        destination_uri: the URI of the output.
        verb: the command, such as ``consolidate``.
        tool_version: the version of ckptcore.
        flow_run_id: the id of the Prefect flow run, if any.
    """

    request: Mapping[str, Any]
    source_uri: str
    destination_uri: str
    verb: str
    tool_version: str
    flow_run_id: str | None = None


@dataclass(frozen=True, slots=True)
class Begun:
    """A conversion that is recorded as running, and what the catalog knew as it began.

    Attributes:
        id: the conversion.
        source: the current or last checkpoint at the source's place with its files, if one was recorded.
        training: the facts about the training of that checkpoint, if any.
    """

    id: str
    source: tuple[CheckpointRow, tuple[FileRow, ...]] | None = None
    training: Training | None = None


@dataclass(frozen=True, slots=True)
class ConversionFacts:
    """The facts to record about a conversion that has published its output.

    plan_digest: of the executed plan. bytes_in, bytes_out: read and written.
    peak_memory: resident bytes, or None. timings: seconds by stage. map_digest, fingerprint, source_stamp,
    source_ctime: see `ConversionRow`. findings: about the source or the output. inputs: (weight, checkpoint)
    of what the source is the average of.
    """

    plan_digest: str
    bytes_in: int
    bytes_out: int
    peak_memory: int | None
    timings: Mapping[str, float]
    map_digest: str | None = None
    fingerprint: str | None = None
    source_stamp: str | None = None
    source_ctime: str | None = None
    findings: tuple[Finding, ...] = ()
    inputs: tuple[tuple[float, CheckpointFacts], ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """One recorded checkpoint.

    Attributes:
        dtypes: the dtypes of its tensors, the one with the most bytes first.
        content_digest: digest over its files' digests; None if a file has none.
        verified_at: when it was last proven complete.
        verified_level: the check level of that proof.
        fingerprint: of its tensor values in any format and topology; None if it was never computed.
        deleted_at: when it was purged after `retire`.
        due_at: when a retired one may be purged.
        lost: how many contents of a deleted one no recorded checkpoint holds any more.
        trouble: what is odd in the row, where an odd value is empty here; "" for a row in order.
    """

    id: str
    kind: str
    format: str
    uri: str
    state: str
    run: str | None
    step: int | None
    nbytes: int
    num_tensors: int
    num_files: int
    dtypes: tuple[str, ...]
    manifest_digest: str
    content_digest: str | None
    origin: dict[str, Any]
    created_at: datetime
    verified_at: datetime | None
    verified_level: str | None
    replaced_at: datetime | None
    fingerprint: str | None = None
    deleted_at: datetime | None = None
    due_at: datetime | None = None
    lost: int = 0
    trouble: str = ""

    @property
    def proof(self) -> str:
        """What a check proves of it: ``proven`` with the digests of its files, else ``tensors proven``."""
        return "proven" if self.content_digest else "tensors proven"

    @property
    def condition(self) -> str:
        """The state, with what follows from it."""
        if self.due_at is not None and self.state == State.RETIRED:
            return f"{self.state}, purge on {self.due_at:%Y-%m-%d}"
        return f"{self.state}, {self.lost} contents lost" if self.lost else self.state


@dataclass(frozen=True, slots=True)
class FileRow:
    """One file of a checkpoint; digest as in `ckptcore.utils.part_digest`, or None. role: see `Role`.

    trouble: as of `CheckpointRow`.
    """

    path: str
    nbytes: int
    digest: str | None
    role: str = Role.DATA.value
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor of a checkpoint. shape: in elements. fingerprint: None if unknown.

    trouble: as of `CheckpointRow`.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    fingerprint: str | None = None
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class ConversionRow:
    """One run of a conversion.

    Attributes:
        timings: seconds by stage.
        peak_memory: bytes.
        map_digest: of the renaming of tensors; None if no fingerprint was computed.
        fingerprint: of the converted tensors, under their new names and before any cast; None if it was not
            computed.
        source_stamp: digest (`ckptcore.checking.source_stamps.digest`) over the identity of every source
            file, as it was before the first byte was read; None if unknown.
        source_ctime: the same over the status times; None if unknown or the store has no such time.
        export_verdict: ok, failed or unproven, from `verify-export`; None if it never ran.
        export_checks: verdict, summary and time (``at``) by check.
        export_verified_at: the time of the last check.
        trouble: as of `CheckpointRow`.
    """

    id: str
    verb: str
    state: str
    source_uri: str
    destination_uri: str
    request: dict[str, Any]
    plan_digest: str | None
    tool_version: str
    flow_run_id: str | None
    started_at: datetime
    ended_at: datetime | None
    bytes_in: int | None
    bytes_out: int | None
    peak_memory: int | None
    error_code: str | None
    error_message: str | None
    timings: dict[str, float]
    map_digest: str | None = None
    fingerprint: str | None = None
    source_stamp: str | None = None
    source_ctime: str | None = None
    export_verdict: str | None = None
    export_checks: dict[str, dict[str, str]] = field(default_factory=dict)
    export_verified_at: datetime | None = None
    trouble: str = ""

    @property
    def made_for(self) -> str:
        """The verb and the mesh of the output: ``reshard for fsdp=4,tp=2``."""
        mesh = self.request.get("mesh")
        return f"{self.verb} for {mesh}" if mesh else self.verb


@dataclass(frozen=True, slots=True)
class CheckpointDetail:
    """Everything about one checkpoint: contents, conversions that wrote or read it, open findings.

    loadable: of an export ``no`` without the file by which transformers or PEFT opens a model, or where
    verify-export failed, ``yes`` where it proved the export, else ``unproven``; otherwise None.
    training: what is known about the training that wrote it, or None.
    """

    checkpoint: CheckpointRow
    files: tuple[FileRow, ...]
    tensors: tuple[TensorRow, ...]
    findings: tuple[Finding, ...]
    tags: dict[str, str]
    written_by: tuple[ConversionRow, ...]
    used_by: tuple[ConversionRow, ...]
    loadable: str | None = None
    training: Training | None = None


@dataclass(frozen=True, slots=True)
class ConversionDetail:
    """Everything about one conversion: its sources, its outputs and its findings."""

    conversion: ConversionRow
    sources: tuple[CheckpointRow, ...]
    derived: tuple[CheckpointRow, ...]
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class LineageStep:
    """One conversion between two checkpoints. depth: conversions from the checkpoint of the query."""

    depth: int
    source: CheckpointRow
    conversion: ConversionRow
    derived: CheckpointRow


@dataclass(frozen=True, slots=True)
class Lineage:
    """The ancestors of a checkpoint and its descendants."""

    checkpoint: CheckpointRow
    ancestors: tuple[LineageStep, ...]
    descendants: tuple[LineageStep, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a file or checkpoint comes from.

    Attributes:
        checkpoint: the checkpoint that contains it.
        file: the file, or None if the query named a checkpoint.
        conversion: the newest conversion that wrote the checkpoint; None for a source.
        sources: the checkpoints that this conversion read.
    """

    checkpoint: CheckpointRow
    file: FileRow | None
    conversion: ConversionRow | None
    sources: tuple[CheckpointRow, ...]


def as_dict(value: Any) -> Any:
    """Convert a value of this module to JSON values: dicts and lists, times in ISO 8601.

    A row has ``trouble`` only if something is odd in it.
    """
    if is_dataclass(value) and not isinstance(value, type):
        named = ((f.name, getattr(value, f.name)) for f in fields(value))
        return {name: as_dict(part) for name, part in named if name != "trouble" or part}
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {str(k): as_dict(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [as_dict(v) for v in value]
    return value
