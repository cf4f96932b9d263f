"""Hold the fingerprints of a checkpoint, or of the state of a running program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckptcore.errors import Finding
from ckptcore.fingerprints.sums import Fingerprinted


@dataclass(frozen=True)
class Fingerprints:
    """The fingerprints of a checkpoint and of its tensors.

    Attributes:
        fingerprint: Of all selected tensors together.
        map_digest: Of the renames and the excluded names.
        tensors: (FQN, dtype, shape, fingerprint) of each.
        renamed: (stored name, name).
        unverified: Number of stored items that were read and have no checksum.
        warnings: Options that had no effect.
    """

    fingerprint: str
    map_digest: str
    tensors: tuple[Fingerprinted, ...]
    renamed: tuple[tuple[str, str], ...]
    unverified: int
    warnings: tuple[Finding, ...] = ()

    def differing(self, fingerprints: Fingerprints) -> tuple[str, ...]:
        """Return the names of tensors that one side lacks, or whose dtype, shape or values differ."""
        return tuple(sorted({fqn for fqn, *_ in {*self.tensors} ^ {*fingerprints.tensors}}))

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        rows = [
            {"fqn": fqn, "dtype": dtype, "shape": list(shape), "fingerprint": fingerprint}
            for fqn, dtype, shape, fingerprint in self.tensors
        ]
        return {
            "fingerprint": self.fingerprint,
            "map_digest": self.map_digest,
            "unverified": self.unverified,
            "tensors": rows,
            "warnings": [w.as_dict() for w in self.warnings],
        }
