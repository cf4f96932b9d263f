"""Lay out a step folder of OLMo-core: the DCP folder, the trainer's state, and the marker after them.

`.metadata` names torch's storage class, which both OLMo-core's reader
(olmo_core/distributed/checkpoint/filesystem.py) and plain torch accept. For a mesh all ranks share the DCP
folder; a rank without its own `train/rank{R}.pt` loads that of rank 0 (olmo_core/train/checkpoint.py).
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

from ckptcore.core.object_tree import decode
from ckptcore.encodings.pickle.writer import Classes
from ckptcore.formats.base import Arrangement, FileLayout, Literal
from ckptcore.formats.dcp.writer import arrange_folder
from ckptcore.formats.olmo.trainer_state import PREFIX, train_files

_CONFIG = "config"  # the object that becomes config.json
WORLD = f"{PREFIX}world_size"
_RANDOM = re.compile(rf"{re.escape(PREFIX)}(rank\d+\.)?rng(\.|$)")


def arrange_step(request: Arrangement, *, folder: str, marker: str) -> tuple[FileLayout, ...]:
    """Lay out the files of a step.

    Args:
        request: What to write.
        folder: Where model and optimizer go.
        marker: The file written last.
    """
    stored = [i for i, t in enumerate(request.tensors) if not t.fqn.startswith(PREFIX)]
    objects = {k: v for k, v in request.objects.items() if not k.startswith(PREFIX)}
    part = replace(request, tensors=[request.tensors[i] for i in stored], objects=objects)
    layouts = [
        replace(layout, tensors=tuple(stored[t] for t in layout.tensors))
        for layout in arrange_folder(part, folder=folder, commit=False)
    ]
    data = json.dumps({"ephemeral": False}).encode()
    return (
        *layouts,
        *train_files(_without_world_size(request), Classes.LIBRARIES),
        FileLayout(marker, len(data), (), (), (Literal(0, data),), commit=True),
    )


def arrange_start(request: Arrangement, *, folder: str, marker: str) -> tuple[FileLayout, ...]:
    """Lay out a step that a run begins from: weights, and the model's config in front of the marker.

    A trainer loads it with ``load_trainer_state=False``.

    Args:
        request: What to write, with the config as an object.
        folder: Where the model goes.
        marker: The file written last.
    """
    objects = {k: v for k, v in request.objects.items() if k != _CONFIG}
    *layouts, last = arrange_step(replace(request, objects=objects), folder=folder, marker=marker)
    data = json.dumps(decode(request.objects[_CONFIG]), indent=2).encode()
    return (*layouts, FileLayout(f"{_CONFIG}.json", len(data), (), (), (Literal(0, data),)), last)


def _without_world_size(request: Arrangement) -> Arrangement:
    """Set the world size of a mesh to 0 where the trainer's state has no random states.

    A trainer restores them when ``world_size`` is its own (olmo_core/train/trainer.py, load_state_dict), and
    fails where they are missing.
    """
    if request.topology is None or WORLD not in request.objects:
        return request
    if any(_RANDOM.match(key) for key in request.objects):
        return request
    return replace(request, objects={**request.objects, WORLD: 0})
