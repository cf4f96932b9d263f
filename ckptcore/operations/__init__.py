"""Operate on folders of checkpoints: sweep, scrub, retire, claim, and rebuild the catalog.

Operations read the catalog and decide what to do; `ckptcore.conversion` converts. They delete only data whose
copy was verified (`ckptcore.custody`). They know no command line and no Prefect.

    automation        sweeps of watched roots, announced checkpoints, several workers
    retention         retire, purge and thin: what is kept of a run, and what is deleted
    publication       push to the hub, signatures
    averages          `merge`: the window of steps and their weights
    scrub             `scrub`: verify that registered checkpoints are still intact
    verify            `prove`: one registered checkpoint, byte for byte
    registered_files  the files at a place, compared with the catalog
    rebuild_catalog   `rebuild`: restore the rows of a lost catalog from the data
    abandoned         what killed conversions left on an object store
    live_check        a checkpoint, compared with the fingerprint that its job sent
    recorded_run      the row of an operation in the catalog
    discover, readiness
                      the checkpoints below a root; complete, still being written, or broken
    claims            one process a conversion
    export_target     `ExportTarget`, `target_of`: output format and destination of a root's checkpoints
    options           options of sweep, scrub, retire, thin and push, for commands and flows
"""
