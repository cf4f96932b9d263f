"""The care of folders of checkpoints: sweep, scrub, retire, claims, and rebuilding the catalog.

Operations read the catalog and say what is to be done; conversions are made by `ckptcore.conversion`. Nothing
is deleted here that is not proven elsewhere, byte for byte. They know no command line and no Prefect.

    sweep             `sweep`, `look_through`: convert what is complete below the watched roots
    scrub             `scrub`: prove that what the catalog knows is still there
    retire            `retire`: delete sources that a verified child replaces
    convert_once      `convert_once`: one of several that are asked converts
    export_target     `Target`, `target_of`: what is made of the checkpoints of a root
    rebuild_catalog   `rebuild`: the rows of a lost catalog, from the data
    options           options of sweep, scrub and retire, for commands and flows
    claims, wait, readiness, discover, distinct, verify, registered_files, proven_files, child_proof,
    replacement, retention, set_aside, interrupted_retire
                      what these rest on
"""
