"""Hold the fingerprints of a checkpoint, or of the state of a running program."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptcore.errors import Finding
from ckptcore.fingerprints.sums import Fingerprinted, checkpoint_fingerprint

MOST_TENSORS = 8192  # of which an event has the beginnings of fingerprints: 44 KiB
_BYTES = 4  # of the fingerprint of each: they name what differs, and decide nothing


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

    def below(self, prefix: str) -> Fingerprints:
        """Return the fingerprints of the tensors whose names begin with a prefix, which is removed."""
        tensors = tuple((t[0][len(prefix) :], *t[1:]) for t in self.tensors if t[0].startswith(prefix))
        return replace(self, fingerprint=checkpoint_fingerprint(tensors), tensors=tensors)

    def as_facts(self, *, model: bool = False) -> dict[str, str]:
        """Return the form for an announcement, as facts about the training.

        Args:
            model: They are of the model alone, under the names of its module, and not of everything that is
                saved.
        """
        facts = {"live_model_fingerprint" if model else "live_fingerprint": self.fingerprint}
        if len(self.tensors) <= MOST_TENSORS:
            facts["live_tensors"] = _short(self.fingerprint, ((t[0], t[3]) for t in self.tensors))
        return facts

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


def differing_of(
    facts: Mapping[str, Any], fingerprint: str, by_name: Mapping[str, str], naming: Callable[[str], str]
) -> tuple[str, ...]:
    """Return the names of tensors that differ from those of an announcement.

    Args:
        facts: Facts with ``live_tensors`` of `Fingerprints.as_facts`; without them nothing is named.
        fingerprint: The announced fingerprint of these tensors.
        by_name: Name -> fingerprint of the checkpoint's tensors.
        naming: From their names to the announced names.
    """
    text = facts.get("live_tensors")
    names = sorted(by_name, key=naming)
    beginnings = _short(fingerprint, ((naming(name), by_name[name]) for name in names))
    if not isinstance(text, str) or len(text) != len(beginnings) or text[:_HEAD] != beginnings[:_HEAD]:
        return ()  # other names, another part, or another fingerprint
    size = 4 * _BYTES // 3 + 1  # characters of each
    pairs = ((text[n : n + size], beginnings[n : n + size]) for n in range(_HEAD, len(beginnings), size))
    return tuple(name for name, (theirs, ours) in zip(names, pairs, strict=True) if theirs != ours)


_HEAD = 16


def _short(fingerprint: str, tensors: Iterable[tuple[str, str]]) -> str:
    """Return the beginnings of the fingerprints of tensors in the order of names, behind that of all."""
    beginnings = (bytes.fromhex(digest)[:_BYTES] for _, digest in sorted(tensors))
    return fingerprint[:_HEAD] + "".join(base64.b64encode(b).decode().rstrip("=") for b in beginnings)
