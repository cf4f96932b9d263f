"""Compare a checkpoint with the fingerprint that its job sent, also where nothing is converted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckptcore.catalog import open_catalog
from ckptcore.catalog.training import LiveVerdict
from ckptcore.checking.check import Report
from ckptcore.comparison.fingerprint import EVERYTHING, FingerprintRules, fingerprint
from ckptcore.comparison.live_comparison import LiveComparison, compare_with_live
from ckptcore.conversion.file_fingerprints import matching
from ckptcore.conversion.live_source import NO_DIGESTS, LiveSource
from ckptcore.core.manifest import Manifest
from ckptcore.errors import CkptError
from ckptcore.fingerprints.sums import Fingerprinted
from ckptcore.planning.request import Settings
from ckptcore.utils.workers import Progress


def recorded_job(uri: str, catalog_url: str | None) -> LiveSource:
    """Return what the catalog knows of the job that wrote the checkpoint at a place; empty without a catalog.

    An unreadable catalog fails later, on writing.
    """
    try:
        with open_catalog(catalog_url, create=False) as catalog:
            recorded = catalog.at(uri)
            training = None if recorded is None else catalog.training(recorded[0].id)
    except CkptError:
        return LiveSource()
    return LiveSource(recorded=recorded, training=training)


def compare_fingerprints(
    manifest: Manifest,
    job: LiveSource,
    fingerprinted: Sequence[Fingerprinted],
    names: Mapping[str, str],
    *,
    prefix: str | None = None,
    digests: Mapping[str, str] = NO_DIGESTS,
) -> LiveComparison | None:
    """Compare tensors that were read with what their job sent; None if it sent nothing.

    Args:
        manifest: The checkpoint.
        job: What the catalog knows of the job.
        fingerprinted: The tensors.
        names: FQN -> its name in ``fingerprinted``, where they differ.
        prefix: Prefix of the model part, if the user named it.
        digests: Path -> digest of files that were read completely.
    """
    stated = job.fingerprints(manifest, digests)
    if not stated:
        return None
    by_name = matching(manifest, fingerprinted, names)[1]
    return compare_with_live(manifest, by_name, stated, facts=job.other_facts(), prefix=prefix)


def against_live(
    manifest: Manifest,
    report: Report,
    uri: str,
    catalog_url: str | None,
    settings: Settings,
    progress: Progress,
) -> tuple[Report, LiveVerdict | None]:
    """Add to the report of a check at level ``values`` whether the checkpoint is what its job had in memory.

    The tensors are read once more, if the job sent a fingerprint and the check found no error.
    """
    job = recorded_job(uri, catalog_url)
    stated = job.fingerprints(manifest)
    if not stated or not report.ok:
        return report, None
    rules = EVERYTHING if "live_fingerprint" in stated else FingerprintRules(model=True)
    taken = fingerprint(manifest, settings, progress, rules)
    compared = compare_fingerprints(manifest, job, taken.tensors, dict(taken.renamed))
    if compared is None:
        return report, None
    return replace(report, findings=(*report.findings, *compared.findings)), compared.verdict
