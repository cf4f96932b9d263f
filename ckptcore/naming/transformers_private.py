"""Read what transformers knows about its classes by attributes and methods that it does not document.

Its documented interface loads and saves models, but lists neither what a class leaves out nor what it renames
on the way: that is in names with an underscore, which every class of a model sets (`PreTrainedModel` of
transformers/modeling_utils.py describes them). They are used here and nowhere else, so that a release that
changes one breaks one module. Versions 4 and 5 are read; an attribute that a version lacks says nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any


def transforms_by_name() -> Mapping[str, Sequence[Any]]:
    """Return the transforms of every model type and class that the installed transformers lists.

    `get_checkpoint_conversion_mapping` is public, but asks for a name; some names are of classes that
    transformers exports nowhere (``MtpModel``), so no list of its public names has them all.
    """
    mapping: Any = importlib.import_module("transformers.conversion_mapping")
    listed: Mapping[str, Sequence[Any]] = mapping._build_checkpoint_conversion_mapping()
    return listed


def new_model(kind: Any, config: Any) -> Any:
    """Build a model of a class in bfloat16.

    `from_config` is public for `AutoModel...` only, which take the class from tables: a class that none of
    them has, or a second class of a config, is built by the method that they call.
    """
    import torch

    return kind._from_config(config, dtype=torch.bfloat16)


def load_report(model: Any, tensors: Mapping[str, Any], config: Any) -> Any:
    """Return what transformers' loader reports when a model takes tensors.

    `from_pretrained` takes the same tensors, but builds the model once more, and its answer
    (``output_loading_info``) leaves out the errors of conversions: those it logs, and raises without them.

    Args:
        model: Its parameters are replaced.
        tensors: Name -> tensor, as files have them.
        config: A `LoadStateDictConfig`.
    """
    answer = model._load_pretrained_model(model, tensors, None, config)
    return answer[0] if isinstance(answer, tuple) else answer


def kept_in_float32(model: Any, *, strictly: bool) -> list[str]:
    """Return the modules that a class keeps in float32.

    Args:
        model: Of the class.
        strictly: Those of a model of any 16 bits; otherwise those of a model of float16 alone.
    """
    listed = model._keep_in_fp32_modules_strict if strictly else model._keep_in_fp32_modules
    return sorted(listed or ())


def unsplit_layers(model: Any) -> set[str]:
    """Return the classes of a model's layers that stay on one device: the repeated ones."""
    return set(model._no_split_modules or ())


def left_out_on_save(model: Any) -> set[str]:
    """Return the names of what a class leaves out when it is saved: tables that it computes itself."""
    return set(model._keys_to_ignore_on_save or ())


def ignored_on_load(model: Any, kind: str) -> list[str]:
    """Return patterns of the ``missing`` or ``unexpected`` names that a class ignores when it is loaded."""
    return list(getattr(model, f"_keys_to_ignore_on_load_{kind}", None) or [])


def tied_parameters(model: Any) -> Any:
    """Return the parameters that a class may tie: a list before transformers 5, there a mapping."""
    return getattr(model, "_tied_weights_keys", None) or []


def renamed_by_version_4(model: Any, names: Sequence[str]) -> Mapping[str, str]:
    """Return stored name -> parameter, as transformers before 5 renames what it loads."""
    rename = getattr(model, "_get_key_renaming_mapping", None)
    if rename is None:
        return {name: name for name in names}
    renamed: Mapping[str, str] = rename(names, getattr(model, "_checkpoint_conversion_mapping", None) or None)
    return renamed
