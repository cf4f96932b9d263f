"""Run `ckptcore push`, `sign` and `verify-signature`, which bring outputs to others.

Commands parse, call and print; `ckptcore.cli.main` handles errors.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from ckptcore.cli import render as show
from ckptcore.cli.options import ANSWER, Output, declared, takes
from ckptcore.operations.options import PushOptions
from ckptcore.planning.options import here, options_of, read_options


@takes(declared(*options_of(PushOptions), of=PushOptions), ANSWER)
def push(
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="DST... URL",
            help="Folders that `ckptcore export` wrote; then hf://ORG/NAME@BRANCH. {step} in it is the step "
            "of each folder.",
        ),
    ],
    **arguments: Any,
) -> None:
    """Send exports to the Hugging Face hub, a branch a step.

    Only proven exports are sent, and only what the branch lacks. A branch that holds something else is
    refused. Token and endpoint are those of huggingface_hub (HF_TOKEN, HF_ENDPOINT, hf auth login).
    """
    from ckptcore.catalog import default_url, open_catalog
    from ckptcore.catalog.aliases import accepted_codes
    from ckptcore.cli.render_operations import pushed, pushed_line
    from ckptcore.operations.publication.push import PushRules, push_each

    *folders, url = places
    if not folders:
        raise typer.BadParameter("name at least one folder, and then the URL", param_hint="DST... URL")
    options = read_options(PushOptions, arguments)
    rules = PushRules(
        tag=options.tag,
        overwrite=options.overwrite,
        create=options.create,
        card=None if options.card is None else here("--card", options.card),
        accept=accepted_codes(options.accept or ()),
        dry_run=options.dry_run,
    )
    as_json = arguments["output"] is Output.JSON
    with open_catalog(options.catalog or default_url(), create=False) as catalog, show.progress() as progress:
        outcomes = push_each(catalog, folders, url, rules, progress, pushed_line(as_json))
    pushed(outcomes, as_json=as_json)
    failed = next((item.error for item in outcomes if item.error is not None), None)
    raise typer.Exit(0 if failed is None else failed.exit_code)


class SignedDigest(StrEnum):
    """The digest by which a signature lists files."""

    SHA256 = "sha256"
    BLAKE3 = "blake3"


Folder = Annotated[str, typer.Argument(metavar="DST", help="Folder of a checkpoint.")]
Signature = Annotated[
    str | None,
    typer.Option("--signature", metavar="FILE", help="The signature. Default: DST.sig, beside the folder."),
]


@takes(declared("catalog", "no_catalog"), ANSWER)
def sign(
    folder: Folder,
    key: Annotated[
        str,
        typer.Option(
            "--key",
            metavar="FILE",
            help="Private key (PEM, a NIST curve). CKPTCORE_KEY_PASSWORD is its password, if it has one.",
        ),
    ],
    certificate: Annotated[
        str | None, typer.Option("--certificate", metavar="FILE", help="Certificate of the key (PEM).")
    ] = None,
    chain: Annotated[
        list[str] | None,
        typer.Option(
            "--chain", metavar="FILE", help="Certificates that lead from it to its root (repeatable)."
        ),
    ] = None,
    signature: Signature = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a signature that is there.")
    ] = False,
    digest: Annotated[
        SignedDigest,
        typer.Option(
            "--digest",
            help="Digest of each file. All verifiers know sha256; with blake3, files that are untouched "
            "since the catalog recorded them are not read.",
        ),
    ] = SignedDigest.SHA256,
    **arguments: Any,
) -> None:
    """Sign a folder in OpenSSF's model-signing format.

    Every file is listed with its digest, and must be the one that the catalog recorded. Others verify the
    signature with `model_signing`, or with `ckptcore verify-signature`.
    """
    from ckptcore.cli.render_operations import signed
    from ckptcore.operations.publication.signing import SigningKey
    from ckptcore.operations.publication.signing import sign as run

    if chain and certificate is None:
        raise typer.BadParameter("needs --certificate", param_hint="--chain")
    signing_key = SigningKey(
        here("--key", key),
        None if certificate is None else here("--certificate", certificate),
        tuple(here("--chain", path) for path in chain or ()),
    )
    outcome = run(
        folder,
        None if signature is None else str(here("--signature", signature)),
        signing_key,
        algorithm=digest.value,
        catalog=False if arguments["no_catalog"] else arguments["catalog"],
        overwrite=overwrite,
    )
    signed(outcome, as_json=arguments["output"] is Output.JSON)


@takes(ANSWER)
def verify_signature(
    folder: Folder,
    key: Annotated[
        str | None, typer.Option("--key", metavar="FILE", help="Public key of the signer (PEM).")
    ] = None,
    chain: Annotated[
        list[str] | None,
        typer.Option(
            "--chain",
            metavar="FILE",
            help="Root certificates that you trust, for one that signs (repeatable).",
        ),
    ] = None,
    signature: Annotated[
        str | None,
        typer.Option(
            "--signature", metavar="FILE", help="The signature. Default: DST/model.sig, or DST.sig beside it."
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            "--ignore", metavar="NAME", help="File or folder in DST that need not be signed (repeatable)."
        ),
    ] = None,
    **arguments: Any,
) -> None:
    """Verify that a folder is what its signer signed.

    Signatures are those of OpenSSF's model-signing. Exit code 1 if the signature is not valid, or a file was
    changed, removed or added.
    """
    from ckptcore.cli.render_operations import signature_check
    from ckptcore.operations.publication.signing import Trusted
    from ckptcore.operations.publication.signing import verify_signature as run

    trusted = Trusted(
        None if key is None else here("--key", key), tuple(here("--chain", path) for path in chain or ())
    )
    outcome = run(
        folder,
        None if signature is None else str(here("--signature", signature)),
        trusted,
        tuple(ignore or ()),
    )
    signature_check(outcome, as_json=arguments["output"] is Output.JSON)
    raise typer.Exit(0 if outcome.ok else 1)
