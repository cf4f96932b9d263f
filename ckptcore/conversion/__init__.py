"""The pipeline of a conversion: prepare, execute, verify, publish, register.

It uses formats, checks, plans and execution, the store and the catalog. It knows no command line, no Prefect,
and no folders of many checkpoints. All state between its stages is in a staging folder beside the
destination, so each stage can run in another process, and the next run resumes a killed one.

    pipeline         `convert`, and its stages `prepare`, `execute`, `finish`, `remove_staging`; `inspect`,
                     `validate`
    destination      `refuse_existing`, `require_place`: checks whether a place may be written
    registration     `start`, `register`, `fail`: records conversions in the catalog
    export_verdict   `find_source`, `record_verdict`: finds an export's source, and stores the verdict on it
    publish          `Result`; reads the output back, then publishes it
    staging          the output beside its destination until it is complete, on disks and on object stores
    foreign_files, file_fingerprints, source_digests
                     the internals of the stages
"""
