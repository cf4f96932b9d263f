"""Refuse the shards of torch_xla's FSDP by name: a rank's tensors are flat slices, padded.

Users choose the names of the files (torch_xla/distributed/fsdp/state_dict_utils.py), so the content decides.
This is of its own: two families of formats read such files, and so does whoever looks for what a folder has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptcore.errors import UnsupportedFormat

NAME, TITLE = "torch-xla", "the shards of torch_xla FSDP"
HINT = "join them with python3 -m torch_xla.distributed.fsdp.consolidate_sharded_ckpts"
_KEY = "shard_metadata"  # of every rank's file, beside ``model``
INSIDE = "flatten_info"  # in that: fairscale's shards have metadata of this name, too


def refuse_shards(tree: Mapping[Any, Any], path: str) -> None:
    """Raise `UnsupportedFormat` where a file's content is one rank's shards."""
    shards = tree.get(_KEY)
    if type(shards) is dict and "world_size" in shards:
        raise shards_in(path)


def shards_in(path: str) -> UnsupportedFormat:
    """Return the error about a file that has them."""
    message = f"{path} is one rank's file of {TITLE}: it has {_KEY}"
    return UnsupportedFormat(message, hint=HINT, format=NAME, file=path)
