"""The pipeline of a conversion: prepare, execute, verify, publish, register.

It knows formats, checks, plans and execution, the store and the catalog. It knows no command line, no
Prefect, and no folders of many checkpoints. Everything between its stages lies in a staging folder beside the
destination, so that each stage can run in another process, and a killed run goes on where it stopped.

    pipeline         `convert`, and its stages `prepare`, `execute`, `finish`, `settle`; `inspect`, `validate`
    saved_plan       plans that are kept: `plan_into`, `load_request`
    destination      `refuse_existing`, `require_place`: may this place be written?
    registration     `start`, `register`, `fail`: what the catalog learns
    export_verdict   `find_source`, `record_verdict`: where an export comes from, and what was proven of it
    publish          `Result`; the output is read back, then published
    staging, staged_plan, staged_proof, publication_record, local_publication, remote_publication,
    foreign_files, file_fingerprints
                     how the stages keep what they promise
"""
