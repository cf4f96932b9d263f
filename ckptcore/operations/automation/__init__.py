"""Convert what trainers leave, without a person: watched roots, announced checkpoints, and several workers.

- sweep: `sweep`, `look_through`: convert complete checkpoints below the watched roots
- sweep_items: the results of a sweep
- sweep_thin: thin the steps below a watched root
- convert_once: `convert_once`: convert a checkpoint in one of several processes that are asked to
- wait: waits until an announced checkpoint is complete
- verified_exports: verifies what a sweep has exported
"""
