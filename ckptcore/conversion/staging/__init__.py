"""Hold an output beside its destination until it is complete, then publish it.

- staging: `Staging`, the interface
- open_staging: `open_staging`, the staging of a destination, by the kind of its store
- staged_plan: plans in a staging folder; `plan_into`, `load_request`: plans saved for later
- staged_run: `plan_run`, what carries a staged plan out
- local_staging, object_staging, s3_staging: the kinds, each with how it brings files to the destination
- remote_publication: publishes on an object store, where nothing can be renamed
"""
