"""Report bytes of files that belong to no tensor, object or structure.

They do no harm to what is read, and may be all that is left of something: an entry that was removed from the
metadata, or what another program keeps there. So this is a warning that stops no conversion.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from ckptcore.core.byte_ledger import UnusedBytes
from ckptcore.core.manifest import Envelope, Manifest
from ckptcore.core.unused_bytes import unused_bytes
from ckptcore.errors import Finding, finding
from ckptcore.utils.text import count

_NAMED = 5  # ranges in a message


def unused_rule(manifest: Manifest) -> Iterable[Finding]:
    """Report what the account of the reading does not explain, but for the bytes of an ``oversized-file``."""
    unused = unused_bytes(manifest)
    if not unused:
        return ()
    exact = {f.path: f.size for f, ends in zip(manifest.files, ending(manifest), strict=True) if ends}
    return unused_findings((span for span in unused if span.end != exact.get(span.file)), "coverage")


def unused_findings(unused: Iterable[UnusedBytes], level: str) -> Iterator[Finding]:
    """Yield a finding for each file and kind of unused bytes."""
    kinds: dict[tuple[str, str], list[UnusedBytes]] = {}
    for span in unused:
        kinds.setdefault((span.file, span.description), []).append(span)
    for (path, label), ranges in kinds.items():
        nbytes = sum(span.end - span.start for span in ranges)
        places = ", ".join(f"[{span.start}, {span.end})" for span in ranges[:_NAMED])
        rest = f" and {count(len(ranges) - _NAMED, 'more range')}" if len(ranges) > _NAMED else ""
        message = f"{path}: {count(nbytes, 'byte')} at {places}{rest} belong to no tensor or object"
        message += f": {label}" if label else ""
        yield finding("unused-bytes", level, message, file=path)


def ending(manifest: Manifest) -> npt.NDArray[np.bool_]:
    """Return for each file whether it ends with its last item.

    Torch zips fill their file exactly. A DCP file with a safetensors blob ends where the blob's header says,
    and the blob exists even when it is empty. Files of raw items alone (safetensors, torch_save) are checked
    by their reader.
    """
    items = manifest.items
    exact = np.zeros(len(manifest.files), np.bool_)
    if not bool((items.envelope == int(Envelope.SAFETENSORS)).any()):
        exact[items.file[items.envelope == int(Envelope.TORCHZIP)]] = True
    return exact
