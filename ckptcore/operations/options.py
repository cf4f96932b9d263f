"""Declare the options of sweep, scrub, retire, thin and push once, for the command line and for flows.

As in `ckptcore.planning.options`, a field is an option. Commands add those for memory, threads and device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ckptcore.planning.options import Option, Texts

# The catalog that a command acts on; unlike a conversion, it cannot do without one.
Catalog = Annotated[
    str | None,
    Option(
        "Catalog to use. Default: CKPTCORE_CATALOG_URL, otherwise the user's own.",
        "URL",
        env="CKPTCORE_CATALOG_URL",
    ),
]
VerifyExport = Annotated[
    bool, Option("Verify an export against its source after it is published, and record the verdict.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """Hold what a sweep converts."""

    dry_run: Annotated[bool, Option("Report what would be done, and change nothing.")] = False
    min_age: Annotated[
        str, Option("Skip checkpoints that changed within this time: 90s, 2m or 1h.", "TIME")
    ] = "2m"
    retry_failed: Annotated[
        bool, Option("Also retry conversions that failed recently, and broken checkpoints.")
    ] = False
    relist: Annotated[
        bool,
        Option(
            "Also list the files of checkpoints on object stores that are complete and converted. Without it "
            "that is done once a day."
        ),
    ] = False
    strict: Annotated[
        bool, Option("Fail (exit code 1) if a checkpoint is broken. Without it, that is only reported.")
    ] = False
    fingerprint: Annotated[bool, Option("Compute one digest of all tensor values for every conversion.")] = (
        False
    )
    verify_export: VerifyExport = True
    meta: Annotated[
        Texts,
        Option(
            "Fact about the training of every checkpoint that is converted, such as user=ada or "
            "git_commit=3f9a (repeatable). What differs from step to step is refused: metrics, epoch, "
            "samples, tokens.",
            "KEY=VALUE",
        ),
    ] = None
    catalog: Catalog = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubOptions:
    """Hold how much a scrub verifies."""

    share: Annotated[
        float, Option("Share of the catalog's checkpoints to verify, above 0 and up to 1.", "SHARE")
    ] = 0.05
    budget: Annotated[str, Option("Start no further checkpoint after this time: 90s, 10m or 2h.", "TIME")] = (
        "10m"
    )
    catalog: Catalog = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetireOptions:
    """Hold what is kept, and what may be lost."""

    keep_last: Annotated[
        int | None,
        Option("Keep the newest N steps of every run. Default: what the root says, otherwise 3.", "N"),
    ] = None
    keep_every: Annotated[
        int | None, Option("Also keep every step that is a multiple of K. Default: what the root says.", "K")
    ] = None
    keep_best: Annotated[
        Texts,
        Option(
            "Also keep the N steps of every run with the lowest value of a metric, or with :max the highest "
            "(repeatable). Where no step has it, all are kept. Default: what the root says.",
            "N:METRIC",
        ),
    ] = None
    rest: Annotated[
        str | None,
        Option(
            "How the other steps are kept: full (the default), or weights: then an export that holds the "
            "model part takes the place of its source, and the optimizer is given up by name.",
            "TIER",
        ),
    ] = None
    yes: Annotated[
        bool | None,
        Option(
            "Set sources aside, from where `ckptcore catalog restore` brings them back. Without it, no "
            "source is changed; with --dry-run, nothing is, whatever else is asked for.",
            off="dry-run",
        ),
    ] = None
    purge: Annotated[
        bool, Option("Delete what was set aside, and whose grace period is over, if it is proven once more.")
    ] = False
    grace: Annotated[
        str,
        Option("How long what --yes sets aside can be restored: 7d or 12h. 0 deletes it at once.", "TIME"),
    ] = "7d"
    fingerprint: Annotated[bool, Option("Read sources and their conversions to compare fingerprints.")] = (
        False
    )
    accept_loss: Annotated[
        Texts,
        Option(
            "Objects and files that need no proof. The word cast accepts what a cast lost, the word "
            "optimizer the loss of optimizer, schedulers and random states (repeatable).",
            "GLOB",
        ),
    ] = None
    catalog: Catalog = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinOptions:
    """Hold what steps lose, and which stay as they are."""

    drop: Annotated[
        Texts,
        Option(
            "What goes: a kind of training state (optimizer, scheduler, random state, data loader, loss "
            "scaler, progress), or a glob on names of tensors, objects and files that are not the model's "
            "(repeatable). Default: optimizer.",
            "NAME",
        ),
    ] = None
    keep_optimizer_last: Annotated[
        int | None,
        Option(
            "Leave the newest N steps of every run as they are. Only complete steps that have what would go "
            "are counted. Default: what the root says, otherwise 1.",
            "N",
        ),
    ] = None
    min_age: Annotated[
        str, Option("Leave steps as they are that changed within this time: 90s, 2m or 1h.", "TIME")
    ] = "2m"
    yes: Annotated[
        bool | None,
        Option(
            "Thin the steps. The old ones are set aside, from where `ckptcore catalog restore` brings them "
            "back, and `ckptcore retire --purge` deletes them. Without it, nothing is changed.",
            off="dry-run",
        ),
    ] = None
    grace: Annotated[
        str, Option("How long the old steps can be restored: 7d or 12h. 0 deletes them at once.", "TIME")
    ] = "7d"
    catalog: Catalog = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOptions:
    """Hold how outputs are sent to a hub."""

    tag: Annotated[bool, Option("Name the commit by a tag in place of a branch.")] = False
    overwrite: Annotated[
        bool, Option("Replace what the branch or tag holds. The history of a branch keeps it.")
    ] = False
    create: Annotated[bool, Option("Create the repository, private, where there is none.")] = False
    card: Annotated[
        str | None, Option("Model card to send in place of README.md; that of the output stays.", "FILE")
    ] = None
    accept: Annotated[Texts, Option("Send although there are alarms of this code (repeatable).", "CODE")] = (
        None
    )
    dry_run: Annotated[bool, Option("Read and compare, and send nothing.")] = False
    catalog: Catalog = None
