"""Declare the options of sweep, scrub, retire and verify-export once, for the command line and for flows.

As in `ckptcore.planning.options`, a field is an option; the means of a conversion come beside these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ckptcore.planning.options import Option, Texts

# The catalog that something is done in the name of; there is no doing without one.
Catalog = Annotated[
    str | None,
    Option(
        "The catalog to go by; default: CKPTCORE_CATALOG_URL, else the user's own.",
        "URL",
        env="CKPTCORE_CATALOG_URL",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """What a sweep converts."""

    dry_run: Annotated[bool, Option("Say what would be done, and do nothing.")] = False
    settle: Annotated[str, Option("Leave alone what changed within this time.", "TIME")] = "2m"
    again: Annotated[bool, Option("Also what failed a short time ago, or was broken.")] = False
    fingerprint: Annotated[bool, Option("One digest of the numbers of every conversion.")] = False
    catalog: Catalog = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubOptions:
    """How much a scrub proves."""

    share: Annotated[float, Option("Of what the catalog knows, above 0 to 1.")] = 0.05
    budget: Annotated[str, Option("Stop after this time, the first aside.", "TIME")] = "10m"
    catalog: Catalog = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetireOptions:
    """What is kept, and what may be lost."""

    keep_last: Annotated[int, Option("The newest N steps of every run.", "N")] = 3
    keep_every: Annotated[int | None, Option("And every step that K divides.", "K")] = None
    yes: Annotated[bool, Option("Delete; without it nothing is changed.", off="dry-run")] = False
    fingerprint: Annotated[bool, Option("Read sources and children to take their fingerprints.")] = False
    accept_cast: Annotated[bool, Option("The same as --accept-loss cast.", hidden=True)] = False
    accept_loss: Annotated[
        Texts,
        Option(
            "Objects and files that may go unproven; the word cast: what a cast took (repeatable).", "GLOB"
        ),
    ] = None
    catalog: Catalog = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """What an export is held against."""

    against: Annotated[
        str | None,
        Option("The source; default: the one that the catalog, or else the model card, names.", "SRC"),
    ] = None
    reference: Annotated[
        str | None, Option("A Hugging Face folder that is right: its logits are compared.", "FOLDER")
    ] = None
    near: Annotated[
        str | None,
        Option("A related Hugging Face folder: tensors of one name must point the same way.", "BASE"),
    ] = None
    near_threshold: Annotated[float, Option("The least cosine that is near.", "COSINE")] = 0.8
    logits: Annotated[bool, Option("Open it with transformers; this takes the model's memory.")] = False
    logits_dtype: Annotated[str, Option("The dtype that models are opened in.", "DTYPE")] = "fp32"
    logits_tolerance: Annotated[
        float, Option("The largest difference of logits that is none; 0 is bit for bit.", "DIFFERENCE")
    ] = 0.0
    any_memory: Annotated[bool, Option("Open models that are larger than the free memory, too.")] = False
