"""Catalog values: what is told to the catalog, and what does it answer?

Plain frozen values, so that nothing outside this folder ever holds a database row.
Ids are UUIDs as text; times are aware and in UTC; sizes are bytes; shapes are tuples of elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from ckptcore.errors import LEVELS, Finding


class Kind(StrEnum):
    """source: found, as a training job left it. derived: written by a conversion."""

    SOURCE = "source"
    DERIVED = "derived"


class State(StrEnum):
    """What the newest word about a checkpoint is.

    present: nothing is known against it. damaged: its open findings include an error.
    incomplete: it is still being written, or its save was aborted.
    replaced: something else stands at its URI now. gone: nothing was there when it was last looked for.
    deleted: it was deleted on purpose, by `ckptcore retire`.
    """

    PRESENT = "present"
    DAMAGED = "damaged"
    INCOMPLETE = "incomplete"
    REPLACED = "replaced"
    GONE = "gone"
    DELETED = "deleted"


class Role(StrEnum):
    """What a file of a checkpoint is for.

    data: it holds what the manifest names: tensors and objects. extra: it belongs to what was published, and
    holds none: config, tokenizer, index, metadata, card.
    """

    DATA = "data"
    EXTRA = "extra"


class Outcome(StrEnum):
    """How a conversion stands."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class Direction(StrEnum):
    """Which side of a conversion a checkpoint is on."""

    IN = "in"
    OUT = "out"


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """What is known of one checkpoint when it is recorded.

    uri: its folder or file; local paths are stored absolute and with symbolic links followed.
    format: the name of its on-disk format.
    manifest_digest: digest of its manifest, without a prefix.
    nbytes: the bytes of its tensors.
    tensors: (fqn, dtype, shape, nbytes) of every tensor; FQNs are unique.
    files: (path relative to `uri`, nbytes, BLAKE3 hex digest or None) of every file that holds what the
        manifest names, paths unique. extra: the same of every other file that was published, or found.
    step, run: training step, and the name of the training run, where known.
    origin: what the checkpoint says about its writer: ranks, mesh, versions. Stored as JSON.
    verified: the check level that this very run has proven, or None.
    fingerprint: of what it holds (`ckptcore.fingerprints.sums`), or None; fingerprints: of those of its
    tensors
        that are known, by FQN.
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

    def __post_init__(self) -> None:
        if self.verified is not None and self.verified not in LEVELS:
            raise ValueError(f"verified={self.verified!r} is none of {', '.join(LEVELS)}")


@dataclass(frozen=True, slots=True)
class ConversionFacts:
    """What is known of one conversion when it has published its output.

    plan_digest: of the plan that was carried out. bytes_in, bytes_out: read and written.
    peak_memory: bytes resident, or None. timings: stage -> seconds. map_digest, fingerprint, source_stamp,
    source_ctime: see `ConversionRow`.
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


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """One checkpoint as the catalog knows it.

    dtypes: the dtypes of its tensors, the one with the most bytes first.
    content_digest: digest over its files' digests; None where not every file has one.
    fingerprint: of the numbers it holds, whatever its format and topology; None where nobody has taken it.
    verified_at, verified_level: when, and to which check level, it was last proven whole.
    deleted_at: when it was deleted on purpose.
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


@dataclass(frozen=True, slots=True)
class FileRow:
    """One file of a checkpoint; digest is BLAKE3 in hex, or None. role: see `Role`."""

    path: str
    nbytes: int
    digest: str | None
    role: str = Role.DATA.value


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor of a checkpoint; shape in elements. fingerprint: where it is known."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class ConversionRow:
    """One run of a conversion. timings: stage -> seconds. peak_memory: bytes.

    fingerprint: of what was carried, under its new names and before any cast; map_digest: of what was done
    to the names. None where no fingerprint was taken. source_stamp, source_ctime: digests
    (`ckptcore.execution.source_stamps.digest`) over identity and status time of every file of the source that
    was used, as they were before its first byte was read; None where that is not known, or the store has no
    such time. export_verdict: ok, failed or unproven, as `verify-export` has it; None where nobody asked.
    export_checks: check -> its verdict, summary and when (``at``); export_verified_at: when the last of them.
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

    @property
    def made_for(self) -> str:
        """The verb, and the ranks it wrote for: ``reshard for fsdp=4,tp=2``."""
        mesh = self.request.get("mesh")
        return f"{self.verb} for {mesh}" if mesh else self.verb


@dataclass(frozen=True, slots=True)
class CheckpointDetail:
    """All about one checkpoint: what it holds, what wrote it, what used it, what is open.

    loadable: ``no`` for an exported folder that lacks the file by which transformers, or PEFT, knows a model;
    None where nothing speaks against it.
    """

    checkpoint: CheckpointRow
    files: tuple[FileRow, ...]
    tensors: tuple[TensorRow, ...]
    findings: tuple[Finding, ...]
    tags: dict[str, str]
    written_by: tuple[ConversionRow, ...]
    used_by: tuple[ConversionRow, ...]
    loadable: str | None = None


@dataclass(frozen=True, slots=True)
class ConversionDetail:
    """All about one conversion: what went in, what came out, what was found on the way."""

    conversion: ConversionRow
    sources: tuple[CheckpointRow, ...]
    derived: tuple[CheckpointRow, ...]
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class LineageStep:
    """One conversion between two checkpoints; depth counts conversions from the one asked for."""

    depth: int
    source: CheckpointRow
    conversion: ConversionRow
    derived: CheckpointRow


@dataclass(frozen=True, slots=True)
class Lineage:
    """Where a checkpoint comes from (ancestors) and what became of it (descendants)."""

    checkpoint: CheckpointRow
    ancestors: tuple[LineageStep, ...]
    descendants: tuple[LineageStep, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """An answer to "where did this come from?".

    file: the file concerned, or None when a whole checkpoint was asked for.
    conversion: the newest conversion that wrote the checkpoint; None for a source.
    sources: the checkpoints that this conversion read.
    """

    checkpoint: CheckpointRow
    file: FileRow | None
    conversion: ConversionRow | None
    sources: tuple[CheckpointRow, ...]


def as_dict(value: Any) -> Any:
    """The JSON face of a value of this module: dicts and lists, times in ISO 8601."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: as_dict(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {str(k): as_dict(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [as_dict(v) for v in value]
    return value
