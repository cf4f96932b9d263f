"""Convert what trainers leave, without a person: watched roots, announced checkpoints, and several workers.

- sweep: `sweep`, `look_through`: convert complete checkpoints below the watched roots
- sweep_items: the results of a sweep
- sweep_thin: thin the steps below a watched root
- root_targets: checks of a root's target when it is added or changed
- convert_once: `convert_once`: convert a checkpoint in one of several processes that are asked to
- wait: waits until an announced checkpoint is complete
- verified_exports: verifies what a sweep has exported
"""
