"""Lay out sharded folders of Lightning and Fabric: a DCP folder, then `meta.pt`.

The files are those of FSDPStrategy and ModelParallelStrategy (lightning/pytorch/strategies/fsdp.py,
save_checkpoint; lightning/fabric/strategies/model_parallel.py, _save_checkpoint). The values of modules and
optimizers are in the DCP folder, nested at least once; every other top-level value is in `meta.pt`. Loaders
open `meta.pt` first, and it is written last.
"""

from __future__ import annotations

from dataclasses import replace

from ckptcore.core.object_tree import decode, references, tensors_in
from ckptcore.encodings.pickle.writer import Classes
from ckptcore.formats.base import Arrangement, FileLayout, natural
from ckptcore.formats.dcp.writer import arrange_folder
from ckptcore.formats.lightning.tree import META
from ckptcore.formats.torch_save.layout import torch_file


def arrange_sharded(request: Arrangement) -> tuple[FileLayout, ...]:
    """Lay out the files that the ranks of a mesh write: those of the DCP folder, then `meta.pt`."""
    beside = {k: v for k, v in request.objects.items() if len(request.paths.get(k, (k,))) == 1}
    inside = {name for form in beside.values() for name in references(form)}
    stored = [i for i, t in enumerate(request.tensors) if t.fqn not in inside]
    part = replace(
        request,
        tensors=[request.tensors[i] for i in stored],
        objects={k: v for k, v in request.objects.items() if k not in beside},
    )
    layouts = [
        replace(layout, tensors=tuple(stored[t] for t in layout.tensors))
        for layout in arrange_folder(part, commit=False)
    ]
    rank = {name: n for n, name in enumerate(request.paths)}
    keys = sorted(beside, key=lambda k: rank.get(k, len(rank)))
    tree = {request.paths.get(key, (key,))[0]: decode(beside[key]) for key in keys}
    number = {t.fqn: i for i, t in enumerate(request.tensors)}
    order = [number[name] for name in sorted(tensors_in(tree), key=natural)]
    return (*layouts, torch_file(META, tree, request.tensors, order, commit=True, classes=Classes.TRAINERS))
