"""Require, before an output is published, that its source is what the training job had in memory.

The sums of a conversion cover the tensors that it writes, under their names in the source. Nothing is read
for the comparison alone: where the output lacks tensors of the part that the job has summed, the result says
that nothing was compared.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from ckptcore.catalog.normalize import hex_digest
from ckptcore.catalog.training import LIVE, PRECEDENCE, Training, read_facts
from ckptcore.catalog.types import FileRow, Role
from ckptcore.comparison.live_comparison import LiveComparison, compare_with_live
from ckptcore.conversion.file_fingerprints import fingerprints, matching
from ckptcore.conversion.registration import UNANNOUNCED, Announcement, Registration
from ckptcore.conversion.source_digests import NOT_THERE, Recorded, differs
from ckptcore.conversion.staging.staging import Staging, noted
from ckptcore.core.manifest import Manifest
from ckptcore.errors import DamagedCheckpoint
from ckptcore.execution.receipts import every_receipt
from ckptcore.fingerprints.sums import checkpoint_fingerprint
from ckptcore.naming.rename import tie_rule
from ckptcore.planning.plan import Plan, load_file_plan, load_head
from ckptcore.planning.request import Settings
from ckptcore.store import local_path

NOT_ASKED = LiveComparison(None)
NO_DIGESTS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class LiveSource:
    """What is known of a job that wrote a source.

    Attributes:
        announcement: Of this conversion.
        recorded: What the catalog has at the source's place, if it has something.
        training: The facts that it has of it.
    """

    announcement: Announcement = UNANNOUNCED
    recorded: Recorded | None = None
    training: Training | None = None

    @classmethod
    def of(cls, source_record: Registration | Announcement) -> LiveSource:
        """Return what is known of a source: its conversion in the catalog, or what a user reports of it."""
        if isinstance(source_record, Announcement):
            return cls(source_record)
        return cls(source_record.announcement, source_record.source, source_record.training)

    def settings(self, settings: Settings) -> Settings:
        """Return settings that sum the tensors if there is something to compare the sums with."""
        # A fingerprint that nobody stated would cost time for nothing.
        return replace(settings, fingerprint=True) if self._stated(self.training) else settings

    def fingerprints(self, manifest: Manifest, digests: Mapping[str, str] = NO_DIGESTS) -> dict[str, str]:
        """Return the fingerprints of the job, by the names of `LIVE`.

        Those that the catalog has are of what it recorded, and not of what was saved there later.

        Args:
            manifest: The source.
            digests: Path -> digest of files that were read completely.
        """
        if self.training is None or self.recorded is None:
            return self._stated(None)
        row, files = self.recorded
        # By state and digest: facts of a row describe the save that it recorded.
        same = row.state not in NOT_THERE and row.manifest_digest == hex_digest(manifest.digest)
        since = self.training.updated_at
        # A later save of equal structure has the same manifest digest;
        # only times and digests of files show it.
        if not same or (since is not None and _is_resaved(manifest.root, files, digests, since)):
            return self._stated(None)
        return self._stated(self.training)

    def other_facts(self) -> dict[str, Any]:
        """Return other facts, in which the beginnings of the fingerprints of tensors may be."""
        recorded = {} if self.training is None else self.training.facts.extra
        return {**recorded, **read_facts(self.announcement.meta)[0].extra}

    def _stated(self, training: Training | None) -> dict[str, str]:
        """Return what announcement and catalog state, by the precedence of their origins."""
        announced, _ = read_facts(self.announcement.meta)
        stated: dict[str, str] = {}
        for name in LIVE:
            rows = [(PRECEDENCE.index(self.announcement.origin), getattr(announced, name))]
            if training is not None and (origin := training.sources.get(name)) in PRECEDENCE:
                rows.append((PRECEDENCE.index(origin), getattr(training.facts, name)))
            values = [value for _, value in sorted(rows, key=lambda row: row[0]) if value is not None]
            if values:
                stated[name] = values[0]
        return stated


def require_as_live(
    staging: Staging,
    manifest: Manifest,
    live: LiveSource,
    digests: Mapping[str, str],
    prefix: str | None = None,
) -> LiveComparison:
    """Require that the tensors of a source are those that its job had in memory, as far as they were summed.

    Args:
        staging: The staging folder, locked; the files of its plan are all written.
        manifest: The source.
        live: What is known of its job.
        digests: Path -> digest of files of the source that were read completely.
        prefix: Prefix of the model part, if the user named it.

    Returns:
        Whether they are equal, or why that is not known.

    Raises:
        DamagedCheckpoint: They differ. What was staged is removed: a run after the source was restored may
            not resume with it.
    """
    stated = live.fingerprints(manifest, digests)
    if not stated:
        return NOT_ASKED
    plan = load_head(staging.plan)
    receipts = every_receipt(staging.receipts, plan.digest, plan.files)
    summed = fingerprints((load_file_plan(staging.plan, f.index) for f in plan.files), receipts) or ()
    by_name = matching(manifest, summed, _written_names(plan))[1]
    output = checkpoint_fingerprint(summed) if summed else None
    comparison = compare_with_live(
        manifest, by_name, stated, facts=live.other_facts(), prefix=prefix, output=output
    )
    if comparison.different and comparison.verdict is not None:
        (different,) = comparison.findings
        # If it is published already, the staged files are no longer there, and
        # the output is verified at its destination.
        if staging.published_plan(noted(staging)) != plan.digest:
            staging.clear()
        raise DamagedCheckpoint(
            different.message,
            hint=different.hint,
            findings=comparison.findings,
            live=[comparison.verdict.verdict, comparison.verdict.compared],
        )
    return comparison


def _written_names(plan: Plan) -> dict[str, str]:
    """Return source name -> name of the output's tensor with the same elements, where the names differ.

    It is "" for a tensor that a map split, joined or permuted. A tensor that is tied to another one, and not
    written, is equal to it: execution has compared them.
    """
    changed = {source: "" for target in plan.made if not target.same for source in target.sources}
    tied = {tie_rule(written): written for _, written in plan.ties}
    return dict(plan.renamed) | changed | {fqn: tied[rule] for fqn, rule in plan.dropped if rule in tied}


def _is_resaved(folder: str, files: Iterable[FileRow], digests: Mapping[str, str], since: datetime) -> bool:
    """Report whether all files with tensors were written after a time, or are others than the recorded."""
    data = [file for file in files if file.role == Role.DATA]
    place = local_path(folder)
    if place is None:
        # Objects have no times of their files' writing: only digests of those that were read completely can
        # show it.
        read = [f for f in data if f.path in digests]
        return bool(read) and all(differs(f, digests[f.path]) for f in read)
    try:
        return bool(data) and all(os.stat(place / f.path).st_mtime > since.timestamp() for f in data)
    except OSError:  # one is missing
        return False
