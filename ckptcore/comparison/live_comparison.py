"""Compare the tensors of a checkpoint with what its job had in memory when it saved them.

A job sends fingerprints (`ckptcore.fingerprint_state`) with the announcement of its checkpoint: of
everything that it saved, or of its model under the names of the module. Whoever has read the tensors, for a
conversion or a check, compares them here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptcore.catalog.training import DIFFERENT, EQUAL, LIVE, LiveVerdict
from ckptcore.core.manifest import Manifest, TensorSpec
from ckptcore.errors import AmbiguousModel, Finding, finding
from ckptcore.fingerprints.result import differing_of
from ckptcore.fingerprints.sums import checkpoint_fingerprint
from ckptcore.naming.model_part import find_model
from ckptcore.naming.rename import strip_wrappers

_NAMED = 5  # tensors in a message
_ALL, _MODEL = LIVE
_PARTS = {_ALL: "all tensors", _MODEL: "the model part"}


@dataclass(frozen=True, slots=True)
class LiveComparison:
    """The result.

    Attributes:
        verdict: Whether the tensors are equal; None if they were not compared.
        findings: The difference, or why nothing was compared; none where they are equal.
        stored: The checkpoint's own fingerprint of the part that was compared.
    """

    verdict: LiveVerdict | None
    findings: tuple[Finding, ...] = ()
    stored: str = ""

    @property
    def different(self) -> bool:
        """Whether the checkpoint is not what its job had in memory."""
        return self.verdict is not None and self.verdict.verdict == DIFFERENT


def compare_with_live(
    manifest: Manifest,
    fingerprints: Mapping[str, str],
    live: Mapping[str, str],
    *,
    facts: Mapping[str, Any] | None = None,
    prefix: str | None = None,
    output: str | None = None,
) -> LiveComparison:
    """Compare the fingerprints of a checkpoint's tensors with those of its job.

    Args:
        manifest: The checkpoint.
        fingerprints: FQN -> fingerprint of tensors that were read.
        live: Fingerprints of the job, by the names of `ckptcore.catalog.training.LIVE`; at least one.
        facts: Other facts of the announcement, by which tensors that differ are named.
        prefix: Prefix of the model part, if the user named it.
        output: Fingerprint of an export under the names of the hub, before any cast: that is what
            `ckptcore.fingerprint_model` computes of a model with other names.

    Returns:
        The difference of a part, if there is one; else the equality of a part, if there is one.
    """
    compared = [
        _compare_part(manifest, fingerprints, part, live[part], facts or {}, prefix, output)
        for part in LIVE
        if part in live
    ]
    for verdict in (DIFFERENT, EQUAL):
        matching = [c for c in compared if c.verdict is not None and c.verdict.verdict == verdict]
        if matching:
            return matching[0]
    return LiveComparison(None, tuple(f for comparison in compared for f in comparison.findings))


def _compare_part(
    manifest: Manifest,
    fingerprints: Mapping[str, str],
    part: str,
    live: str,
    facts: Mapping[str, Any],
    prefix: str | None,
    output: str | None,
) -> LiveComparison:
    """Compare the announced fingerprint of a part with the sums of the stored tensors."""
    if part == _MODEL and output == live:
        return LiveComparison(LiveVerdict(EQUAL, live), (), live)
    try:
        specs, namings = (manifest.tensors, [str]) if part == _ALL else _model(manifest, prefix)
    except AmbiguousModel as error:
        return _not_compared(part, error.message)
    missing = [spec.fqn for spec in specs if spec.fqn not in fingerprints]
    if missing or not specs:
        return _not_compared(
            part, f"{len(missing)} of its tensors were not summed ({', '.join(missing[:1])})"
        )
    # A model is saved below a key, or several: the module's names begin behind one of them.
    stored = [_fingerprint(specs, fingerprints, naming) for naming in namings]
    if live in stored:
        return LiveComparison(LiveVerdict(EQUAL, live), (), live)
    message = (
        f"{manifest.root} is not what the job had in memory: the fingerprint of {_PARTS[part]} is "
        f"{stored[0]}, the job sent {live} ({part})"
    )
    mine = {spec.fqn: fingerprints[spec.fqn] for spec in specs}
    named = min((differing_of(facts, live, mine, naming) for naming in namings), key=len)
    if 2 * len(named) > len(mine):  # then names differ, or all of it
        named = ()
    rest = f" and {len(named) - _NAMED} more" if named[_NAMED:] else ""
    tensors = f"; different: {', '.join(named[:_NAMED])}{rest}" if named else ""
    fqn = named[0] if len(named) == 1 else None
    different = finding("live-mismatch", "values", message + tensors, fqn=fqn)
    return LiveComparison(LiveVerdict(DIFFERENT, live), (different,), stored[0])


def _not_compared(part: str, reason: str) -> LiveComparison:
    message = f"{_PARTS[part]} was not compared with what the job had in memory: {reason}"
    return LiveComparison(None, (finding("live-not-compared", "values", message),))


def _model(manifest: Manifest, prefix: str | None) -> tuple[Sequence[TensorSpec], list[Callable[[str], str]]]:
    """Return the tensors of the model part, and functions from their names to those of the module.

    The first is the one of `ckptcore fingerprint --model`.
    """
    model = find_model(manifest, prefix)
    specs = [spec for spec in manifest.tensors if model.holds(spec.fqn)]
    return specs, list(_namings(model.prefix))


def _namings(prefix: str) -> Iterator[Callable[[str], str]]:
    for start in (*(n + 1 for n in reversed(range(len(prefix))) if prefix[n] == "."), 0):
        yield lambda name, start=start: strip_wrappers(name[start:])  # type: ignore[misc]
        yield lambda name, start=start: name[start:]  # type: ignore[misc]


def _fingerprint(
    specs: Sequence[TensorSpec], fingerprints: Mapping[str, str], naming: Callable[[str], str]
) -> str:
    return checkpoint_fingerprint((naming(s.fqn), s.dtype, s.shape, fingerprints[s.fqn]) for s in specs)
