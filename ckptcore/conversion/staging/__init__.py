"""Hold an output beside its destination until it is complete, then publish it.

- staging: `Staging`, the interface
- open_staging: `open_staging`, the staging of a destination, by the kind of its store
- staged_plan: plans in a staging folder; `plan_into`, `load_request`: plans saved for later
- local_staging, remote_publication, s3_staging: the kinds (a folder here, a prefix of an object store, one
  with uploads and leases), each with how it brings files to the destination
"""
