"""Build the model of a config.json on the meta device, and compare an export's names and shapes with it.

The module runs in a process of its own (`ckptcore.planning.transformers_process`). Its input is
``{"config": content of config.json, "tensors": {name: shape, or null}}``. No weight is allocated.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptcore.naming import transformers_private
from ckptcore.planning.transformers_conversion import ModelMismatch, compare
from ckptcore.planning.transformers_process import LOCAL, Answer, brief, quiet_transformers, serve

# Of transformers' tables of classes, by what models are for; those without a head last.
_TABLES = (
    "FOR_CAUSAL_LM_",
    "FOR_IMAGE_TEXT_TO_TEXT_",
    "FOR_SEQ_TO_SEQ_CAUSAL_LM_",
    "FOR_SPEECH_SEQ_2_SEQ_",
    "FOR_MASKED_LM_",
    "FOR_PRETRAINING_",
    "FOR_SEQUENCE_CLASSIFICATION_",
    "FOR_TOKEN_CLASSIFICATION_",
    "FOR_QUESTION_ANSWERING_",
    "FOR_IMAGE_CLASSIFICATION_",
    "FOR_CTC_",
    "",
)
_MISFITS = ("missing", "unexpected", "shapes", "broken", "inexact", "names")


def describe(content: dict[str, Any], tensors: Mapping[str, Sequence[int] | None], name: str = "") -> Answer:
    """Return the model's class and the fields of `ModelMismatch`, or why there is no model.

    Of a config that names no class, it is the one of its model type that the tensors are exactly of.

    Args:
        content: Of config.json.
        tensors: Name -> shape; None where it is unknown.
        name: Class of the model; "" for the config's.

    Returns:
        Also ``assumed``: whether other classes could be built, too. ``unknown``: the installed transformers
        has no such model. ``rejected``: it builds none from this config. ``error``: another library is
        missing.
    """
    library = quiet_transformers()
    kind = content.get("model_type")
    if isinstance(kind, str) and kind not in library.CONFIG_MAPPING:
        return {"unknown": f"transformers {library.__version__} has no model type {kind!r}"}
    try:
        called = name or class_of(content)
    except TypeError as error:
        return {"rejected": brief(error)}
    if called and not hasattr(library, called):
        return {"unknown": f"transformers {library.__version__} has no class {called!r}"}
    if called or not isinstance(kind, str):
        return _described(content, tensors, called)
    answers = []
    for candidate in classes_of(kind):
        answers.append(_described(content, tensors, candidate))
        if "class" in answers[-1] and not any(answers[-1][field] for field in _MISFITS):
            return answers[-1] | {"assumed": any("class" in a for a in answers[:-1])}
    answers = answers or [_described(content, tensors, "")]
    return next((a for a in answers if "class" in a), answers[0])


def _described(content: dict[str, Any], tensors: Mapping[str, Sequence[int] | None], name: str) -> Answer:
    """Return `describe`'s answer of one class; "" for the one of causal language models."""
    try:
        model = built(content, name)
    except ImportError as error:  # of a library that only this model needs
        return {"error": brief(error)}
    except Exception as error:  # any failure of a third-party model class: the config does not fit
        return {"rejected": brief(error)}
    model_shapes = {name: tuple(t.shape) for name, t in model.state_dict().items() if hasattr(t, "shape")}
    try:
        outcome = compare(
            model, {name: None if shape is None else tuple(shape) for name, shape in tensors.items()}
        )
    except Exception as error:  # the export's fault where the loader takes what the model itself has
        compare(built(content, name), model_shapes)
        outcome = ModelMismatch(broken=[brief(error)])
    return {"class": type(model).__name__} | outcome.as_dict()


def class_of(content: Mapping[str, Any]) -> str:
    """Return the class that a config.json names, or "". FSDP2 puts its own name before that of a class."""
    named = content.get("architectures")
    if not isinstance(named, list) or not named:
        return ""
    if not isinstance(named[0], str):
        raise TypeError(f"architectures must be names of classes (got {named[0]!r})")
    return named[0].removeprefix("FSDP")


def classes_of(model_type: str) -> list[str]:
    """Return the classes of a model type, the usual ones first."""
    auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    class_names: dict[str, None] = {}
    for table in _TABLES:
        names = getattr(auto, f"MODEL_{table}MAPPING_NAMES", {}).get(model_type, ())
        class_names |= dict.fromkeys([names] if isinstance(names, str) else names)
    return [*class_names]


def built(content: Mapping[str, Any], name: str = "") -> Any:
    """Build the model of a config.json on the meta device; raise what transformers raises.

    It is built in bfloat16: what has another dtype then has it whatever the default is.
    """
    import torch

    library = quiet_transformers()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(content))
        config = library.AutoConfig.from_pretrained(folder, **LOCAL)
    named = name or class_of(content)
    cls = getattr(library, named) if named else None
    with torch.device("meta"):
        return (
            transformers_private.new_model(cls, config)
            if cls is not None
            else library.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        )


def answer(asked: dict[str, Any]) -> Answer:
    """Answer `ckptcore.planning.transformers_process.ask`."""
    return describe(asked["config"], asked["tensors"], asked.get("class", ""))


if __name__ == "__main__":
    serve(answer)
