"""Lay out a torch_dist folder that a job begins from: a release, its tracker, and states that a load needs.

``--load`` names the folder, and the tracker in it the release. Of a release the loader reads neither
optimizer nor random states, and begins at iteration 0 (megatron/training/checkpointing.py, read_metadata,
load_checkpoint).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

import yaml

from ckptcore.core.manifest import TensorSpec
from ckptcore.core.object_tree import decode
from ckptcore.formats.base import Arrangement, FileLayout, Literal
from ckptcore.formats.megatron.config import TRACKER
from ckptcore.formats.megatron.sharded_objects import EXTRA_STATE
from ckptcore.formats.megatron.writer import arrange_torch_dist

_RUN_CONFIG = "run_config"  # the object that becomes Megatron-Bridge's run_config.yaml
RELEASE = "release"  # the folder, and the word for it in the tracker
_PARAMETER = re.compile(r"^(?P<module>.+)\.(?:layer_norm_)?(?:weight|bias)$")
_STACKED = re.compile(r"^decoder\.layers\.(?!\d+\.)")
_EXPERTS = ".experts.experts."
_WITHOUT = re.compile(r"^(?:embedding\..+|output_layer|.+\.router)$")  # modules that have no such state
_PROJECTION, _ATTENTION = ".self_attention.linear_proj", ".self_attention.core_attention"


def arrange_start(request: Arrangement) -> Iterable[FileLayout]:
    """Lay out the release, and last the tracker; raise the errors of `arrange_torch_dist`."""
    states = dict.fromkeys(extra_states(request.tensors))
    objects = {k: v for k, v in request.objects.items() if k != _RUN_CONFIG}
    if _RUN_CONFIG in request.objects:
        data = yaml.safe_dump(decode(request.objects[_RUN_CONFIG])).encode()
        path = f"{RELEASE}/{_RUN_CONFIG}.yaml"
        yield FileLayout(path, len(data), (), (), (Literal(0, data),))
    for layout in arrange_torch_dist(replace(request, objects={**objects, **states})):
        yield replace(layout, path=f"{RELEASE}/{layout.path}")
    yield FileLayout(TRACKER, len(RELEASE), (), (), (Literal(0, RELEASE.encode()),), commit=True)


def extra_states(tensors: Sequence[TensorSpec]) -> Iterator[str]:
    """Yield the keys of the objects that modules of these tensors load as their extra state: None in each.

    A strict load fails where one is missing, and ignores those of modules that a job does not have: they are
    of linear layers, and with Transformer Engine of norms and attention, too. It has its own state of float8
    there, and takes None for the state of a model that has none (extensions/transformer_engine.py).
    """
    grids: dict[str, tuple[int, ...]] = {}
    for spec in tensors:
        match = _PARAMETER.match(spec.fqn)
        if match is None or _WITHOUT.match(module := match["module"]):
            continue
        dims = bool(_STACKED.match(module)) + (_EXPERTS in f"{module}.")
        grids[module] = spec.shape[:dims] or (1,)
        if module.endswith(_PROJECTION):
            grids[module.removesuffix(_PROJECTION) + _ATTENTION] = grids[module]
    for module, grid in grids.items():
        shape = ".".join(map(str, grid))
        for cell in product(*map(range, grid)):
            yield f"{module}.{EXTRA_STATE}/shard_{'.'.join(map(str, cell))}_{shape}"
