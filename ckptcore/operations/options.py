"""Declare the options of sweep, scrub, retire and verify-export once, for the command line and for flows.

As in `ckptcore.planning.options`, a field is an option. The options for memory, threads and device are there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ckptcore.planning.options import Option, Texts

# The catalog of an operation; operations need one.
Catalog = Annotated[
    str | None,
    Option(
        "The catalog to use; default: CKPTCORE_CATALOG_URL, else the user's own.",
        "URL",
        env="CKPTCORE_CATALOG_URL",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """Which checkpoints a sweep converts."""

    dry_run: Annotated[bool, Option("Report what would be done, and change nothing.")] = False
    settle: Annotated[str, Option("Leave alone what changed within this time.", "TIME")] = "2m"
    again: Annotated[bool, Option("Also what failed a short time ago, or was broken.")] = False
    fingerprint: Annotated[bool, Option("Compute the fingerprint of every conversion.")] = False
    catalog: Catalog = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubOptions:
    """How much a scrub verifies."""

    share: Annotated[float, Option("The share of the checkpoints to verify, above 0 and up to 1.")] = 0.05
    budget: Annotated[
        str, Option("Stop after this time; the first checkpoint is always finished.", "TIME")
    ] = "10m"
    catalog: Catalog = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetireOptions:
    """What is kept, and what may be lost."""

    keep_last: Annotated[int, Option("Keep the newest N steps of every run.", "N")] = 3
    keep_every: Annotated[int | None, Option("Also keep every step that K divides.", "K")] = None
    yes: Annotated[bool, Option("Delete; without it nothing changes.", off="dry-run")] = False
    fingerprint: Annotated[bool, Option("Read sources and children to compute their fingerprints.")] = False
    accept_cast: Annotated[bool, Option("The same as --accept-loss cast.", hidden=True)] = False
    accept_loss: Annotated[
        Texts,
        Option(
            "Objects and files that may be lost; cast: the precision that a cast lost (repeatable).", "GLOB"
        ),
    ] = None
    catalog: Catalog = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """What an export is compared with."""

    against: Annotated[
        str | None, Option("The source; default: the one in the catalog, or else in the model card.", "SRC")
    ] = None
    reference: Annotated[
        str | None, Option("A reference Hugging Face folder, whose logits are compared.", "FOLDER")
    ] = None
    near: Annotated[
        str | None, Option("A related Hugging Face folder, whose tensors are compared by cosine.", "BASE")
    ] = None
    near_threshold: Annotated[float, Option("The least cosine that passes.", "COSINE")] = 0.8
    logits: Annotated[
        bool, Option("Open the export with transformers; this loads the model into memory.")
    ] = False
    logits_dtype: Annotated[str, Option("The dtype in which models are opened.", "DTYPE")] = "fp32"
    logits_tolerance: Annotated[
        float, Option("The largest difference of logits that passes; 0 is bit for bit.", "DIFFERENCE")
    ] = 0.0
    any_memory: Annotated[bool, Option("Open models even if they are larger than free memory.")] = False
