"""Operate on folders of checkpoints: sweep, scrub, retire, claim, and rebuild the catalog.

Operations read the catalog and decide what to do; `ckptcore.conversion` converts. They delete only data whose
copy was verified (`ckptcore.custody`). They know no command line and no Prefect.

    sweep             `sweep`, `look_through`: convert complete checkpoints below the watched roots
    scrub             `scrub`: verify that registered checkpoints are still intact
    retire            `retire`: set sources aside that a verified child replaces
    purge             `purge`, `restore`: delete what was set aside, or bring it back
    push              `push_each`, `push`: send proven outputs to the Hugging Face hub
    signing           `sign`, `verify_signature`: signatures of folders, in OpenSSF's format
    convert_once      `convert_once`: convert a checkpoint in one of several processes that are asked to
    export_target     `ExportTarget`, `target_of`: output format and destination of a root's checkpoints
    rebuild_catalog   `rebuild`: restore the rows of a lost catalog from the data
    options           options of sweep, scrub, retire, thin and push, for commands and flows
    claims, wait, readiness, reader_digest, discover, verify, registered_files, replacement,
    part_replacement, retention:
                      internals of these
"""
