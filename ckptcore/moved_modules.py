"""Import modules of release 0.1 by their old names, from when `ckptcore` was a flat package.

Modules that a plug-in format imported, following the example in CONTRIBUTING, are found for one more release,
with a DeprecationWarning. Any other old path fails with the package that its content moved to. Only names of
modules that are not found otherwise get here: see `ckptcore._Moved`, which imports this module then. To be
removed in 0.3.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

# Old -> new, below `ckptcore`: modules that plug-in readers and writers were documented to use.
ALIASES: Mapping[str, str] = {
    "box": "core.box",
    "builder": "core.manifest_builder",
    "dtype": "core.dtype",
    "manifest": "core.manifest",
    "objects": "core.object_tree",
    "paths": "core.tree_paths",
    "sharding": "topology.layout",
    "formats._parts": "formats.common.join",
    "formats._pickle": "encodings.pickle.unpickler",
    "formats._torchzip": "encodings.torchzip.reader",
}

# Package -> the old modules whose content is in it.
ROOMS: Mapping[str, str] = {
    "catalog": "catalog.readonly catalog.roots catalog.tending catalog.text catalog.values",
    "checking": "check filedigests scan verdicts",
    "cli": "catalog.cli catalog.render clirebuild clitend options output tendoutput",
    "comparison": "diff difference fingerprinting leaves walk",
    "conversion": "accounting convert destination fingerprinttable finishing planfile publications "
    "publishing register remotepublishing reproof stagedplan staging",
    "core": "copies cover derive frame meter selection",
    "execution": "device execute filejob joining partjob parts receipts reuse stamps tiles",
    "fingerprints": "devicesums fingerprint fingerprintrows",
    "formats.huggingface": "formats.hf_quantized formats.hf_shards formats.safetensors",
    "formats.megatron": "formats.mcore_dist formats.mcore_zarr formats.megatron_dcp formats.megatron_legacy",
    "formats.olmo": "formats.olmo_core formats.olmo_local formats.olmo_unsharded formats.olmo_v01",
    "loading": "livestate livetensors plainvalues",
    "naming": "model_part parameters remap",
    "operations": "announced apart aside childproof claiming discover held leftover once proving rebuild "
    "registered replaceable retention retire scrub settling sweep target waiting",
    "planning": "compose fileplan fileplanner hf hf_conversion hf_model nesting plan plancolumns planrows "
    "request",
    "reading": "boxreader casting equality gather interleave records resolve",
    "store": "store.localwrite store.survey",
    "topology": "bound cuts experts meshspec placementrules placements placing ruleuse shardingfile stages",
    "utils": "crc crew durations globs shown sizes steps terminal",
}

# Old modules whose name is now a package: names imported from one of them are gone.
_BECAME_ROOMS = frozenset({"cli", "loading", "reading", "topology"}) | {
    f"formats.{family}" for family in ("accelerate", "dcp", "lightning", "torch_ranks", "torch_save")
}
_PUBLIC = (
    "names that stay where they are: those of `ckptcore`, `ckptcore.formats` (plug-ins; by_name gives a "
    "format), `ckptcore.errors`, `ckptcore.testing` and `ckptcore.mcore`"
)


def find(name: str) -> ModuleSpec | None:
    """Return the spec of an old module that is still available; None for any other name.

    The error has no ``name``: with it, ``from ckptcore import staging`` would lose its text.

    Args:
        name: The full name, as in ``import ckptcore.builder``.

    Raises:
        ModuleNotFoundError: An old module has moved; the text names its package.
    """
    old = name.removeprefix("ckptcore.")
    if old in ALIASES:
        return ModuleSpec(name, _Alias(f"ckptcore.{ALIASES[old]}"))
    room = next((room for room, modules in ROOMS.items() if old in modules.split()), None)
    if room is not None:
        raise ModuleNotFoundError(f"{name} has moved into the package ckptcore.{room}; {_PUBLIC}")
    above, _, last = old.rpartition(".")
    if above in _BECAME_ROOMS and not last.startswith("__"):
        raise ModuleNotFoundError(
            f"cannot import {last} from ckptcore.{above}: it is a package now; {_PUBLIC}"
        )
    if above == "formats" and last.startswith("_") and not last.startswith("__"):
        raise ModuleNotFoundError(f"{name} was private, and is gone; {_PUBLIC}")
    return None


class _Alias(Loader):
    """Loads a current module under its old name; both names give the same object."""

    def __init__(self, target: str) -> None:
        self._target = target

    def exec_module(self, module: ModuleType) -> None:
        """Replace the module that the import system made by the current one."""
        old, new = module.__name__, self._target
        hint = "plug-ins import from ckptcore.formats"
        warnings.warn(f"{old} has moved to {new}; {hint}", DeprecationWarning, stacklevel=2)
        sys.modules[old] = import_module(new)
