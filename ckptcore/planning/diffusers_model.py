"""Build the diffusers model of a config.json on the meta device, and compare an export's tensors with it.

The module runs in a process of its own (`ckptcore.planning.transformers_process`), with the input and the
output of `ckptcore.planning.meta_model`. diffusers opens the names that its models have, and no others.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from ckptcore.planning.transformers_conversion import HALF, ModelMismatch
from ckptcore.planning.transformers_process import Answer, brief, serve

_MOST_PARTS = 4  # of a prefix


def describe(content: Mapping[str, Any], tensors: Mapping[str, Sequence[int] | None]) -> Answer:
    """Return the model's class and the fields of `ModelMismatch`, or why there is no model.

    Args:
        content: Of config.json.
        tensors: Name -> shape; None where it is unknown.
    """
    import torch

    library: Any = importlib.import_module("diffusers")  # without types, and of no extra
    name = str(content["_class_name"])
    kind: Any = getattr(library, name, None)
    is_model = isinstance(kind, type) and issubclass(kind, library.ModelMixin)
    if not is_model:
        return {"unknown": f"diffusers {library.__version__} has no model {name!r}"}
    try:
        with torch.device("meta"):
            model = kind.from_config(dict(content))
    except Exception as error:  # a config may have anything
        return {"rejected": brief(error)}
    model_shapes = {n: tuple(t.shape) for n, t in model.state_dict().items()}
    float32_modules = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    in_float32 = [n for n in model_shapes if any(part in n.split(".") for part in float32_modules)]
    tensor_shapes = {
        n: model_shapes.get(n, ()) if shape is None else tuple(shape) for n, shape in tensors.items()
    }
    mismatch = ModelMismatch(
        missing=[n for n in model_shapes if n not in tensor_shapes],
        unexpected=[n for n in tensor_shapes if n not in model_shapes],
        shapes=[
            (n, tensor_shapes[n], model_shapes[n])
            for n in model_shapes
            if n in tensor_shapes and tensor_shapes[n] != model_shapes[n]
        ],
        float32=dict.fromkeys(HALF, in_float32),
        prefixes=[
            p
            for p in _prefixes(tensor_shapes)
            if {n[len(p) :] for n in tensor_shapes if n.startswith(p)} == model_shapes.keys()
        ],
    )
    return {**mismatch.as_dict(), "class": name}


def _prefixes(names: Mapping[str, Any]) -> list[str]:
    """Return what several names may have in front of them, the shortest first."""
    prefixes = {""}
    for name in names:
        parts = name.split(".")[:_MOST_PARTS]
        prefixes |= {".".join(parts[: n + 1]) + "." for n in range(len(parts))}
    return sorted(prefixes, key=len)


def answer(asked: Any) -> Answer:
    """Answer a question of `ckptcore.planning.config_folder`."""
    return describe(asked["config"], asked["tensors"])


if __name__ == "__main__":
    serve(answer)
