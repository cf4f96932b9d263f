"""Laying out a step folder of OLMo-core: the DCP folder, the trainer's state, and the marker behind them.

`.metadata` names torch's own storage class, which OLMo-core's
reader takes as it takes its own (olmo_core/distributed/checkpoint/filesystem.py), and plain torch too.
"""

from __future__ import annotations

import json
from dataclasses import replace

from ckptcore.formats._dcpwrite import arrange_folder
from ckptcore.formats._olmotrain import PREFIX, train_files
from ckptcore.formats.base import Arrangement, FileLayout, Literal


def arrange_step(request: Arrangement, *, folder: str, marker: str) -> tuple[FileLayout, ...]:
    """The files of a step. folder: where model and optimizer go. marker: the file written last."""
    stored = [i for i, t in enumerate(request.tensors) if not t.fqn.startswith(PREFIX)]
    objects = {k: v for k, v in request.objects.items() if not k.startswith(PREFIX)}
    part = replace(request, tensors=[request.tensors[i] for i in stored], objects=objects)
    layouts = [
        replace(layout, tensors=tuple(stored[t] for t in layout.tensors))
        for layout in arrange_folder(part, folder=folder, commit=False)
    ]
    told = json.dumps({"ephemeral": False}).encode()
    return (*layouts, *train_files(request),
            FileLayout(marker, len(told), (), (), (Literal(0, told),), commit=True))  # fmt: skip
