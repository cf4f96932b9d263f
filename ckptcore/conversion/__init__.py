"""The pipeline of a conversion: prepare, execute, verify, publish, register.

It uses formats, checks, plans and execution, the store and the catalog. It knows no command line, no Prefect,
and no folders of many checkpoints. All state between its stages is in a staging folder beside the
destination, so each stage can run in another process, and the next run resumes a killed one.

- pipeline: `convert`, and its stages `prepare`, `execute`, `finish`, `remove_staging`; `inspect`, `validate`
- batch: converts small checkpoints one after the other in one process
- destination, foreign_files: whether a place may be written, and that nothing of another owner is replaced
- file_process: writes files in several processes
- publish: `Result`; reads the output back, then publishes it
- registration: `start`, `register`, `fail`: records conversions in the catalog
- source_digests: compares a source's files with the digests that the catalog recorded
- live_source: compares a source with what its trainer fingerprinted when it saved
- file_fingerprints: what the fingerprints of sources and outputs are, file by file
- export_verdict: `find_source`, `record_verdict`: finds an export's source, and stores the verdict on it
- request_costs: estimates the requests to object stores
- virtual_folder: the folder of an export that is not written
- staging: the output beside its destination until it is complete, on disks and on object stores
"""
